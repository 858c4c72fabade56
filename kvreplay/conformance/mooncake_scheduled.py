"""A side's whole scheduler, driven step by step, with an engine that computes nothing but marks what it would write."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvreplay.conformance.mooncake_shown import shown_metadata
from kvreplay.conformance.mooncake_transcript import Transcript
from kvreplay.conformance.scheduler_vectors import ScriptedSampler
from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.engine.config import SchedulerConfig
from kvreplay.engine.log import EngineLog
from kvreplay.engine.options import SchedulerOptions
from kvreplay.engine.output import ModelRunnerOutput, SchedulerOutput
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.scheduler import Scheduler
from kvreplay.errors import ConfigError
from kvreplay.events import DETAIL_RUN, Event
from kvreplay.kv.attention_managers import make_cache_manager
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, MAMBA_NONE, KVCacheGroupSpec

if TYPE_CHECKING:
    from kvreplay.conformance.mooncake_side import Side

_MAX_NUM_SEQS: Final = 16
_MAX_MODEL_LEN: Final = 1024
_COMPUTED: Final = 0xDD
"""What a consumer's engine fills a block with when it computes its first token."""
_FAILING: Final = (
    "Failing %d request(s) due to KV load failure (failure_policy=fail, %d tokens affected). Request IDs: %s"
)
_RECOVERED: Final = "Recovered from KV load failure: %d request(s) rescheduled (%d tokens affected)."


class _LoadFailures:
    """Listens to the scheduler for what vLLM's would log of failed blocks: all in one line, before what follows."""

    detail = DETAIL_RUN

    def __init__(self, tell: Callable[[dict[str, int]], None]) -> None:
        self._tell = tell
        self._num_tokens: dict[str, int] = {}

    def emit(self, event: Event) -> int:
        if event.kind == "load.failed" and event.status == "blocks" and event.request_id is not None:
            self._num_tokens[event.request_id] = event.num_tokens or 0
        else:
            self.flush()
        return -1

    def flush(self) -> None:
        affected, self._num_tokens = self._num_tokens, {}
        if affected:
            self._tell(affected)


class ScheduledHalf:
    def __init__(self, side: "Side", transcript: Transcript) -> None:
        spec = side.spec
        self._side = side
        self._transcript = transcript
        self._recomputes = spec.policy == "recompute"
        self._failures = _LoadFailures(self._log_failures)
        self._last_state: Json = None
        pool = BlockPool(spec.num_blocks, enable_caching=True)
        config = SchedulerConfig(
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_num_seqs=_MAX_NUM_SEQS,
            max_model_len=_MAX_MODEL_LEN,
        )
        try:
            groups = [
                KVCacheGroupSpec(
                    kind=group.kind,
                    block_size=group.block_size,
                    sliding_window=group.sliding_window,
                    mamba_cache_mode=MAMBA_ALIGN if group.kind == MAMBA else MAMBA_NONE,
                )
                for group in side.groups
            ]
            kv = make_cache_manager(
                groups,
                pool,
                max_model_len=_MAX_MODEL_LEN,
                max_in_flight_tokens=spec.max_num_batched_tokens,
                retention_interval=None,
            )
        except ConfigError as error:
            raise UnsupportedVectorError(str(error)) from error
        self.scheduler = Scheduler(
            config,
            kv,
            side.connector,
            ScriptedSampler(),
            EngineLog(self._failures, None),
            SchedulerOptions(recompute_load_failures=self._recomputes),
        )

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        side, scheduler = self._side, self.scheduler
        out = scheduler.schedule()
        record = self._shown_schedule(out)
        self._compute(out)
        polled = side.poll(out.kv_connector_metadata)
        heard = next((each.output for each in polled if each is not None), None)
        if len(polled) > 1 and side.spec.aggregate:
            heard = side.aggregate(polled)
        side.report(polled, heard)
        outputs = scheduler.update_from_output(out, ModelRunnerOutput(heard or None))
        self._failures.flush()
        emitted = [[each.request.request_id, list(each.token_ids), each.finish_reason] for each in outputs]
        if emitted:
            record["out"] = emitted
            for request_id, _, reason in emitted:
                self._transcript.note([f"out:{request_id}", *([f"done:{request_id}"] if reason else [])])
        self.note_state(record)

    def _shown_schedule(self, out: SchedulerOutput) -> dict[str, Json]:
        record: dict[str, Json] = {}
        scheduled = {share.request.request_id: [share.start, share.num_tokens] for share in out.shares}
        if scheduled:
            record["scheduled"] = scheduled
        if out.finished_req_ids:
            record["fin_prev"] = sorted(out.finished_req_ids)
        if out.kv_connector_metadata is not None:
            record["meta"] = shown_metadata(out.kv_connector_metadata)
        return record

    def _compute(self, out: SchedulerOutput) -> None:
        """A consumer's forward pass: blocks whose first token it computes are overwritten."""
        if self._side.kind != "D":
            return
        for share in out.shares:
            tables = self.scheduler.kv.get_block_ids(share.request.request_id)
            for group, table in enumerate(tables):
                size = self._side.groups[group].block_size
                for index in range(-(-share.start // size), -(-share.end // size)):
                    if index < len(table):
                        self._side.fill(group, table[index], _COMPUTED)

    def _log_failures(self, affected: Mapping[str, int]) -> None:
        """Request → tokens that it has lost."""
        num_tokens = sum(affected.values())
        if self._recomputes:
            template, args = _RECOVERED, (len(affected), num_tokens)
            self._transcript.log_line("main", "WARNING", "scheduler", template, args)
        else:
            self._transcript.log_line(
                "main", "ERROR", "scheduler", _FAILING, (len(affected), num_tokens, set(affected))
            )

    def note_state(self, record: dict[str, Json]) -> None:
        """Record a step if anything was in it, with the state if that has changed."""
        state = self._state()
        changed = state != self._last_state
        if not record and not changed:
            return
        self._last_state = state
        present = state["req"]
        self._transcript.mark(f"st:{request_id}:{row[0]}" for request_id, row in present.items())
        self._transcript.mark(f"gone:{name}" for name in self._side.requests if name not in present)
        after = {"after": state} if changed else {}
        self._transcript.add("sched", side=self._side.kind, **record, **after)

    def _state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        state: dict[str, Any] = {
            "req": {
                request_id: [
                    request.status.name,
                    request.num_computed_tokens,
                    request.num_tokens,
                    [list(ids) for ids in scheduler.kv.get_block_ids(request_id)],
                ]
                for request_id, request in scheduler.requests.items()
            },
            "free": scheduler.pool.num_free,
            "cached": scheduler.pool.num_cached_keys,
        }
        if scheduler.failed_recving:
            state["failed"] = sorted(scheduler.failed_recving)
        if scheduler.finished_recving:
            state["recvd"] = sorted(scheduler.finished_recving)
        return state

    def final(self) -> dict[str, Json]:
        scheduler = self.scheduler
        return {
            "requests": {request_id: request.status.name for request_id, request in scheduler.requests.items()},
            "free": scheduler.pool.num_free,
            "total": self._side.spec.num_blocks - 1,
        }
