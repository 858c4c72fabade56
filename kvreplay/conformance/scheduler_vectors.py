"""Scheduler vectors: a workload, and what the real scheduler did with it in each step.

A vector is a JSON object `{"format": 1, "oracle": "vllm X", "workload": {...}, "steps": [...]}`. `run_workload`
drives our scheduler through the workload and records the same steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvreplay.connectors.scripted.connector import RequestScript, ScriptedConnector, StepEvents
from kvreplay.engine.config import SchedulerConfig
from kvreplay.engine.log import EngineLog
from kvreplay.engine.output import ModelRunnerOutput, RequestOutput, SchedulerOutput
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.scheduler import Scheduler
from kvreplay.errors import ConfigError, EngineFatal
from kvreplay.events import DETAIL_RUN, Event
from kvreplay.kv.block_pool import BlockIds, BlockPool
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.content_index import TokenContent, TokenIndex
from kvreplay.kv.specs import FULL, SLIDING_WINDOW, KVCacheGroupSpec

_SMALL_POOL = 64
_SHORT_STATUS = {
    RequestStatus.WAITING: "W",
    RequestStatus.RUNNING: "R",
    RequestStatus.PREEMPTED: "P",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "K",
}
_CONNECTOR_EVENTS = {"finished_recving", "finished_sending", "invalid", "invalid_ids", "failed_recving"}
_GROUP_KINDS = {"full": FULL, "swa": SLIDING_WINDOW}


class UnsupportedVectorError(ConfigError):
    """The vector needs something that this engine does not model yet; the message says what."""


def reason_unsupported(workload: Mapping[str, Any]) -> str | None:
    """Why this workload cannot be run, or None."""
    engine = workload["engine"]
    groups = engine.get("groups") or [{"type": "full"}]
    if len(groups) != 1:
        return f"{len(groups)} KV cache groups"
    if groups[0]["type"] not in _GROUP_KINDS:
        return f"group type {groups[0]['type']}"
    if engine.get("policy", "fcfs") != "fcfs":
        return f"policy {engine['policy']}"
    for key in ("spec", "async_scheduling"):
        if engine.get(key):
            return key
    return None


def run_workload(workload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps that our scheduler takes. Raises UnsupportedVectorError."""
    reason = reason_unsupported(workload)
    if reason is not None:
        raise UnsupportedVectorError(reason)
    return _Driver(workload).run()


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

    def __init__(self, workload: Mapping[str, Any]) -> None:
        self.workload = workload
        engine = workload["engine"]
        block_size = engine.get("block_size", 16)
        group = _group_spec((engine.get("groups") or [{"type": "full"}])[0], block_size)
        config = _scheduler_config(engine)
        self.events = _events_by_step(workload)
        self.connector = (
            ScriptedConnector(
                {spec["id"]: request_script(spec) for spec in workload["requests"]},
                {step: [_step_events(event) for event in events] for step, events in self.events.items()},
            )
            if _has_connector(workload)
            else None
        )
        pool = BlockPool(engine["num_gpu_blocks"], enable_caching=engine.get("enable_prefix_caching", True))
        self.kv = KVCacheManager(
            [group],
            pool,
            max_model_len=config.max_model_len,
            max_in_flight_tokens=config.max_num_batched_tokens,
            watermark=config.watermark,
            retention_interval=engine.get("retention_interval"),
        )
        self.scheduler = Scheduler(
            config,
            self.kv,
            self.connector,
            _ScriptedSampler(),
            EngineLog(_EvictionSink(), None),
            recompute_load_failures=engine.get("kv_load_failure_policy", "recompute") == "recompute",
        )
        self.index = TokenIndex(group.block_size)
        self.record: dict[str, Any] = {}
        pool.on_evict = self._on_evict
        self.scheduler.on_invalid_evicted = self._on_invalid_evicted

    # -- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> list[dict[str, Any]]:
        arrivals: dict[int, list[Mapping[str, Any]]] = {}
        for spec in self.workload["requests"]:
            arrivals.setdefault(spec.get("arrive", 0), []).append(spec)
        last = max([0, *arrivals, *self.events])
        steps: list[dict[str, Any]] = []
        idle = 0
        for step in range(self.workload.get("max_steps", 300)):
            record = self.record = {"k": step}
            steps.append(record)
            if not self._one_step(step, arrivals.get(step, [])):
                break
            quiet = not record["total"] and not any(key in record for key in ("deliver", "add", "abort", "abort_mid"))
            idle = idle + 1 if quiet else 0
            nothing_to_come = step >= last and not (self.connector is not None and self.connector.has_pending)
            if nothing_to_come and not self.scheduler.requests and not self.scheduler.finished_req_ids:
                break
            if nothing_to_come and idle >= self.workload.get("idle_limit", 8):
                record["stalled"] = sorted(self.scheduler.requests)
                break
        return steps

    def _one_step(self, step: int, arrivals: list[Mapping[str, Any]]) -> bool:
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

    def _drive(self, step: int, arrivals: list[Mapping[str, Any]], where: list[str]) -> None:
        record, scheduler = self.record, self.scheduler
        if arrivals:
            record["add"] = [spec["id"] for spec in arrivals]
            for spec in arrivals:
                scheduler.add_request(self._request(spec))
        for event in self.events.get(step, ()):
            if event.get("abort"):
                where[0] = "abort"
                record["abort"] = event["abort"]
                scheduler.finish_requests(event["abort"], RequestStatus.FINISHED_ABORTED)
            if event.get("reset_prefix_cache"):
                where[0] = "reset"
                record["reset"] = scheduler.reset_prefix_cache(reset_running=event.get("reset_running", False))
        where[0] = "schedule"
        out = scheduler.schedule()
        self._record_schedule(out)
        for event in self.events.get(step, ()):
            if event.get("abort_mid"):
                where[0] = "abort"
                record["abort_mid"] = event["abort_mid"]
                scheduler.finish_requests(event["abort_mid"], RequestStatus.FINISHED_ABORTED)
        where[0] = "update"
        outputs = scheduler.update_from_output(out, ModelRunnerOutput(self._reports()))
        if outputs:
            record["out"] = [_output_row(output) for output in outputs]
        record["after"] = self._state()

    def _request(self, spec: Mapping[str, Any]) -> Request:
        prompt = expand_prompt(spec["prompt"])
        return Request(
            spec["id"],
            self.index.content(prompt, spec.get("salt")),
            num_prompt_tokens=len(prompt),
            max_tokens=spec.get("max_tokens", 4),
            priority=spec.get("priority", 0),
            stop_token_ids=tuple(spec.get("stop") or ()),
        )

    def _reports(self) -> Any:  # noqa: ANN401
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

    @property
    def requests(self) -> dict[str, Request]:
        return self.scheduler.requests

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
        new, resumed, run = [], [], []
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


# -- reading a workload ---------------------------------------------------------------------------------------


def expand_prompt(prompt: Any) -> list[int]:  # noqa: ANN401 - JSON
    """`[ids]`, `{"ramp": [first, n]}`, `{"const": [token, n]}` or `{"cat": [prompt, ...]}`."""
    if isinstance(prompt, list):
        return list(prompt)
    if "ramp" in prompt:
        first, length = prompt["ramp"]
        return [(first + index) % 30000 for index in range(length)]
    if "const" in prompt:
        token, length = prompt["const"]
        return [token] * length
    return [token for part in prompt["cat"] for token in expand_prompt(part)]


def request_script(spec: Mapping[str, Any]) -> RequestScript:
    external = spec.get("external") or {}
    if isinstance(external, int):
        external = {"tokens": external}
    load = spec.get("load") or {}
    script = RequestScript(
        tokens=external.get("tokens", 0),
        mode=external.get("mode", "total"),
        is_async=bool(external.get("async")),
        defer=external.get("defer", 0),
        times=external.get("times"),
        delay_free=spec.get("delay_free", False),
        send_after=spec.get("send_after"),
    )
    if not load:
        return script
    return replace(
        script,
        recv_after=load.get("recv_after"),
        invalid=tuple((group, index) for group, index in load.get("invalid", ())),
        invalid_after=load.get("invalid_after"),
        failed_after=load.get("failed_after"),
        repeat=load.get("repeat", False),
    )


def _group_spec(group: Mapping[str, Any], block_size: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(
        kind=_GROUP_KINDS[group["type"]],
        block_size=group.get("block_size", block_size),
        sliding_window=group.get("sliding_window"),
    )


def _scheduler_config(engine: Mapping[str, Any]) -> SchedulerConfig:
    """The vectors' own defaults, which are not vLLM's."""
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_scheduled_tokens": None,
        "max_num_seqs": 16,
        "max_num_active_seqs": None,
        "max_model_len": 1024,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "enable_chunked_prefill": True,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "prefill_schedule_interval": 1,
    }
    return SchedulerConfig(**{name: engine.get(name, default) for name, default in defaults.items()})


def _events_by_step(workload: Mapping[str, Any]) -> dict[int, list[Mapping[str, Any]]]:
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for event in workload.get("events", ()):
        by_step.setdefault(event["step"], []).append(event)
    return by_step


def _step_events(event: Mapping[str, Any]) -> StepEvents:
    return StepEvents(
        finished_recving=tuple(event.get("finished_recving", ())),
        finished_sending=tuple(event.get("finished_sending", ())),
        failed_recving=tuple(event.get("failed_recving", ())),
        invalid=tuple((request_id, group, index) for request_id, group, index in event.get("invalid", ())),
        invalid_ids=tuple(event.get("invalid_ids", ())),
    )


def _has_connector(workload: Mapping[str, Any]) -> bool:
    wanted = workload["engine"].get("connector")
    if wanted is not None:
        return bool(wanted)
    return any(spec.get("external") or spec.get("delay_free") for spec in workload["requests"]) or any(
        _CONNECTOR_EVENTS & set(event) for event in workload.get("events", ())
    )


def _output_row(output: RequestOutput) -> list[Any]:
    return [output.request.request_id, output.token_ids, output.finish_reason]


# -- comparison -----------------------------------------------------------------------------------------------


def differences(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> Iterator[tuple[int, str, Any, Any]]:
    """(step, field, expected, got) of each difference; of an exception only type and start of the message count."""
    for want, have in zip(expected, got, strict=False):
        for field in sorted({*want, *have}):
            left, right = want.get(field), have.get(field)
            if field == "after" and isinstance(left, dict) and isinstance(right, dict):
                for part in sorted({*left, *right}):
                    if left.get(part) != right.get(part):
                        yield want["k"], f"after.{part}", left.get(part), right.get(part)
            elif field == "error":
                if not _same_error(left, right):
                    yield want["k"], field, left, right
            elif left != right:
                yield want["k"], field, left, right
    if len(expected) != len(got):
        yield min(len(expected), len(got)), "number of steps", len(expected), len(got)


def _same_error(left: Any, right: Any) -> bool:  # noqa: ANN401 - JSON
    if left is None or right is None:
        return bool(left == right)
    start = min(len(left["msg"]), len(right["msg"]), 40)
    same_text = left["msg"][:start] == right["msg"][:start] or not left["msg"]
    return bool(left["where"] == right["where"] and left["type"] == right["type"] and same_text)
