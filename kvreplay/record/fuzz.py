"""The same random workload through two engines, until they differ; then the smallest workload for which they do."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvreplay.conformance.compare import Difference, first_differences
from kvreplay.conformance.minimise import minimised
from kvreplay.conformance.scheduler_vectors import run_workload
from kvreplay.conformance.vector import UnsupportedVectorError
from kvreplay.errors import KvReplayError
from kvreplay.record.oracle import VllmOracle

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """`workload` is minimal, and `differences` are its own."""

    seed: int
    workload: Fields
    differences: list[Difference]


@dataclass(slots=True)
class FuzzCounts:
    equal: int = 0
    differ: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """By reason: what our engine does not model, or the real one refuses."""

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def differences(oracle: VllmOracle, workload: Fields) -> list[Difference]:
    """What differs first between the oracle and our engine. Raises KvReplayError where one of them cannot run it."""
    ours = iter(run_workload(workload))
    recorded = json.loads(json.dumps(list(oracle.record(workload).steps)))
    return first_differences(recorded, ours)


def fuzz(oracle: VllmOracle, seeds: range, draw: Callable[[int], Fields], counts: FuzzCounts) -> Iterator[Finding]:
    """Each finding as it comes; `counts` is kept up to date."""
    for seed in seeds:
        workload = draw(seed)
        try:
            found = differences(oracle, workload)
        except UnsupportedVectorError as error:
            counts.skip(f"not modelled: {error}")
            continue
        except KvReplayError as error:
            counts.skip(str(error))
            continue
        if not found:
            counts.equal += 1
            continue
        counts.differ += 1
        smallest = minimise_difference(oracle, workload, found[0])
        yield Finding(seed, smallest, differences(oracle, smallest))


def minimise_difference(oracle: VllmOracle, workload: Fields, difference: Difference) -> Fields:
    """The smallest workload that differs in the same field; another field may be another difference."""
    what = _top(difference)

    def still(candidate: Fields) -> bool:
        found = differences(oracle, candidate)
        return bool(found) and _top(found[0]) == what

    return minimised(workload, still)


def _top(difference: Difference) -> str:
    """`after.req`, `new`: the field without the request and the column."""
    parts = difference.field.split(".")
    return ".".join(parts[: 2 if parts[0] == "after" else 1])
