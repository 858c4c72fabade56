"""Where loads go: the worked examples of the boundary rule, in the forms that it has had (vllm#52807)."""

import dataclasses

import pytest

from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.layout import OffloadGroup
from kvreplay.engine.request import RequestStatus
from kvreplay.errors import EngineFatal
from tests.connectors.offloading.desk import IDEAL, Desk, Settings, blocks_of, full, state, window

FROM_ZERO = dataclasses.replace(VLLM_0_33, boundary="from-zero")
FROM_COMPUTED = dataclasses.replace(VLLM_0_33, boundary="from-computed")


def hybrid_desk(**settings: Settings) -> Desk:
    """Full attention and a recurrent state, 16-token blocks, 32 tokens stored by an earlier request."""
    desk = Desk(full(0, tokens_per_block=16), state(1, tokens_per_block=16), **settings)
    desk.store("earlier", 40, [1, 2, 3], [4, 5, 6])
    desk.add("r", 40)
    return desk


class TestRecurrentStateBelowTheMark:
    """16 tokens computed, 16 to load. The recurrent group's block 41 is real and has no hash, as a state always was."""

    tables = ([31, 32], [41, 42])
    unhashed = ([32], [41, 42])

    @pytest.mark.parametrize("behaviour", [FROM_COMPUTED, VLLM_0_33, IDEAL])
    def test_only_the_block_beyond_it_is_loaded(self, behaviour: OffloadBehaviour) -> None:
        desk = hybrid_desk(behaviour=behaviour)
        assert desk.ask("r", 16) == 16
        job = desk.allocate("r", *self.tables, external=16, unhashed=self.unhashed)
        assert blocks_of(job) == ([32, 42], (1, 1), (1, 1))
        keys = [desk.keys("r", group)[1] for group in (0, 1)]
        assert job is not None
        assert desk.cpu.chunks.keys[job.chunk_ids].tolist() == keys

    def test_a_scan_from_zero_kills_the_engine(self) -> None:
        desk = hybrid_desk(behaviour=FROM_ZERO)
        desk.ask("r", 16)
        with pytest.raises(EngineFatal, match="load starts below the computed tokens"):
            desk.allocate("r", *self.tables, external=16, unhashed=self.unhashed)

    def test_without_local_tokens_a_scan_from_zero_does_no_harm(self) -> None:
        desk = hybrid_desk(behaviour=FROM_ZERO)
        assert desk.ask("r", 0) == 32
        assert blocks_of(desk.allocate("r", [31, 32], [0, 42], external=32)) == ([31, 32, 42], (2, 1), (0, 1))

    def test_without_external_tokens_nothing_is_checked(self) -> None:
        desk = hybrid_desk(behaviour=FROM_ZERO)
        assert desk.allocate("r", *self.tables, unhashed=self.unhashed) is None


class TestWhereALoadStarts:
    def test_inside_a_chunk_of_several_blocks(self) -> None:
        """Blocks of 16, chunks of 64, 32 tokens local: the first chunk's last two blocks and all of the second."""
        desk = Desk(full(0, tokens_per_block=16, blocks_per_chunk=4))
        desk.store("earlier", 140, range(1, 10))
        desk.add("r", 140)
        assert desk.ask("r", 32) == 96
        job = desk.allocate("r", range(11, 20), external=96, unhashed=[range(13, 20)])
        assert blocks_of(job) == ([13, 14, 15, 16, 17, 18], (6,), (2,))
        assert job is not None
        assert desk.cpu.chunks.keys[job.chunk_ids].tolist() == desk.keys("r")[:2].tolist()

    def test_null_blocks_before_a_window_are_passed_over(self) -> None:
        desk = Desk(full(0), window(1, 8))
        desk.store("earlier", 25, range(1, 8), range(11, 18))
        desk.add("r", 25)
        assert desk.ask("r") == 24
        job = desk.allocate("r", range(21, 28), [0, 0, 0, 0, 31, 32, 33], external=24)
        assert blocks_of(job) == ([21, 22, 23, 24, 25, 26, 31, 32], (6, 2), (0, 4))

    def test_where_the_local_tokens_end_inside_a_block_the_engine_dies(self) -> None:
        desk = Desk()
        desk.store("earlier", 17, range(1, 6))
        desk.add("r", 17)
        assert desk.ask("r", 2) == 14
        with pytest.raises(EngineFatal, match="local tokens end inside a block"):
            desk.allocate("r", range(11, 16), external=14)

    def test_a_synchronous_load_goes_by_position_because_its_blocks_are_hashed_already(self) -> None:
        for behaviour, num_loaded in ((VLLM_0_33, 4), (FROM_COMPUTED, 0)):
            desk = Desk(behaviour=behaviour, sync_load_budget=100)
            desk.store("earlier", 17, range(1, 6))
            desk.add("r", 17)
            assert desk.connector.get_num_new_matched_tokens(desk.requests["r"], 0) == (16, False)
            job = desk.allocate("r", range(11, 16), external=16, unhashed=[[15]])
            assert len(blocks_of(job)[0]) == num_loaded

    def test_a_window_must_not_reach_further_than_a_hit_needs(self) -> None:
        desk = Desk(full(0), window(1, 8))
        desk.store("earlier", 25, range(1, 8), range(11, 18))
        desk.add("r", 25)
        desk.ask("r")
        with pytest.raises(EngineFatal, match="num_pending_gpu_blocks <= sliding_window_size_in_chunks"):
            desk.allocate("r", range(21, 28), range(31, 38), external=24)


class TestWhatIsLoaded:
    def test_chunks_are_pinned_until_every_worker_has_reported(self) -> None:
        desk = Desk(num_workers=2)
        desk.store("earlier", 17, range(1, 6))
        desk.add("r", 17)
        desk.ask("r")
        job = desk.allocate("r", range(11, 16), external=16)
        assert job is not None
        desk.step()
        assert desk.cpu.chunks.ref_counts[job.chunk_ids].tolist() == [1, 1, 1, 1]
        desk.report(job.job_id)
        assert desk.cpu.chunks.ref_counts[job.chunk_ids].tolist() == [1, 1, 1, 1]
        desk.report(job.job_id)
        assert desk.cpu.chunks.ref_counts[job.chunk_ids].tolist() == [0, 0, 0, 0]

    def test_what_is_loaded_is_not_stored_again(self) -> None:
        desk = Desk()
        desk.store("earlier", 17, range(1, 6))
        desk.add("r", 25)
        desk.ask("r")
        job = desk.allocate("r", range(11, 18), external=16)
        assert job is not None
        desk.step()
        desk.report(job.job_id)
        desk.allocate("r", range(11, 18))
        metadata = desk.step(desk.run("r", 9, range(11, 18), start=16))
        (stored,) = metadata.store_jobs.values()
        assert blocks_of(stored) == ([15, 16], (2,), (4,))

    def test_a_job_in_flight_forbids_another_load(self) -> None:
        desk = Desk()
        desk.store("earlier", 17, range(1, 6))
        desk.add("r", 17)
        desk.ask("r")
        desk.allocate("r", range(11, 16), external=16)
        desk.connector.states["r"].num_local_tokens = 0
        with pytest.raises(EngineFatal, match=r"not req_status\.transfer_jobs"):
            desk.allocate("r", range(21, 26), external=16)

    def test_a_chunk_that_has_gone_since_the_lookup_kills_the_engine_or_fails_the_load(self) -> None:
        for behaviour in (VLLM_0_33, IDEAL):
            desk = Desk(behaviour=behaviour)
            desk.store("earlier", 17, range(1, 6))
            desk.add("r", 17)
            desk.ask("r")
            desk.cpu.discard(desk.keys("r")[1:2])
            if behaviour is VLLM_0_33:
                with pytest.raises(EngineFatal, match="chunk not found in cache"):
                    desk.allocate("r", range(11, 16), external=16)
                continue
            job = desk.allocate("r", range(11, 16), external=16)
            assert job is not None
            assert job.failure == "an offloaded chunk is gone"
            assert desk.cpu.chunks.ref_counts[:4].tolist() == [0, -2, 0, 0]

    def test_an_aborted_requests_load_still_unpins(self) -> None:
        desk = Desk()
        desk.store("earlier", 17, range(1, 6))
        desk.add("r", 17)
        desk.ask("r")
        job = desk.allocate("r", range(11, 16), external=16)
        assert job is not None
        desk.step()
        desk.finish("r", RequestStatus.FINISHED_ABORTED)
        desk.step(finished=["r"])
        desk.report(job.job_id)
        assert desk.cpu.chunks.num_evictable == 4
        assert not desk.connector.states


class TestSyncLoads:
    def test_a_step_brings_in_no_more_than_its_budget(self) -> None:
        desk = Desk(sync_load_budget=20)
        desk.store("earlier", 17, range(1, 6))
        for req_id in ("a", "b"):
            desk.add(req_id, 18)
        ask = desk.connector.get_num_new_matched_tokens
        assert ask(desk.requests["a"], 0) == (16, False)
        assert ask(desk.requests["b"], 0) == (16, True)
        desk.step()
        assert ask(desk.requests["b"], 0) == (16, False)

    def test_a_token_must_be_left_to_compute(self) -> None:
        desk = Desk(sync_load_budget=20)
        desk.store("earlier", 16, range(1, 5))
        desk.add("r", 16)
        assert desk.connector.get_num_new_matched_tokens(desk.requests["r"], 0) == (16, True)

    def test_nobody_waits_for_a_chunk_that_one_loads_synchronously(self) -> None:
        desk = Desk(sync_load_budget=16)
        desk.store("earlier", 17, range(1, 6))
        desk.add("a", 18)
        desk.add("b", 18)
        desk.ask("a")
        desk.allocate("a", range(11, 16), external=16)
        assert desk.ask("b") == 16


def test_a_layout_of_groups_that_share_no_hash_size_is_refused() -> None:
    group = OffloadGroup(group_id=0, tokens_per_block=6)
    with pytest.raises(Exception, match="no multiple of the hash block size 4"):
        Desk(group, tokens_per_hash=4)
