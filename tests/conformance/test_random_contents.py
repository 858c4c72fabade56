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
    """A stall may be the connector's doing, which never ends a load or keeps blocks, or that of a pool that is too
    small for one request."""
    findings = CheckedDriver(read_workload(workload), profile(behaviour)).check()
    return {finding.checker for finding in findings} - {"PROGRESS"}


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
