"""Tiers behind the CPU: chunks cascade to them, and are promoted from them."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.catalogue import ROWS
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext, context_of
from kvreplay.connectors.offloading.cpu_buffers import ChunkContents
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.connectors.offloading.storage_tier import StorageTier
from kvreplay.connectors.offloading.tiering import TieringOffloadingManager, TierJob, TierResult
from kvreplay.sim.bus import Bus
from kvreplay.sim.event_loop import EventLoop
from tests.connectors.offloading.bench import RowFault

MISS, HIT, PENDING, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY


def keys(*numbers: int) -> Keys:
    return np.array(numbers, np.int64)


class HandTier:
    """A tier whose jobs end when the test says so."""

    name = "hand"
    locality: str | None = "LOCAL"

    def __init__(self, *held: int, medium: str | None = "STORAGE", policy: OffloadPolicy | None = None) -> None:
        self.medium = medium
        self.held = set(held)
        self.jobs: list[TierJob] = []
        self.finished: list[TierResult] = []
        self.ended: list[str] = []
        self.accepts = True
        self.unsure: set[int] = set()
        self._policy = policy or OffloadPolicy.CHUNK_LEVEL

    def on_new_request(self, context: RequestContext) -> OffloadPolicy:
        return self._policy

    def lookup(self, key: int, context: RequestContext) -> LookupResult:
        return RETRY if key in self.unsure else HIT if key in self.held else MISS

    def submit_store(self, job: TierJob) -> None:
        self.jobs.append(job)

    def submit_load(self, job: TierJob) -> None:
        self.jobs.append(job)

    def end(self, *, success: bool = True, successful_keys: Keys | None = None) -> TierJob:
        """End the oldest job."""
        job = self.jobs.pop(0)
        self.finished.append(TierResult(job.job_id, success, successful_keys, job.is_promotion))
        if success and not job.is_promotion:
            self.held.update(job.keys.tolist())
        return job

    def get_finished_jobs(self) -> Sequence[TierResult]:
        finished, self.finished = self.finished, []
        return finished

    def accepts_store(self, num_chunks: int) -> bool:
        return self.accepts

    def on_request_finished(self, context: RequestContext) -> None:
        self.ended.append(context.req_id)

    def drain_jobs(self) -> None:
        while self.jobs:
            self.end()

    def has_pending_work(self) -> bool:
        return False


class Stack:
    """A CPU tier of so many chunks, and what is behind it."""

    def __init__(self, num_chunks: int, *tiers: HandTier, protects_found: bool = False) -> None:
        self.primary = CPUOffloadingManager(num_chunks, KeySpace(1))
        self.manager = TieringOffloadingManager(self.primary, tiers, protects_found=protects_found)
        self.contexts: dict[str, RequestContext] = {}

    def add(self, req_id: str, params: dict[str, object] | None = None) -> RequestContext:
        context = self.contexts[req_id] = context_of(req_id, params)
        self.manager.on_new_request(context)
        return context

    def store(self, req_id: str, *numbers: int) -> None:
        """In a step of its own."""
        context = self.contexts.get(req_id) or self.add(req_id)
        assert self.manager.prepare_store(keys(*numbers), context) is not None
        self.manager.on_schedule_end()
        self.manager.complete_store(keys(*numbers), context)

    def ask(self, req_id: str, *numbers: int) -> list[LookupResult]:
        return [self.manager.lookup(number, self.contexts[req_id]) for number in numbers]

    def refs(self, *numbers: int) -> list[int]:
        refs: list[int] = self.primary.chunks.ref_counts[self.primary.chunks.find(keys(*numbers))].tolist()
        return refs


class TestCascades:
    def test_what_is_stored_goes_on_to_every_tier_and_is_pinned_meanwhile(self) -> None:
        first, second = HandTier(), HandTier()
        stack = Stack(4, first, second)
        stack.store("r", 1, 2)
        assert stack.refs(1, 2) == [2, 2]
        first.end()
        second.end()
        stack.manager.on_schedule_end()
        assert stack.refs(1, 2) == [0, 0]
        assert first.held == second.held == {1, 2}

    def test_a_tier_may_decline(self) -> None:
        tier = HandTier()
        tier.accepts = False
        stack = Stack(4, tier)
        stack.store("r", 1)
        assert tier.jobs == []
        assert stack.refs(1) == [0]

    def test_a_failed_one_only_unpins(self) -> None:
        tier = HandTier()
        stack = Stack(4, tier)
        stack.store("r", 1)
        tier.end(success=False)
        stack.manager.on_schedule_end()
        assert (stack.refs(1), tier.held) == ([0], set())

    def test_a_failed_store_does_not_go_on(self) -> None:
        tier = HandTier()
        stack = Stack(4, tier)
        context = stack.add("r")
        stack.manager.prepare_store(keys(1), context)
        stack.manager.complete_store(keys(1), context, success=False)
        assert tier.jobs == []

    def test_the_tiers_hear_of_a_requests_end_after_its_last_cascade(self) -> None:
        tier = HandTier()
        stack = Stack(4, tier)
        context = stack.add("r")
        stack.manager.prepare_store(keys(1), context)
        stack.manager.on_request_finished(context)
        assert tier.ended == []
        stack.manager.complete_store(keys(1), context)
        assert tier.ended == ["r"]

    def test_the_engine_keeps_stepping_while_they_last(self) -> None:
        tier = HandTier()
        stack = Stack(4, tier)
        stack.store("r", 1)
        assert stack.manager.has_pending_work()
        tier.end()
        stack.manager.on_schedule_end()
        assert not stack.manager.has_pending_work()


class TestWholeRequests:
    """A tier may want all of a request's chunks, also those that the CPU tier had already."""

    def test_what_was_there_goes_on_at_once(self) -> None:
        tier = HandTier(policy=OffloadPolicy.REQUEST_LEVEL)
        stack = Stack(4, tier)
        stack.store("earlier", 1)
        tier.drain_jobs()
        context = stack.add("r")
        stack.manager.prepare_store(keys(1, 2), context)
        (job,) = tier.jobs
        assert job.keys.tolist() == [1]

    def test_what_is_being_written_goes_on_when_it_is_ready(self) -> None:
        tier = HandTier(policy=OffloadPolicy.REQUEST_LEVEL)
        stack = Stack(4, tier)
        other, context = stack.add("other"), stack.add("r")
        stack.manager.prepare_store(keys(1), other)
        stack.manager.prepare_store(keys(1), context)
        stack.manager.on_schedule_end()
        assert tier.jobs == []
        stack.manager.complete_store(keys(1), other)
        stack.manager.on_schedule_end()
        assert [job.context.req_id for job in tier.jobs] == ["other", "r"]


class TestPromotions:
    def test_a_slot_is_taken_at_once_and_the_copy_ordered_at_the_steps_end(self) -> None:
        tier = HandTier(1, 2)
        stack = Stack(4, tier)
        stack.add("r")
        assert stack.ask("r", 1, 2, 3) == [PENDING, PENDING, MISS]
        assert tier.jobs == []
        stack.manager.on_schedule_end()
        (job,) = tier.jobs
        assert (job.keys.tolist(), job.is_promotion) == ([1, 2], True)
        assert stack.ask("r", 1) == [PENDING]
        tier.end()
        stack.manager.on_schedule_end()
        assert stack.ask("r", 1, 2) == [HIT, HIT]

    def test_what_failed_is_asked_for_anew(self) -> None:
        tier = HandTier(1, 2)
        stack = Stack(4, tier)
        stack.add("r")
        stack.ask("r", 1, 2)
        stack.manager.on_schedule_end()
        tier.end(success=False, successful_keys=keys(2))
        stack.manager.on_schedule_end()
        assert stack.refs(1, 2) == [-2, 0]
        assert stack.ask("r", 1) == [PENDING]

    def test_without_room_it_is_a_miss(self) -> None:
        tier = HandTier(1)
        stack = Stack(0, tier)
        stack.add("r")
        assert stack.ask("r", 1) == [MISS]
        assert stack.manager.num_promotion_failures == 1

    def test_one_tier_that_does_not_know_yet_is_asked_again_unless_another_has_it(self) -> None:
        unsure, sure = HandTier(), HandTier(1)
        unsure.unsure = {1, 2}
        stack = Stack(4, unsure, sure)
        stack.add("r")
        assert stack.ask("r", 1, 2) == [PENDING, RETRY]

    @pytest.mark.parametrize(("protects", "states"), [(False, [MISS, PENDING]), (True, [HIT, MISS])])
    def test_one_may_evict_what_the_same_lookup_has_just_found(
        self,
        protects: bool,
        states: list[LookupResult],
    ) -> None:
        """A tier of one chunk that has key 1; key 2 is promoted. In 0.33.0 only key 2 itself is protected."""
        tier = HandTier(2)
        stack = Stack(1, tier, protects_found=protects)
        stack.store("earlier", 1)
        tier.drain_jobs()
        tier.held = {2}
        stack.add("r")
        assert stack.ask("r", 1)[0] is HIT
        stack.ask("r", 2)
        assert [stack.primary.lookup(number, stack.contexts["r"]) for number in (1, 2)] == states

    def test_the_accounts_know_where_a_chunk_came_from(self) -> None:
        tier = HandTier(1)
        stack = Stack(4, tier)
        stack.store("earlier", 2)
        context = stack.add("r")
        stack.ask("r", 1, 2)
        assert [stack.manager.get_load_source(number, context) for number in (1, 2)] == ["STORAGE", "CPU"]

    @pytest.mark.parametrize(
        ("params", "result"),
        [
            (None, PENDING),
            ([], MISS),
            ([{"medium": "cpu"}], MISS),
            ([{"medium": "storage"}], PENDING),
            ([{"medium": "STORAGE", "locality": "remote"}], MISS),
            ([{"locality": "LOCAL"}], PENDING),
            ([{"medium": "tape"}], PENDING),
            ([{"medium": "tape"}, {"medium": "cpu"}], MISS),
            ("storage", PENDING),
            ([17], PENDING),
        ],
    )
    def test_a_client_may_choose_the_tiers(self, params: object, result: LookupResult) -> None:
        stack = Stack(4, HandTier(1))
        stack.add("r", None if params is None else {"kv_load_tiers": params})
        assert stack.ask("r", 1) == [result]

    def test_a_tier_of_unknown_medium_is_always_allowed(self) -> None:
        stack = Stack(4, HandTier(1, medium=None))
        stack.add("r", {"kv_load_tiers": [{"medium": "CPU"}]})
        assert stack.ask("r", 1) == [PENDING]


class TestReset:
    def test_jobs_are_waited_for_and_the_tiers_keep_what_they_have(self) -> None:
        tier = HandTier(2)
        stack = Stack(4, tier)
        stack.store("r", 1)
        stack.manager.reset_cache()
        assert tier.held == {1, 2}
        assert stack.primary.chunks.num_free == 4

    def test_nothing_is_promoted_until_all_late_copies_have_been_reported(self) -> None:
        tier = HandTier(1)
        stack = Stack(4, tier)
        stack.add("r")
        stack.manager.reset_cache()
        assert stack.ask("r", 1) == [MISS]
        stack.manager.on_reset_flushed()
        assert stack.ask("r", 1) == [PENDING]

    def test_an_ended_request_is_ended_in_the_tiers(self) -> None:
        tier = HandTier()
        stack = Stack(4, tier)
        context = stack.add("r")
        stack.manager.prepare_store(keys(1), context)
        stack.manager.on_request_finished(context)
        stack.manager.reset_cache()
        assert tier.ended == ["r"]


class _Memory:
    """CPU chunks that hold one word."""

    def __init__(self) -> None:
        self.words = dict.fromkeys(range(8), 0)

    def take_chunk(self, chunk_id: int) -> Sequence[ChunkContents]:
        word = np.array([[self.words[chunk_id]]], np.uint64)
        return [ChunkContents(word, word[:, 0], {})]

    def put_chunk(self, chunk_id: int, contents: Sequence[ChunkContents]) -> None:
        self.words[chunk_id] = int(contents[0].words[0, 0])


class Storage:
    """A tier of 100-byte chunks, a byte per nanosecond, without latency."""

    def __init__(self, *, tier_bytes: int | None = None, fault: RowFault | None = None) -> None:
        self.loop = EventLoop()
        bus = Bus(self.loop)
        bus.interceptor = fault
        self.memory = _Memory()
        self.num_woken = 0
        config = OffloadingConfig(
            cpu_bytes_to_use=1, tier_bytes=tier_bytes, tier_bytes_per_s=1_000_000_000, tier_latency=0.0
        )
        self.tier = StorageTier(
            "E0", 0, config=config, chunk_bytes=100, memory=self.memory, bus=bus, on_report=self._wake
        )

    def _wake(self, is_promotion: bool = False) -> None:
        self.num_woken += 1

    def order(self, job_id: int, numbers: list[int], chunks: list[int], *, is_promotion: bool = False) -> None:
        job = TierJob(job_id, keys(*numbers), np.array(chunks, np.int32), is_promotion, RequestContext("r"))
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)

    def run(self) -> list[tuple[int, bool]]:
        self.loop.run_until_quiescent()
        return [(result.job_id, result.success) for result in self.tier.get_finished_jobs()]

    def holds(self, *numbers: int) -> list[bool]:
        return [self.tier.lookup(number, RequestContext("r")) is HIT for number in numbers]


ROW = {row.name: row for row in ROWS}


class TestStorage:
    def test_words_go_there_and_come_back(self) -> None:
        storage = Storage()
        storage.memory.words[3] = 42
        storage.order(0, [1], [3])
        assert storage.run() == [(0, True)]
        storage.order(1, [1], [5], is_promotion=True)
        assert storage.run() == [(1, True)]
        assert storage.memory.words[5] == 42

    def test_jobs_run_one_after_another_and_wake_whoever_waits(self) -> None:
        storage = Storage()
        storage.order(0, [1, 2], [0, 1])
        storage.order(1, [3], [2])
        storage.run()
        assert (storage.loop.now_ns, storage.num_woken) == (300, 2)

    def test_a_full_tier_loses_what_was_used_longest_ago(self) -> None:
        storage = Storage(tier_bytes=250)
        storage.order(0, [1, 2], [0, 1])
        storage.run()
        storage.holds(1)
        storage.order(1, [3], [2])
        storage.run()
        assert storage.holds(1, 2, 3) == [True, False, True]

    def test_what_has_left_since_it_was_found_cannot_be_brought(self) -> None:
        storage = Storage()
        storage.order(0, [1], [0])
        storage.run()
        storage.order(1, [1, 2], [4, 5], is_promotion=True)
        storage.loop.run_until_quiescent()
        (result,) = storage.tier.get_finished_jobs()
        assert not result.success
        assert result.successful_keys is not None
        assert result.successful_keys.tolist() == [1]

    def test_whoever_drains_waits_for_all_of_them(self) -> None:
        storage = Storage()
        storage.order(0, [1], [0])
        storage.tier.drain_jobs()
        assert storage.holds(1) == [True]
        assert storage.run() == [(0, True)]

    def test_a_dead_process_hears_nothing(self) -> None:
        storage = Storage()
        storage.order(0, [1], [0])
        storage.tier.close()
        assert storage.run() == []

    def test_a_promotion_that_fails(self) -> None:
        storage = Storage(fault=RowFault(ROW["offload.promotion-fail"]))
        storage.order(0, [1], [0])
        storage.order(1, [1], [1], is_promotion=True)
        assert storage.run() == [(0, True), (1, False)]

    def test_a_store_that_fails(self) -> None:
        storage = Storage(fault=RowFault(ROW["offload.tier-store-fail"]))
        storage.order(0, [1], [0])
        assert storage.run() == [(0, False)]
        assert storage.holds(1) == [False]

    def test_a_slow_one(self) -> None:
        storage = Storage(fault=RowFault(ROW["offload.tier-slow"]))
        storage.order(0, [1], [0])
        storage.run()
        assert storage.loop.now_ns == 1_000_000_100
