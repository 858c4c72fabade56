"""Public incidents of numbers that say something else than they are taken for: what a run's summary says instead."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig
from kvreplay.replay.network import LinkTiming
from kvreplay.report.terminal import print_report
from kvreplay.verdict.model import Summary, Transfers
from tests.scenarios.stage import BLOCK, Sizes, judge, pair, request, single, workload

MB = 10**6


@pytest.mark.incident("Q2")
class TestQ2TransfersAtOnce:
    """vllm#48224, vllm#55854: four transfers of 10 MB, 1 s each, in the same second: 40 MB/s, of which each has 10.

    Prompts of 40 tokens, 10 blocks of 1 MB; from each of four producers a link of 10 MB/s.
    """

    def config(self, ranks: tuple[Sizes, Sizes] = ((1, 1), (1, 1))) -> ReplayConfig:
        base = pair(ranks=ranks)
        group = KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=MB // BLOCK)
        return replace(
            base,
            model=replace(base.model, groups=(group,)),
            topology=replace(base.topology, prefill=4),
            network=LinkTiming(latency_ns=0, bandwidth_bytes_per_s=10 * MB),
        )

    def judge(self, folder: Path, *faults: str, ranks: tuple[Sizes, Sizes] = ((1, 1), (1, 1))) -> Summary:
        clients = workload(*(request(name, prompt_tokens=40, output_tokens=2) for name in "abcd"))
        decode = self.config(ranks)
        roles = {
            name: replace(role, cache=replace(role.cache, num_gpu_blocks=60)) for name, role in decode.roles.items()
        }
        return judge(folder, replace(decode, roles=roles), clients, *faults)

    def told(self, summary: Summary, width: int = 120) -> str:
        console = Console(width=width, file=StringIO())
        print_report(summary, console)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    def test_together_and_each(self, tmp_path: Path) -> None:
        summary = self.judge(tmp_path)
        assert summary.transfers == Transfers(
            started=4, finished=4, bytes=40 * MB, seconds=1.0, bytes_per_s=40.0 * MB, bytes_per_s_each=10.0 * MB
        )
        assert "40.0 MB in 4 writes" in self.told(summary)
        assert "40.0 MB/s in the 1.00 s in which there were any, 10.0 MB/s each" in self.told(summary)
        assert "Transfers" not in self.told(summary, width=80)

    def test_of_two_ranks_each_writes_its_half(self, tmp_path: Path) -> None:
        """Over one link: the second half is through after a second, and began with the first."""
        moved = self.judge(tmp_path, ranks=((2, 1), (2, 1))).transfers
        assert moved is not None
        assert (moved.started, moved.bytes, moved.seconds) == (8, 40 * MB, 1.0)
        assert moved.bytes_per_s == 40.0 * MB
        assert moved.bytes_per_s_each == pytest.approx(40.0 * MB / (4 * (0.5 + 1.0)), abs=1)

    def test_what_nobody_came_for_is_no_failure_of_a_transfer(self, tmp_path: Path) -> None:
        """`a` is asked for too late, the write of `b` fails."""
        summary = self.judge(tmp_path, "mooncake.p-expire-before-pull:request=a", "mooncake.engine-ret:request=b")
        moved = summary.transfers
        assert moved is not None
        assert (moved.started, moved.finished, moved.failed, moved.expired) == (3, 2, 1, 2)
        assert sum(moved.failed_by_cause.values()) == 1
        assert moved.bytes_per_s == 20.0 * MB
        told = self.told(summary)
        assert "1 write failed: " in told
        assert "2 requests expired: nobody asked for the blocks in time" in told

    def test_where_nothing_is_transferred_nothing_is_said(self, tmp_path: Path) -> None:
        assert judge(tmp_path, single(), workload(request("a"))).transfers is None
