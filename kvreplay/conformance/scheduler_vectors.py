"""Scheduler vectors: a workload, and what the real scheduler did with it in each step.

A vector is a JSON object `{"format": 1, "oracle": "vllm X", "workload": {...}, "steps": [...]}`. `run_workload`
drives our scheduler through the workload and records the same steps.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.conformance.workload import GroupSpec, RequestSpec, Workload, read_workload
from kvreplay.engine.config import SchedulerConfig
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.engine.log import EngineLog
from kvreplay.engine.output import ModelRunnerOutput, RequestOutput, SchedulerOutput
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.scheduler import Scheduler
from kvreplay.errors import EngineFatal
from kvreplay.events import DETAIL_RUN, Event
from kvreplay.kv.block_pool import BlockIds, BlockPool
from kvreplay.kv.cache_manager import make_cache_manager
from kvreplay.kv.content_index import TokenContent, TokenIndex
from kvreplay.kv.specs import FULL, SLIDING_WINDOW, KVCacheGroupSpec

_SMALL_POOL = 64
_SHORT_STATUS = {
    RequestStatus.WAITING: "W",
    RequestStatus.RUNNING: "R",
    RequestStatus.PREEMPTED: "P",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "K",
}
_GROUP_KINDS = {"full": FULL, "swa": SLIDING_WINDOW}
_SCHEDULER_SETTINGS = (
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_num_seqs",
    "max_num_active_seqs",
    "max_model_len",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "enable_chunked_prefill",
    "scheduler_reserve_full_isl",
    "watermark",
    "prefill_schedule_interval",
)


def reason_unsupported(workload: Workload) -> str | None:
    """Why this workload cannot be run, or None."""
    engine, groups = workload.engine, workload.groups
    if len(groups) != 1:
        return f"{len(groups)} KV cache groups"
    if groups[0].type not in _GROUP_KINDS:
        return f"group type {groups[0].type}"
    if groups[0].extra_retained:
        return "extra_retained"
    if engine.policy != "fcfs":
        return f"policy {engine.policy}"
    for key in ("spec", "async_scheduling"):
        if getattr(engine, key):
            return key
    return None


def run_workload(document: Json) -> Iterator[dict[str, Any]]:
    """The steps that our scheduler takes. Raises UnsupportedVectorError, and ConfigError for what no one could run."""
    workload = read_workload(document)
    reason = reason_unsupported(workload)
    if reason is not None:
        raise UnsupportedVectorError(reason)
    return _steps(workload)


def _steps(workload: Workload) -> Iterator[dict[str, Any]]:
    # A generator, so that what goes wrong in here is met where steps are taken.
    yield from _Driver(workload).run()


class _ScriptedSampler:
    """The token at position p is (p * 7 + 13) % 1000."""

    def sample(self, request: Request, position: int) -> int:
        token = (position * 7 + 13) % 1000
        content = request.content
        assert isinstance(content, TokenContent)
        content.append(token)
        return token

    def output_hash(self, request: Request) -> int:
        return 0


class _EvictionSink:
    """Keeps nothing; vectors are compared through the driver's own record."""

    detail = DETAIL_RUN

    def emit(self, event: Event) -> int:
        return -1


class _Driver:
    """Arrivals, events and steps in the order of the recorded driver."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        engine = workload.engine
        group = _group_spec(workload.groups[0], engine.block_size)
        config = SchedulerConfig(**{name: getattr(engine, name) for name in _SCHEDULER_SETTINGS})
        self.events = workload.events_by_step
        self.connector = workload.scripted_connector()
        pool = BlockPool(engine.num_gpu_blocks, enable_caching=engine.enable_prefix_caching)
        self.kv = make_cache_manager(
            [group],
            pool,
            max_model_len=config.max_model_len,
            max_in_flight_tokens=config.max_num_batched_tokens,
            watermark=config.watermark,
            retention_interval=engine.retention_interval,
        )
        self.scheduler = Scheduler(
            config,
            self.kv,
            self.connector,
            _ScriptedSampler(),
            EngineLog(_EvictionSink(), None),
            recompute_load_failures=engine.kv_load_failure_policy == "recompute",
        )
        self.requests = self.scheduler.requests
        self.index = TokenIndex(group.block_size)
        self.record: dict[str, Any] = {}
        pool.on_evict = self._on_evict
        self.scheduler.on_invalid_evicted = self._on_invalid_evicted

    # -- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> Iterator[dict[str, Any]]:
        arrivals = self.workload.arrivals_by_step
        last_step = self.workload.last_step
        idle = 0
        for step in range(self.workload.max_steps):
            record = self.record = {"k": step}
            if not self._one_step(step, arrivals.get(step, [])):
                yield record
                return
            quiet = not record["total"] and not any(key in record for key in ("deliver", "add", "abort", "abort_mid"))
            idle = idle + 1 if quiet else 0
            nothing_to_come = step >= last_step and not (self.connector is not None and self.connector.has_pending)
            done = nothing_to_come and not self.scheduler.requests and not self.scheduler.finished_req_ids
            stalled = nothing_to_come and not done and idle >= self.workload.idle_limit
            if stalled:
                record["stalled"] = sorted(self.scheduler.requests)
            yield record
            if done or stalled:
                return

    def _one_step(self, step: int, arrivals: list[RequestSpec]) -> bool:
        """One step into `self.record`; False if the engine died."""
        if self.connector is not None:
            self.connector.step = step
            self.connector.lookups, self.connector.allocations = [], []
        where = ["add"]
        try:
            self._drive(step, arrivals, where)
        except EngineFatal as death:
            self._record_connector()
            self.record["error"] = {"where": where[0], "type": death.exception, "msg": death.message}
            return False
        return True

    def _drive(self, step: int, arrivals: list[RequestSpec], where: list[str]) -> None:
        record, scheduler = self.record, self.scheduler
        if arrivals:
            record["add"] = [spec.id for spec in arrivals]
            for spec in arrivals:
                scheduler.add_request(self._request(spec))
        for event in self.events.get(step, ()):
            if event.abort:
                where[0] = "abort"
                record["abort"] = event.abort
                scheduler.finish_requests(event.abort, RequestStatus.FINISHED_ABORTED)
            if event.reset_prefix_cache:
                where[0] = "reset"
                record["reset"] = scheduler.reset_prefix_cache(reset_running=event.reset_running)
        where[0] = "schedule"
        out = scheduler.schedule()
        self._record_schedule(out)
        for event in self.events.get(step, ()):
            if event.abort_mid:
                where[0] = "abort"
                record["abort_mid"] = event.abort_mid
                scheduler.finish_requests(event.abort_mid, RequestStatus.FINISHED_ABORTED)
        where[0] = "update"
        outputs = scheduler.update_from_output(out, ModelRunnerOutput(self._reports()))
        if outputs:
            record["out"] = [_output_row(output) for output in outputs]
        record["after"] = self._state()

    def _request(self, spec: RequestSpec) -> Request:
        prompt = spec.prompt_token_ids
        return Request(
            spec.id,
            self.index.content(prompt, spec.salt),
            num_prompt_tokens=len(prompt),
            max_tokens=spec.max_tokens,
            priority=spec.priority,
            stop_token_ids=tuple(spec.stop or ()),
        )

    def _reports(self) -> KVConnectorOutput | None:
        if self.connector is None:
            return None
        reports = self.connector.take_reports(self)
        if reports is not None:
            named = {
                "recv": sorted(reports.finished_recving),
                "send": sorted(reports.finished_sending),
                "failed": sorted(reports.failed_recving),
                "invalid": reports.invalid_block_ids,
            }
            self.record["deliver"] = {name: ids for name, ids in named.items() if ids}
        return reports

    # -- SchedulerView ----------------------------------------------------------------------------------------

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.kv.get_block_ids(request_id)

    # -- the record -------------------------------------------------------------------------------------------

    def _on_evict(self, block_ids: BlockIds) -> None:
        self.record.setdefault("evict", []).extend(block_ids.tolist())

    def _on_invalid_evicted(self, block_ids: list[int]) -> None:
        if block_ids:
            self.record.setdefault("evict_inv", []).extend(block_ids)

    def _record_connector(self) -> None:
        if self.connector is not None:
            if self.connector.lookups:
                self.record["lookup"] = self.connector.lookups
            if self.connector.allocations:
                self.record["alloc"] = self.connector.allocations

    def _record_schedule(self, out: SchedulerOutput) -> None:
        self._record_connector()
        record = self.record
        new: list[list[Any]] = []
        resumed: list[list[Any]] = []
        run: list[list[Any]] = []
        for share in out.shares:
            request_id = share.request.request_id
            if share.admitted:
                tables = [list(ids) for ids in self.kv.get_block_ids(request_id)]
                row = [request_id, share.start, share.num_tokens, tables]
                (resumed if share.request.num_preemptions else new).append(row)
            else:
                taken = [ids.tolist() for ids in share.new_blocks]
                run.append([request_id, share.start, share.num_tokens, taken if any(taken) else None])
        for key, rows in (("new", new), ("resumed", resumed), ("run", run)):
            if rows:
                record[key] = rows
        if out.preempted:
            record["preempted"] = sorted(out.preempted)
        record["total"] = out.total_num_scheduled_tokens
        if out.finished_req_ids:
            record["fin_prev"] = sorted(out.finished_req_ids)
        if out.has_sync_kv_loads:
            record["sync_load"] = True

    def _state(self) -> dict[str, Any]:
        scheduler, pool = self.scheduler, self.kv.pool
        state: dict[str, Any] = {"running": list(scheduler.running)}
        queues = {
            "waiting": [request.request_id for request in scheduler.waiting],
            "kvhold": [request.request_id for request in scheduler.kv_holding_waiting],
            "deferred": sorted(scheduler.deferred_waiting),
        }
        state.update({name: ids for name, ids in queues.items() if ids})
        state["free"] = pool.num_free
        state["cached"] = pool.num_cached_keys
        sets = {"failed": sorted(scheduler.failed_recving), "recvd": sorted(scheduler.finished_recving)}
        state.update({name: ids for name, ids in sets.items() if ids})
        requests = {
            request_id: [
                _SHORT_STATUS.get(request.status, request.status.name),
                request.num_computed_tokens,
                request.num_tokens,
                request.num_preemptions,
                [list(ids) for ids in self.kv.get_block_ids(request_id)],
            ]
            for request_id, request in scheduler.requests.items()
        }
        if requests:
            state["req"] = requests
        if pool.num_blocks <= _SMALL_POOL:
            state["fq"] = pool.free_queue().tolist()
            held = np.flatnonzero(pool.ref_counts[1:]) + 1
            if len(held):
                state["ref"] = {str(block_id): int(pool.ref_counts[block_id]) for block_id in held.tolist()}
        return state


def _group_spec(group: GroupSpec, block_size: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(
        kind=_GROUP_KINDS[group.type],
        block_size=group.block_size or block_size,
        sliding_window=group.sliding_window,
    )


def _output_row(output: RequestOutput) -> list[Any]:
    return [output.request.request_id, output.token_ids, output.finish_reason]
