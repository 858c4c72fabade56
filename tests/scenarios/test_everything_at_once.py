"""Every message and action fault of the Mooncake connector at once, on instances whose ranks are cut differently."""

from functools import cache
from pathlib import Path

import pytest

from kvreplay.faults.catalogue import catalogue
from kvreplay.faults.plan import make_plan
from kvreplay.faults.registry import VERBS
from kvreplay.faults.verb import MessageVerb
from kvreplay.replay.config_load import load_config
from kvreplay.replay.presets import find_trace
from kvreplay.replay.runner import RunOptions, run_trace
from kvreplay.sim.envelope import BOOTSTRAP_REGISTER
from kvreplay.trace.importers.mooncake import read_mooncake
from kvreplay.trace.reader import read_trace
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.workload import write_workload
from kvreplay.verdict.model import Summary

PUBLIC = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
PART = 1_500
_BEYOND_REQUESTS = ("mooncake.dup-transfer-id", "mooncake.role-mismatch", "mooncake.kv-both-chain")
"""Parameters that are wrong beyond their own request: they end engines, or all share one transfer."""
BEYOND = (
    "mooncake.dup-transfer-id:p=0.04",
    "mooncake.role-mismatch:nth=45",
    "mooncake.kv-both-chain:p=0.05",
    "mooncake.register-conflict:instance=P1",
    "mooncake.register-timeout:instance=P2,times=1",
    "mooncake.register-mem:instance=P3",
    "mooncake.engine-init:instance=D3",
)
"""What the others' run leaves out: these, instances that never come up, and one that comes up late."""
POLICIES = ["fail", "recompute"]


def every_fault(p: float) -> tuple[str, ...]:
    """All of them that act on messages or parameters, each on a share of its conversations, and clients that leave."""
    of_messages = [
        row.name
        for row in catalogue().values()
        if row.needs == "mooncake"
        and row.name not in _BEYOND_REQUESTS
        and row.target != BOOTSTRAP_REGISTER  # who cannot register does not come up
        and (isinstance(VERBS[row.verb], MessageVerb) or row.rewrite is not None)
    ]
    return tuple(f"{name}:p={p}" for name in ["abort", "mooncake.p-abort-while-waiting", *of_messages])


def run(
    trace: Path,
    profile: str,
    policy: str,
    p: float,
    limit: int | None = None,
    *,
    beyond: tuple[str, ...] = (),
    sets: tuple[str, ...] = (),
) -> Summary:
    inject = (*every_fault(p), *beyond)
    loaded = load_config("mooncake-4p4d-tp4-tp2", policy=policy, profile=profile, sets=sets)
    options = RunOptions(trace=trace, loaded=loaded, plan=make_plan(inject), injected=inject, limit=limit)
    return run_trace(options, read_trace(trace)).summary


def check_ideal(summary: Summary) -> None:
    """Whoever was there has ended, every block is back, and no law is broken."""
    requests = summary.requests
    assert summary.verdict == "passed"
    assert requests.finished + requests.failed + requests.aborted == requests.total
    assert requests.failed_unfaulted == 0
    assert (summary.violations, summary.stalled, summary.crashes) == ([], [], [])


def check_blame(summary: Summary) -> None:
    """Everything that is wrong names one of the plan's faults."""
    planned = {fault.spec for fault in summary.faults}
    assert {found.fault for found in summary.violations} <= planned
    assert {stall.fault for stall in summary.stalled} <= planned


@cache
def canned(profile: str, policy: str) -> Summary:
    return run(find_trace("multi-turn"), profile, policy, 0.04)


class TestOnACannedTrace:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_ideally_everything_ends_well(self, policy: str) -> None:
        check_ideal(canned("ideal", policy))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_what_is_wrong_names_its_fault(self, policy: str) -> None:
        summary = canned("vllm-0.33", policy)
        assert summary.verdict == "stalled"
        assert summary.violations
        check_blame(summary)

    @pytest.mark.parametrize("profile", ["vllm-0.33", "ideal"])
    def test_the_same_again_is_the_same(self, profile: str) -> None:
        assert canned(profile, "recompute") == run(find_trace("multi-turn"), profile, "recompute", 0.04)


def test_between_them_the_plans_have_every_row() -> None:
    named = {spec.partition(":")[0] for spec in (*every_fault(1), *BEYOND)}
    assert {name for name, row in catalogue().items() if row.needs == "mooncake"} <= named


@pytest.mark.parametrize("sets", [(), ("connector.kv_role=kv_both",)], ids=["two roles", "both roles"])
class TestWithWhatGoesBeyondARequest:
    """On the canned trace, with everything else at the same time."""

    @pytest.mark.parametrize("policy", POLICIES)
    def test_ideally_only_those_are_missing_that_cannot_come_up(self, policy: str, sets: tuple[str, ...]) -> None:
        summary = run(find_trace("multi-turn"), "ideal", policy, 0.04, beyond=BEYOND, sets=sets)
        requests = summary.requests
        assert {crash.instance for crash in summary.crashes} == {"D3", "P1", "P3"}
        assert requests.rejected == requests.total / 4, "what the proxy sends to D3"
        assert requests.finished + requests.failed + requests.aborted + requests.rejected == requests.total
        assert requests.failed_unfaulted == 0
        assert not (policy == "recompute" and requests.failed)
        assert (summary.violations, summary.stalled) == ([], [])
        assert all(fault.fired for fault in summary.faults if fault.spec in BEYOND)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_what_is_wrong_names_its_fault(self, policy: str, sets: tuple[str, ...]) -> None:
        summary = run(find_trace("multi-turn"), "vllm-0.33", policy, 0.04, beyond=BEYOND, sets=sets)
        assert summary.verdict == "crashed"
        assert summary.violations
        assert all(fault.fired for fault in summary.faults if fault.spec in BEYOND)
        check_blame(summary)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("everything") / "conversations.parquet"
    write_workload(path, read_mooncake(PUBLIC), TraceMetadata(source={"tool": "test"}))
    return path


@pytest.mark.slow
@pytest.mark.skipif(not PUBLIC.exists(), reason="the public conversation trace is not beside the checkout")
class TestOnRealTraffic:
    """The first 1,500 requests of Mooncake's public conversation trace."""

    @pytest.mark.parametrize("policy", POLICIES)
    def test_ideally_everything_ends_well(self, conversations: Path, policy: str) -> None:
        check_ideal(run(conversations, "ideal", policy, 0.01, PART))

    def test_what_is_wrong_names_its_fault_and_the_same_again_is_the_same(self, conversations: Path) -> None:
        first, second = (run(conversations, "vllm-0.33", "fail", 0.01, PART) for _ in range(2))
        assert first.violations
        assert first.requests.unfinished == 0
        check_blame(first)
        assert first == second
