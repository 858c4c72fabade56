"""The verb `evict`."""

from kvreplay.faults.verb import ActionVerb, Order
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import MOMENT, Setting, Settings
from kvreplay.sim.envelope import Command


def orders(settings: Settings, request_id: str | None) -> tuple[Order, ...]:
    return (Order(Command("evict", {"num_blocks": settings["blocks"]})),)


VERB = ActionVerb(
    name="evict",
    doc="cached blocks that nobody holds lose their content, oldest first",
    orders=orders,
    settings={
        "at": Setting(default=60 * NS_PER_S, unit=MOMENT, doc="when"),
        "blocks": Setting(default=1, unit="blocks", minimum=1, doc="how many"),
    },
)
