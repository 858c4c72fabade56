"""The verb `clock-skew`."""

from kvreplay.faults.verb import ActionVerb, Order
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, MOMENT, Setting, Settings
from kvreplay.sim.envelope import Command


def orders(settings: Settings, request_id: str | None) -> tuple[Order, ...]:
    sign = -1 if settings["direction"] == "behind" else 1
    return (Order(Command("clock-skew", {"skew_ns": sign * settings["skew"]})),)


VERB = ActionVerb(
    name="clock-skew",
    doc="the instance's clock jumps against the others'",
    orders=orders,
    settings={
        "at": Setting(default=0, unit=MOMENT, doc="when"),
        "skew": Setting(default=10 * NS_PER_S, unit=DURATION, doc="by how much"),
        "direction": Setting(default="ahead", choices=("ahead", "behind"), doc="which way"),
    },
)
