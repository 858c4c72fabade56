"""The scheduler's half of the OffloadingConnector (vLLM: offloading/scheduler.py, OffloadingConnectorScheduler)."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from kvreplay.connectors.offloading.arrays import Marks
from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.context import MEDIA, context_of
from kvreplay.connectors.offloading.engine_steps import step_of
from kvreplay.connectors.offloading.handoffs import HandoffStores
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.ledger import Job, JobLedger, listed
from kvreplay.connectors.offloading.loads import LoadBuilder
from kvreplay.connectors.offloading.lookup import ChunkLookup
from kvreplay.connectors.offloading.manager import OffloadingManager
from kvreplay.connectors.offloading.request_state import GroupState, RequestState
from kvreplay.connectors.offloading.stores import StoreBuilder
from kvreplay.connectors.offloading.structs import (
    OffloadingConnectorMetadata,
    OffloadingOutput,
    OffloadStep,
    TransferJob,
)
from kvreplay.engine.connector import KVConnectorOutput, RequestBlocks
from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.request import Request
from kvreplay.errors import EngineFatal, engine_asserts
from kvreplay.kv.block_list import BlockList
from kvreplay.kv.prefix_cache import BlockIds

_MAX_RETRIES: Final = 1
"""A request whose load has failed may load once more; then it is computed, wherever its chunks still are."""
_MAX_RESCUES: Final = 8
"""A request that goes in circles so often, though something else had changed, is asked at every poll."""


class StepObserver(Protocol):
    """Is told what the connector orders, and what comes of its stores."""

    def step_built(self, stores: Mapping[int, TransferJob], flushed: Collection[int]) -> None: ...

    def store_ended(self, job_id: int, req_id: str, num_blocks: int, failure: str | None) -> None: ...

    def looked_up(self, state: RequestState, hit: int) -> None:
        """Of models of which too little is kept in a window, or with a drafter; not of a search that is given up."""
        ...


class OffloadingScheduler:
    """One engine's.

    `max_loadable`: how far beyond the local hit a load may reach, where groups that are not offloaded limit it; None:
    nothing does. `now_ns` is the time and `wake_at` has the engine ask again at that time, both for bounded lookups.
    `mirrors_states`: follow also the tables of groups whose states are handed over, which is of no use but to show what
    vLLM's connector would have of them. `has_drafter`: the model speculates with a drafter of the EAGLE kind.
    `held_blocks`: what a request holds now, per group of the engine; for who must know which ids are out of date.
    """

    requires_kv_delivery = False

    def __init__(
        self,
        layout: OffloadLayout,
        manager: OffloadingManager,
        space: KeySpace,
        *,
        behaviour: OffloadBehaviour = VLLM_0_33,
        max_loadable: Callable[[Request, int], int] | None = None,
        now_ns: Callable[[], int] | None = None,
        wake_at: Callable[[int], None] | None = None,
        lookup_timeout_ns: int = 0,
        observer: StepObserver | None = None,
        mirrors_states: bool = True,
        has_drafter: bool = False,
        held_blocks: Callable[[str], Sequence[BlockIds]] | None = None,
    ) -> None:
        self.layout = layout
        self._mirrored = tuple(
            index for index, group in enumerate(layout.groups) if mirrors_states or not group.is_aligned_state
        )
        self._group_ids = tuple(group.group_id for group in layout.groups)
        self._watched = tuple(index for index in layout.windowed if index in self._mirrored)
        """Groups of which an id may have to be forgotten."""
        self.follows_windows = not layout.offload_prompt_only
        """Else nothing is stored of a request that only decodes: what leaves its windows is all one, until a reset has
        it offer its prompt again. (With it each block that a decoding request fills is a store of its own, ordered in
        the step that fills it, so that there are no steps to skip.)"""
        self.manager = manager
        self.behaviour = behaviour
        self.ledger = JobLedger()
        self.states: dict[str, RequestState] = {}
        self.lookup_version = 0
        """Grows whenever a lookup may be answered otherwise than before."""
        self._num_promoted = 0
        """Of these times, those when a promotion had ended."""
        self.num_allocation_failures = 0
        """Offers for which the CPU tier had no room."""
        self.chunks_being_loaded: set[int] | None = set() if layout.enable_prefix_caching else None
        """Whoever hits one of these waits, and then finds it in the GPU's prefix cache."""
        self.lookup = ChunkLookup(
            layout,
            manager,
            self.chunks_being_loaded,
            widens_drafters=behaviour.eagle_lookup == "widened",
            asks_states=behaviour.hit_groups == "all",
        )
        self.stores = StoreBuilder(
            layout, manager, self.ledger, space, behaviour, self._note_allocation_failure, self._mirrored
        )
        self._loads = LoadBuilder(layout, manager, self.ledger, behaviour)
        self._handoffs = HandoffStores(layout, manager, self.stores, behaviour, self._note_allocation_failure)
        self._space = space
        self._max_loadable = max_loadable
        self._defers_readmission = behaviour.readmission == "defer"
        self._forgets_all_stale = behaviour.stale_ids == "all"
        self._held_blocks = held_blocks if self._forgets_all_stale else None
        self._now_ns = now_ns if behaviour.pending_lookup == "bound" else None
        self._wake_at = wake_at
        self._lookup_timeout_ns = lookup_timeout_ns
        self._observer = observer
        self._hits_may_be_short = has_drafter or any(mask.is_short for mask in self.stores.masks)
        self._given_now = Marks()
        self._unsettled: dict[str, None] = {}
        """Requests with windows that have more to offer: from blocks that must not have been given away since."""
        self._owes_stores = False
        """The workers have kept stores for the next step."""

        # What this step has decided so far.
        self.load_jobs: dict[int, TransferJob] = {}
        self.sync_loads: set[str] = set()
        self._sync_load_tokens = 0
        self._jobs_to_flush: set[int] = set()
        self._allocated: list[BlockIds | Sequence[int]] = []
        """Blocks given to requests in this step, hits and null blocks included."""

    completes_failed_loads = True

    @property
    def lookup_is_pure(self) -> bool:
        """Asking again changes nothing, and while `lookup_version` stays, neither does the answer."""
        return self.manager.lookup_is_pure and not self.layout.sync_load_budget

    def _note_allocation_failure(self, req_id: str) -> None:
        self.num_allocation_failures += 1

    def is_asked_in_vain(self, request_id: str, *, is_idle: bool) -> bool:
        state = self.states[request_id]
        is_final = state.last_question is not None and state.last_answer is None
        if is_final and self.manager.never_answers(state.context):
            return True
        if not is_idle:
            return False
        if state.is_settled and not self.manager.may_interfere(state.context, has_found=state.has_found):
            return True
        return self._is_left_alone(state)

    def _is_left_alone(self, state: RequestState) -> bool:
        """Whether it may be left alone until something else changes. (vLLM's engine goes on asking.)"""
        if not state.context.is_going_in_circles or self.manager.may_end_circles(state.context):
            return False
        if state.num_rescued >= _MAX_RESCUES:
            return False
        state.context.left_alone_in = state.context.left_alone_in or self._situation_of(state)
        return True

    def _situation_of(self, state: RequestState) -> tuple[int, int, int]:
        """What its circles depend on, but for other circles."""
        return self.lookup_version - self._num_promoted, state.num_local_tokens, state.request.num_tokens

    def is_going_in_circles(self, request_id: str) -> bool:
        return self.states[request_id].context.is_going_in_circles

    def peer_of(self, request: Request) -> str | None:
        return None

    def get_load_source(self, request_id: str) -> str | None:
        return self.states[request_id].load_source

    # -- requests come ----------------------------------------------------------------------------------------

    def loads_every_group(self, request_id: str) -> bool:
        return False

    def leaves_drafter_out(self, request_id: str) -> bool:
        return False

    def on_new_request(self, request: Request) -> None:
        context = context_of(request.request_id, request.kv_transfer_params)
        context.is_bounded = self._now_ns is not None
        policy = self.manager.on_new_request(context)
        self.states[request.request_id] = RequestState(
            request, context, self.layout, self._space, policy, self._mirrored
        )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        state = self.states[request.request_id]
        question = (self.lookup_version, num_computed_tokens, request.num_tokens)
        if state.last_question == question and self._would_answer_alike(state):
            return state.last_answer, bool(state.last_answer)
        state.last_question = None
        state.is_settled = False
        state.clear_tables()
        state.rewind()
        self._unsettled.pop(request.request_id, None)
        if state.jobs and self._defers_readmission:
            state.is_settled, state.has_found = True, False  # until its copies are over
            return None, False
        state.notice_keys()
        state.num_local_tokens = num_computed_tokens
        if state.context.left_alone_in not in (None, self._situation_of(state)):
            # Something has changed at last: it may come through now.
            state.context.left_alone_in, state.context.num_attempts = None, 0
            state.num_rescued += 1
        hit: int | None = 0
        if not request.skip_reading_prefix_cache and state.num_lost_loads <= _MAX_RETRIES:
            bound = None if self._max_loadable is None else self._max_loadable(request, num_computed_tokens)
            found = self.lookup.find(state, bound)
            hit = self._bounded(state, found)
            if self._hits_may_be_short and found is not None and bound is None and self._observer is not None:
                self._observer.looked_up(state, found)
            if hit is None:
                is_final = self.manager.never_answers(state.context)
            else:
                is_final = bound is None and not self._hits_may_be_short
            if is_final:
                state.last_question, state.last_answer = question, hit
        is_sync = self._reserve_sync_load(state, hit)
        return hit, bool(hit) and not is_sync

    def _would_answer_alike(self, state: RequestState) -> bool:
        """Whether the last question, asked again, has the last answer: it did not fit, and nothing has changed."""
        if state.last_answer is None:
            return self.manager.never_answers(state.context)
        return self.lookup_is_pure and self.lookup.observer is None

    def _bounded(self, state: RequestState, hit: int | None) -> int | None:
        """An undecided lookup is waited for, but not for ever."""
        if hit is not None or self._now_ns is None:
            state.deferred_since_ns = None
            return hit
        now_ns = self._now_ns()
        if state.deferred_since_ns is None:
            state.deferred_since_ns = now_ns
            if self._wake_at is not None:
                self._wake_at(now_ns + self._lookup_timeout_ns)
        return 0 if now_ns >= state.deferred_since_ns + self._lookup_timeout_ns else None

    def note_news(self, *, is_promotion: bool = False) -> None:
        """An undecided lookup may have an answer now: the time has come for which `wake_at` was called, or a copy to or
        from a secondary tier is over."""
        self.lookup_version += 1
        self._num_promoted += is_promotion

    def _reserve_sync_load(self, state: RequestState, hit: int | None) -> bool:
        """Whether the step waits for this load: what it may bring in so is limited. A token must be left to compute."""
        request, budget = state.request, self.layout.sync_load_budget
        self.sync_loads.discard(request.request_id)
        if not budget or not hit or state.num_local_tokens + hit >= request.num_tokens:
            return False
        if self._sync_load_tokens + hit > budget:
            return False
        self._sync_load_tokens += hit
        self.sync_loads.add(request.request_id)
        return True

    # -- requests get blocks ----------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        tables = tuple(
            [
                table.array if isinstance(table, BlockList) else np.array(table, np.int64)
                for table in blocks.get_block_ids()
            ]
        )
        # Also for other connectors' loads: their blocks may be the source of a store.
        self._allocated += tables
        state = self.states[request.request_id]
        state.admitted_tables = tables
        state.last_question = None
        if not num_external_tokens:
            return
        self.lookup_version += 1
        total = state.num_local_tokens + num_external_tokens
        is_sync = request.request_id in self.sync_loads
        job = self._loads.build(state, tables, blocks.get_unhashed_block_ids_all_groups(), total, is_sync=is_sync)
        self.load_jobs[job.job_id] = job
        sources = {self.manager.get_load_source(key, state.context) for key in self._loaded_keys(job)}
        state.load_source = next((medium for medium in reversed(MEDIA) if medium in sources), MEDIA[0])
        if self.chunks_being_loaded is not None and not is_sync:
            self.chunks_being_loaded.update(self.ledger.jobs[job.job_id].keys.tolist())

    # -- the end of schedule() --------------------------------------------------------------------------------

    def build_connector_meta(self, out: SchedulerOutput) -> OffloadingConnectorMetadata | None:
        """Once per schedule(), with what that has decided. None: the workers need not hear of this step."""
        states = out.boundary_states
        shares = [share for share in out.shares if self._is_of_interest(share) or share.request.request_id in states]
        if not (shares or out.finished_req_ids or out.preempted or out.block_copies or out.boundary_states) and not (
            self.load_jobs or self._sync_load_tokens or self._jobs_to_flush or self._allocated
        ):
            return self._build_nothing(has_forward=out.total_num_scheduled_tokens > 0)
        return self.build_meta(step_of(out, shares))

    def _is_of_interest(self, share: Share) -> bool:
        """Whether anything follows from a share: blocks that it got, or something to offer."""
        if share.admitted:
            return True
        for block_ids in share.new_blocks:
            if len(block_ids):
                return True
        return not self.stores.is_settled(self.states[share.request.request_id])

    def _build_nothing(self, *, has_forward: bool) -> OffloadingConnectorMetadata | None:
        """`build_meta` for a step in which nothing has been decided."""
        self.manager.on_schedule_end()
        if not self._owes_stores:
            return None
        self._owes_stores = False
        return OffloadingConnectorMetadata(has_forward=has_forward)

    def build_meta(self, step: OffloadStep) -> OffloadingConnectorMetadata | None:
        """Orders for the workers; what was gathered in this step is spent."""
        self._update_states(step)
        if step.preempted:
            self._flush_preempted(step.preempted)
        if self.ledger.fences and self._allocated:
            self._jobs_to_flush |= self.ledger.fenced_by(self._allocated_set())
        store_jobs: dict[int, TransferJob] = {}
        if step.handoffs:
            store_jobs = {job.job_id: job for job in self._handoffs.build(step, self.states)}
        for share in step.requests:
            self._build_store(share.request_id, share.num_computed_tokens + share.num_scheduled_tokens, store_jobs)
        for req_id in step.finished:
            self._build_store(req_id, 0, store_jobs)
        if self.layout.windowed:
            self._note_settled(step)
        self.lookup_version += bool(store_jobs or self.load_jobs)
        metadata = OffloadingConnectorMetadata(self.load_jobs, store_jobs, self._jobs_to_flush, step.has_forward)
        if self._observer is not None and metadata:
            self._observer.step_built(store_jobs, self._jobs_to_flush)
        for req_id in step.finished:
            self._sign_off(req_id)
        self.load_jobs = {}
        self.sync_loads = set()
        self._sync_load_tokens = 0
        self._jobs_to_flush = set()
        self._allocated = []
        self.manager.on_schedule_end()
        # What the workers have kept of the last step starts with this one.
        is_news = bool(metadata) or self._owes_stores
        self._owes_stores = bool(store_jobs.keys() - metadata.jobs_to_flush)
        return metadata if is_news else None

    def _note_settled(self, step: OffloadStep) -> None:
        for share in step.requests:
            if self.stores.is_settled(self.states[share.request_id]):
                self._unsettled.pop(share.request_id, None)
            else:
                self._unsettled[share.request_id] = None

    def _update_states(self, step: OffloadStep) -> None:
        lengths_before: dict[str, Sequence[int]] = {}
        for share in step.requests:
            state = self.states[share.request_id]
            state.notice_keys()
            state.shared_prefix_boundary = share.shared_prefix_boundary
            blocks = share.blocks
            if share.is_full_table:
                state.clear_tables()
                blocks = state.admitted_tables if blocks is None else blocks
            if blocks is not None:
                if self._watched:
                    lengths_before[share.request_id] = [len(group.table) for group in state.groups]
                state.extend_tables(blocks)
                if blocks is not state.admitted_tables:
                    for group_id in self._group_ids:
                        self._allocated.append(blocks[group_id])
        if step.copied_to:
            self._allocated.append(step.copied_to)
        if self._watched and any(len(block_ids) for block_ids in self._allocated):
            self._forget_stale_ids(lengths_before)

    @property
    def allocated_ids(self) -> BlockIds:
        """Real blocks given to requests in this step, each once."""
        if not any(len(block_ids) for block_ids in self._allocated):
            return np.empty(0, np.int64)
        ids: BlockIds = np.unique(np.concatenate([np.asarray(block_ids, np.int64) for block_ids in self._allocated]))
        return ids[1:] if ids[0] == 0 else ids

    def _allocated_set(self) -> set[int]:
        """The same, as a set, which also holds the null block."""
        allocated: set[int] = set()
        for block_ids in self._allocated:
            allocated.update(listed(block_ids))
        return allocated

    def _forget_stale_ids(self, lengths_before: dict[str, Sequence[int]]) -> None:
        """A block that has left a window may have been given to someone else: its old place is nobody's now."""
        # Null blocks may be among them: where one is, there is nothing to forget.
        self._given_now.fill(np.concatenate([np.asarray(block_ids, np.int64) for block_ids in self._allocated]))
        for req_id, state in self.states.items():
            lengths = lengths_before.get(req_id)
            for index in self._watched:
                group_state = state.groups[index]
                end = len(group_state.table) if lengths is None else lengths[index]
                start = self._first_watched(group_state)
                if start < end:
                    ids = group_state.table.ids[start:end]
                    ids[self._given_now.holds(ids)] = 0

    def _forget_what_is_not_held(self, state: RequestState, held: Sequence[BlockIds]) -> None:
        """It offers everything again. What has left its windows, perhaps in steps that it was not shown in, may have
        been given away."""
        for index in self._watched:
            ids, now = state.groups[index].table.ids, held[state.groups[index].group.group_id]
            ids[len(now) :] = 0
            ids[: len(now)][now[: len(ids)] == 0] = 0

    def _first_watched(self, group_state: GroupState) -> int:
        if self._forgets_all_stale:
            return 0
        return group_state.next_stored_chunk_idx * group_state.group.blocks_per_chunk

    def _flush_preempted(self, preempted: Sequence[str]) -> None:
        """A preempted request's blocks are as good as overwritten."""
        for req_id in preempted:
            state = self.states.get(req_id)
            if state is None:
                continue
            # After a reset it may have been preempted and be loading again in this very step.
            job_ids = [job_id for job_id in state.jobs if job_id not in self.load_jobs]
            if job_ids:
                engine_asserts(
                    self.ledger.jobs[job_ids[0]].tolerates_others, "any_job.is_store or any_job.is_sync_load"
                )
                self._jobs_to_flush.update(job_ids)

    def _loaded_keys(self, job: TransferJob) -> Sequence[int]:
        """What the sources of a load are asked by; all come from the CPU tier where there is no other."""
        return () if self.manager.lookup_is_pure else self.ledger.jobs[job.job_id].keys.tolist()

    def _build_store(self, req_id: str, num_computed: int, jobs: dict[int, TransferJob]) -> None:
        """What a request offers now, if it is accepted. `num_computed`: its tokens at the end of the step."""
        state = self.states.get(req_id)
        job = self.stores.build(state, num_computed) if state is not None else None
        if state is None or job is None:
            return
        jobs[job.job_id] = job
        if state.request.status.is_finished:
            # Its blocks have been freed already: some may belong to others as of this step.
            deferred = self.ledger.jobs[job.job_id].deferred_fence
            self.ledger.fence(job.job_id, deferred)
            if self._allocated and not self._allocated_set().isdisjoint(listed(deferred)):
                self._jobs_to_flush.add(job.job_id)

    def _sign_off(self, req_id: str) -> None:
        state = self.states.get(req_id)
        if state is None:
            return
        self._unsettled.pop(req_id, None)
        state.finished_signaled = True
        self.manager.on_request_finished(state.context)
        if not state.jobs:
            del self.states[req_id]

    # -- reports and ends -------------------------------------------------------------------------------------

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping although nobody waits for anything."""
        return bool(self.ledger.jobs or self.ledger.reset_fence) or self.manager.has_pending_work()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if isinstance(output, OffloadingOutput):
            for job_id, failure in output.failed_jobs.items():
                if job_id in self.ledger.jobs:
                    self.ledger.jobs[job_id].failure = failure
            self._complete_jobs(output.completed_jobs.items())

    def note_invalid(self, request: Request, num_tokens: int) -> None:
        """What is being stored of it is forgotten when it is there."""
        state = self.states.get(request.request_id)
        for job_id in state.jobs if state is not None else ():
            job = self.ledger.jobs[job_id]
            if job.is_store and (self._space.positions(job.keys) > num_tokens).any():
                job.failure = job.failure or "computed on a load that failed"

    def _complete_jobs(self, reports: Iterable[tuple[int, int]]) -> None:
        for job_id, count in reports:
            if self.ledger.is_stale(job_id):
                if self.ledger.note_stale_report(job_id, count):
                    self.manager.on_reset_flushed()
                    self.lookup_version += 1
                continue
            job = self.ledger.jobs.get(job_id)
            if job is None:
                raise EngineFatal("KeyError", str(job_id))
            job.pending -= count
            if job.pending > 0:
                continue
            engine_asserts(job.pending == 0, "job_status.pending_count == 0")
            self._complete(job_id, job)

    def _complete(self, job_id: int, job: Job) -> None:
        self.lookup_version += 1
        state = self.states[job.req_id]
        if job.is_store:
            self.manager.complete_store(job.keys, state.context, success=job.failure is None)
            if self._observer is not None:
                self._observer.store_ended(job_id, job.req_id, job.num_blocks, job.failure)
        else:
            self.manager.complete_load(job.keys, state.context)
            if job.failure is not None:
                state.num_lost_loads += 1
                self.manager.discard(job.keys)
            if self.chunks_being_loaded:
                self.chunks_being_loaded.difference_update(job.keys.tolist())
        self.ledger.close(job_id, request_has_ended=state.request.status.is_finished)
        del state.jobs[job_id]
        if state.finished_signaled and not state.jobs:
            del self.states[job.req_id]

    def request_finished(self, request: Request, blocks: RequestBlocks | None) -> bool:
        """Its last chunks are stored in the next step; until then what it holds is known only by number.

        `blocks`: what it holds; None: no more than was shown in its steps.
        """
        state = self.states.get(request.request_id)
        if state is None:
            context = context_of(request.request_id, request.kv_transfer_params)
            self.manager.on_new_request(context)
            self.manager.on_request_finished(context)
            return False
        state.notice_keys()
        if blocks is not None and not self.layout.offload_prompt_only:
            state.catch_up(blocks.get_block_ids())
        for job_id in state.jobs:
            self.ledger.fence(job_id, self.ledger.jobs[job_id].deferred_fence)
        return False

    def has_pending_block_frees(self) -> bool:
        return False

    @property
    def needs_every_step(self) -> bool:
        """Whether steps may not be skipped: a block that is given out may be read by a store, now or later, or stores
        wait for the next step."""
        return self._owes_stores or bool(self.ledger.fences or self._unsettled)

    def needs_share(self, request_id: str) -> bool:
        """Whether this request must be shown in each of its steps, though it only decodes: it has more to offer.

        Always where generated tokens are stored, too: the step that fills a block orders its copy.
        """
        state = self.states.get(request_id)
        return state is not None and not self.stores.is_settled(state)

    def note_allocated(self, block_ids: Sequence[int]) -> None:
        """Blocks given out in this step to requests that are not shown."""
        self._allocated.append(block_ids)

    def note_uneventful(self) -> None: ...

    def reset_cache(self) -> bool:
        """Forget everything that is offloaded. What is in flight is flushed, and its reports are disregarded."""
        engine_asserts(
            not (self.load_jobs or self.sync_loads or self._jobs_to_flush or self._allocated), "between steps only"
        )
        self._jobs_to_flush.update(self.ledger.jobs)
        if self._observer is not None:
            for job_id, job in self.ledger.jobs.items():
                if job.is_store:
                    self._observer.store_ended(job_id, job.req_id, job.num_blocks, "reset")
        for req_id, state in list(self.states.items()):
            if state.request.status.is_finished:
                if not state.finished_signaled:
                    self.manager.on_request_finished(state.context)
                del self.states[req_id]
        self.manager.reset_cache()
        self.lookup_version += 1
        self._unsettled.clear()
        for state in self.states.values():
            state.rewind()
            if self._held_blocks is not None:
                self._forget_what_is_not_held(state, self._held_blocks(state.request.request_id))
            if self.layout.windowed:
                self._unsettled[state.request.request_id] = None
            state.jobs.clear()
            state.partial_tail_boundary = None
        had_jobs = bool(self.ledger.jobs)
        self.ledger.reset()
        if not had_jobs and not self.ledger.reset_fence:
            self.manager.on_reset_flushed()
        if self.chunks_being_loaded is not None:
            self.chunks_being_loaded.clear()
        return True
