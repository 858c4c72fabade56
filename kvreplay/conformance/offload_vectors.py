"""Offloading vectors with a scheduler: our connector under the calls that the real scheduler made.

The recorded steps say whom the scheduler looked up, admitted, preempted and ended, and which blocks it handed out. The
connector is called accordingly, in the real order, and everything that it decides is recorded in the same form:
lookups, jobs, offers, flushes, what the workers submit and acknowledge, evictions, and its own and the manager's state.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvreplay.conformance.offload_junctions import Junctions
from kvreplay.conformance.offload_managers import LETTERS
from kvreplay.conformance.offload_recording import ContentLabels, RecordingManager
from kvreplay.conformance.offload_simulation import Delays, Record, StepClock, StepCopyEngine, StepTier
from kvreplay.conformance.offload_state import connector_state, cpu_state
from kvreplay.conformance.offload_tables import TableBlocks, blocks_of_load, fresh_blocks, hashed_blocks
from kvreplay.conformance.offload_workload import (
    Finish,
    LoadRow,
    OffloadEvent,
    OffloadWorkload,
    OutputRow,
    RecordedStep,
    ShareRow,
    Tables,
    layout_of,
    read_offload_workload,
    read_recorded_steps,
)
from kvreplay.conformance.vector import Json
from kvreplay.conformance.workload import sampled_token
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.manager import LookupResult, StorePlan
from kvreplay.connectors.offloading.scheduler import OffloadingScheduler
from kvreplay.connectors.offloading.structs import (
    Handoff,
    OffloadingConnectorMetadata,
    OffloadingOutput,
    OffloadStep,
    StepRequest,
    TransferJob,
)
from kvreplay.connectors.offloading.tiering import TieringOffloadingManager
from kvreplay.connectors.offloading.worker import LOADS, SYNC_LOADS, OffloadingWorker
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.errors import ConfigError, EngineFatal
from kvreplay.kv.content_index import TokenIndex

COMPARED: Final = (
    "lookup",
    "load",
    "offer",
    "store",
    "flush",
    "submit",
    "deliver",
    "done",
    "cpu_evict",
    "req_done",
    "cpu_reset",
    "promote",
    "tier",
    "tier_done",
    "off",
    "cpu",
    "error",
)
"""What the connector decides. The rest was decided by the scheduler, or (`hazard`) follows from both."""

_FINISHED: Final[Mapping[str, RequestStatus]] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "error": RequestStatus.FINISHED_ERROR,
}
_PARKED: Final = "K"
_FATAL_LOADS: Final = ("_prepare_load", "update_state_after_alloc")
"""Functions in which a load can kill the engine."""


def expected_steps(document: Mapping[str, Json]) -> list[Record]:
    """The recorded steps, cut down to what is compared."""
    loading: set[str] = set()
    return [_compared(step, loading) for step in document["steps"] if not _is_torn(step.get("error"))]


def _is_torn(error: Mapping[str, Json] | None) -> bool:
    """Whether the scheduler died of itself half way through schedule(): how far the step came is not recorded."""
    if error is None:
        return False
    found_no_block = error.get("where") == "schedule" and str(error.get("msg", "")).startswith("Cannot get ")
    return found_no_block or str(error.get("at", "")).startswith("schedule:")


def _compared(step: Mapping[str, Json], loading: set[str]) -> Record:
    """`loading`: requests whose load our connector has in flight; other connectors' loads are left out."""
    record: Record = {"k": step["k"]}
    record.update((name, step[name]) for name in COMPARED if name in step)
    loading.update(row[1] for row in step.get("load", ()))
    if "deliver" in record:
        reported = record["deliver"]
        own = {
            "ack": reported.get("ack", []),
            "recv": [req_id for req_id in reported.get("recv", ()) if req_id in loading],
        }
        loading.difference_update(own["recv"])
        record["deliver"] = {name: rows for name, rows in own.items() if rows}
        if not record["deliver"]:
            del record["deliver"]
    error = record.get("error")
    if error is not None and error.get("where") not in ("schedule", "update") and not _kills_reset(error):
        del record["error"]  # the scheduler's own
    elif error is not None:
        # A key is cut out of the message at its closing quote, which is a double one where the key holds a single one.
        record["error"] = {
            **error,
            "msg": re.sub(r'^chunk .*"(?= )', "chunk", str(error.get("msg", "")), flags=re.DOTALL),
        }
    return record


def _kills_reset(error: Mapping[str, Json]) -> bool:
    """Whether the connector did not let itself be reset."""
    return str(error.get("at", "")).startswith("reset_cache:")


def replayed_steps(document: Mapping[str, Json]) -> Iterator[Record]:
    """The same, as our connector decides them."""
    workload = read_offload_workload(document["workload"])
    tokens_per_hash = document["resolved"].get("hash_block_size")
    if not isinstance(tokens_per_hash, int) or tokens_per_hash < 1:
        raise ConfigError("resolved.hash_block_size: expected a number of tokens")
    return _Driver(workload, read_recorded_steps(document["steps"]), tokens_per_hash).run()


class _Driver:
    def __init__(self, workload: OffloadWorkload, steps: list[RecordedStep], tokens_per_hash: int) -> None:
        self.workload = workload
        self.steps = steps
        self.layout = layout_of(workload, tokens_per_hash)
        self.clock = StepClock()
        self.space = KeySpace(len(self.layout.groups))
        group_ids = [group.group_id for group in self.layout.groups]
        self.labels = ContentLabels(workload.requests, TokenIndex(tokens_per_hash), self.space, group_ids)
        self.block_sizes = [spec.block_size or workload.engine.block_size for spec in workload.groups]
        self.specs = {spec.id: spec for spec in workload.requests}
        self.order = {spec.id: place for place, spec in enumerate(workload.requests)}
        self.events: dict[int, list[OffloadEvent]] = {}
        for event in workload.events:
            self.events.setdefault(event.step, []).append(event)
        self.tiers = [
            StepTier(index, spec, self.clock, self.labels.names)
            for index, spec in enumerate(workload.offload.tiers or ())
        ]
        self.primary = CPUOffloadingManager(
            workload.offload.cpu_chunks,
            self.space,
            eviction_policy=workload.offload.eviction_policy,
            store_threshold=workload.offload.store_threshold,
            max_tracker_size=workload.offload.max_tracker_size,
        )
        self.manager = self._make_manager()
        self.connector = OffloadingScheduler(self.layout, self.manager, self.space)
        self.connector.lookup.observer = self._note_lookup
        self.delays = Delays(workload.offload, workload.requests)
        self.engines = [StepCopyEngine(self.clock, self.delays, rank) for rank in range(self.layout.num_workers)]
        self.workers = [OffloadingWorker(engine) for engine in self.engines]
        self.requests: dict[str, Request] = {}
        self.unannounced: list[str] = []
        """Ended, and not yet told to the workers."""
        self.held: dict[str, None] = {}
        """Ended while a load was running: the scheduler keeps them until it is over."""
        self.junctions = Junctions(
            self.layout, {req_id: content.block_keys for req_id, content in self.labels.contents.items()}
        )
        self.junction_of: dict[str, int] = {}
        self.outputs: list[tuple[list[ShareRow], OffloadingOutput]] = []
        """Of the steps in flight: what was scheduled, and what the workers report."""
        self.pending_recv: dict[str, int] = {}
        self.looked_up: list[list[str]] = []
        self.last_off: Record | None = None
        self.last_cpu: Record | None = None

    def _make_manager(self) -> RecordingManager:
        if self.workload.offload.tiers is None:
            return RecordingManager(self.primary, self.clock, self.labels)
        tiering = TieringOffloadingManager(self.primary, self.tiers)
        manager = RecordingManager(tiering, self.clock, self.labels)

        def note_promotion(key: int, context: RequestContext, plan: StorePlan | None) -> None:
            chunk_ids = None if plan is None else plan.chunk_ids.tolist()
            self.clock.note("promote", [context.req_id, [self.labels.name(key)], chunk_ids])
            manager.note_evicted(plan)

        tiering.on_promote = note_promotion
        return manager

    def _note_lookup(self, key: int, result: LookupResult) -> None:
        self.looked_up.append([self.labels.name(key), LETTERS[LookupResult(result)]])

    # -- a step -----------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Record]:
        for place, step in enumerate(self.steps):
            if _is_torn(step.error):
                return
            self.clock.step = step.k
            record = self.clock.record = {"k": step.k}
            where = "reset"
            try:
                self._arrivals(step)
                if not self._events(step):
                    yield record
                    return
                where = "schedule"
                if self._schedules():
                    self._schedule(step, self.steps[place - 1] if place else None)
                where = "update"
                if not self.workload.engine.async_scheduling or step.upd_of is not None:
                    self._update(step)
            except EngineFatal as death:
                record["error"] = {"where": where, "type": death.exception, "msg": death.message}
                yield record
                return
            self._note_state()
            yield record

    def _arrivals(self, step: RecordedStep) -> None:
        for req_id in step.add:
            spec = self.specs.get(req_id)
            if spec is None or req_id in self.requests:
                raise ConfigError(f"steps[{step.k}].add: {req_id!r} {'arrives twice' if spec else 'is no request'}")
            request = Request(
                req_id,
                self.labels.contents[req_id],
                num_prompt_tokens=len(spec.prompt_token_ids),
                max_tokens=spec.max_tokens,
                kv_transfer_params=spec.kv_params,
            )
            request.skip_reading_prefix_cache = spec.skip_read
            self.requests[req_id] = request
            self.connector.on_new_request(request)

    def _events(self, step: RecordedStep) -> bool:
        """Aborts and resets. False if the scheduler died of one."""
        is_fatal = step.error is not None and step.error.get("where") == "reset" and not _kills_reset(step.error)
        for event in self.events.get(step.k, ()):
            for req_id in sorted(event.abort, key=lambda req_id: self.order.get(req_id, len(self.order))):
                self._abort(req_id, step.k)
            if is_fatal and event.reset_prefix_cache and event.reset_running:
                return False
            if event.reset_connector:
                self.connector.reset_cache()
        return not is_fatal

    def _present(self, req_id: str) -> Request:
        """A request that the recording names as one that has arrived, and not ended."""
        if req_id not in self.requests:
            raise ConfigError(f"steps[{self.clock.step}]: {req_id!r} is no request that is there")
        return self.requests[req_id]

    def _abort(self, req_id: str, k: int) -> None:
        request = self.requests.get(req_id)
        if request is None:
            return
        row = self.steps[k - 1].after.req.get(req_id) if k else None
        if row is not None:
            request.num_computed_tokens = row.num_computed
            if row.status == _PARKED:
                self.held[req_id] = None
        request.status = RequestStatus.FINISHED_ABORTED
        self._end(request)

    def _end(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.unannounced.append(request.request_id)
        self.connector.request_finished(request, None)

    def _schedules(self) -> bool:
        """Whether schedule() was called: with asynchronous scheduling not if there was nothing to do."""
        if not self.workload.engine.async_scheduling:
            return True
        return bool(self.requests or self.unannounced or self.held) or self.connector.has_pending_push_work()

    def _was_reset(self, step: RecordedStep, before: RecordedStep | None) -> bool:
        """Whether the GPU's prefix cache was emptied."""
        resets = [event for event in self.events.get(step.k, ()) if event.reset_prefix_cache or event.reset_connector]
        if not any(event.reset_prefix_cache for event in resets):
            return False
        if resets[-1].reset_prefix_cache:
            return step.reset is True
        # What is recorded came of the connector's reset, which was later. Who runs holds blocks, and prevents it.
        return before is None or not before.after.running or any(event.reset_running for event in resets)

    def _schedule(self, step: RecordedStep, before: RecordedStep | None) -> None:
        if self._was_reset(step, before):
            self.junctions.reset()
        self.junctions.follow(step.run, are_whole=False)
        self._admissions(step)
        shares = [*step.run, *self._in_order_of_admission(step)]
        for share in shares:
            self._present(share.request_id).num_computed_tokens = share.num_computed
        whole = {share.request_id for share in (*step.new, *step.resumed)}
        finished = sorted(self.unannounced, key=lambda req_id: self.order[req_id])
        self.unannounced.clear()
        metadata = self.connector.build_meta(
            OffloadStep(
                requests=[
                    StepRequest(
                        *(share.request_id, share.num_computed, share.num_tokens, share.blocks),
                        is_full_table=share.request_id in whole,
                        shared_prefix_boundary=self.junction_of.get(share.request_id, 0),
                    )
                    for share in shares
                ],
                preempted=step.preempted,
                finished=finished,
                copied_to=[destination for _, destination in step.cow],
                handoffs={req_id: [Handoff(*row) for row in rows] for req_id, rows in step.boundary.items()},
            )
        )
        metadata = metadata or OffloadingConnectorMetadata()
        for job in metadata.store_jobs.values():
            self.delays.note(job)
            self.clock.note("store", self._store_row(job))
        if metadata.jobs_to_flush:
            self.clock.record["flush"] = sorted(metadata.jobs_to_flush)
        self.outputs.append((shares, self._run_workers(metadata)))

    def _admissions(self, step: RecordedStep) -> None:
        """Lookups, each followed by what the scheduler then allocated."""
        loads = {row.request_id: row for row in step.load}
        tables: dict[str, Tables] = {share.request_id: share.blocks or [] for share in (*step.new, *step.resumed)}
        others = {req_id: rows for req_id, _, rows in step.alloc2}
        asked = {req_id for req_id, *_ in step.lookup}
        admitted = {share.request_id: share for share in self._in_order_of_admission(step)}
        self.junctions.follow((share for req_id, share in admitted.items() if req_id not in asked), are_whole=True)
        for req_id, local, *_ in step.lookup:
            self._look_up(req_id, local)
            if req_id in admitted:
                self.junctions.follow([admitted[req_id]], are_whole=True)
            if req_id in loads:
                row = loads[req_id]
                self.junctions.forget(() if req_id in admitted else row.block_ids)
                self._load(row, blocks_of_load(step, row, local, tables.get(req_id), self.block_sizes))
            elif req_id in tables:
                self._allocate(req_id, tables[req_id])
            elif req_id in others:
                self._allocate(req_id, others[req_id])
        self._fatal_load(step)
        for req_id in (*tables, *others):
            if req_id not in asked:
                self._allocate(req_id, tables.get(req_id) or others[req_id])

    def _look_up(self, req_id: str, local: int) -> None:
        self.looked_up = []
        request = self._present(req_id)
        is_blind = request.skip_reading_prefix_cache
        self.junction_of[req_id] = 0 if is_blind else self.junctions.find(req_id, local, request.num_tokens)
        answer, is_async = self.connector.get_num_new_matched_tokens(request, local)
        self.clock.note("lookup", [req_id, local, answer, is_async, self.looked_up])

    def _allocate(self, req_id: str, tables: Tables) -> None:
        self.connector.update_state_after_alloc(self._present(req_id), hashed_blocks(tables), 0)

    def _load(self, row: LoadRow, blocks: TableBlocks) -> None:
        job_id = self.connector.ledger.next_id
        self.connector.update_state_after_alloc(self._present(row.request_id), blocks, row.num_external)
        job = self.connector.load_jobs[job_id]
        self.delays.note(job)
        names = self.labels.names(self.manager.last_loaded)
        queue = SYNC_LOADS if job.is_sync else LOADS
        self.clock.note("load", [job_id, row.request_id, row.num_external, queue, names, *_copy_columns(job)])

    def _fatal_load(self, step: RecordedStep) -> None:
        """A load that killed the engine left no row, but its lookup is the last one."""
        place = str((step.error or {}).get("at", ""))
        if not step.lookup or not place.startswith(_FATAL_LOADS):
            return
        req_id, local, num_external, *_ = step.lookup[-1]
        if num_external and all(row.request_id != req_id for row in step.load):
            blocks = fresh_blocks(self.layout, len(self.workload.groups), local + num_external)
            self.connector.update_state_after_alloc(self._present(req_id), blocks, num_external)

    def _in_order_of_admission(self, step: RecordedStep) -> list[ShareRow]:
        """Finished loads first, then in the order of the lookups."""
        asked = {row[0]: place for place, row in enumerate(step.lookup)}
        ran = {req_id: place for place, req_id in enumerate(_ran(step))}
        return sorted(
            (*step.new, *step.resumed),
            key=lambda share: (asked.get(share.request_id, -1), ran.get(share.request_id, len(ran))),
        )

    def _store_row(self, job: TransferJob) -> list[Any]:
        keys = self.primary.chunks.keys[job.chunk_ids]
        return [job.job_id, job.req_id, self.labels.names(keys), *_copy_columns(job)]

    # -- the workers ------------------------------------------------------------------------------------------

    def _run_workers(self, metadata: OffloadingConnectorMetadata) -> OffloadingOutput:
        output = OffloadingOutput()
        recving: dict[str, None] = {}
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.start_load_kv(metadata)
            worker.wait_for_save(metadata)
            report = worker.get_finished()
            for job_id in report.completed:
                output.completed_jobs[job_id] = output.completed_jobs.get(job_id, 0) + 1
            for req_id in report.finished_recving:
                left = self.pending_recv.get(req_id, len(self.workers)) - 1
                self.pending_recv[req_id] = left
                if not left:
                    del self.pending_recv[req_id]
                    recving[req_id] = None
        output.finished_recving = sorted(recving, key=lambda req_id: self.order[req_id])
        return output

    def _update(self, step: RecordedStep) -> None:
        """Sampled tokens first, then the workers' reports."""
        shares, output = self.outputs.pop(0)
        died = step.error is not None and step.error.get("where") == "update"
        for row in self._unrecorded_outputs(shares) if died else step.out:
            request = self._present(row.request_id)
            request.num_tokens += len(row.tokens)
            request.num_output_tokens += len(row.tokens)
            if row.finish is not None:
                request.status = _FINISHED[row.finish]
                self._end(request)
        deliver: Record = {}
        if output.completed_jobs:
            deliver["ack"] = [[job_id, count] for job_id, count in output.completed_jobs.items()]
        if output.finished_recving:
            deliver["recv"] = sorted(output.finished_recving)
        if deliver:
            self.clock.record["deliver"] = deliver
        for req_id in output.finished_recving:
            self.held.pop(req_id, None)
        self.connector.update_connector_output(output)

    def _unrecorded_outputs(self, shares: list[ShareRow]) -> Iterator[OutputRow]:
        """What was sampled in the step whose reports killed the scheduler: nobody came to record it."""
        for share in shares:
            request = self.requests.get(share.request_id)
            if request is None or share.num_computed + share.num_tokens < request.num_tokens:
                continue
            spec = self.specs[share.request_id]
            token = sampled_token(request.num_tokens)
            is_full = request.num_tokens + 1 >= self.workload.engine.max_model_len
            finish: Finish | None = "length" if is_full or request.num_output_tokens + 1 >= spec.max_tokens else None
            if token in (spec.stop or ()):
                finish = "stop"
            yield OutputRow(share.request_id, [token], finish)

    def _note_state(self) -> None:
        """Where it has changed."""
        off = connector_state(self.connector, self.labels)
        cpu = self.tier_state()
        if off != self.last_off:
            self.clock.record["off"] = self.last_off = off
        if cpu != self.last_cpu:
            self.clock.record["cpu"] = self.last_cpu = cpu

    def tier_state(self) -> Record:
        """Of the CPU tier and what is behind it."""
        state = cpu_state(self.primary, self.labels)
        if self.tiers:
            state["tier_keys"] = [sorted(self.labels.name(key) for key in tier.keys) for tier in self.tiers]
            tiering = self.manager.inner
            if isinstance(tiering, TieringOffloadingManager) and tiering.promotions_held:
                state["held"] = True
        return state


def _ran(step: RecordedStep) -> list[str]:
    """Who ran, in the order in which they were scheduled: who runs on, and who has ended behind who sampled before."""
    order = list(step.after.running)
    place = 0
    for row in step.out:
        if row.request_id in order:
            place = order.index(row.request_id) + 1
        else:
            order.insert(place, row.request_id)
            place += 1
    return order


def _copy_columns(job: TransferJob) -> list[Any]:
    """CPU chunk ids, GPU block ids, blocks per group, index of the first block per group."""
    gpu = job.gpu
    return [job.chunk_ids.tolist(), gpu.block_ids.tolist(), list(gpu.group_sizes), list(gpu.block_indices)]
