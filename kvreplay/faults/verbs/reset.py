"""The verb `reset`."""

from kvreplay.faults.verb import ActionVerb, Order
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import MOMENT, Setting, Settings
from kvreplay.sim.envelope import Command


def orders(settings: Settings, request_id: str | None) -> tuple[Order, ...]:
    return (Order(Command("reset")),)


VERB = ActionVerb(
    name="reset",
    doc="the instance's prefix cache is reset",
    orders=orders,
    settings={"at": Setting(default=60 * NS_PER_S, unit=MOMENT, doc="when")},
)
