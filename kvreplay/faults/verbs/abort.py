"""The verb `abort`."""

from typing import Final

from kvreplay.faults.patterns import SERVING
from kvreplay.faults.verb import REQUEST_ACTION_KEYS, ActionVerb, Order
from kvreplay.sim.catalogue import DURATION, Setting, Settings
from kvreplay.sim.envelope import Command

EVENT_OF: Final = {
    "queued": "request.routed",
    "pulling": f"pull.sent@{SERVING}",
    "running": f"request.first_token@{SERVING}",
}


def moment(settings: Settings) -> str:
    event: str = EVENT_OF[settings["when"]]
    return event


def orders(settings: Settings, request_id: str | None) -> tuple[Order, ...]:
    return (Order(Command("abort", {"request_id": request_id}), settings["delay"]),)


VERB = ActionVerb(
    name="abort",
    doc="the client aborts the request",
    orders=orders,
    moment=moment,
    settings={
        "when": Setting(
            default="pulling",
            choices=tuple(EVENT_OF),
            doc="once it is routed, once it has asked for its blocks, or once its first token is out",
        ),
        "delay": Setting(default=0, unit=DURATION, doc="how long after that"),
    },
    acts_on_requests=True,
    keys=REQUEST_ACTION_KEYS,
)
