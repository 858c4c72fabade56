"""Public incidents of engines with several ranks, or with other numbers of them on either side."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvreplay.errors import ConfigError
from kvreplay.ids import NS_PER_MS
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig
from kvreplay.replay.config_load import config_from_json
from kvreplay.sim.envelope import WRITE_DATA
from tests.connectors.mooncake.engines import Engines
from tests.scenarios.offload_stage import offloading, there_and_back
from tests.scenarios.stage import BLOCK, Play, Sizes, judge, pair, play, request, role, workload
from tests.scenarios.test_ranks import FOUR_TO_TWO

ONE = workload(request("a"))


@pytest.mark.incident("L1")
class TestL1FewerHeadsThanRanks:
    """vllm#45330, vllm#43523, sglang#31295: 2 heads, and 4 ranks on one side, two of which hold the same head."""

    SIZES = (((1, 1), (4, 1)), ((4, 1), (1, 1)), ((2, 1), (4, 1)), ((4, 1), (2, 1)))

    def config(self, ranks: tuple[Sizes, Sizes]) -> ReplayConfig:
        base = pair(ranks=ranks)
        group = KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=8)
        return replace(base, model=replace(base.model, groups=(group,), num_kv_heads=2))

    @pytest.mark.parametrize("ranks", SIZES, ids=str)
    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_each_rank_gets_its_head(self, ranks: tuple[Sizes, Sizes], behaviour: str) -> None:
        """A wrong one, or bytes beyond a block, would be wrong contents."""
        played = play(self.config(ranks), ONE, behaviour=behaviour)
        assert not played.violations
        assert played.ends() == play(pair(), ONE).ends()

    @pytest.mark.parametrize(
        ("ranks", "message"),
        [
            (SIZES[0], "source KV region length does not match the consumer TP ratio at region 0: local=32, remote=16"),
            (
                SIZES[1],
                "destination KV region length does not match the producer TP ratio at region 0: local=16, remote=32",
            ),
        ],
        ids=str,
    )
    def test_from_the_sizes_alone_no_pull_fits(self, ranks: tuple[Sizes, Sizes], message: str) -> None:
        """Two heads of 16 bytes; four times as many ranks do not have a fourth of them. Refused, request by request."""
        played = play(self.config(ranks), ONE, behaviour="vllm-0.33 mooncake_heads=tp_ratio")
        assert played.ends()["a"][0] == "failed"
        (reason,) = {event.cause for event in played.of("request.failed")}
        assert reason is not None
        assert reason.startswith(f"Mooncake {message}, ")
        assert not played.of("engine.crashed")

    def test_two_parts_and_four_readers(self) -> None:
        """The record's numbers: a rank with both heads sends each of them to the two ranks that hold it."""
        engines = Engines((1, 1), (4, 1), heads=self.config(self.SIZES[0]).sharding.heads)
        engines.finish()
        engines.pull()
        engines.run()
        writes = [envelope for envelope in engines.wire.sent if envelope.kind == WRITE_DATA]
        assert len(writes) == 4
        sources = {piece.copy.part.source_offset for write in writes for _, piece in write.payload.landing()}
        assert len(sources) == 2


@pytest.mark.incident("L3")
class TestL3CompleteWhenOneRankHasReported:
    """vllm#21048, vllm#26734: of two ranks the second gets its part 20 s later."""

    def play(self, behaviour: str) -> Play:
        return play(pair(ranks=FOUR_TO_TWO), ONE, "mooncake.resp-delayed:rank=1,delay=20s", behaviour=behaviour)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_it_goes_on_when_the_last_has(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert not played.violations
        (promoted,) = played.of("request.promoted")
        last = max(event.time_ns for event in played.of("pull.settled"))
        assert last > 20_000 * NS_PER_MS
        assert last <= promoted.time_ns <= last + 2 * NS_PER_MS

    def test_else_the_first_is_taken_for_both(self, tmp_path: Path) -> None:
        """Two pulls of rank 1 are open then; and the producer has let go of its blocks when its second rank reports."""
        played = self.play("vllm-0.33 rank_reports=any")
        (promoted,) = played.of("request.promoted")
        assert promoted.time_ns < 20_000 * NS_PER_MS
        config = pair(ranks=FOUR_TO_TWO)
        fault = "mooncake.resp-delayed:rank=1,delay=20s"
        summary = judge(tmp_path, config, ONE, fault, behaviour="vllm-0.33 rank_reports=any")
        assert [(found.checker, found.detail) for found in summary.violations] == [
            ("RANK-AGREE", f"complete though pull {place} of it is still open") for place in (2, 3)
        ]
        assert [(crash.instance, crash.message) for crash in summary.crashes] == [
            ("P0", "finished_sending of unknown request a")
        ]


@pytest.mark.incident("L4")
class TestL4OneRankHasNoRoom:
    """sglang#26921, sglang#28429, sglang#37909: two write-backs; rank 1 of two can take the first only.

    A collective call that one rank does not join is here a job that one rank does not report: nobody may take what it
    was to store for stored, nor wait for it without end. One manager decides for all ranks what is stored where.
    """

    def play(self, fault: str, behaviour: str) -> Play:
        config = offloading(scheduler={"max_num_batched_tokens": 8})
        config = replace(config, topology=replace(config.topology, tp=2))
        return play(config, there_and_back(), fault, behaviour=behaviour, recompute=True)

    @pytest.mark.parametrize("fault", ["offload.submit-refused", "offload.ack-lost"])
    def test_ideally_both_ranks_have_the_same(self, fault: str) -> None:
        """A rank that took nothing ends the job for both; a report that is lost is repeated."""
        played = self.play(f"{fault}:request=a,rank=1,nth=2", "ideal")
        assert not played.violations
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        (loaded,) = played.of("load.started", request_id="b")
        assert loaded.num_tokens == (8 if fault == "offload.submit-refused" else 16)

    def test_in_0_33_a_rank_that_refuses_kills_the_engine(self) -> None:
        played = self.play("offload.submit-refused:request=a,rank=1,nth=2", "vllm-0.33")
        assert [event.status for event in played.of("engine.crashed")] == ["AssertionError"]

    def test_and_what_one_rank_never_reports_is_waited_for_without_end(self) -> None:
        played = self.play("offload.ack-lost:request=a,rank=1,nth=2", "vllm-0.33")
        assert [(event.request_id, event.cause) for event in played.of("request.stalled")] == [
            ("b", "an undecided lookup")
        ]


@pytest.mark.incident("L5")
class TestL5RanksWithDifferentNumbersOfBlocks:
    """vllm#19341: rank 0 has 22 blocks, rank 1 has 18; the consumer's pool is that of both, or of the first.

    (The record has 10 and 8: the longest request of this model needs 16.) `a` has 8 of them, `b` the next 12; then the
    prompt of `a` is hit.
    """

    CLIENTS = workload(
        request("a", 0, prompt_tokens=28, output_tokens=2, text="abcdefg"),
        request("b", 100, prompt_tokens=48),
        request("c", 200, prompt_tokens=32, output_tokens=2, text="abcdefgh"),
    )

    def play(self, behaviour: str, *of_ranks: int) -> Play:
        roomy = role(num_gpu_blocks=40)
        base = pair(prefill=roomy, decode=roomy, ranks=((2, 1), (2, 1)))
        cache = replace(base.roles["decode"].cache, rank_gpu_blocks=of_ranks)
        config = replace(base, roles={**base.roles, "decode": replace(base.roles["decode"], cache=cache)})
        assert config_from_json(config.to_json()) == config
        return play(config, self.CLIENTS, behaviour=behaviour)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_only_blocks_that_every_rank_has_are_given_out(self, behaviour: str) -> None:
        played = self.play(behaviour, 22, 18)
        assert not played.violations
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        given = {block for event in played.of("block.allocated", instance="D0") for block in event.block_ids or ()}
        assert max(given) == 17

    def test_else_a_rank_reads_and_writes_anothers(self) -> None:
        played = self.play("vllm-0.33 rank_blocks=first", 22, 18)
        assert {event.status for event in played.violations} == {"CONTENT"}
        assert {event.request_id for event in played.violations} == {"c"}

    def test_where_the_first_has_least_nobody_notices(self) -> None:
        assert not self.play("vllm-0.33 rank_blocks=first", 18, 22).violations

    def test_each_rank_has_a_number(self) -> None:
        with pytest.raises(ConfigError, match=r"cache\.rank_gpu_blocks: decode has 2 ranks, got 1 numbers"):
            self.play("vllm-0.33", 22)
