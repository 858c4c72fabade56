"""A scheduler with a scripted connector, KV buffers and checkers: what a scenario in steps comes to."""

from collections.abc import Sequence
from typing import Any

from kvreplay.behaviour import profile
from kvreplay.conformance.checked_run import CheckedDriver
from kvreplay.conformance.finding import VectorFinding
from kvreplay.conformance.vector import Json
from kvreplay.conformance.workload import read_workload


def load(tokens: int, *, after: int | None = None, **more: Json) -> dict[str, Json]:
    """An external hit of `tokens` that arrives `after` steps, or at once."""
    script: dict[str, Json] = {"external": {"tokens": tokens, "async": after is not None}, "load": {**more}}
    if after is not None:
        script["load"]["recv_after"] = after
    return script


def request(name: str, tokens: int, arrive: int = 0, *, first: int | None = None, **more: Json) -> dict[str, Json]:
    """A prompt of its own, unless `first` says with which token it begins."""
    begin = sum(map(ord, name)) * 1000 % 20000 if first is None else first
    return {"id": name, "prompt": {"ramp": [begin, tokens]}, "arrive": arrive, **more}


def engine(num_usable: int, block_size: int = 16, **more: Json) -> dict[str, Json]:
    return {"num_gpu_blocks": num_usable + 1, "block_size": block_size, "max_num_batched_tokens": 512, **more}


class Outcome:
    """What a scenario comes to: the laws it breaks, and its steps."""

    def __init__(
        self,
        engine: dict[str, Json],
        requests: list[dict[str, Json]],
        *switches: str,
        behaviour: str = "vllm-0.33",
        events: Sequence[dict[str, Json]] = (),
    ) -> None:
        in_effect = profile(behaviour)
        for switch in switches:
            in_effect = in_effect.with_switch(switch)
        self.steps: list[Json] = []
        driver = _Recording({"engine": engine, "requests": requests, "events": [*events]}, in_effect, self.steps)
        self.findings: list[VectorFinding] = driver.check()

    @property
    def laws(self) -> set[str]:
        return {finding.checker for finding in self.findings}

    @property
    def finished(self) -> list[str]:
        """In order."""
        return [row[0] for step in self.steps for row in step.get("out", ()) if row[2] in ("length", "stop")]

    @property
    def error(self) -> str | None:
        """What the engine died of."""
        return next((step["error"]["msg"] for step in self.steps if "error" in step), None)

    @property
    def free(self) -> list[int]:
        """Free blocks after each step."""
        return [step["after"]["free"] for step in self.steps if "after" in step]

    def num_preempted(self) -> int:
        return sum(len(step.get("preempted", ())) for step in self.steps)

    def computed(self, name: str) -> list[int]:
        """Where each of the request's shares begins."""
        rows = [row for step in self.steps for key in ("new", "resumed", "run") for row in step.get(key, ())]
        return [row[1] for row in rows if row[0] == name]


class _Recording(CheckedDriver):
    def __init__(self, document: Json, behaviour: Any, steps: list[Json]) -> None:  # noqa: ANN401 - Behaviour
        super().__init__(read_workload(document), behaviour)
        self._steps = steps

    def run(self) -> Any:  # noqa: ANN401 - an iterator of steps
        for step in super().run():
            self._steps.append(step)
            yield step
