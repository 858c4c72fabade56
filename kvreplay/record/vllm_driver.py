"""Takes the real scheduler through a workload, and records what it decides in each step.

Between `schedule()` and `update_from_output()` stands what vLLM's engine core does there, in its order, with sampled
tokens that depend on nothing but their position. With async scheduling two batches are in flight, as in
`EngineCore.step_with_batch_queue`.

vLLM iterates over sets of request ids when it finishes requests and when it reads a connector's report: orders that
change with PYTHONHASHSEED are pinned to the order of arrival, block ids to ascending order.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvreplay.conformance.workload import RequestSpec, StepEvent, Workload, sampled_token
from kvreplay.record.vllm_setup import build_scheduler, known

_SMALL_POOL: Final = 64
"""Up to so many blocks a record shows the free queue and the reference counts."""

_MAX_MESSAGE: Final = 300
_SHORT_STATUS: Final = {"WAITING": "W", "RUNNING": "R", "PREEMPTED": "P", "WAITING_FOR_REMOTE_KVS": "K"}
_CONNECTOR_REPORTS: Final = (
    ("recv", "finished_recving"),
    ("send", "finished_sending"),
    ("failed", "failed_recving"),
    ("invalid", "invalid_block_ids"),
)


class _Batch(NamedTuple):
    """What a step handed to the workers; `tokens` are sampled now unless drafts decide their positions."""

    output: Any
    request_ids: list[str]
    samples: list[bool]
    tokens: list[list[int]]


class _EngineDeath(Exception):  # noqa: N818 - it is not our error
    """An exception out of the scheduler, of which the engine core would die."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(where)
        self.where = where
        self.error = error

    def described(self) -> dict[str, str]:
        message = str(self.error).split("\n")[0][:_MAX_MESSAGE]
        return {"where": self.where, "type": type(self.error).__name__, "msg": message}


@contextmanager
def _calling(where: str) -> Iterator[None]:
    """Around each call into the scheduler, so that a mistake of the driver's is not taken for the engine's death."""
    try:
        yield
    except Exception as error:
        raise _EngineDeath(where, error) from error


class WorkloadDriver:
    """One run of one workload. `connector`: settings of another one than the scripted, for who extends it."""

    def __init__(self, workload: Workload, connector: Mapping[str, Any] | None = None) -> None:
        self.workload = workload
        self.scheduler, self.scheduler_block_size, self.hash_block_size = build_scheduler(workload, connector)
        self.requests = self.scheduler.requests
        self.record: dict[str, Any] = {}
        self._specs = {spec.id: spec for spec in workload.requests}
        self._events = workload.events_by_step
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._script = workload.scripted_connector() if connector is None else None
        if self._script is not None:
            self.scheduler.connector.script = self._script
        self._hash_blocks = self._make_hasher()
        self._in_flight: deque[_Batch] = deque()
        self._depth = self.scheduler.vllm_config.max_concurrent_batches if workload.engine.async_scheduling else 1
        self._num_verified: dict[str, int] = {}
        self._watch_evictions()
        self._pin_finish_order()

    def steps(self) -> Iterator[dict[str, Any]]:
        arrivals = self.workload.arrivals_by_step
        num_quiet = 0
        for step in range(self.workload.max_steps):
            record = self.record = {"k": step}
            try:
                self._take_step(step, arrivals.get(step, ()))
            except _EngineDeath as death:
                self._record_connector()
                record["error"] = death.described()
                yield record
                return
            num_quiet = num_quiet + 1 if self._is_quiet() else 0
            is_over = self._nothing_to_come(step) and self._nothing_left()
            is_stalled = not is_over and self._nothing_to_come(step) and num_quiet >= self.workload.idle_limit
            if is_stalled:
                record["stalled"] = sorted(self.requests)
            yield record
            if is_over or is_stalled:
                return

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        ids: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return ids

    # -- one step ---------------------------------------------------------------------------------------------

    def _take_step(self, step: int, arrivals: Iterable[RequestSpec]) -> None:
        events = self._events.get(step, ())
        self._start_record(step)
        self._add(arrivals)
        self._abort_and_reset(events)
        is_full = self._schedule(events)
        self.record.setdefault("total", 0)
        if is_full:
            self._update()
        self.record["after"] = self._state()

    def _add(self, arrivals: Iterable[RequestSpec]) -> None:
        for spec in arrivals:
            self.record.setdefault("add", []).append(spec.id)
            request = self._request(spec)
            with _calling("add"):
                self.scheduler.add_request(request)

    def _abort_and_reset(self, events: Iterable[StepEvent]) -> None:
        for event in events:
            self._abort("abort", event.abort)
            if event.reset_prefix_cache:
                with _calling("reset"):
                    was_reset = self.scheduler.reset_prefix_cache(reset_running_requests=event.reset_running)
                self.record["reset"] = was_reset

    def _abort(self, field: str, request_ids: list[str]) -> None:
        if request_ids:
            self.record[field] = request_ids
            with _calling("abort"):
                self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def _schedule(self, events: Iterable[StepEvent]) -> bool:
        """Put a batch in flight; whether the oldest one's output is due in this step.

        Without async scheduling there is a batch in every step, also where the engine core would sleep.
        """
        scheduler = self.scheduler
        if self.workload.engine.async_scheduling and not scheduler.has_requests():
            return bool(self._in_flight)
        with _calling("schedule"):
            output = scheduler.schedule()
        self._record_schedule(output)
        self._in_flight.append(self._execute(output))
        for event in events:
            self._abort("abort_mid", event.abort_mid)
        has_work = output.total_num_scheduled_tokens > 0 or scheduler.has_requests()
        return len(self._in_flight) >= self._depth or not has_work

    def _execute(self, output: Any) -> _Batch:  # noqa: ANN401 - SchedulerOutput
        request_ids = list(output.num_scheduled_tokens)
        samples = [not self.requests[request_id].is_prefill_chunk for request_id in request_ids]
        tokens = [
            [sampled_token(self.requests[request_id].num_computed_tokens)] if is_sampled else []
            for request_id, is_sampled in zip(request_ids, samples, strict=True)
        ]
        return _Batch(output, request_ids, samples, tokens)

    def _update(self) -> None:
        batch = self._in_flight.popleft()
        is_async, speculates = self.workload.engine.async_scheduling, self.workload.engine.spec is not None
        if is_async:
            self.record["upd_of"] = list(batch.output.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=batch.request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(batch.request_ids)},
            sampled_token_ids=self._verify(batch) if speculates else batch.tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=self._reports(),
        )
        with _calling("update"):
            by_client = self.scheduler.update_from_output(batch.output, output)
        rows = [
            [out.request_id, list(out.new_token_ids), None if out.finish_reason is None else str(out.finish_reason)]
            for outputs in by_client.values()
            for out in outputs.outputs
        ]
        if rows:
            self.record["out"] = rows
        if speculates and not is_async:
            self._propose(batch)

    # -- what stands for the workers --------------------------------------------------------------------------

    def _verify(self, batch: _Batch) -> list[list[int]]:
        """Accepted drafts and one more token each, at the positions where they will be appended."""
        tokens: list[list[int]] = []
        admitted = {request.req_id for request in batch.output.scheduled_new_reqs}
        for request_id, is_sampled in zip(batch.request_ids, batch.samples, strict=True):
            request = self.requests.get(request_id)
            if request is None or not is_sampled:
                tokens.append([])
                continue
            num_drafts = len(batch.output.scheduled_spec_decode_tokens.get(request_id, ()))
            num_accepted = 0
            if num_drafts:
                num_accepted = self._num_accepted(request_id, num_drafts, is_new=request_id in admitted)
                self.record.setdefault("acc", []).append([request_id, num_accepted])
            first = request.num_tokens
            tokens.append([sampled_token(position) for position in range(first, first + 1 + num_accepted)])
        return tokens

    def _num_accepted(self, request_id: str, num_drafts: int, *, is_new: bool) -> int:
        index = self._num_verified.get(request_id, 0)
        self._num_verified[request_id] = index + 1
        assert self.workload.engine.spec is not None
        accept = self._specs[request_id].accept or self.workload.engine.spec.accept or [num_drafts]
        # The drafts of a request that has just been admitted are padding.
        return 0 if is_new else min(num_drafts, accept[index % len(accept)])

    def _propose(self, batch: _Batch) -> None:
        output = batch.output
        if output.total_num_scheduled_tokens and not output.skip_drafts:
            drafts = [[0] * output.num_spec_tokens_to_schedule for _ in batch.request_ids]
            with _calling("update"):
                self.scheduler.update_draft_token_ids(DraftTokenIds(list(batch.request_ids), drafts))

    def _reports(self) -> Any:  # noqa: ANN401 - KVConnectorOutput
        reports = None if self._script is None else self._script.take_reports(self)
        if reports is None:
            return None
        self.record["deliver"] = {
            name: sorted(getattr(reports, field)) for name, field in _CONNECTOR_REPORTS if getattr(reports, field)
        }
        return known(
            KVConnectorOutput,
            finished_sending=reports.finished_sending or None,
            finished_recving=reports.finished_recving or None,
            failed_recving=set(reports.failed_recving),
            invalid_block_ids=set(reports.invalid_block_ids),
        )

    # -- requests ---------------------------------------------------------------------------------------------

    def _request(self, spec: RequestSpec) -> Any:  # noqa: ANN401 - Request
        return Request(
            request_id=spec.id,
            prompt_token_ids=spec.prompt_token_ids,
            sampling_params=SamplingParams(max_tokens=spec.max_tokens, ignore_eos=True, stop_token_ids=spec.stop),
            pooling_params=None,
            priority=spec.priority,
            arrival_time=float(spec.arrive),
            cache_salt=spec.salt,
            block_hasher=self._hash_blocks,
        )

    def _make_hasher(self) -> Any:  # noqa: ANN401
        _seed_hashes()
        lookahead = getattr(self.scheduler, "num_hash_lookahead_tokens", 0)
        return get_request_block_hasher(self.hash_block_size, sha256, *([lookahead] if lookahead else []))

    # -- watching ---------------------------------------------------------------------------------------------

    def _watch_evictions(self) -> None:
        """Note the blocks that lose their hash, under `evict_inv` those that `evict_blocks` was asked to evict."""
        pool = self._pool
        evict_one, evict_blocks = pool._maybe_evict_cached_block, pool.evict_blocks
        field = "evict"

        def watched_evict_one(block: Any) -> bool:  # noqa: ANN401
            had_hash: bool = evict_one(block)
            if had_hash:
                self.record.setdefault(field, []).append(block.block_id)
            return had_hash

        def watched_evict_blocks(block_ids: Iterable[int]) -> None:
            nonlocal field
            field = "evict_inv"
            try:
                evict_blocks(sorted(block_ids))
            finally:
                field = "evict"

        pool._maybe_evict_cached_block, pool.evict_blocks = watched_evict_one, watched_evict_blocks

    def _pin_finish_order(self) -> None:
        finish_requests = self.scheduler.finish_requests

        def in_order(request_ids: str | Iterable[str] | None, status: Any) -> list[Any]:  # noqa: ANN401
            if request_ids is None or isinstance(request_ids, str):
                return list(finish_requests(request_ids, status))
            rank = {request_id: index for index, request_id in enumerate(self.requests)}
            ordered = sorted(request_ids, key=lambda request_id: (rank.get(request_id, len(rank)), request_id))
            return [finished for request_id in ordered for finished in finish_requests(request_id, status)]

        self.scheduler.finish_requests = in_order

    # -- the record -------------------------------------------------------------------------------------------

    def _start_record(self, step: int) -> None:
        if self._script is not None:
            self._script.step = step
            self._script.lookups, self._script.allocations = [], []
            self.scheduler.connector.boundary, self.scheduler.connector.tails = {}, []

    def _record_connector(self) -> None:
        if self._script is None:
            return
        connector = self.scheduler.connector
        fields = {
            "lookup": self._script.lookups,
            "alloc": self._script.allocations,
            "boundary": connector.boundary,
            "tails": connector.tails,
        }
        self.record.update({name: value for name, value in fields.items() if value})

    def _record_schedule(self, output: Any) -> None:  # noqa: ANN401 - SchedulerOutput
        record, scheduled = self.record, output.num_scheduled_tokens
        for request in output.scheduled_new_reqs:
            field = "resumed" if self.requests[request.req_id].num_preemptions else "new"
            tables = [list(ids) for ids in request.block_ids]
            row = [request.req_id, request.num_computed_tokens, scheduled[request.req_id], tables]
            record.setdefault(field, []).append(row)
        cached = output.scheduled_cached_reqs
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            new_ids = [list(ids) for ids in blocks] if blocks else None
            record.setdefault("run", []).append([request_id, computed, scheduled[request_id], new_ids])
        record["total"] = output.total_num_scheduled_tokens
        fields = {
            "preempted": sorted(output.preempted_req_ids or ()),
            "fin_prev": sorted(output.finished_req_ids),
            "cow": [[copy.src_block_id, copy.dst_block_id] for copy in _get(output, "kv_cache_block_copies")],
            "zero": list(_get(output, "new_block_ids_to_zero")),
            "sync_load": bool(_get(output, "has_sync_kv_loads")),
            "spec": {key: len(drafts) for key, drafts in output.scheduled_spec_decode_tokens.items()},
            "skip_drafts": bool(
                self.workload.engine.spec and _get(output, "skip_drafts") and output.total_num_scheduled_tokens
            ),
        }
        record.update({name: value for name, value in fields.items() if value})

    def _state(self) -> dict[str, Any]:
        # Here, because loads that waited for the steps in flight are allocated in an update.
        self._record_connector()
        scheduler, pool = self.scheduler, self._pool
        state: dict[str, Any] = {"running": _ids(scheduler.running)}
        queues = {
            "waiting": _ids(scheduler.waiting),
            "kvhold": _ids(_get(scheduler, "kv_holding_waiting")),
            "deferred": sorted(_ids(_get(scheduler, "deferred_waiting"))),
            "skipped": _ids(_get(scheduler, "skipped_waiting")),
        }
        state.update({name: ids for name, ids in queues.items() if ids})
        state["free"] = pool.get_num_free_blocks()
        state["cached"] = len(pool.cached_block_hash_to_block)
        kept = {
            "failed": sorted(scheduler.failed_recving_kv_req_ids),
            "recvd": sorted(scheduler.finished_recving_kv_req_ids),
            "deferred_frees": sum(len(blocks) for _, blocks in _get(scheduler, "deferred_frees")),
            "deferred_loads": list(_get(scheduler, "deferred_loads")),
            "req": {request_id: self._request_row(request) for request_id, request in self.requests.items()},
        }
        state.update({name: value for name, value in kept.items() if value})
        if pool.num_gpu_blocks <= _SMALL_POOL:
            state["fq"] = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
            counts = {
                str(block.block_id): block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null
            }
            if counts:
                state["ref"] = counts
        return state

    def _request_row(self, request: Any) -> list[Any]:  # noqa: ANN401
        return [
            _SHORT_STATUS.get(request.status.name, request.status.name),
            request.num_computed_tokens,
            request.num_tokens,
            request.num_preemptions,
            [list(ids) for ids in self.get_block_ids(request.request_id)],
        ]

    # -- the end ----------------------------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        stirred = any(self.record.get(field) for field in ("add", "abort", "abort_mid", "deliver", "upd_of"))
        return not self.record["total"] and not stirred

    def _nothing_to_come(self, step: int) -> bool:
        return step >= self.workload.last_step and not (self._script is not None and self._script.has_pending)

    def _nothing_left(self) -> bool:
        return not self.requests and not self._in_flight and not self.scheduler.finished_req_ids


@cache
def _seed_hashes() -> None:
    """Once a process: a second call would change the hash that every chain of blocks starts from."""
    init_none_hash(sha256)


def _ids(requests: Iterable[Any]) -> list[str]:
    return [request.request_id for request in requests]


def _get(owner: Any, name: str) -> Any:  # noqa: ANN401
    """An attribute that not every version has, or that may be None; then nothing."""
    return getattr(owner, name, None) or ()
