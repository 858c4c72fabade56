"""Our SimpleCPUOffloadConnector decides, step by step, what the real one decided."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvreplay.conformance.kinds.simple_cpu import SimpleCpuVectors
from kvreplay.conformance.simple_cpu_vectors import run_simple_cpu
from kvreplay.conformance.suite import KINDS
from kvreplay.conformance.vector import read_vector
from kvreplay.errors import ConfigError

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.json"))


@cache
def read(path: Path) -> Any:  # noqa: ANN401 - JSON
    return json.loads(path.read_text())


def test_they_are_from_the_real_one_and_of_one_kind() -> None:
    assert len(VECTORS) == 30
    for path in VECTORS:
        vector = read_vector(path)
        assert vector is not None
        assert vector.oracle == "vllm 0.33.0"
        assert [kind.name for kind in KINDS if kind.recognises(vector)] == ["simple_cpu"]


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_decides_as_recorded(path: Path) -> None:
    vector = read_vector(path)
    assert vector is not None
    assert list(SimpleCpuVectors().replay(vector, "virtual")) == []


def test_they_show_what_matters() -> None:
    steps = [step for path in VECTORS for step in read(path)["steps"]]
    assert sum("load" in step for step in steps) >= 20
    assert sum("store" in step for step in steps) > 100
    assert any(step.get("flush") for step in steps)
    assert any(len(set(step["store"][1])) < len(step["store"][1]) for step in steps if "store" in step)
    lazy = [path for path in VECTORS if read(path)["workload"]["simple_cpu"].get("lazy_offload")]
    assert len(lazy) == 10
    assert all(any("load" in step for step in read(path)["steps"]) for path in lazy)
    engines = [read(path)["workload"]["engine"] for path in VECTORS]
    assert any("spec" in engine for engine in engines)
    assert any(engine.get("async_scheduling") for engine in engines)


@pytest.mark.parametrize(
    "spec",
    [{"num_cpu_blocks": 1}, {"store_steps": 0}, {"load_steps": "soon"}, {"cpu_blocks": 5}, {"lazy_offload": 1}, []],
)
def test_a_workload_that_is_none_is_refused(spec: Any) -> None:  # noqa: ANN401 - JSON
    workload = {**read(VECTORS[-1])["workload"], "simple_cpu": spec}
    with pytest.raises(ConfigError, match=r"^workload\.simple_cpu: "):
        list(run_simple_cpu(workload))
