"""Scheduler vectors: a workload, and what the real scheduler decided in each step.

`{"format": 1, "oracle": "vllm X", "resolved": {...}, "workload": {...}, "steps": [...]}`
"""

from collections.abc import Sequence

from kvreplay.conformance.compare import Difference, first_differences
from kvreplay.conformance.vector import Json, Vector
from kvreplay.errors import ConfigError


class SchedulerVectors:
    name = "scheduler"
    crosses_sockets = False

    def recognises(self, vector: Vector) -> bool:
        workload = vector.document.get("workload")
        is_connectors = isinstance(workload, dict) and ("offload" in workload or "simple_cpu" in workload)
        return "workload" in vector.document and not is_connectors

    def replay(self, vector: Vector, over: str) -> Sequence[Difference]:
        from kvreplay.conformance.scheduler_vectors import run_workload

        expected = recorded_steps(vector)
        return first_differences(expected, run_workload(vector.document["workload"]))


def recorded_steps(vector: Vector) -> list[dict[str, Json]]:
    """Raises ConfigError where there are none."""
    steps = vector.document.get("steps")
    if not isinstance(steps, list) or not steps:
        raise ConfigError("steps: expected a list of steps")
    for index, step in enumerate(steps):
        if not isinstance(step, dict) or step.get("k") != index:
            raise ConfigError(f"steps[{index}]: expected an object with k {index}")
    return steps
