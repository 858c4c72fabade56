"""The runner: a trace in, a summary and perhaps a trace out."""

from pathlib import Path

import pytest

from kvreplay.errors import TraceError
from kvreplay.events import DETAIL_BLOCKS
from kvreplay.replay.config_load import load_config
from kvreplay.replay.presets import find_trace
from kvreplay.replay.runner import open_trace, trace_config
from kvreplay.trace.reader import read_trace
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.workload import Workload, read_workload, write_workload
from kvreplay.verdict.exit_status import ExitStatus
from kvreplay.verdict.model import summary_from_json
from tests.scenarios.stage import judge, pair, request, workload

CLIENTS = workload(
    request("a", session="s", turn=0),
    request("b", 20, prompt_tokens=30, output_tokens=5),
    request("c", 100, prompt_tokens=12, session="s", turn=1),
    aborts=[("b", 60)],
)


class TestFinding:
    def test_a_path(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        write_workload(path, CLIENTS, TraceMetadata(source={"tool": "test"}))
        assert find_trace(str(path)) == path
        found, trace = open_trace(str(path))
        assert found == path
        assert trace_config(trace) is None

    def test_a_canned_trace_by_its_name(self) -> None:
        assert find_trace("decode-stall").name == "decode-stall.parquet"

    def test_neither(self) -> None:
        with pytest.raises(TraceError, match=r"^no-such-thing: no such file, nor a canned trace \(.*decode-stall"):
            find_trace("no-such-thing")


class TestOutput:
    def test_what_is_written_ends_with_the_summary_that_is_returned(self, tmp_path: Path) -> None:
        output = tmp_path / "out.parquet"
        summary = judge(tmp_path, pair(), CLIENTS, "timeout:request=a", output=output)
        rows = read_trace(output).frame()
        last = rows.row(-1, named=True)
        assert last["kind"] == "run.summary"
        assert summary_from_json(last["cause"]) == summary
        assert summary.wall_seconds is None

    def test_it_can_be_replayed_and_comes_to_the_same(self, tmp_path: Path) -> None:
        output = tmp_path / "out.parquet"
        first = judge(tmp_path, pair(), CLIENTS, "timeout:request=a", output=output)
        again = read_workload(read_trace(output))
        assert [arrival.request_id for arrival in again.arrivals] == ["a", "b", "c"]
        (tmp_path / "again").mkdir()
        second = judge(tmp_path / "again", pair(), again, "timeout:request=a")
        assert second.fingerprint == first.fingerprint

    def test_metadata_says_how_it_was_made(self, tmp_path: Path) -> None:
        output = tmp_path / "out.parquet"
        judge(tmp_path, pair(), CLIENTS, "timeout:request=a", output=output, seed=7, limit=2, policy="recompute")
        metadata = read_trace(output).metadata
        assert (metadata.seed, metadata.profile, metadata.faults) == (7, "vllm-0.33", ["timeout:request=a"])
        assert metadata.source["options"]["policy"] == "recompute"
        assert metadata.source["options"]["limit"] == 2
        assert str(tmp_path) not in str(metadata.source)
        assert load_config(trace_config=trace_config(read_trace(output))).config == pair()

    def test_what_a_checker_finds_at_the_end_has_the_time_of_the_breach(self, tmp_path: Path) -> None:
        """The row can only come last; what it tells of happened when the request failed."""
        output = tmp_path / "out.parquet"
        summary = judge(tmp_path, pair(), CLIENTS, "mooncake.bootstrap-stale-addr", output=output)
        ends = read_trace(output).rows(("request.failed",), ("request_id", "instance", "time_ns")).to_pylist()
        failed_s = {row["request_id"]: row["time_ns"] / 1e9 for row in ends if row["instance"] == "D0"}
        found = {finding.request_id: finding.time_s for finding in summary.violations if finding.checker == "NO-FATAL"}
        assert found
        assert all(failed_s[name] == time_s < summary.virtual_seconds for name, time_s in found.items())
        rows = read_trace(output).rows(("violation",), ("time_ns",)).to_pylist()
        assert {row["time_ns"] / 1e9 for row in rows} == {summary.virtual_seconds}

    def test_finer_details_change_neither_fingerprint_nor_summary(self, tmp_path: Path) -> None:
        coarse = judge(tmp_path, pair(), CLIENTS)
        output = tmp_path / "out.parquet"
        fine = judge(tmp_path, pair(), CLIENTS, output=output, detail=DETAIL_BLOCKS)
        assert fine == coarse
        assert len(read_trace(output).rows(("step",), ("kind",))) > 0
        assert len(read_trace(output).rows(("block.allocated",), ("kind",))) > 0


class TestOptions:
    def test_a_limit_takes_the_first_requests_and_what_happens_to_them(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, pair(), CLIENTS, limit=1)
        assert (summary.requests.total, summary.requests.finished) == (1, 1)

    def test_nothing_to_replay_is_the_users_mistake(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"no request is left to replay$"):
            judge(tmp_path, pair(), CLIENTS, limit=0)

    def test_an_empty_workload_is_one_too(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"no request arrives in it"):
            judge(tmp_path, pair(), Workload(()))

    def test_a_baseline_is_the_faultless_twin(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, pair(), CLIENTS, "timeout:request=a", baseline=True)
        assert summary.baseline is not None
        assert summary.requests.failed == 1
        assert summary.baseline.requests.failed == 0

    def test_without_faults_there_is_no_twin(self, tmp_path: Path) -> None:
        assert judge(tmp_path, pair(), CLIENTS, baseline=True).baseline is None

    def test_fail_on_decides_what_counts(self, tmp_path: Path) -> None:
        def status(*fail_on: str) -> int:
            return judge(tmp_path, pair(), CLIENTS, "timeout:request=a", fail_on=fail_on).exit_status

        assert status("crashed", "stalled", "violated") == ExitStatus.PASSED
        assert status("failed") == ExitStatus.VIOLATED

    def test_the_seed_decides_by_chance_only(self, tmp_path: Path) -> None:
        prints = {judge(tmp_path, pair(), CLIENTS, "timeout:p=0.5", seed=seed).fingerprint for seed in range(4)}
        assert len(prints) >= 2
        assert len({judge(tmp_path, pair(), CLIENTS, seed=seed).fingerprint for seed in range(2)}) == 1


def test_a_fault_that_never_fired_is_told(tmp_path: Path) -> None:
    summary = judge(tmp_path, pair(), CLIENTS, "timeout:nth=50")
    (fault,) = summary.faults
    assert (fault.spec, fault.fired, fault.requests) == ("timeout:nth=50", 0, 0)
