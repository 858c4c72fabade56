"""Vectors of the offloading connector: with a scheduler, of its CPU manager alone, and direct calls."""

from collections.abc import Mapping, Sequence
from typing import Final

from kvreplay.conformance.compare import Difference
from kvreplay.conformance.vector import Vector

_KINDS_WITHOUT_SCHEDULER: Final = ("cpu_manager", "offload_calls")


class OffloadVectors:
    name = "offload"
    crosses_sockets = False

    def recognises(self, vector: Vector) -> bool:
        workload = vector.document.get("workload")
        with_scheduler = isinstance(workload, Mapping) and "offload" in workload
        return with_scheduler or vector.document.get("kind") in _KINDS_WITHOUT_SCHEDULER

    def replay(self, vector: Vector, over: str) -> Sequence[Difference]:
        from kvreplay.conformance.offload_replay import replay_offload

        return replay_offload(vector.document)
