"""Random workloads over every kind of groups, with loads that fail: what an ideal engine keeps, and shorter ways."""

from collections.abc import Iterable
from typing import Any

import pytest

from kvreplay.behaviour import profile
from kvreplay.conformance.checked_run import CheckedDriver
from kvreplay.conformance.random_workloads import LAYOUTS, random_workload
from kvreplay.conformance.scheduler_vectors import run_workload
from kvreplay.conformance.workload import read_workload
from kvreplay.kv import attention_managers
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.uniform_manager import UniformAttentionCacheManager

FEATURES = ("async", "priority", "roles")
SEEDS = range(12)
UNIFORM = ("full_swa", "full_two_swa")


def broken(workload: Any, behaviour: str) -> set[str]:  # noqa: ANN401 - JSON
    """Laws. A stall that no engine could help breaks none."""
    driver = CheckedDriver(read_workload(workload), profile(behaviour))
    laws = {finding.checker for finding in driver.check()}
    return laws - {"PROGRESS"} if "PROGRESS" in laws and cannot_go_on(driver, workload) else laws


def cannot_go_on(driver: CheckedDriver, workload: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether what is scripted, or configured, leaves whoever is stalled no way on."""
    scheduler, kv = driver.scheduler, driver.kv
    script = {request["id"]: request for request in workload["requests"]}
    requests = list(scheduler.requests.values())
    if any(request.status.is_parked and _never_ends(script[request.request_id]) for request in requests):
        return True
    # Of those that wait to be scheduled the first is in the way of all.
    head = next(iter(scheduler.waiting), None)
    if head is None or kv.num_blocks_held(head.request_id):
        return False
    if not scheduler.config.enable_chunked_prefill and head.num_tokens > scheduler.config.token_budget:
        return True
    kept = sum(kv.num_blocks_held(request.request_id) for request in requests if request.status.is_finished)
    most = head.num_prompt_tokens + min(head.max_tokens, head.num_output_tokens + 1)
    need = kv.num_blocks_to_finish(head.request_id, most, 0, scheduler._num_step_slots)
    need += sum(spec.is_aligned_mamba for spec in kv.groups)  # the state that the next one is made from
    return need + kv.watermark_blocks > kv.pool.num_blocks - 1 - kept


def _never_ends(request: Any) -> bool:  # noqa: ANN401 - JSON
    load = request.get("load", {})
    return "recv_after" not in load and "failed_after" not in load


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ideal_reads_nothing_wrong_and_survives(layout: str) -> None:
    for seed in SEEDS:
        assert broken(random_workload(seed, layouts=[layout], features=FEATURES), "ideal") == set(), seed


def test_drafts_that_a_threshold_cuts_kill_no_ideal_engine() -> None:
    """One token left, padded for three drafts, and long prefills cut to three tokens."""
    workload = random_workload(940, layouts=["full_two_swa"], features=("spec",))
    assert broken(workload, "ideal") == set()
    capped = profile("ideal").with_switch("padded_decodes=capped")
    findings = CheckedDriver(read_workload(workload), capped).check()
    assert {finding.checker for finding in findings} == {"NO-FATAL"}


def test_who_hits_what_was_computed_on_a_bad_block_in_the_same_step_is_not_taken_in() -> None:
    """It has hit the window's last blocks only, so that it holds none that was reported."""
    assert broken(random_workload(53, layouts=["swa"], features=FEATURES), "ideal") == set()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_real_engine_accounts_for_every_block(layout: str) -> None:
    for seed in SEEDS:
        workload = random_workload(seed, layouts=[layout], features=FEATURES)
        assert broken(workload, "vllm-0.33").isdisjoint({"CONSERVATION", "FENCE"}), seed


def decisions(workload: Any) -> list[Any]:  # noqa: ANN401 - JSON
    return list(run_workload(workload))


def sparse(seeds: Iterable[int]) -> list[Any]:
    workloads = [random_workload(seed, layouts=UNIFORM, features=FEATURES) for seed in seeds]
    for workload in workloads:
        workload["engine"]["retention_interval"] = 0
    return workloads


def test_uniform_groups_have_a_shorter_way_to_the_same_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    workloads = sparse(range(60))
    short = [decisions(workload) for workload in workloads]
    chosen = [attention_managers._kind_for(*_rules(workload)) for workload in workloads]
    assert chosen.count(UniformAttentionCacheManager) > 10
    monkeypatch.setattr(attention_managers, "_kind_for", lambda *_: KVCacheManager)
    assert [decisions(workload) for workload in workloads] == short


def _rules(workload: Any) -> tuple[Any, ...]:  # noqa: ANN401 - JSON
    from kvreplay.conformance.scheduler_vectors import Driver

    driver = Driver(read_workload(workload))
    engine = driver.workload.engine
    return driver.kv.groups, driver.kv._drafts, engine.retention_interval, engine.hash_block_size
