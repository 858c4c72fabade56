"""Our scheduler decides, step by step, what the real one decided."""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvreplay.conformance.scheduler_vectors import (
    UnsupportedVectorError,
    differences,
    reason_unsupported,
    run_workload,
)

FOLDER = Path(__file__).parent / "scheduler"
NUM_OF_ONE_GROUP = 87
"""Vectors of one group, FCFS, without speculative decoding and async scheduling."""


@cache
def read(name: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads((FOLDER / f"{name}.json").read_text())


NAMES = [path.stem for path in sorted(FOLDER.glob("*.json")) if reason_unsupported(read(path.stem)["workload"]) is None]
FIELDS = sorted({field for name in NAMES for step in read(name)["steps"] for field in step} - {"k", "after"})
STATE_FIELDS = sorted({field for name in NAMES for step in read(name)["steps"] for field in step.get("after", ())})


def test_all_vectors_of_one_group_are_here() -> None:
    assert len(NAMES) >= NUM_OF_ONE_GROUP
    assert {read(name)["oracle"] for name in NAMES} == {"vllm 0.33.0"}


@pytest.mark.parametrize("name", NAMES)
def test_decides_as_recorded(name: str) -> None:
    vector = read(name)
    assert list(differences(vector["steps"], run_workload(vector["workload"]))) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_second_run_decides_the_same_and_leaves_the_vector_alone(name: str) -> None:
    workload = deepcopy(read(name)["workload"])
    first = run_workload(workload)
    assert workload == read(name)["workload"]
    assert run_workload(workload) == first


def test_a_workload_beyond_the_engine_is_refused_by_what_it_needs() -> None:
    workload = deepcopy(read(NAMES[0])["workload"])
    workload["engine"]["policy"] = "priority"
    assert reason_unsupported(workload) == "policy priority"
    with pytest.raises(UnsupportedVectorError, match=r"^policy priority$"):
        run_workload(workload)


class TestTheComparisonCanFail:
    """Whatever is changed in a record is named, with its step."""

    @staticmethod
    def changed(value: Any) -> Any:  # noqa: ANN401 - JSON
        """The smallest change of a value: a number moved by one, the innermost last entry of a list changed."""
        match value:
            case bool():
                return not value
            case int():
                return value + 1
            case str():
                return f"{value}?"
            case list():
                return [*value[:-1], TestTheComparisonCanFail.changed(value[-1])] if value else [1]
            case dict():
                last = list(value)[-1]
                return {**value, last: TestTheComparisonCanFail.changed(value[last])}
        return 0

    @staticmethod
    def where(has_field: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], int]:
        """A copy of the first vector with such a step, and that step's number."""
        for name in NAMES:
            for place, step in enumerate(read(name)["steps"]):
                if has_field(step):
                    return deepcopy(read(name)["steps"]), place
        raise AssertionError("no vector has it")

    @pytest.mark.parametrize("field", [field for field in FIELDS if field != "error"])
    def test_in_a_field(self, field: str) -> None:
        steps, place = self.where(lambda step: field in step)
        recorded = steps[place][field]
        steps[place][field] = self.changed(recorded)
        unchanged, _ = self.where(lambda step: field in step)
        assert list(differences(steps, unchanged)) == [(place, field, steps[place][field], recorded)]
        del steps[place][field]
        assert list(differences(unchanged, steps)) == [(place, field, recorded, None)]

    @pytest.mark.parametrize("field", STATE_FIELDS)
    def test_in_the_state_after_a_step(self, field: str) -> None:
        steps, place = self.where(lambda step: field in step.get("after", ()))
        recorded = steps[place]["after"][field]
        steps[place]["after"][field] = self.changed(recorded)
        unchanged, _ = self.where(lambda step: field in step.get("after", ()))
        assert list(differences(unchanged, steps)) == [
            (place, f"after.{field}", recorded, steps[place]["after"][field])
        ]

    @pytest.mark.parametrize("key", ["where", "type", "msg"])
    def test_in_how_the_engine_died(self, key: str) -> None:
        steps, place = self.where(lambda step: bool(step.get("error", {}).get("msg")))
        unchanged = deepcopy(steps)
        steps[place]["error"][key] = "other"
        ((step, field, _, _),) = differences(steps, unchanged)
        assert (step, field) == (place, "error")

    def test_in_the_number_of_steps(self) -> None:
        steps = read(NAMES[0])["steps"]
        assert list(differences(steps, steps[:-1])) == [(len(steps) - 1, "number of steps", len(steps), len(steps) - 1)]

    def test_in_the_free_queues_order(self) -> None:
        steps, place = self.where(lambda step: len(step.get("after", {}).get("fq", ())) > 1)
        unchanged = deepcopy(steps)
        steps[place]["after"]["fq"].reverse()
        ((step, field, _, _),) = differences(steps, unchanged)
        assert (step, field) == (place, "after.fq")

    @pytest.mark.parametrize(
        ("name", "setting", "value"),
        [
            ("04_preempt_pressure", "num_gpu_blocks", 64),
            ("23_async_invalid_recompute", "kv_load_failure_policy", "fail"),
            ("11_watermark", "watermark", 0.0),
            ("12_apc_shared_prefix", "enable_prefix_caching", False),
            ("01_fcfs_chunked", "max_num_batched_tokens", 31),
        ],
    )
    def test_where_the_engine_is_set_up_otherwise(self, name: str, setting: str, value: object) -> None:
        vector = deepcopy(read(name))
        vector["workload"]["engine"][setting] = value
        assert list(differences(vector["steps"], run_workload(vector["workload"])))
