"""Vectors from an installed vLLM: refused without one; with one, given by KVREPLAY_VLLM_PYTHON, tried for real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "conformance" / "scheduler"
VLLM_PYTHON = os.environ.get("KVREPLAY_VLLM_PYTHON", "")

needs_vllm = pytest.mark.skipif(not VLLM_PYTHON, reason="KVREPLAY_VLLM_PYTHON names no Python that has vLLM")


def vllm_vectors(*arguments: object, python: str = VLLM_PYTHON) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "kvreplay.record.vllm_vectors", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.mark.parametrize("arguments", [("check", VECTORS), ("make", "x.json", "-o", "there"), ("fuzz",)])
def test_without_vllm_it_says_so_in_one_line(arguments: tuple[object, ...], tmp_path: Path) -> None:
    # A Python in which no vLLM can be found, whatever is installed.
    hide = "import sys; sys.modules['vllm'] = None; "
    run = "from kvreplay.record.vllm_vectors import main; sys.exit(main(sys.argv[1:]))"
    found = subprocess.run(
        [sys.executable, "-c", hide + run, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert found.returncode == 2
    assert found.stderr == "error: vLLM is not installed in this Python; vectors are recorded where it is\n"
    assert list(tmp_path.iterdir()) == []


@needs_vllm
@pytest.mark.slow
def test_every_vector_comes_out_of_vllm_again() -> None:
    found = vllm_vectors("check", VECTORS)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.endswith("vectors reproduced, 0 differ\n")


@needs_vllm
@pytest.mark.slow
def test_a_vector_is_made_from_a_workload_and_is_the_one_that_was_kept(tmp_path: Path) -> None:
    kept = json.loads((VECTORS / "59_hybrid_mamba_fine_hash.json").read_text())
    (tmp_path / "w.json").write_text(json.dumps(kept["workload"]))
    found = vllm_vectors("make", tmp_path / "w.json", "-o", tmp_path / "made")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads((tmp_path / "made" / "w.json").read_text()) == kept


@needs_vllm
@pytest.mark.slow
def test_a_vector_that_vllm_does_not_reproduce_is_told(tmp_path: Path) -> None:
    kept = json.loads((VECTORS / "04_preempt_pressure.json").read_text())
    kept["steps"][3]["after"]["fq"].reverse()
    (tmp_path / "x.json").write_text(json.dumps(kept))
    found = vllm_vectors("check", tmp_path)
    assert found.returncode == 3
    assert "step 3, after.fq: expected [9,10], got [10,9]" in found.stdout


@needs_vllm
@pytest.mark.slow
def test_what_vllm_refuses_is_one_line(tmp_path: Path) -> None:
    workload = {"engine": {"num_gpu_blocks": 9, "max_num_batched_tokens": 8}, "requests": []}
    (tmp_path / "w.json").write_text(json.dumps(workload))
    found = vllm_vectors("make", tmp_path / "w.json", "-o", tmp_path / "made")
    assert found.returncode == 2
    assert found.stderr.startswith("error: w: vllm ")
    assert "max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (16)" in found.stderr
    assert found.stderr.count("\n") == 1


@needs_vllm
@pytest.mark.slow
def test_random_workloads_find_no_difference() -> None:
    found = vllm_vectors("fuzz", "--count", 150, "--layouts", "full,swa", "--features", "none")
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
