"""Each scheduler vector with KV buffers and checkers on: what goes wrong in vLLM 0.33.0, and nothing under `ideal`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvreplay.behaviour import profile
from kvreplay.conformance.checked_run import CheckedDriver, check_workload
from kvreplay.conformance.finding import VectorFinding
from kvreplay.conformance.workload import read_workload

FOLDER = Path(__file__).parent / "scheduler"
NAMES = [path.stem for path in sorted(FOLDER.glob("*.json"))]

HAZARDS = {
    "CONTENT": [80, 81, 82],
    "NULL-BLOCK": [31, 32],
    "AGREE": [86, 87],
    "PROGRESS": [39, 85, 88, 211, 212, 213, 214, 215],
    "NO-FATAL": [43, 44, 45, 54, 147, 201, 210],
}
"""What the vectors were made to show."""

MORE = {
    "121_chunked_local_unaligned": {"NULL-BLOCK"},
    "r002_mamba": {"CONTENT"},
    "r007_one": {"CONTENT"},
    "r009_swa1": {"NULL-BLOCK"},
    "r011_swa1": {"NULL-BLOCK"},
    "r018_one": {"CONTENT"},
}
"""What is found in others: a chunk that begins inside a block is hit without its first blocks (121); the last token of
a prompt that was loaded whole goes into a state that has it (r002); a load's bad block is reported a step after it was
read (r007, r018); a load is cut back, or goes back by its last token, to where its window was not loaded (r009, r011).
"""


def expected(name: str) -> set[str]:
    number = name.partition("_")[0]
    found = {checker for checker, numbers in HAZARDS.items() if number.isdecimal() and int(number) in numbers}
    return found | MORE.get(name, set())


@cache
def workload(name: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads((FOLDER / f"{name}.json").read_text())["workload"]


def findings(name: str, behaviour: str = "vllm-0.33") -> list[VectorFinding]:
    return check_workload(workload(name), profile(behaviour))


@pytest.mark.parametrize("name", NAMES)
def test_the_real_engine_breaks_what_the_vector_shows_and_no_other_law(name: str) -> None:
    assert {finding.checker for finding in findings(name)} == expected(name)


@pytest.mark.parametrize("name", NAMES)
def test_an_ideal_engine_breaks_no_law(name: str) -> None:
    assert findings(name, "ideal") == []


def places(name: str) -> list[tuple[str, str | None, int | None]]:
    return [(finding.checker, finding.request_id, finding.block_id) for finding in findings(name)]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("31_null_block_swa_single", [("NULL-BLOCK", "a", 0)]),
        ("80_hazard_fail_leaves_sharer_block", [("CONTENT", "d", 7)]),
        ("81_hazard_recompute_hit_before_rewrite", [("CONTENT", "c", 6)]),
        ("82_hazard_recompute_preempted", [("CONTENT", "a", 11)]),
        ("86_hazard_async_sched_sync_invalid", [("AGREE", "a", None)]),
        ("39_failed_without_recv", [("PROGRESS", "a", None)]),
        ("54_hybrid_invalid_blocks_error", [("NO-FATAL", None, None)]),
    ],
)
def test_a_finding_names_who_and_which_block(name: str, found: list[tuple[str, str | None, int | None]]) -> None:
    assert places(name) == found


def test_a_death_says_what_it_was() -> None:
    (death,) = findings("54_hybrid_invalid_blocks_error")
    assert death.detail.startswith("the engine died in update: RuntimeError: A KV connector reported block-level")


# -- the checkers see what they should ----------------------------------------------------------------------------


class Forgetful(CheckedDriver):
    """Its loads bring nothing."""

    def _land(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("name", ["20_sync_load", "21_async_load_ok", "53_hybrid_async_load", "64_ds_v4_async_load"])
def test_a_load_that_brings_nothing_is_noticed(name: str) -> None:
    driver = Forgetful(read_workload(workload(name)), profile("vllm-0.33"))
    assert {finding.checker for finding in driver.check()} == {"CONTENT"}


class Lossy(CheckedDriver):
    """Every block that is copied or zeroed stays as it was."""

    def execute(self, out: Any) -> None:  # noqa: ANN401 - SchedulerOutput
        out.block_copies = []
        super().execute(out)


def test_a_state_that_is_not_copied_is_noticed() -> None:
    driver = Lossy(read_workload(workload("59_hybrid_mamba_fine_hash")), profile("vllm-0.33"))
    assert {finding.checker for finding in driver.check()} == {"CONTENT"}


@pytest.mark.parametrize(
    ("behaviour", "checkers"), [("pre-50388", {"NO-FATAL"}), ("post-50388", set()), ("ideal", set())]
)
def test_each_version_takes_a_report_by_block_of_several_groups_its_own_way(behaviour: str, checkers: set[str]) -> None:
    found = findings("54_hybrid_invalid_blocks_error", behaviour)
    assert {finding.checker for finding in found} == checkers
    if checkers:
        assert "ValueError: too many values to unpack" in found[0].detail
