"""Our scheduler decides, step by step, what the real one decided."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvreplay.conformance.compare import first_differences
from kvreplay.conformance.scheduler_vectors import reason_unsupported, run_workload
from kvreplay.conformance.vector import UnsupportedVectorError
from kvreplay.conformance.workload import read_workload

FOLDER = Path(__file__).parent / "scheduler"
NUM_RECORDED = 184


@cache
def read(name: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads((FOLDER / f"{name}.json").read_text())


NAMES = [
    path.stem
    for path in sorted(FOLDER.glob("*.json"))
    if reason_unsupported(read_workload(read(path.stem)["workload"])) is None
]
FIELDS = sorted({field for name in NAMES for step in read(name)["steps"] for field in step} - {"k"})
STATE_FIELDS = sorted({field for name in NAMES for step in read(name)["steps"] for field in step.get("after", ())})


def test_all_recorded_vectors_are_here_and_none_is_beyond_the_engine() -> None:
    assert len(NAMES) >= NUM_RECORDED
    assert len(NAMES) == len(list(FOLDER.glob("*.json")))
    assert {read(name)["oracle"] for name in NAMES} == {"vllm 0.33.0"}


@pytest.mark.parametrize("name", NAMES)
def test_decides_as_recorded(name: str) -> None:
    vector = read(name)
    assert first_differences(vector["steps"], run_workload(vector["workload"])) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_second_run_decides_the_same_and_leaves_the_vector_alone(name: str) -> None:
    workload = deepcopy(read(name)["workload"])
    first = list(run_workload(workload))
    assert workload == read(name)["workload"]
    assert list(run_workload(workload)) == first


def test_a_workload_beyond_the_engine_is_refused_by_what_it_needs() -> None:
    workload = deepcopy(read(NAMES[0])["workload"])
    workload["engine"]["groups"] = [{"type": "cross_attention"}]
    with pytest.raises(UnsupportedVectorError, match=r"^group type cross_attention$"):
        list(run_workload(workload))


# -- the comparison can fail ----------------------------------------------------------------------------------


def changed(value: Any) -> Any:  # noqa: ANN401 - JSON
    """A value that differs in one place: a number moved by one, in a list or an object in the last of it."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"other {value}"
        case list():
            return [*value[:-1], changed(value[-1])] if value else [1]
        case dict():
            last = list(value)[-1]
            return {**value, last: changed(value[last])}
    return 0


def recorded_with(field: str, *, in_state: bool = False) -> tuple[str, int]:
    """The first vector and step with such a field."""
    for name in NAMES:
        for place, step in enumerate(read(name)["steps"]):
            if field in (step.get("after", ()) if in_state else step):
                return name, place
    raise AssertionError(f"no vector has {field}")


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_field_of_a_step_is_changed_is_named(field: str) -> None:
    name, place = recorded_with(field)
    steps = deepcopy(read(name)["steps"])
    steps[place][field] = changed(steps[place][field])
    found = first_differences(steps, run_workload(read(name)["workload"]))
    assert {(difference.step, difference.field.partition(".")[0]) for difference in found} == {(place, field)}


@pytest.mark.parametrize("field", STATE_FIELDS)
def test_whatever_part_of_the_state_is_changed_is_named(field: str) -> None:
    name, place = recorded_with(field, in_state=True)
    steps = deepcopy(read(name)["steps"])
    steps[place]["after"][field] = changed(steps[place]["after"][field])
    found = first_differences(steps, run_workload(read(name)["workload"]))
    assert {(difference.step, ".".join(difference.field.split(".")[:2])) for difference in found} == {
        (place, f"after.{field}")
    }


def test_the_free_queues_order_is_compared() -> None:
    name, place = recorded_with("fq", in_state=True)
    steps = deepcopy(read(name)["steps"])
    steps[place]["after"]["fq"].reverse()
    (difference,) = first_differences(steps, run_workload(read(name)["workload"]))
    assert (difference.step, difference.field) == (place, "after.fq")


def test_a_missing_step_is_a_difference() -> None:
    steps = read(NAMES[0])["steps"]
    assert first_differences(steps[:-1], run_workload(read(NAMES[0])["workload"]))


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
def test_an_engine_that_is_set_up_otherwise_decides_otherwise(name: str, setting: str, value: object) -> None:
    workload = deepcopy(read(name)["workload"])
    workload["engine"][setting] = value
    assert first_differences(read(name)["steps"], run_workload(workload))
