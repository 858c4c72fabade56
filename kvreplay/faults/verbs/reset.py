"""The verb `reset`."""

from typing import Final

from kvreplay.faults.verb import ActionVerb, Order
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import MOMENT, Setting, Settings
from kvreplay.sim.envelope import Command

_ARGUMENTS: Final = {
    "gpu": {"gpu": True},
    "connector": {"connector": True},
    "both": {"gpu": True, "connector": True},
    "running": {"gpu": True, "running": True},
    "all": {"gpu": True, "running": True, "connector": True},
}


def orders(settings: Settings, request_id: str | None) -> tuple[Order, ...]:
    return (Order(Command("reset", dict(_ARGUMENTS[settings["what"]]))),)


VERB = ActionVerb(
    name="reset",
    doc="the instance's prefix cache is reset, which is refused while a request holds blocks; `running`: they are "
    "preempted first; `connector`: what it has cached; `both`, `all`: with the connector's",
    orders=orders,
    settings={
        "at": Setting(default=60 * NS_PER_S, unit=MOMENT, doc="when"),
        "what": Setting(default="gpu", doc="which cache", choices=tuple(_ARGUMENTS)),
    },
)
