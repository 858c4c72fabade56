"""The same random workload through two engines, until they differ; then the smallest workload for which they do."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from kvreplay.conformance.compare import Difference, first_differences
from kvreplay.conformance.minimise import minimised
from kvreplay.conformance.scheduler_vectors import run_workload
from kvreplay.conformance.vector import UnsupportedVectorError
from kvreplay.conformance.workload import read_workload
from kvreplay.errors import KvReplayError
from kvreplay.record.oracle import VllmOracle

Fields: TypeAlias = dict[str, Any]

MAX_ALIKE: Final = 3
"""Findings that start in the same field: more of them are counted, not shrunk."""


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
    """Each finding as it comes, a few of those that look alike; `counts` is kept up to date."""
    seen: dict[str, int] = {}
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
        signature = _signature(found[0])
        seen[signature] = seen.get(signature, 0) + 1
        if seen[signature] > MAX_ALIKE:
            continue
        smallest = minimise_difference(oracle, workload, found[0])
        yield Finding(seed, smallest, differences(oracle, smallest))


def minimise_difference(oracle: VllmOracle, workload: Fields, difference: Difference) -> Fields:
    """The smallest workload that differs in the same field; another field may be another difference."""
    what = _signature(difference)

    def still(candidate: Fields) -> bool:
        # No frontend lets such a request through.
        workload = read_workload(candidate)
        if any(len(request.prompt_token_ids) >= workload.engine.max_model_len for request in workload.requests):
            return False
        found = differences(oracle, candidate)
        return bool(found) and _signature(found[0]) == what

    return minimised(workload, still)


def _signature(difference: Difference) -> str:
    """`after.req`, `new`: the field without the request and the column; of a bug of ours the place as well."""
    parts = difference.field.split(".")
    field = ".".join(parts[: 2 if parts[0] == "after" else 1])
    return field if field != "bug" else f"bug {str(difference.got).rpartition('(')[2]}"
