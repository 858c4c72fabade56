"""What is stored, when, and from which blocks."""

import dataclasses

import pytest

from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadGroup
from kvreplay.connectors.offloading.structs import Handoff
from kvreplay.engine.request import RequestStatus
from kvreplay.errors import EngineFatal
from tests.connectors.offloading.desk import IDEAL, Desk, Settings, blocks_of, full, only_store, state, window

ABORTED = RequestStatus.FINISHED_ABORTED
BEFORE_49146 = dataclasses.replace(VLLM_0_33, abort_clamp="none")


def admitted(
    num_tokens: int, *groups: OffloadGroup, params: dict[str, object] | None = None, **settings: Settings
) -> Desk:
    """A desk with a request "r" that has been looked up."""
    desk = Desk(*groups, **settings)
    desk.add("r", num_tokens, params=params)
    desk.ask("r")
    return desk


class TestWhatIsComplete:
    def test_chunks_are_offered_as_they_fill(self) -> None:
        desk = admitted(14)
        desk.allocate("r", range(1, 5))
        first = desk.step(desk.run("r", 6, range(1, 5)))
        assert blocks_of(only_store(first)) == ([1], (1,), (0,))
        second = desk.step(desk.grow("r", 8, [], start=6))
        assert blocks_of(only_store(second)) == ([2, 3], (2,), (1,))

    def test_of_large_chunks_only_whole_ones(self) -> None:
        desk = admitted(30, full(blocks_per_chunk=3))
        metadata = desk.admit("r", range(1, 9))
        assert blocks_of(only_store(metadata)) == ([1, 2, 3, 4, 5, 6], (6,), (0,))

    def test_what_the_tier_has_already_is_not_copied_again(self) -> None:
        desk = Desk()
        desk.store("earlier", 8, range(1, 4))
        desk.add("r", 16)
        desk.ask("r", 8)
        assert blocks_of(only_store(desk.admit("r", range(1, 5)))) == ([3, 4], (2,), (2,))

    def test_only_of_the_prompt(self) -> None:
        desk = admitted(6)
        desk.admit("r", range(1, 4))
        desk.sample("r", 4)
        assert not desk.step(desk.grow("r", 1, [], start=9)).store_jobs

    def test_or_of_all_of_it(self) -> None:
        desk = admitted(6, offload_prompt_only=False)
        desk.admit("r", range(1, 4))
        desk.sample("r", 4)
        assert blocks_of(only_store(desk.step(desk.grow("r", 4, [], start=6)))) == ([2], (1,), (1,))

    def test_a_client_may_limit_it(self) -> None:
        desk = admitted(16, params={"max_offload_tokens": 9})
        assert blocks_of(only_store(desk.admit("r", range(1, 5)))) == ([1, 2], (2,), (0,))

    def test_a_drafters_last_chunk_is_left_out_while_its_request_decodes(self) -> None:
        desk = admitted(8, full(0, is_drafter=True), offload_prompt_only=False)
        assert blocks_of(only_store(desk.admit("r", range(1, 5)))) == ([1, 2], (2,), (0,))
        desk.sample("r", 9)
        assert not desk.step(desk.grow("r", 4, [], start=8)).store_jobs
        assert blocks_of(only_store(desk.step(desk.grow("r", 4, [5], start=12)))) == ([3], (1,), (2,))


class TestTheEndOfARequest:
    def test_the_last_sampled_token_was_never_written(self) -> None:
        """Prompt of 7, block of 4, one token sampled: 8 tokens, but the eighth slot is empty."""
        desk = admitted(7, offload_prompt_only=False)
        assert blocks_of(only_store(desk.admit("r", [1, 2]))) == ([1], (1,), (0,))
        desk.sample("r")
        desk.finish("r")
        assert not desk.step(finished=["r"]).store_jobs

    def test_what_decoding_completed_is_stored_when_it_ends(self) -> None:
        desk = admitted(7, offload_prompt_only=False)
        desk.admit("r", [1, 2])
        desk.sample("r", 2)
        desk.finish("r")
        assert blocks_of(only_store(desk.step(finished=["r"]))) == ([2], (1,), (1,))

    def test_the_manager_hears_of_it_after_the_last_offer(self) -> None:
        desk = admitted(7)
        desk.admit("r", [1, 2])
        desk.sample("r")
        desk.finish("r")
        access = desk.connector.states["r"].context.access
        assert access is not None
        assert not access.finished
        desk.step(finished=["r"])
        assert access.finished

    def test_its_state_lives_until_its_last_report(self) -> None:
        desk = admitted(7)
        desk.admit("r", [1, 2])
        desk.finish("r")
        desk.step(finished=["r"])
        assert list(desk.connector.states) == ["r"]
        desk.report_all()
        assert not desk.connector.states

    def test_one_that_nobody_knows_is_announced_and_ended(self) -> None:
        desk = Desk()
        desk.add("r", 7)
        del desk.connector.states["r"]
        desk.finish("r")
        assert not desk.connector.states


class TestAborts:
    @pytest.mark.parametrize("behaviour", [VLLM_0_33, IDEAL])
    def test_before_it_got_any_block_there_is_nothing_to_store(self, behaviour: OffloadBehaviour) -> None:
        desk = admitted(16, behaviour=behaviour)
        desk.finish("r", ABORTED)
        assert not desk.step(finished=["r"]).store_jobs
        assert not desk.connector.states

    def test_before_the_clamp_the_engine_died_of_it(self) -> None:
        """vllm#49146: keys for a whole prompt, and no blocks."""
        desk = admitted(16, behaviour=BEFORE_49146)
        desk.finish("r", ABORTED)
        with pytest.raises(EngineFatal, match="keys and block ids differ in number"):
            desk.step(finished=["r"])

    def test_what_was_computed_by_then_is_stored(self) -> None:
        desk = admitted(16)
        desk.allocate("r", range(1, 5))
        desk.step(desk.run("r", 6, range(1, 5)))
        desk.requests["r"].num_computed_tokens = 8
        desk.finish("r", ABORTED)
        assert blocks_of(only_store(desk.step(finished=["r"]))) == ([2], (1,), (1,))


class TestNoRoom:
    def test_the_offer_is_made_again(self) -> None:
        desk = admitted(16, num_chunks=3)
        desk.allocate("r", range(1, 5))
        assert not desk.step(desk.run("r", 16, range(1, 5))).store_jobs
        assert desk.connector.num_allocation_failures == 1
        desk.finish("r")
        assert not desk.step(finished=["r"]).store_jobs
        assert desk.connector.num_allocation_failures == 2

    def test_it_succeeds_once_there_is_room(self) -> None:
        desk = Desk(num_chunks=2)
        desk.add("first", range(100, 108))
        desk.ask("first")
        desk.admit("first", [1, 2])
        desk.add("r", 9)
        desk.ask("r")
        desk.allocate("r", [3, 4, 5])
        assert not desk.step(desk.run("r", 9, [3, 4, 5])).store_jobs
        desk.report_all()
        desk.sample("r")
        assert blocks_of(only_store(desk.step(desk.grow("r", 1, [], start=9)))) == ([3, 4], (2,), (0,))


class TestWindows:
    def test_only_what_some_hit_could_need_is_stored(self) -> None:
        """Hits end at multiples of 16. Of a window of 4 that is the block before each, and before the prompt's end."""
        desk = admitted(40, full(0, tokens_per_block=16), window(1, 4), tokens_per_hash=4)
        metadata = desk.admit("r", [1, 2, 3], range(11, 21))
        assert blocks_of(only_store(metadata)) == ([1, 2, 14, 18, 20], (2, 3), (0, 3))

    def test_a_null_block_cannot_be_stored(self) -> None:
        desk = admitted(16, full(0), window(1, 4))
        metadata = desk.admit("r", range(1, 5), [0, 0, 13, 14])
        assert blocks_of(only_store(metadata)) == ([1, 2, 3, 4, 13, 14], (4, 2), (0, 2))

    @pytest.mark.parametrize(("behaviour", "hit"), [(VLLM_0_33, 0), (IDEAL, 16)])
    def test_a_window_of_one_token_more_than_blocks_is_stored_short(
        self, behaviour: OffloadBehaviour, hit: int
    ) -> None:
        """A window of 5 reaches 4 tokens back, one block, but the lookup asks for two."""
        groups = (full(0, tokens_per_block=16), window(1, 5))
        desk = Desk(*groups, tokens_per_hash=4, behaviour=behaviour)
        desk.store("earlier", 32, [1, 2], range(11, 19))
        desk.add("r", [*range(16), *range(500, 516)])
        assert desk.ask("r") == hit

    def test_with_sparse_retention_only_where_a_replay_ends(self) -> None:
        desk = admitted(33, full(0), window(1, 4), retention_interval=0)
        metadata = desk.admit("r", range(1, 10), range(11, 20))
        assert blocks_of(only_store(metadata))[1:] == ((8, 1), (0, 7))


class TestRecurrentStates:
    def desk(self, num_tokens: int = 14, behaviour: OffloadBehaviour = VLLM_0_33, **settings: Settings) -> Desk:
        groups = (full(0), state(1, is_aligned_state=True))
        desk = admitted(num_tokens, *groups, tokens_per_hash=2, behaviour=behaviour, **settings)
        desk.allocate("r", range(1, 5), [0, 0, 0, 14])
        return desk

    def test_a_state_is_stored_when_it_is_handed_over(self) -> None:
        desk = self.desk()
        metadata = desk.step(desk.run("r", 12, range(1, 5), [0, 0, 13, 14]), handoffs={"r": [Handoff(1, 13, 12)]})
        states, attention = metadata.store_jobs.values()
        assert blocks_of(states) == ([13], (0, 1), (0, 2))
        assert blocks_of(attention) == ([1, 2, 3], (3, 0), (0, 0))

    def test_the_block_tables_own_state_is_not(self) -> None:
        desk = self.desk()
        metadata = desk.step(desk.run("r", 12, range(1, 5), [0, 0, 13, 14]))
        assert blocks_of(only_store(metadata)) == ([1, 2, 3], (3, 0), (0, 0))

    def test_a_tail_inside_a_block_is_one_offer_with_the_attention_block(self) -> None:
        desk = self.desk()
        metadata = desk.step(desk.run("r", 14, range(1, 5), [0, 0, 0, 14]), handoffs={"r": [Handoff(1, 20, 14)]})
        tail, _ = metadata.store_jobs.values()
        assert blocks_of(tail) == ([4, 20], (1, 1), (3, 3))
        of_request = desk.connector.states["r"]
        keys = [of_request.boundary_key(index, 14) for index in (0, 1)]
        assert desk.cpu.chunks.keys[tail.chunk_ids].tolist() == keys

    def test_beyond_what_the_client_allows_the_engine_dies_or_it_is_left_out(self) -> None:
        for behaviour in (VLLM_0_33, IDEAL):
            desk = self.desk(behaviour=behaviour, params={"max_offload_tokens": 9})
            share = desk.run("r", 14, range(1, 5), [0, 0, 0, 14])
            handoffs = {"r": [Handoff(1, 20, 14)]}
            if behaviour is VLLM_0_33:
                with pytest.raises(EngineFatal, match="boundary <= max_boundary"):
                    desk.step(share, handoffs=handoffs)
                continue
            assert blocks_of(only_store(desk.step(share, handoffs=handoffs))) == ([1, 2], (2, 0), (0, 0))

    def test_a_tail_may_be_found_again(self) -> None:
        desk = self.desk()
        desk.step(desk.run("r", 14, range(1, 5), [0, 0, 0, 14]), handoffs={"r": [Handoff(1, 20, 14)]})
        desk.report_all()
        desk.add("again", [*range(14), *range(700, 706)])
        assert desk.ask("again", 12) == 2


class _WholeRequests(CPUOffloadingManager):
    def on_new_request(self, context: RequestContext) -> OffloadPolicy:
        super().on_new_request(context)
        return OffloadPolicy.REQUEST_LEVEL


def test_a_tier_that_wants_whole_requests_is_offered_what_was_loaded_too() -> None:
    space = KeySpace(1)
    manager = _WholeRequests(20, space)
    desk = Desk(manager=manager)
    desk.store("earlier", 9, [1, 2, 3])
    desk.add("r", 9)
    assert desk.ask("r") == 8
    job = desk.allocate("r", [4, 5, 6], external=8)
    assert job is not None
    desk.step()
    desk.report(job.job_id)
    assert desk.connector.states["r"].groups[0].next_stored_chunk_idx == 0


class TestShowing:
    """What the engine may leave out while requests only decode."""

    def test_a_request_whose_prompt_has_been_dealt_with_needs_no_step(self) -> None:
        desk = admitted(8)
        assert desk.connector.needs_share("r")
        desk.admit("r", [1, 2])
        assert not desk.connector.needs_share("r")

    def test_one_that_had_no_room_does(self) -> None:
        desk = admitted(8, num_chunks=1)
        desk.admit("r", [1, 2])
        assert desk.connector.needs_share("r")

    def test_so_does_one_whose_output_is_offloaded(self) -> None:
        desk = admitted(8, offload_prompt_only=False)
        desk.admit("r", [1, 2])
        assert desk.connector.needs_share("r")

    def test_the_step_after_one_with_stores_must_not_be_left_out(self) -> None:
        desk = admitted(8)
        desk.admit("r", [1, 2])
        assert desk.connector.needs_every_step
        assert desk.connector.has_pending_push_work()
        desk.step()
        desk.report_all()
        assert not desk.connector.needs_every_step
        assert not desk.connector.has_pending_push_work()
