"""What crosses a boundary, and what becomes of it.

A fault maps one `Envelope` to its `Delivery`s and does nothing else; it never sees a clock or an engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

# Kinds of messages. A fault's target is one of these.
CLIENT_ARRIVAL: Final = "client.arrival"
CLIENT_ABORT: Final = "client.abort"
BOOTSTRAP_QUERY: Final = "bootstrap.query"
BOOTSTRAP_ANSWER: Final = "bootstrap.answer"
BOOTSTRAP_REGISTER: Final = "bootstrap.register"
BOOTSTRAP_REGISTERED: Final = "bootstrap.registered"
PULL_REQUEST: Final = "pull.request"
PULL_REPLY: Final = "pull.reply"
WRITE_DATA: Final = "write.data"
WRITE_DONE: Final = "write.done"
RANK_REPORT: Final = "rank.report"
LOOKUP: Final = "lookup.query"
COPY_JOB: Final = "copy.job"
COPY_DONE: Final = "copy.done"


@dataclass(slots=True, kw_only=True)
class Envelope:
    """A message on its way.

    `conversation` names one exchange (one pull with one peer, one bootstrap query, one copy job) and is
    stable across runs; `peer_index` of `num_peers` is the peer's place where one request talks to several;
    `reply_index` counts replies within the conversation from 0. `size_bytes` is what a link's bandwidth is
    charged for.
    """

    kind: str
    source: str
    destination: str
    payload: Any
    request_ids: tuple[str, ...] = ()
    transfer_ids: tuple[str, ...] = ()
    conversation: str = ""
    attempt: int = 0
    peer_index: int = 0
    num_peers: int = 1
    reply_index: int = 0
    size_bytes: int = 0
    corruptions: tuple["Corruption", ...] = ()
    """Byte faults to apply to the delivered copy; the source keeps the truth."""
    fault_handle: int = -1
    """The event of the last fault that changed this delivery, or its time."""
    write_result: int | None = None
    """A transfer-engine write's forced return value (0 or -1); None: what it would return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """Bytes of one destination block of a write are changed on delivery.

    `block` is the index of the block within the write, or None for one drawn from `draw`; `fault_handle` is
    the `fault.injected` event's handle, so that a finding can name its fault.
    """

    draw: int
    fault_spec: str
    block: int | None = None
    fault_handle: int = -1


@dataclass(frozen=True, slots=True)
class Delivery:
    """One arrival of an envelope. `delay_ns` comes on top of the link's own time.

    `waits_for`, an event pattern, holds it back: the interceptor keeps it until such an event is seen.
    """

    envelope: Envelope
    delay_ns: int = 0
    waits_for: str = ""

    @property
    def held(self) -> bool:
        return bool(self.waits_for)


class Interceptor(Protocol):
    """Decides what becomes of a message. Returns None for "as usual", else its deliveries (none: dropped)."""

    kinds: frozenset[str]
    """Kinds that some fault matches; all others bypass the interceptor."""

    def intercept(self, envelope: Envelope, now_ns: int) -> list[Delivery] | None: ...

    def has_passed(self, kind: str, conversation: str) -> bool:
        """Whether every further message of this kind in this conversation goes as usual, so that it need not be one."""
        ...

    def swallows(self, kind: str, conversation: str) -> bool:
        """Whether every further message of this kind in this conversation is lost, as long as there are faults."""
        ...

    def hold(self, delivery: Delivery, release: Callable[[], None]) -> None:
        """Keep a held delivery. `release` lets it arrive, at once or when the network is done with it."""
        ...


@dataclass(slots=True)
class Answer:
    """What `Bus.ask` returns: a reply (`payload`), after `delay_ns` that the caller's step pays, or never."""

    payload: Any = None
    delay_ns: int = 0
    never: bool = False


NEW_IDENTITY: Final = "new"
SAME_IDENTITY: Final = "same"
"""What a `restart` says of the engine id: a random one, or one that is configured."""


@dataclass(slots=True)
class Command:
    """What an action fault tells a control address to do: `crash`, `restart`, `abort`, `preempt`, ..."""

    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)
    victims: list[str] = field(default_factory=list)
    """Filled in by whoever carries it out: the requests that it hit, beyond those in the arguments."""


Handler = Callable[[Envelope], None]
Asker = Callable[[Envelope], Answer]
Controller = Callable[[Command], bool | None]
"""Carries out a command. False: there was nothing to act on (the request is over, the instance is down)."""
