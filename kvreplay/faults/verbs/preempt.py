"""The verb `preempt`."""

from kvreplay.faults.verb import REQUEST_ACTION_KEYS, ActionVerb, Order
from kvreplay.sim.catalogue import DURATION, EVENT, Setting, Settings
from kvreplay.sim.envelope import Command


def orders(settings: Settings, request_id: str | None) -> tuple[Order, ...]:
    return (Order(Command("preempt", {"request_id": request_id}), settings["delay"]),)


VERB = ActionVerb(
    name="preempt",
    doc="the request loses its blocks as if another needed them",
    orders=orders,
    settings={
        "at": Setting(default="request.first_token@serving", unit=EVENT, doc="what it happens on"),
        "delay": Setting(default=0, unit=DURATION, doc="how long after that"),
    },
    acts_on_requests=True,
    keys=REQUEST_ACTION_KEYS,
)
