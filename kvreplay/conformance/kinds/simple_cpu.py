"""Vectors of SimpleCPUOffloadConnector: a scheduler's workload with `simple_cpu`, and what was decided in each step."""

from collections.abc import Mapping, Sequence

from kvreplay.conformance.compare import Difference, first_differences
from kvreplay.conformance.kinds.scheduler import recorded_steps
from kvreplay.conformance.vector import Vector


class SimpleCpuVectors:
    name = "simple_cpu"
    crosses_sockets = False

    def recognises(self, vector: Vector) -> bool:
        workload = vector.document.get("workload")
        return isinstance(workload, Mapping) and "simple_cpu" in workload and "offload" not in workload

    def replay(self, vector: Vector, over: str) -> Sequence[Difference]:
        from kvreplay.conformance.simple_cpu_vectors import run_simple_cpu

        return first_differences(recorded_steps(vector), run_simple_cpu(vector.document["workload"]))
