"""The verb `crash`."""

from kvreplay.faults.verb import ActionVerb, Order
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, MOMENT, Setting, Settings
from kvreplay.sim.envelope import NEW_IDENTITY, Command


def orders(settings: Settings, request_id: str | None) -> tuple[Order, ...]:
    crash = Order(Command("crash"))
    if settings["down"] is None:
        return (crash,)
    return (crash, Order(Command("restart", {"identity": NEW_IDENTITY}), settings["down"]))


VERB = ActionVerb(
    name="crash",
    doc="the instance dies: state, timers and traffic are gone; it comes back with a new identity",
    orders=orders,
    settings={
        "at": Setting(default=60 * NS_PER_S, unit=MOMENT, doc="when it dies"),
        "down": Setting(default=None, unit=DURATION, doc="how long it stays away"),
    },
)
