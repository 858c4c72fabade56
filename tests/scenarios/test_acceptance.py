"""The main job on real traffic: Mooncake's public conversation trace on four prefill and four decode instances.

It is not part of the repository; where it is not found beside the checkout, these tests are skipped.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from kvreplay.checkers.finding import CONSERVATION, PROGRESS
from kvreplay.faults.plan import make_plan
from kvreplay.replay.config_load import load_config
from kvreplay.replay.runner import RunOptions, run_trace
from kvreplay.trace.importers.mooncake import read_mooncake
from kvreplay.trace.reader import read_trace
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.workload import write_workload
from kvreplay.verdict.exit_status import ExitStatus
from kvreplay.verdict.model import Summary

PUBLIC = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
HOUR = 12_031
PART = 3_000
TIMEOUTS = "timeout:p=0.02"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PUBLIC.exists(), reason="the public conversation trace is not beside the checkout"),
]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("acceptance") / "conversations.parquet"
    write_workload(path, read_mooncake(PUBLIC), TraceMetadata(source={"tool": "test"}))
    return path


class Run:
    """A run of the trace, and what it wrote."""

    def __init__(self, trace: Path, output: Path, *inject: str, limit: int, policy: str = "fail", profile: str) -> None:
        loaded = load_config("mooncake-4p4d", policy=policy, profile=profile)
        options = RunOptions(
            trace=trace, loaded=loaded, plan=make_plan(inject), injected=inject, limit=limit, output=output
        )
        self.summary: Summary = run_trace(options, read_trace(trace)).summary
        self.rows = read_trace(output).frame()

    def of(self, *kinds: str) -> pl.DataFrame:
        return self.rows.filter(pl.col("kind").is_in(list(kinds)))

    def requests_of(self, *kinds: str, instances: str = "D") -> set[str]:
        rows = self.of(*kinds).filter(pl.col("instance").cast(pl.String).str.starts_with(instances))
        return set(rows["request_id"].cast(pl.String))

    @property
    def faulted(self) -> set[str]:
        return self.requests_of("fault.injected")


@contextmanager
def played(
    trace: Path, folder: Path, *inject: str, limit: int = PART, policy: str = "fail", profile: str = "vllm-0.33"
) -> Iterator[Run]:
    output = folder / "out.parquet"
    yield Run(trace, output, *inject, limit=limit, policy=policy, profile=profile)
    output.unlink()


def test_without_faults_nothing_goes_wrong(conversations: Path, tmp_path: Path) -> None:
    with played(conversations, tmp_path) as run:
        assert run.summary.exit_status == ExitStatus.PASSED
        assert run.summary.requests.finished == PART
        assert run.summary.violations == []
        assert set(run.summary.recomputed_tokens.by_cause) <= {"eviction", "full-hit-last-token"}
        assert len(run.requests_of("request.finished")) == PART


def test_under_recompute_every_request_of_the_hour_finishes(conversations: Path, tmp_path: Path) -> None:
    """And what was computed again adds up from the trace: every lost token is computed again, once, by its cause."""
    with played(conversations, tmp_path, TIMEOUTS, limit=HOUR, policy="recompute") as run:
        summary = run.summary
        assert summary.exit_status == ExitStatus.PASSED
        assert (summary.requests.total, summary.requests.finished) == (HOUR, HOUR)
        assert summary.violations == [], "outputs are right and blocks are conserved"
        assert 0.01 * HOUR < len(run.faulted) < 0.03 * HOUR
        assert run.requests_of("load.failed") == run.faulted

        recomputed = run.of("tokens.recomputed").with_columns(pl.col("cause").cast(pl.String))
        by_cause = dict(recomputed.group_by("cause").agg(pl.col("num_tokens").sum()).iter_rows())
        assert by_cause == summary.recomputed_tokens.by_cause
        assert sum(by_cause.values()) == summary.recomputed_tokens.total

        lost = run.of("load.failed").select("seq", "request_id", "num_tokens")
        again = recomputed.filter(pl.col("cause") == "load-failure")
        per_load = again.group_by("cause_seq").agg(pl.col("num_tokens").sum())
        joined = lost.join(per_load, left_on="seq", right_on="cause_seq", how="full")
        assert joined.null_count().sum_horizontal().item() == 0, "each row names the load that it makes up for"
        assert (joined["num_tokens_right"] >= joined["num_tokens"]).all()
        assert joined["num_tokens"].sum() == summary.loads.failed_tokens


def test_under_fail_exactly_the_faulted_requests_fail(conversations: Path, tmp_path: Path) -> None:
    with played(conversations, tmp_path, TIMEOUTS) as run:
        assert run.summary.exit_status == ExitStatus.PASSED
        assert run.faulted
        assert run.requests_of("request.failed") == run.faulted
        assert run.summary.requests.failed == len(run.faulted)
        assert run.summary.requests.finished == PART - len(run.faulted)
        assert run.summary.requests.failed_unfaulted == 0
        assert run.summary.violations == []


def test_before_50984_exactly_the_faulted_requests_stall_and_keep_their_blocks(
    conversations: Path, tmp_path: Path
) -> None:
    with played(conversations, tmp_path, TIMEOUTS, profile="pre-50984") as run:
        summary = run.summary
        assert summary.exit_status == ExitStatus.STALLED
        assert {stall.request_id for stall in summary.stalled} == run.faulted
        assert summary.requests.stalled == summary.requests.lost == len(run.faulted)
        assert summary.requests.finished == PART - len(run.faulted)
        parked = (
            run.of("request.parked").select("request_id", "num_blocks").with_columns(pl.col("request_id").cast(str))
        )
        promised = dict(parked.iter_rows())
        assert {stall.request_id: stall.blocks_held for stall in summary.stalled} == {
            name: promised[name] for name in run.faulted
        }
        at_the_end = run.of("usage").filter(pl.col("status").cast(str) == "blocks").group_by("instance").last()
        held = sum(stall.blocks_held for stall in summary.stalled)
        assert 0.9 * held < at_the_end["num_tokens"].sum() <= held, "some share a prefix"
        assert summary.violations == [], "what a stall implies is attached to it"
        implied = Counter(checker for stall in summary.stalled for checker in stall.implied)
        assert implied[CONSERVATION] == len(run.faulted)
        assert set(implied) <= {CONSERVATION, PROGRESS}


def test_corrupted_blocks_are_told_once_with_all_their_names(conversations: Path, tmp_path: Path) -> None:
    with played(conversations, tmp_path, "corrupt:p=0.02", limit=1_000) as run:
        content = [violation for violation in run.summary.violations if violation.checker == "CONTENT"]
        assert run.summary.exit_status == ExitStatus.VIOLATED
        assert {violation.request_id for violation in content} == run.faulted
        assert len({(violation.instance, violation.block_id, violation.transfer_id) for violation in content}) == len(
            content
        )
        for violation in content:
            assert (violation.group, violation.fault) == (0, "corrupt:p=0.02")
            assert violation.transfer_id == f"xfer-{violation.request_id}"


def test_under_ideal_none_is_read(conversations: Path, tmp_path: Path) -> None:
    with played(conversations, tmp_path, "corrupt:p=0.02", limit=1_000, policy="recompute", profile="ideal") as run:
        assert run.faulted
        assert run.summary.exit_status == ExitStatus.PASSED
        assert run.summary.requests.finished == 1_000


@pytest.mark.parametrize("detail", ["run", "blocks"])
def test_processes_with_different_hash_seeds_write_the_same_bytes(
    conversations: Path, tmp_path: Path, detail: str
) -> None:
    run = partial(run_in_process, conversations, detail)
    first, second = run(tmp_path / "first.parquet", "0"), run(tmp_path / "second.parquet", "4711")
    assert first == second
    assert len(first) > 10_000


def run_in_process(trace: Path, detail: str, output: Path, hash_seed: str) -> bytes:
    arguments = ["--config", "mooncake-4p4d", "--limit", "200", "--detail", detail, "--policy", "recompute"]
    faults = ("timeout:p=0.05", "corrupt:p=0.05", "abort:p=0.05", "peer-crash:at=60s,instance=P1,down=60s")
    injected = [argument for fault in faults for argument in ("--inject", fault)]
    command = [sys.executable, "-m", "kvreplay", "run", str(trace), *arguments, *injected, "-o", str(output)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode in (ExitStatus.PASSED, ExitStatus.VIOLATED), done.stderr
    return output.read_bytes()
