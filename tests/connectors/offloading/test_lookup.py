"""What a request is offered beyond its local hit."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.layout import OffloadGroup
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.engine.request import RequestStatus
from tests.connectors.offloading.desk import IDEAL, Clock, Desk, Settings, full, state, window

NARROW = dataclasses.replace(VLLM_0_33, eagle_lookup="narrow")
READY, PENDING, GONE = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS


def hold(desk: Desk, keys: Keys, results: Sequence[LookupResult] | None = None) -> None:
    """Put these chunks into the CPU tier, ready or not."""
    wanted = [READY] * len(keys) if results is None else results
    context = RequestContext("somebody")
    for key, result in zip(keys.tolist(), wanted, strict=True):
        if result is not GONE:
            desk.cpu.prepare_store(np.array([key]), context)
        if result is READY:
            desk.cpu.complete_store(np.array([key]), context)


def desk_with(
    num_tokens: int, *groups: OffloadGroup, behaviour: OffloadBehaviour = VLLM_0_33, **settings: Settings
) -> Desk:
    desk = Desk(*groups, behaviour=behaviour, **settings)
    desk.add("r", num_tokens)
    return desk


class TestFullAttention:
    def test_chunks_up_to_the_first_that_is_missing(self) -> None:
        desk = desk_with(20)
        hold(desk, desk.keys("r")[[0, 1, 3]])
        assert desk.ask("r") == 8

    def test_only_beyond_the_local_hit(self) -> None:
        desk = desk_with(20)
        hold(desk, desk.keys("r")[1:4])
        assert desk.ask("r", 4) == 12
        assert desk.ask("r", 8) == 8
        assert desk.ask("r", 16) == 0

    def test_the_last_token_may_be_loaded_too(self) -> None:
        desk = desk_with(16)
        hold(desk, desk.keys("r"))
        assert desk.ask("r") == 16

    def test_less_than_a_chunk_is_nothing(self) -> None:
        desk = desk_with(40, full(blocks_per_chunk=4))
        hold(desk, desk.keys("r"))
        assert desk.ask("r", 4) == 28
        assert desk.ask("r", 20) == 0

    def test_a_chunk_still_being_written_defers_the_answer(self) -> None:
        desk = desk_with(16)
        hold(desk, desk.keys("r")[:3], [READY, PENDING, READY])
        assert desk.ask("r") is None

    def test_one_behind_a_gap_does_not(self) -> None:
        desk = desk_with(16)
        hold(desk, desk.keys("r")[:3], [READY, GONE, PENDING])
        assert desk.ask("r") == 4

    def test_a_client_may_limit_what_is_loaded(self) -> None:
        desk = desk_with(4)
        desk.add("limited", 20, params={"max_load_tokens": 10})
        hold(desk, desk.keys("limited"))
        assert desk.ask("limited") == 8

    @pytest.mark.parametrize("limit", [True, -1, "8", 8.0, None])
    def test_a_limit_that_is_no_number_of_tokens_is_ignored(self, limit: object) -> None:
        desk = desk_with(4)
        desk.add("limited", 20, params={"max_load_tokens": limit})
        hold(desk, desk.keys("limited"))
        assert desk.ask("limited") == 20

    def test_a_request_may_not_want_it(self) -> None:
        desk = desk_with(16)
        hold(desk, desk.keys("r"))
        desk.requests["r"].skip_reading_prefix_cache = True
        assert desk.ask("r") == 0


class TestWindows:
    def test_a_hit_ends_where_a_whole_window_is_there(self) -> None:
        desk = desk_with(33, full(0), window(1, 8))
        hold(desk, desk.keys("r", 0))
        hold(desk, desk.keys("r", 1)[[2, 3, 6]])
        assert desk.ask("r") == 16

    def test_a_window_at_the_start_may_be_short(self) -> None:
        desk = desk_with(33, full(0), window(1, 16))
        hold(desk, desk.keys("r", 0))
        hold(desk, desk.keys("r", 1)[:2])
        assert desk.ask("r") == 8

    def test_the_last_token_is_computed(self) -> None:
        """Whoever samples from it needs its window, so a hit of all 16 tokens becomes one of 12."""
        desk = desk_with(16, full(0), window(1, 4))
        for group in (0, 1):
            hold(desk, desk.keys("r", group))
        assert desk.ask("r") == 15

    def test_the_widest_window_is_asked_first_and_all_agree_in_the_end(self) -> None:
        desk = desk_with(33, full(0), window(1, 4), window(2, 12))
        hold(desk, desk.keys("r", 0))
        hold(desk, desk.keys("r", 1)[[3, 6]])
        hold(desk, desk.keys("r", 2)[1:7])
        assert desk.ask("r") == 28
        desk.cpu.discard(desk.keys("r", 1)[6:7])
        desk.connector.lookup_version += 1  # it has not been told
        assert desk.ask("r") == 16

    def test_a_gap_rules_out_what_is_pending_behind_it(self) -> None:
        desk = desk_with(33, full(0), window(1, 8))
        hold(desk, desk.keys("r", 0))
        hold(desk, desk.keys("r", 1)[:7], [READY, READY, READY, GONE, GONE, PENDING, GONE])
        assert desk.ask("r") == 12

    def test_a_deferral_ends_when_a_shorter_hit_does_not_need_it(self) -> None:
        desk = desk_with(33, full(0), window(1, 4))
        hold(desk, desk.keys("r", 0)[:8], [READY] * 6 + [PENDING] * 2)
        hold(desk, desk.keys("r", 1)[2:3])
        assert desk.ask("r") == 12

    def test_a_recurrent_state_is_a_window_of_one_chunk(self) -> None:
        desk = desk_with(33, full(0), state(1, is_aligned_state=True))
        hold(desk, desk.keys("r", 0))
        hold(desk, desk.keys("r", 1)[[4]])
        assert desk.ask("r") == 20


class TestDrafters:
    """The last chunk of a drafter's group may still be rewritten: it does not count (EAGLE, MTP)."""

    def test_one_chunk_less(self) -> None:
        desk = desk_with(20, full(0, is_drafter=True))
        hold(desk, desk.keys("r")[:3])
        assert desk.ask("r") == 8

    def test_one_chunk_is_none(self) -> None:
        desk = desk_with(20, full(0, is_drafter=True))
        hold(desk, desk.keys("r")[:1])
        assert desk.ask("r") == 0

    @pytest.mark.parametrize(("behaviour", "hit"), [(NARROW, 12), (VLLM_0_33, 16), (IDEAL, 16)])
    def test_where_others_shorten_the_hit_it_asks_for_one_more(self, behaviour: OffloadBehaviour, hit: int) -> None:
        """16 tokens are there for attention; the drafter has 5 chunks, of which the fourth is proven by the fifth."""
        desk = desk_with(24, full(0), full(1, is_drafter=True), behaviour=behaviour)
        hold(desk, desk.keys("r", 0)[:4])
        hold(desk, desk.keys("r", 1)[:5])
        assert desk.ask("r") == hit

    def test_a_group_that_shortens_the_hit_makes_it_give_up_one_again(self) -> None:
        desk = desk_with(40, full(0, is_drafter=True), window(1, 4))
        hold(desk, desk.keys("r", 0)[:6])
        hold(desk, desk.keys("r", 1)[2:3])
        assert desk.ask("r") == 12


class TestPartialTails:
    """States at hash boundaries (2 tokens) inside blocks of 4: a hit may end there."""

    def desk(self, num_tokens: int = 15) -> Desk:
        return desk_with(num_tokens, full(0), state(1, is_aligned_state=True), tokens_per_hash=2)

    def hold_boundary(self, desk: Desk, boundary: int) -> None:
        desk.keys("r")
        of_request = desk.connector.states["r"]
        hold(desk, np.array([of_request.boundary_key(index, boundary) for index in (0, 1)]))

    def test_a_boundary_in_the_block_behind_the_hit(self) -> None:
        desk = self.desk()
        for group in (0, 1):
            hold(desk, desk.keys("r", group)[:2])
        self.hold_boundary(desk, 10)
        assert desk.ask("r") == 10
        assert desk.connector.states["r"].partial_tail_boundary == 10

    def test_one_alone_without_any_complete_chunk(self) -> None:
        desk = self.desk()
        self.hold_boundary(desk, 2)
        assert desk.ask("r") == 2

    def test_every_group_must_have_it(self) -> None:
        desk = self.desk()
        desk.keys("r")
        hold(desk, np.array([desk.connector.states["r"].boundary_key(1, 2)]))
        assert desk.ask("r") == 0

    def test_the_loads_last_key_is_the_boundarys(self) -> None:
        desk = self.desk()
        for group in (0, 1):
            hold(desk, desk.keys("r", group)[:1])
        self.hold_boundary(desk, 6)
        assert desk.ask("r") == 6
        job = desk.allocate("r", [1, 2], [3, 4], external=6)
        assert job is not None
        of_request = desk.connector.states["r"]
        loaded = desk.cpu.chunks.keys[job.chunk_ids].tolist()
        assert loaded[1] == of_request.boundary_key(0, 6)
        assert loaded[-1] == of_request.boundary_key(1, 6)


class TestWaiting:
    def test_who_wants_what_another_loads_waits_and_then_finds_it_on_the_gpu(self) -> None:
        desk = Desk(num_workers=2)
        desk.store("earlier", 17, range(1, 6))
        for req_id in ("r1", "r2"):
            desk.add(req_id, 17)
        assert desk.ask("r1") == 16
        job = desk.allocate("r1", range(11, 16), external=16)
        assert job is not None
        assert desk.ask("r2") is None
        desk.step()
        desk.report(job.job_id)
        assert desk.ask("r2") is None
        desk.report(job.job_id)
        assert desk.ask("r2", 16) == 0

    def test_without_a_prefix_cache_nobody_could_find_it_there(self) -> None:
        desk = Desk(enable_prefix_caching=False)
        desk.store("earlier", 17, range(1, 6))
        for req_id in ("r1", "r2"):
            desk.add(req_id, 17)
        desk.ask("r1")
        desk.allocate("r1", range(11, 16), external=16)
        assert desk.ask("r2") == 16

    def test_a_request_with_a_job_in_flight_asks_again_later(self) -> None:
        """Preempted and back before the report of its flushed stores is in: vllm#46014."""
        for behaviour, answer in ((VLLM_0_33, None), (dataclasses.replace(VLLM_0_33, readmission="ask"), 0)):
            desk = Desk(behaviour=behaviour)
            desk.add("r", 16)
            desk.ask("r")
            metadata = desk.admit("r", range(1, 5))
            flushed = desk.step(preempted=["r"])
            assert flushed.jobs_to_flush == set(metadata.store_jobs)
            assert desk.ask("r", 16) == answer
            desk.report_all()
            assert desk.ask("r", 16) == 0

    def test_an_undecided_lookup_is_waited_for_only_so_long(self) -> None:
        clock = Clock()
        desk = Desk(behaviour=IDEAL, clock=clock)
        desk.add("r", 16)
        hold(desk, desk.keys("r")[:2], [READY, PENDING])
        assert desk.ask("r") is None
        assert clock.alarms == [5_000]
        clock.now_ns = 4_999
        assert desk.ask("r") is None
        clock.now_ns = 5_000
        assert desk.ask("r") == 0

    def test_asking_in_vain_grows_the_version_only_when_something_changes(self) -> None:
        desk = desk_with(16)
        assert desk.connector.lookup_is_pure
        before = desk.connector.lookup_version
        desk.ask("r")
        desk.step()
        assert desk.connector.lookup_version == before
        desk.admit("r", range(1, 5))
        assert desk.connector.lookup_version > before
        before = desk.connector.lookup_version
        desk.report_all()
        assert desk.connector.lookup_version > before

    def test_an_ended_request_leaves_nothing_behind(self) -> None:
        desk = desk_with(16)
        desk.ask("r")
        desk.finish("r", RequestStatus.FINISHED_ABORTED)
        desk.step(finished=["r"])
        assert not desk.connector.states


class TestBothWaysOfAsking:
    """Whole ranges at once, and key after key where somebody looks: one answer."""

    @given(
        st.lists(st.lists(st.sampled_from([READY, READY, READY, PENDING, GONE]), min_size=9, max_size=9), min_size=3),
        st.integers(0, 4).map(lambda chunks: chunks * 4),
        st.sampled_from([(4, 8), (12, 4), (16, 20)]),
    )
    def test_they_agree(self, held: list[list[LookupResult]], local: int, windows: tuple[int, int]) -> None:
        answers = []
        for is_watched in (False, True):
            desk = desk_with(37, full(0), window(1, windows[0]), window(2, windows[1]))
            for group in range(3):
                hold(desk, desk.keys("r", group), held[group])
            if is_watched:
                desk.connector.lookup.observer = lambda key, result: None
            answers.append(desk.ask("r", local))
        assert answers[0] == answers[1]
