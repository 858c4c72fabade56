"""Scheduler vectors: a workload, and what the real scheduler did with it in each step.

A vector is a JSON object `{"format": 1, "oracle": "vllm X", "workload": {...}, "steps": [...]}`. `run_workload`
drives our scheduler through the workload and records the same steps.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvreplay.behaviour import DEFAULT_PROFILE, Behaviour, profile
from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.conformance.workload import (
    GroupSpec,
    RequestSpec,
    Speculation,
    StepEvent,
    Workload,
    read_workload,
    sampled_token,
)
from kvreplay.connectors.scripted.connector import ScriptedConnector
from kvreplay.engine.config import SPECULATIVE_METHODS, SchedulerConfig, SpeculativeConfig
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.engine.history.skipped_waiting import scheduler_kind
from kvreplay.engine.log import EngineLog
from kvreplay.engine.options import SchedulerOptions
from kvreplay.engine.output import ModelRunnerOutput, RequestOutput, SchedulerOutput, Share
from kvreplay.engine.recovery import FailureRules
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.rules import SchedulerRules
from kvreplay.errors import EngineFatal
from kvreplay.events import DETAIL_RUN, Event
from kvreplay.kv.attention_managers import make_cache_manager
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.cache_manager import NO_DRAFTS
from kvreplay.kv.content_index import TokenContent, TokenIndex
from kvreplay.kv.managers.mamba import BoundaryState
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import (
    CHUNKED_LOCAL,
    CIRCULAR_BUFFER,
    FULL,
    MAMBA,
    MAMBA_NONE,
    MLA,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    KVCacheGroupSpec,
)

_SMALL_POOL = 64
_BUSY = ("deliver", "upd_of")
"""What keeps a step from being quiet, if there is anything in it."""
_SHORT_STATUS = {
    RequestStatus.WAITING: "W",
    RequestStatus.RUNNING: "R",
    RequestStatus.PREEMPTED: "P",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "K",
}
_GROUP_KINDS = {
    "full": FULL,
    "mla": MLA,
    "swa": SLIDING_WINDOW,
    "swa_mla": SLIDING_WINDOW_MLA,
    "chunked_local": CHUNKED_LOCAL,
    "mamba": MAMBA,
    "ring": CIRCULAR_BUFFER,
}
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
    "policy",
    "async_scheduling",
)


def reason_unsupported(workload: Workload) -> str | None:
    """Why this workload cannot be run, or None."""
    for group in workload.groups:
        if group.type not in _GROUP_KINDS:
            return f"group type {group.type}"
    spec = workload.engine.spec
    if spec is not None and spec.method not in SPECULATIVE_METHODS:
        return f"speculation by {spec.method}"
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
    yield from Driver(workload).run()


class ScriptedSampler:
    """What `sampled_token` says."""

    def sample(self, request: Request, position: int) -> int:
        token = sampled_token(position)
        content = request.content
        assert isinstance(content, TokenContent)
        content.append(token)
        return token

    def output_hash(self, request: Request) -> int:
        return 0


class _Verifier:
    """How many drafts are right: the i-th verification of a request accepts the i-th count of its list, over again."""

    def __init__(self, workload: Workload) -> None:
        spec = workload.engine.spec
        shared = spec.accept if spec is not None else None
        self._counts = {request.id: request.accept or shared for request in workload.requests}
        self._num_verified: dict[str, int] = {}

    def num_accepted(self, share: Share) -> int:
        request_id = share.request.request_id
        index = self._num_verified.get(request_id, 0)
        self._num_verified[request_id] = index + 1
        if share.admitted:
            return 0  # placeholders, not drafts
        counts = self._counts[request_id]
        return share.num_drafts if counts is None else min(share.num_drafts, counts[index % len(counts)])


class _EvictionSink:
    """Keeps nothing; vectors are compared through the driver's own record."""

    detail = DETAIL_RUN

    def emit(self, event: Event) -> int:
        return -1


class Driver:
    """Arrivals, events and steps in the order of the recorded driver. Whoever drives more than decisions extends it."""

    def __init__(self, workload: Workload, behaviour: Behaviour | None = None) -> None:
        behaviour = behaviour or profile(DEFAULT_PROFILE)
        rules = SchedulerRules.of(behaviour)
        self.workload = workload
        engine = workload.engine
        groups = [_group_spec(group, engine.block_size) for group in workload.groups]
        config = SchedulerConfig(**{name: getattr(engine, name) for name in _SCHEDULER_SETTINGS})
        speculation = _speculation(engine.spec)
        self.events = workload.events_by_step
        drafts = NO_DRAFTS
        if speculation is not None:
            drafts = speculation.cache_rules(
                enable_caching=engine.enable_prefix_caching, has_connector=workload.has_connector
            )
        pool = BlockPool(engine.num_gpu_blocks, enable_caching=engine.enable_prefix_caching)
        self.kv = make_cache_manager(
            groups,
            pool,
            max_model_len=config.max_model_len,
            max_in_flight_tokens=config.max_in_flight_tokens,
            watermark=config.watermark,
            retention_interval=engine.retention_interval,
            hash_block_size=engine.hash_block_size,
            drafts=drafts,
            exact_estimates=rules.exact_estimates,
            looks_at_whole_chunks=rules.looks_at_whole_chunks,
            adopts_per_group=rules.adopts_per_group,
            has_connector=workload.has_connector,
        )
        self.connector = self.make_connector()
        self.log = EngineLog(_EvictionSink(), None)
        self.scheduler = scheduler_kind(behaviour)(
            config,
            self.kv,
            self.connector,
            ScriptedSampler(),
            self.log,
            SchedulerOptions(
                rules=rules,
                failure_rules=FailureRules.of(behaviour),
                recompute_load_failures=engine.kv_load_failure_policy == "recompute" or self.connector is None,
                kv_role=engine.kv_role if self.connector is not None else "",
                divergent_hits=engine.divergent_hits,
                defer_async_loads=engine.hisparse_host_blocks is not None,
                speculation=speculation,
                cache_block_size=engine.block_size,
            ),
        )
        self.requests = self.scheduler.requests
        self.verifier = _Verifier(workload)
        self.index = TokenIndex(self.kv.rules.hash_block_size, self.kv.rules.num_hash_lookahead_tokens)
        self.record: dict[str, Any] = {}
        self.in_flight: deque[SchedulerOutput] = deque()
        pool.on_evict = self._on_evict
        self.scheduler.subscribe(on_invalid_evicted=self._on_invalid_evicted, on_partial_tails=self._on_partial_tails)

    def make_connector(self) -> ScriptedConnector | None:
        return self.workload.scripted_connector()

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
            quiet = not record["total"] and not any(record.get(key) for key in _BUSY)
            quiet = quiet and not any(key in record for key in ("add", "abort", "abort_mid"))
            idle = idle + 1 if quiet else 0
            nothing_to_come = step >= last_step and not (self.connector is not None and self.connector.has_pending)
            is_empty = not self.requests and not self.in_flight and not self.scheduler.finished_req_ids
            done = nothing_to_come and is_empty
            stalled = nothing_to_come and not done and idle >= self.workload.idle_limit
            if stalled:
                record["stalled"] = sorted(self.requests)
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
            self._apply(event, where)
        where[0] = "schedule"
        takes_output = self._schedule(step, where)
        record.setdefault("total", 0)
        if takes_output:
            where[0] = "update"
            self._update(self.in_flight.popleft())
        record["after"] = self._state()

    def _apply(self, event: StepEvent, where: list[str]) -> None:
        """What comes from outside before a step is scheduled."""
        if event.abort:
            where[0] = "abort"
            self.record["abort"] = event.abort
            self.scheduler.finish_requests(event.abort, RequestStatus.FINISHED_ABORTED)
        if event.reset_prefix_cache:
            where[0] = "reset"
            self.record["reset"] = self.scheduler.reset_prefix_cache(reset_running=event.reset_running)

    def _schedule(self, step: int, where: list[str]) -> bool:
        """The next step joins those in flight. Returns whether the output of the first is taken in now."""
        scheduler = self.scheduler
        is_async = scheduler.config.async_scheduling
        if is_async and not scheduler.has_requests:
            return bool(self.in_flight)
        out = scheduler.schedule()
        self._record_schedule(out)
        self.in_flight.append(out)
        self.execute(out)
        for event in self.events.get(step, ()):
            if event.abort_mid:
                where[0] = "abort"
                self.record["abort_mid"] = event.abort_mid
                scheduler.finish_requests(event.abort_mid, RequestStatus.FINISHED_ABORTED)
        may_wait = bool(out.total_num_scheduled_tokens) or scheduler.has_requests
        return len(self.in_flight) >= scheduler.config.max_concurrent_batches or not may_wait

    def _update(self, out: SchedulerOutput) -> None:
        record, scheduler = self.record, self.scheduler
        if scheduler.config.async_scheduling:
            record["upd_of"] = [share.request.request_id for share in out.shares]
        accepted = self._accepted(out)
        reports = self._reports()
        reports = self.before_update(out, reports)
        outputs = scheduler.update_from_output(out, ModelRunnerOutput(reports, accepted))
        self.after_update(out, outputs)
        self._record_connector()
        if outputs:
            record["out"] = [_output_row(output) for output in outputs]
        if scheduler.speculation is not None and not scheduler.config.async_scheduling:
            scheduler.take_drafts(out)

    # -- what the workers would do ----------------------------------------------------------------------------

    def execute(self, out: SchedulerOutput) -> None:
        """A step has been scheduled; those before it may still be in flight."""

    def before_update(self, out: SchedulerOutput, reports: KVConnectorOutput | None) -> KVConnectorOutput | None:
        """The step has been computed, and its output is about to be taken in. Returns what is reported with it."""
        return reports

    def after_update(self, out: SchedulerOutput, outputs: list[RequestOutput]) -> None: ...

    # -- the driver's part ------------------------------------------------------------------------------------

    def _accepted(self, out: SchedulerOutput) -> dict[str, int]:
        accepted: dict[str, int] = {}
        for share in out.shares:
            request_id = share.request.request_id
            if share.num_drafts and share.samples and request_id in self.requests:
                accepted[request_id] = self.verifier.num_accepted(share)
        if accepted:
            self.record["acc"] = [[request_id, count] for request_id, count in accepted.items()]
        return accepted

    def _request(self, spec: RequestSpec) -> Request:
        prompt = spec.prompt_token_ids
        return Request(
            spec.id,
            self.make_content(prompt, spec.salt),
            num_prompt_tokens=len(prompt),
            max_tokens=spec.max_tokens,
            arrival_ns=spec.arrive,
            priority=spec.priority,
            stop_token_ids=tuple(spec.stop or ()),
        )

    def make_content(self, prompt: list[int], salt: str | None) -> TokenContent:
        return self.index.content(prompt, salt)

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

    def _on_partial_tails(self, request: Request, tails: list[BoundaryState]) -> bool:
        self.record.setdefault("tails", []).append([request.request_id, [list(tail) for tail in tails]])
        return False

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
        self._record_block_work(out)
        drafts = {share.request.request_id: share.num_drafts for share in out.shares if share.num_drafts}
        if drafts:
            record["spec"] = drafts
        if self.scheduler.speculation is not None and out.skip_drafts and out.total_num_scheduled_tokens:
            record["skip_drafts"] = True

    def _record_block_work(self, out: SchedulerOutput) -> None:
        record = self.record
        if out.block_copies:
            record["cow"] = [list(copy) for copy in out.block_copies]
        if out.blocks_to_zero:
            record["zero"] = out.blocks_to_zero
        if out.boundary_states and self.connector is not None:
            record["boundary"] = {
                request_id: [list(state) for state in states] for request_id, states in out.boundary_states.items()
            }

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
        if scheduler.fences.num_waiting_blocks:
            state["deferred_frees"] = scheduler.fences.num_waiting_blocks
        if scheduler.fences.waiting_loads:
            state["deferred_loads"] = scheduler.fences.waiting_loads
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
    is_mamba = group.type == "mamba"
    return KVCacheGroupSpec(
        kind=_GROUP_KINDS[group.type],
        block_size=group.block_size or block_size,
        sliding_window=group.sliding_window if group.type in ("swa", "swa_mla") else None,
        attention_chunk_size=group.chunk if group.type == "chunked_local" else None,
        mamba_cache_mode=group.mode if is_mamba else MAMBA_NONE,
        num_speculative_blocks=group.spec_blocks if is_mamba else 0,
        tokens_per_state=group.tokens_per_state if group.type == "mla" else 1,
        extra_retained_tokens=group.extra_retained if group.type in ("swa", "swa_mla") else 0,
        bounded_replay=group.bounded_replay and group.type == "swa_mla",
        is_eagle=group.eagle,
        bytes_per_token=0 if is_mamba else group.head_size,
    )


def _speculation(spec: Speculation | None) -> SpeculativeConfig | None:
    if spec is None:
        return None
    return SpeculativeConfig(
        num_speculative_tokens=spec.tokens,
        method=spec.method,
        num_mtp_layers=spec.mtp_layers,
        disable_eagle_block_drop=spec.disable_block_drop,
        disable_lookahead_block_hashes=spec.disable_lookahead_hashes,
        parallel_drafting=spec.parallel_drafting,
    )


def _output_row(output: RequestOutput) -> list[Any]:
    return [output.request.request_id, output.token_ids, output.finish_reason]
