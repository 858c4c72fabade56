"""Wrong contents that somebody has read, until it is known whether they matter.

They do once they have led to a token, or were hit in the cache. One finding for each place where it began: what was
written after reading it is derived from it, and is reported in its stead only where the reader itself got away (its
sample was dropped, it was aborted) but what it had written stayed to be hit.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from kvreplay.engine.request import Request
from kvreplay.kv.memory import Provenance


class WrongBlock(NamedTuple):
    """A block whose wrong contents were read and then mattered. The null block has no contents at all."""

    block_id: int
    group: int
    request_id: str
    """Who read it first."""
    position: int
    """The first wrong position in it."""
    provenance: Provenance | None
    is_write: bool = False
    """The null block was not read but written to."""


@dataclass(slots=True, eq=False)
class Origin:
    """Where wrong contents came from, as its first reader saw it."""

    wrong: WrongBlock
    is_reported: bool = False
    is_dropped: bool = False
    """Nothing that this reader sampled came of it."""


@dataclass(slots=True)
class Suspect:
    """One read: for each wrong block, where that began, and what this reader saw."""

    request: Request
    wrong: list[tuple[Origin, WrongBlock]]
    step: int
    is_hit: bool
    """Read by hitting blocks that somebody else left in the cache: a finding whether or not a token follows."""


class Suspects:
    def __init__(self) -> None:
        self._suspects: list[Suspect] = []

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def add(self, suspect: Suspect) -> None:
        self._suspects.append(suspect)

    def commit(self, step: int, emitted: Container[str], dropped: Container[str]) -> list[WrongBlock]:
        """After the update of a step. `emitted`: who got a token; `dropped`: whose sample led to nothing.

        What later steps have read, which are in flight already, waits for theirs.
        """
        findings: list[WrongBlock] = []
        waiting: list[Suspect] = []
        for suspect in self._suspects:
            request = suspect.request
            if suspect.step > step:
                waiting.append(suspect)
            elif request.request_id in dropped:
                _drop(suspect)
            elif request.request_id in emitted or suspect.is_hit:
                findings += _report(suspect)
            elif request.status.is_finished:
                _drop(suspect)
            else:
                waiting.append(suspect)
        self._suspects = waiting
        return findings


def _drop(suspect: Suspect) -> None:
    for origin, seen in suspect.wrong:
        if origin.wrong is seen:
            origin.is_dropped = True


def _report(suspect: Suspect) -> list[WrongBlock]:
    findings = []
    for origin, seen in suspect.wrong:
        if not origin.is_reported:
            origin.is_reported = True
            findings.append(seen if origin.is_dropped else origin.wrong)
    return findings
