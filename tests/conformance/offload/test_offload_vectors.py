"""Our offloading connector decides, step by step, what the real one decided."""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvreplay.conformance.offload_replay import replay_offload
from kvreplay.conformance.offload_vectors import COMPARED
from kvreplay.conformance.vector import UnsupportedVectorError
from kvreplay.errors import ConfigError

HERE = Path(__file__).parent
ORIGINALS = Path(__file__).parents[4] / "shared" / "golden" / "offload"
GIVEN = [path for folder in ("vectors", "managers", "alloc") for path in sorted(HERE.glob(f"{folder}/*.json"))]
VECTORS = [*GIVEN, *sorted(HERE.glob("more/*.json"))]
WITH_SCHEDULER = sorted(HERE.glob("vectors/*.json"))


@cache
def read(path: Path) -> Any:  # noqa: ANN401 - JSON
    return json.loads(path.read_text())


def name_of(path: Path) -> str:
    return path.stem


def document(name: str) -> Any:  # noqa: ANN401 - JSON
    (path,) = HERE.glob(f"*/{name}.json")
    return deepcopy(read(path))


def test_all_given_vectors_are_here() -> None:
    assert len(WITH_SCHEDULER) == 148
    assert len(list(HERE.glob("managers/*.json"))) == 56
    assert sum(len(read(path)["cases"]) for path in HERE.glob("alloc/*.json")) == 176
    assert {read(path)["oracle"] for path in VECTORS} == {"vllm 0.33.0"}


@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="the recorded originals are not on this machine")
def test_they_are_as_recorded() -> None:
    for path in GIVEN:
        assert path.read_bytes() == (ORIGINALS / path.relative_to(HERE)).read_bytes(), path.name


@pytest.mark.parametrize("path", VECTORS, ids=name_of)
def test_decides_as_recorded(path: Path) -> None:
    assert list(replay_offload(read(path))) == []


@pytest.mark.parametrize("name", ["87_five_groups_pressure", "mr07_arc", "lookup"])
def test_a_second_run_decides_the_same_and_leaves_the_vector_alone(name: str) -> None:
    vector = document(name)
    assert list(replay_offload(vector)) == []
    assert vector == document(name)
    assert list(replay_offload(vector)) == []


# -- the comparison can fail ----------------------------------------------------------------------------------


def falsified(field: str) -> Iterator[tuple[Any, int]]:
    """Vectors in which one step says something else about this field, and that step."""
    for path in WITH_SCHEDULER:
        for index, step in enumerate(read(path)["steps"]):
            if field in step and not (field == "error" and step["error"]["where"] == "reset"):
                vector = deepcopy(read(path))
                vector["steps"][index][field] = changed(step[field])
                yield vector, step["k"]
                return


def changed(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        name = "type" if "type" in value else next(iter(value))
        return {**value, name: changed(value[name])}
    if isinstance(value, list):
        return [*value[:-1], changed(value[-1])] if value else ["something"]
    return not value if isinstance(value, bool) else value + type(value)(1)


@pytest.mark.parametrize("field", COMPARED)
def test_a_difference_in_any_compared_field_is_found_in_its_step(field: str) -> None:
    for vector, step in falsified(field):
        differences = replay_offload(vector)
        assert {difference.step for difference in differences} == {step}
        assert any(difference.field.partition(".")[0] == field for difference in differences)


def test_a_difference_in_a_manager_is_found_at_its_operation() -> None:
    vector = document("lru_03_pin")
    vector["results"][9]["st"]["lru"].reverse()
    (difference,) = replay_offload(vector)
    assert (difference.step, difference.field) == (9, "st.lru")


def test_a_difference_in_a_call_is_found_at_its_case() -> None:
    vector = document("alloc")
    vector["cases"][0]["result"]["dst"] = [32, 41]
    (difference,) = replay_offload(vector)
    assert (difference.step, difference.field, difference.got) == (0, "dst", [32, 42])


# -- what is no vector, or none that can be replayed ----------------------------------------------------------


def test_a_key_that_nobody_knows_is_refused_by_name() -> None:
    vector = document("01_store_load")
    vector["workload"]["offload"]["compression"] = "zstd"
    with pytest.raises(UnsupportedVectorError, match="unknown field `compression`"):
        replay_offload(vector)


def test_speculative_decoding_is_not_replayed() -> None:
    vector = document("01_store_load")
    vector["workload"]["engine"]["spec"] = {"tokens": 3}
    with pytest.raises(UnsupportedVectorError, match=r"^speculative decoding or HiSparse"):
        replay_offload(vector)


@pytest.mark.parametrize(
    ("name", "part"),
    [("01_store_load", "steps"), ("mr00_lru", "ops"), ("alloc", "cases"), ("01_store_load", "resolved")],
)
def test_a_vector_without_a_part_is_broken(name: str, part: str) -> None:
    vector = document(name)
    del vector[part]
    with pytest.raises(ConfigError, match=f"^{part}: expected"):
        replay_offload(vector)


def test_a_step_that_is_no_step_is_broken() -> None:
    vector = document("01_store_load")
    vector["steps"][0]["new"] = [["a", "zero", 16, [[1, 2, 3, 4]]]]
    with pytest.raises(ConfigError, match=r"^steps: Expected `int`, got `str`"):
        replay_offload(vector)
