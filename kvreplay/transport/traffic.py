"""What is on its way between sockets: the clock moves only when nothing is (Trio's `MockClock` jumps so).

Each process counts, by connection and direction, what it has sent and taken. Where all have said so and nothing was
sent that was not taken, every effect of what has happened has happened too, however slow the machine is.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from kvreplay.sim.recent import Recent

_MAX_EARLY: Final = 1 << 12
"""Connections that nobody has opened yet, and what was told of them. Most of these are strangers'."""


class Connection(NamedTuple):
    """Of whoever calls itself `identity`, to whoever listens at `endpoint`."""

    endpoint: str
    identity: str


class Told(msgspec.Struct, array_like=True, frozen=True):
    """What a process tells of its sockets since it last did so."""

    opened: list[Connection]
    balances: list[tuple[Connection, int, int]]
    """How many more questions, and how many more answers, were sent than taken."""
    closed: list[Connection]
    """What is on its way over them is lost, or will be taken by nobody."""
    gone: list[str]
    """Endpoints at which nobody listens any more."""


@dataclass(slots=True)
class Traffic:
    """One process's count. `tell` hands it over and begins anew."""

    _opened: list[Connection] = field(default_factory=list)
    _balances: dict[Connection, list[int]] = field(default_factory=dict)
    _closed: list[Connection] = field(default_factory=list)
    _gone: list[str] = field(default_factory=list)

    def opened(self, connection: Connection) -> None:
        self._opened.append(connection)

    def sent(self, connection: Connection, *, is_answer: bool = False) -> None:
        self._add(connection, is_answer, 1)

    def taken(self, connection: Connection, *, is_answer: bool = False) -> None:
        self._add(connection, is_answer, -1)

    def closed(self, connection: Connection) -> None:
        """By the one who opened it."""
        self._closed.append(connection)

    def gone(self, endpoint: str) -> None:
        self._gone.append(endpoint)

    def tell(self) -> Told | None:
        """None: nothing new."""
        if not (self._opened or self._balances or self._closed or self._gone):
            return None
        balances = [(connection, counts[0], counts[1]) for connection, counts in self._balances.items()]
        told = Told(self._opened, balances, self._closed, self._gone)
        self._opened, self._balances, self._closed, self._gone = [], {}, [], []
        return told

    def _add(self, connection: Connection, is_answer: bool, count: int) -> None:  # noqa: FBT001 - internal
        self._balances.setdefault(connection, [0, 0])[is_answer] += count


class Ledger:
    """The counts of all processes together.

    What was taken and not sent is no reason to wait: its sender tells later. What was sent over a connection that none
    of them has opened is a stranger's business.
    """

    def __init__(self) -> None:
        self._open: dict[Connection, list[int]] = {}
        self._early: Recent[Connection, list[int]] = Recent(_MAX_EARLY)
        self._gone: dict[str, None] = {}
        self._awaited: dict[Connection, None] = {}

    @property
    def is_even(self) -> bool:
        """Nothing is on its way."""
        return not self._awaited

    def hear(self, told: Told) -> None:
        for connection in told.opened:
            if connection.endpoint not in self._gone:
                self._open[connection] = self._early.pop(connection, [0, 0])
                self._look_at(connection)
        for connection, num_questions, num_answers in told.balances:
            counts = self._open.get(connection)
            if counts is None:
                counts = self._early[connection] = self._early.get(connection, [0, 0])
            counts[0] += num_questions
            counts[1] += num_answers
            self._look_at(connection)
        for connection in told.closed:
            self._close(connection)
        for endpoint in told.gone:
            self._gone[endpoint] = None
            for connection in [connection for connection in self._open if connection.endpoint == endpoint]:
                self._close(connection)

    def listens(self, endpoint: str) -> None:
        """Somebody does, perhaps where another did before."""
        self._gone.pop(endpoint, None)

    def give_up(self) -> None:
        """What is on its way has been lost: a socket may do that."""
        for connection in self._awaited:
            self._open[connection] = [min(count, 0) for count in self._open[connection]]
        self._awaited.clear()

    def _look_at(self, connection: Connection) -> None:
        counts = self._open.get(connection)
        if counts is not None and (counts[0] > 0 or counts[1] > 0):
            self._awaited[connection] = None
        else:
            self._awaited.pop(connection, None)

    def _close(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._awaited.pop(connection, None)
