"""What the supervisor of a run and its instances' processes say to each other, over pipes."""

from typing import Any, Final

import msgspec

from kvreplay.events import Event
from kvreplay.transport.traffic import Told


class _Message(msgspec.Struct, tag=True, kw_only=True):
    pass


# -- to an instance ---------------------------------------------------------------------------------------


class Setup(_Message):
    """The first message: everything that the instance's course depends on, besides what it hears. `endpoints`: who
    listens before any instance does."""

    name: str
    trace: str
    limit: int | None
    config: str
    profile: str
    switches: dict[str, str]
    recompute: bool
    faults: list[str]
    seed: int
    detail: int
    endpoints: dict[str, str]


class Grant(_Message):
    """Nothing is on its way anywhere, and it is this instance's turn: what has come arrives, and what is due at the
    instant that all share happens, as far as it ranks no lower."""

    rank: int


class Directory(_Message):
    """Where others listen now. `gone`: an instance that does not listen any more."""

    endpoints: dict[str, str]
    gone: str | None = None


class Arrival(_Message):
    """One leg of a client's request."""

    request: int
    request_id: str
    max_tokens: int
    priority: int
    params: dict[str, Any] | None
    turned_away: str = ""


class Abort(_Message):
    request_id: str


class Seen(_Message):
    """What happened elsewhere, as far as a fault waits for it."""

    events: list[Event]


class Hit(_Message):
    """A fault has hit, here or elsewhere: its place in the plan, and the supervisor's handle of the event."""

    place: int
    handle: int
    request_id: str | None
    instances: list[str]


class Order(_Message):
    """Do this, and say so: an action fault's verb, or `report-stalls`, `heal`, `close-accounts`."""

    number: int
    verb: str
    arguments: dict[str, Any] = {}


class Decision(_Message):
    """The answer to a `Question`."""

    number: int
    hits: bool


class Quit(_Message):
    pass


# -- from an instance -------------------------------------------------------------------------------------


class Ready(_Message):
    pass


class Listening(_Message):
    """All addresses of the instance, and where they are."""

    endpoints: dict[str, str]


class Serving(_Message):
    """Whether the engine lives, and whether clients can reach it."""

    is_up: bool
    is_serving: bool


class Happened(_Message):
    """Events in their order; `cause_handle` counts those of this process from 0."""

    events: list[Event]


class Ended(_Message):
    request_id: str
    has_finished: bool


class Settled(_Message):
    """Its turn is over. `is_quiet`: nothing but daemons is left to happen here; `has_kept`: something has come that
    waits for the next turn; `next_due`: (time, rank) of the next thing to happen; `num_heard`: messages of the
    supervisor; `told`: what is on its way; `unreported_from_ns`: no event of before is still to come."""

    is_quiet: bool
    has_kept: bool
    next_due: tuple[int, int]
    num_heard: int
    told: Told | None
    unreported_from_ns: int


class Done(_Message):
    number: int
    ok: bool
    victims: list[str]


class Question(_Message):
    """Does the fault at this place of the plan hit this conversation, the next anywhere that matches?"""

    number: int
    place: int
    conversation: str


class Account(_Message):
    """At the end: how often each fault of the plan has fired here, for whom, and what came in that was nothing."""

    end_ns: int
    fired: list[int]
    requests: list[list[str]]
    malformed: dict[str, int]


class Failed(_Message):
    """kvreplay itself has failed in the process."""

    traceback: str


ToInstance = Setup | Grant | Directory | Arrival | Abort | Seen | Hit | Order | Decision | Quit
FromInstance = Ready | Listening | Serving | Happened | Ended | Settled | Done | Question | Account | Failed

_encoder: Final = msgspec.msgpack.Encoder()
_to_instance: Final = msgspec.msgpack.Decoder(ToInstance)
_from_instance: Final = msgspec.msgpack.Decoder(FromInstance)


def encode(message: ToInstance | FromInstance) -> bytes:
    return _encoder.encode(message)


def decode_to_instance(data: bytes) -> ToInstance:
    message: ToInstance = _to_instance.decode(data)
    return message


def decode_from_instance(data: bytes) -> FromInstance:
    message: FromInstance = _from_instance.decode(data)
    return message
