"""Engines of several ranks: shares that land where they belong, counts of peers, reports of ranks."""

from dataclasses import replace

import numpy as np
import pytest

from kvreplay.behaviour import profile
from kvreplay.connectors.mooncake.plan import HeadLayout
from kvreplay.connectors.mooncake.producer import Producer
from kvreplay.connectors.mooncake.ranks import Ranks, all_ranks
from kvreplay.connectors.mooncake.sharded_buffers import ShardedBuffers
from kvreplay.connectors.mooncake.sharding import Sharding
from kvreplay.connectors.mooncake.structs import (
    BootstrapAnswer,
    MooncakeConnectorMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
)
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.sim.envelope import Envelope
from tests.connectors.mooncake.engines import BLOCK_SIZE, PROMPT, Engines, Sizes
from tests.connectors.mooncake.pair import behaviour, request_for

TARGETS = (4, 5, 6)
ALL_TOKENS = list(range(12))
MLA = HeadLayout(num_kv_heads=8, is_mla=True)
TWO_HEADS = HeadLayout(num_kv_heads=2)
SPEC = KVCacheGroupSpec(block_size=BLOCK_SIZE)


def producers(engines: Engines) -> list[Producer]:
    halves = [rank.producer for rank in engines.p.ranks]
    return [half for half in halves if half is not None]


def answered(engines: Engines, addresses: dict[str, dict[str, str]]) -> None:
    """The bootstrap server says that these are the producer's workers."""
    body = str({"0": {"engine_id": "P0#0", "worker_addr": addresses}}).replace("'", '"').encode()
    engines.wire.transforms["bootstrap.answer"] = lambda envelope: [
        replace(envelope, payload=BootstrapAnswer(body=body))
    ]


class TestShares:
    @pytest.mark.parametrize("heads", [None, MLA, TWO_HEADS], ids=["eight-heads", "mla", "two-heads"])
    @pytest.mark.parametrize(
        ("producer", "consumer"),
        [
            *[((tp, 1), (other, 1)) for tp in (1, 2, 4) for other in (1, 2, 4)],
            ((1, 2), (1, 1)),
            ((1, 1), (1, 2)),
            ((1, 2), (1, 2)),
            ((1, 2), (1, 4)),
            ((2, 2), (1, 1)),
            ((4, 1), (1, 2)),
            ((2, 2), (4, 2)),
        ],
    )
    def test_every_rank_gets_its_own(self, producer: Sizes, consumer: Sizes, heads: HeadLayout | None) -> None:
        engines = Engines(producer, consumer, heads=heads)
        engines.finish()
        engines.pull()
        engines.run()
        assert engines.p.finished() == ["p1"]
        assert engines.d.finished() == ["d1"]
        assert engines.d.memory.wrong_tokens(*TARGETS) == []
        assert [half.entries for half in producers(engines)] == [{}] * len(engines.p.ranks)

    def test_nothing_is_right_before_it_arrives(self) -> None:
        engines = Engines((2, 1))
        assert engines.d.memory.wrong_tokens(*TARGETS) == ALL_TOKENS

    @pytest.mark.parametrize("lost", [0, 1])
    def test_half_of_a_block_is_wrong(self, lost: int) -> None:
        engines = Engines((2, 1))
        engines.wire.transforms["write.data"] = lambda envelope: [] if envelope.peer_index == lost else [envelope]
        engines.finish()
        engines.pull()
        engines.run()
        assert engines.d.memory.wrong_tokens(*TARGETS) == ALL_TOKENS

    def test_of_replicated_heads_the_first_replica_sends(self) -> None:
        engines = Engines((4, 1), (1, 1), heads=TWO_HEADS)
        engines.finish()
        engines.pull()
        engines.run()
        writes = [envelope for envelope in engines.wire.sent if envelope.kind == "write.data"]
        assert [envelope.peer_index for envelope in writes] == [0, 2]
        assert {envelope.size_bytes for envelope in writes} == {3 * BLOCK_SIZE * 64 // 2}
        assert engines.d.memory.wrong_tokens(*TARGETS) == []

    def test_a_share_in_anothers_place_is_wrong(self) -> None:
        buffers = ShardedBuffers(8, BLOCK_SIZE, (0, 1))
        table = np.array([1, 2], np.int64)
        buffers.write(table, PROMPT, 0, 0, 8)
        assert buffers.wrong_positions(table, PROMPT, 0, 0, 8) is None
        words = buffers.read_blocks(0, [1])
        buffers.write_blocks(0, [1], np.roll(words, BLOCK_SIZE, axis=1))
        found = buffers.wrong_positions(table, PROMPT, 0, 0, 8)
        assert found is not None
        assert found.tolist() == [0, 1, 2, 3]

    def test_what_follows_from_wrong_contents_is_wrong_in_every_share(self) -> None:
        buffers = ShardedBuffers(8, BLOCK_SIZE, (0, 1))
        table = np.array([1, 2], np.int64)
        buffers.write(table, PROMPT, 0, 0, 4)
        wrong = buffers.wrong_positions(table, PROMPT, 0, 0, 8)
        assert wrong is not None
        taint = buffers.taint_of(table, wrong)
        assert taint & 1
        buffers.write(table, PROMPT, 0, 4, 8, taint)
        assert (buffers.read_blocks(0, [2])[0] != 0).all()
        still = buffers.wrong_positions(table, PROMPT, 0, 0, 8)
        assert still is not None
        assert still.tolist() == [4, 5, 6, 7]


class TestSharding:
    @pytest.mark.parametrize(
        ("engines", "units", "stages"),
        [([(1, 1), (1, 1)], 1, 1), ([(4, 1), (2, 1)], 4, 1), ([(16, 1), (1, 2)], 8, 2), ([(3, 1), (2, 3)], 6, 3)],
    )
    def test_the_finest_cut_of_any_engine_makes_the_shares(self, engines: list[Sizes], units: int, stages: int) -> None:
        sharding = Sharding.of(HeadLayout(num_kv_heads=8), engines)
        assert (sharding.num_units, sharding.num_stages) == (units, stages)

    def test_rows_go_rank_by_rank(self) -> None:
        sharding = Sharding.of(HeadLayout(num_kv_heads=8), [(2, 2), (4, 1)])
        assert sharding.row_shares(2, 2) == (0, 1, 2, 3, 4, 5, 6, 7)
        assert sharding.row_shares(1, 1) == (0, 1, 2, 3, 4, 5, 6, 7)
        assert sharding.row_shares(4, 1) == (0, 4, 1, 5, 2, 6, 3, 7)

    def test_ranks_beyond_the_heads_hold_the_same(self) -> None:
        assert Sharding.of(TWO_HEADS, [(4, 1), (1, 1)]).row_shares(4, 1) == (0, 0, 1, 1)

    def test_of_latents_there_is_one_share(self) -> None:
        assert Sharding.of(MLA, [(4, 1), (2, 1)]).row_shares(4, 1) == (0, 0, 0, 0)

    def test_one_rank_moves_whole_rows(self) -> None:
        sharding = Sharding.of(HeadLayout(num_kv_heads=8), [(1, 1), (1, 1)])
        assert sharding.columns([SPEC], Ranks()) is None
        assert sharding.row_shares(1, 1) == (0,)

    def test_columns_of_all_ranks_fill_the_row(self) -> None:
        sharding = Sharding.of(HeadLayout(num_kv_heads=8), [(2, 2), (4, 1)])
        for tp_size, pp_size in ((2, 2), (4, 1), (1, 1)):
            covered = [
                column
                for ranks in all_ranks(tp_size, pp_size)
                for columns in (sharding.columns([SPEC], ranks) or {}).values()
                for column in range(columns.start, columns.start + columns.length)
            ]
            assert covered == list(range(8 * BLOCK_SIZE))


class TestSeveralPeers:
    def test_a_request_is_complete_when_the_last_peer_has_settled(self) -> None:
        engines = Engines((2, 1))
        engines.wire.delays_s["pull.reply"] = [0, 5]
        engines.finish()
        engines.pull()
        engines.run(1)
        assert engines.d.finished() == []
        engines.run()
        assert engines.d.finished() == ["d1"]

    @pytest.mark.parametrize("failing", [0, 1])
    def test_one_failure_fails_the_request_and_completion_waits(self, failing: int) -> None:
        engines = Engines((2, 1))
        error = MooncakeXferResponse(MooncakeXferResponseStatus.ERROR, err_msg="no")

        def transform(envelope: Envelope) -> list[Envelope]:
            return [replace(envelope, payload=error) if envelope.peer_index == failing else envelope]

        engines.wire.transforms["pull.reply"] = transform
        engines.finish()
        engines.pull()
        engines.run()
        assert engines.d.invalid() == [[4, 5, 6]]
        assert engines.d.finished() == ["d1"]

    def test_a_producer_keeps_its_blocks_until_every_consumer_rank_has_asked(self) -> None:
        engines = Engines((1, 1), (2, 1))
        engines.wire.transforms["pull.request"] = lambda envelope: [] if envelope.source.endswith("/1") else [envelope]
        engines.finish()
        engines.pull()
        engines.run(100)
        assert [(half.entries["X1"].need_send, half.entries["X1"].sent) for half in producers(engines)] == [(2, 1)]
        engines.run()
        assert engines.p.finished() == ["p1"], "freed by expiry"

    def test_stages_of_another_cut_ask_every_stage(self) -> None:
        engines = Engines((1, 2), (1, 4))
        engines.finish()
        engines.pull()
        engines.run(0)
        pulls = [envelope for envelope in engines.wire.sent if envelope.kind == "pull.request"]
        assert len(pulls) == 8

    def test_conversations_of_the_ranks_have_names_of_their_own(self) -> None:
        engines = Engines((2, 1), (2, 1))
        engines.finish()
        engines.pull()
        engines.run()
        pulls = [envelope.conversation for envelope in engines.wire.sent if envelope.kind == "pull.request"]
        assert len(set(pulls)) == 2
        places = [(event.rank, event.status) for event in engines.sink.events if event.kind == "pull.settled"]
        assert sorted(places) == [(0, "ok"), (1, "ok")]


class TestRanksThatAreNotThere:
    def test_an_answer_without_the_last_rank_is_believed(self) -> None:
        engines = Engines((2, 1))
        answered(engines, {"0": {"0": "tcp://P0/mooncake/0"}})
        engines.finish()
        engines.pull()
        engines.run()
        assert engines.d.finished() == ["d1"]
        assert engines.d.invalid() == []
        assert engines.d.memory.wrong_tokens(*TARGETS) == ALL_TOKENS

    def test_ideally_what_has_not_arrived_is_noticed_and_the_ranks_are_asked_for_again(self) -> None:
        engines = Engines((2, 1), switches=profile("ideal"))
        answered(engines, {"0": {"0": "tcp://P0/mooncake/0"}})
        engines.finish()
        engines.pull()
        engines.run(10)
        assert engines.d.invalid() == [[4, 5, 6]]
        engines.wire.transforms.clear()
        engines.finish(p_req_id="p2", transfer_id="X2")
        engines.pull(request_for("d2", "X2"))
        engines.run(10)
        assert engines.d.finished() == ["d1", "d2"]
        assert engines.d.memory.wrong_tokens(*TARGETS) == []

    def test_an_answer_without_the_first_rank_loses_the_pull(self) -> None:
        engines = Engines((2, 1))
        answered(engines, {"1": {"0": "tcp://P0/mooncake/1"}})
        engines.finish()
        engines.pull()
        engines.run()
        assert engines.d.reports == []

    def test_and_with_it_those_from_other_producers_in_the_same_step(self) -> None:
        engines = Engines()
        body = (
            b'{"0": {"engine_id": "P0#0", "worker_addr": {"0": {"0": "tcp://P0/mooncake/0"}}},'
            b' "1": {"engine_id": "bad", "worker_addr": {"7": {"0": "tcp://P0/mooncake/0"}}}}'
        )
        engines.wire.transforms["bootstrap.answer"] = lambda envelope: [
            replace(envelope, payload=BootstrapAnswer(body=body))
        ]
        engines.finish()
        engines.pull(request_for("d0", "X0", engine_id="bad"))
        engines.run(1)
        both = {
            "bad": {"d2": request_for("d2", "X2", engine_id="bad")},
            "P0#0": {"d1": request_for("d1", "X1")},
        }
        engines.d.workers.start_load_kv(MooncakeConnectorMetadata(reqs_to_recv=both))
        engines.run(1)
        assert engines.d.finished() == []

    def test_ideally_only_the_bad_one_fails(self) -> None:
        engines = Engines((2, 1), switches=behaviour(mooncake_lost_pulls="fail"))
        answered(engines, {"1": {"0": "tcp://P0/mooncake/1"}})
        engines.finish()
        engines.pull()
        engines.run(1)
        assert engines.d.invalid() == [[4, 5, 6]]
        assert engines.d.finished() == ["d1"]
