"""The verb `restart`."""

from kvreplay.faults.verb import ActionVerb, Order
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, MOMENT, Setting, Settings
from kvreplay.sim.envelope import NEW_IDENTITY, SAME_IDENTITY, Command


def orders(settings: Settings, request_id: str | None) -> tuple[Order, ...]:
    restart = Command("restart", {"identity": settings["identity"]})
    return (Order(Command("crash")), Order(restart, settings["down"]))


VERB = ActionVerb(
    name="restart",
    doc="the instance is taken down and comes back, under the same or a new identity",
    orders=orders,
    settings={
        "at": Setting(default=60 * NS_PER_S, unit=MOMENT, doc="when it goes down"),
        "down": Setting(default=30 * NS_PER_S, unit=DURATION, doc="how long it stays away"),
        "identity": Setting(
            default=SAME_IDENTITY,
            choices=(SAME_IDENTITY, NEW_IDENTITY),
            doc="the engine id it comes back with: a configured one, or a random one",
        ),
    },
)
