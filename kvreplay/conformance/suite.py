"""Replays vectors of any kind, and counts how many come out equal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from kvreplay.behaviour import Behaviour
from kvreplay.conformance.compare import Difference
from kvreplay.conformance.finding import VectorFinding
from kvreplay.conformance.kinds.mooncake import MooncakeVectors
from kvreplay.conformance.kinds.offload import OffloadVectors
from kvreplay.conformance.kinds.scheduler import SchedulerVectors
from kvreplay.conformance.kinds.simple_cpu import SimpleCpuVectors
from kvreplay.conformance.vector import FORMAT, UnsupportedVectorError, Vector, read_vector
from kvreplay.errors import ConfigError, KvReplayError


class VectorKind(Protocol):
    """One kind of vectors. Its module imports nothing heavy before something is replayed."""

    name: str
    crosses_sockets: bool
    """Whether there are messages in it that can go over real sockets."""

    def recognises(self, vector: Vector) -> bool:
        """Whether it is one of this kind. Must not fail, whatever is in the document, and be disjoint from others."""
        ...

    def replay(self, vector: Vector, over: str) -> Sequence[Difference]:
        """What differs first, causes before effects; nothing if all is equal. `over`: the transport.

        Raises UnsupportedVectorError for what is not modelled, and ConfigError for a vector that is broken.
        """
        ...


VIRTUAL: Final = "virtual"
NO_SOCKETS: Final = "nothing in it crosses a socket"

KINDS: Final[Sequence[VectorKind]] = (SchedulerVectors(), OffloadVectors(), SimpleCpuVectors(), MooncakeVectors())


class Result(StrEnum):
    EQUAL = "equal"
    DIFFERS = "differs"
    SKIPPED = "skipped"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reason` says why a vector was skipped, or what is wrong with it; `oracle` is empty where it is broken."""

    path: Path
    result: Result
    oracle: str = ""
    kind: str | None = None
    reason: str | None = None
    differences: Sequence[Difference] = ()
    findings: Sequence[VectorFinding] = ()
    """Laws that its workload breaks, where that was asked for."""


@dataclass(slots=True)
class Tally:
    """How the vectors of one oracle came out."""

    oracle: str
    equal: int = 0
    differ: int = 0
    skipped: int = 0

    @property
    def total(self) -> int:
        return self.equal + self.differ + self.skipped


def replay_files(paths: Iterable[Path], check: Behaviour | None = None, over: str = VIRTUAL) -> Iterator[Outcome]:
    """One outcome for each file that is a vector, or may be a broken one. `check`: also play what can be played with
    KV buffers and checkers on, by an engine that behaves so. `over`: the transport."""
    for path in paths:
        try:
            vector = read_vector(path)
            if vector is not None:
                outcome = replay_vector(vector, over)
                yield outcome if check is None else replace(outcome, findings=_findings(outcome, vector, check))
        except KvReplayError as error:
            yield Outcome(path, Result.BROKEN, reason=str(error))


def replay_vector(vector: Vector, over: str = VIRTUAL) -> Outcome:
    """Raises ConfigError for one that is broken."""
    oracle = vector.oracle
    kind = next((kind for kind in KINDS if kind.recognises(vector)), None)
    if kind is None:
        return Outcome(vector.path, Result.SKIPPED, oracle, reason="unknown kind of vector")
    if vector.document.get("format", FORMAT) != FORMAT:
        return Outcome(vector.path, Result.SKIPPED, oracle, kind.name, f"format {vector.document['format']}")
    if over != VIRTUAL and not kind.crosses_sockets:
        return Outcome(vector.path, Result.SKIPPED, oracle, kind.name, NO_SOCKETS)
    try:
        differences = kind.replay(vector, over)
    except UnsupportedVectorError as error:
        return Outcome(vector.path, Result.SKIPPED, oracle, kind.name, str(error))
    result = Result.DIFFERS if differences else Result.EQUAL
    return Outcome(vector.path, result, oracle, kind.name, differences=differences)


def _findings(outcome: Outcome, vector: Vector, behaviour: Behaviour) -> list[VectorFinding]:
    if outcome.kind != SchedulerVectors.name or outcome.result is Result.SKIPPED:
        return []
    from kvreplay.conformance.checked_run import check_workload

    return check_workload(vector.document["workload"], behaviour)


def tallies(outcomes: Iterable[Outcome]) -> list[Tally]:
    """By oracle, in order of name."""
    by_oracle: dict[str, Tally] = {}
    for outcome in outcomes:
        if outcome.result is Result.BROKEN:
            continue
        tally = by_oracle.setdefault(outcome.oracle, Tally(outcome.oracle))
        tally.equal += outcome.result is Result.EQUAL
        tally.differ += outcome.result is Result.DIFFERS
        tally.skipped += outcome.result is Result.SKIPPED
    return sorted(by_oracle.values(), key=lambda tally: tally.oracle)


def default_places() -> list[Path]:
    """Where the project keeps its vectors, seen from its root. Raises ConfigError elsewhere."""
    place = Path("tests/conformance")
    if not place.is_dir():
        raise ConfigError(
            "name a file or a folder of vectors: there is no tests/conformance in the current folder; vectors are part "
            "of kvreplay's source, not of what pip installs"
        )
    return [place]
