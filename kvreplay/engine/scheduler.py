"""The scheduler: who computes which tokens in the next step (vLLM: v1/core/sched/scheduler.py).

There is no prefill or decode phase: a step gives each request tokens so that its computed tokens catch up with
its tokens. Requests that only decode can be kept in `Lockstep`, where they are not touched while nothing happens
to them; the decisions are the same, and everything that looks at such a request first takes it out.
"""

from collections.abc import Container

import numpy as np

from kvreplay.engine.accounts import RecomputeAccounts
from kvreplay.engine.config import SchedulerConfig
from kvreplay.engine.connector import KVConnectorOutput, SchedulerConnector
from kvreplay.engine.log import EngineLog
from kvreplay.engine.options import VLLM_0_33_OPTIONS, SchedulerOptions
from kvreplay.engine.output import ModelRunnerOutput, RequestOutput, SchedulerOutput, Share
from kvreplay.engine.recovery import Recovery
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.sampler import Sampler
from kvreplay.engine.sched.admission import AdmissionLayer
from kvreplay.engine.sched.state import Scan
from kvreplay.errors import EngineFatal
from kvreplay.kv.cache_manager import KVCacheManager

_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_IGNORED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Scheduler(AdmissionLayer):
    """One engine instance's scheduler. `schedule` and `update_from_output` alternate, first in, first out; with
    overlapping steps the next is scheduled before the output of the last is taken in.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        connector: SchedulerConnector | None,
        sampler: Sampler,
        log: EngineLog,
        options: SchedulerOptions = VLLM_0_33_OPTIONS,
        accounts: RecomputeAccounts | None = None,
    ) -> None:
        super().__init__(config, kv, connector, sampler, log, options, accounts)
        self.recovery = Recovery(self, recompute=options.recompute_load_failures, rules=options.failure_rules)

    # =========================================================================================================
    # schedule()
    # =========================================================================================================

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"duplicate request id {request.request_id}"
        request.arrival_order = next(self._arrivals)
        self._scan = Scan.UNKNOWN
        self.waiting.add(request)
        self.requests[request.request_id] = request
        if self.connector is not None:
            self.connector.on_new_request(request)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and count its tokens as computed.

        Raises EngineFatal where the real scheduler dies.
        """
        assert self._in_flight is None or self._is_async, "one step at a time"
        self.step += 1
        self._in_step = self._is_scheduling = True
        out = SchedulerOutput(self.step, skip_drafts=self._num_lookahead_tokens > 0)
        self.kv.start_step()
        if self.connector is not None and self.connector.lookup_version != self._lookup_version:
            self._lookup_version = self.connector.lookup_version
            self._scan = Scan.UNKNOWN
        if self._decoding and not self._lockstep_is_exact():
            self._dissolve_lockstep()
        defer_prefills = self._defers_prefills()
        threshold = self._long_prefill_threshold()
        self._schedule_running(out, threshold, defer_prefills=defer_prefills)
        prefill_admitted = False
        if out.shares:
            self._blocks_changed()
        if self._output_is_shared and self._decoding:
            self._cache_filled_blocks()  # what this step fills may be what the first in the queue waits to hit
        if not out.preempted and self._scan is Scan.UNKNOWN:
            prefill_admitted = self._schedule_waiting(out, threshold, defer_prefills=defer_prefills)
            if not defer_prefills:
                self._prefill_capacity_bound = self.num_waiting > len(self.deferred_waiting)
        self._finish_schedule(out, prefill_admitted=prefill_admitted)
        self._is_scheduling = False
        return out

    def schedule_uneventful(self) -> SchedulerOutput:
        """`schedule()` for a step of which `can_coast` and `steps_until_shortage` have told what it does."""
        assert self._in_flight is None, "one step at a time"
        self.step += 1
        self._in_step = True
        lockstep = self.lockstep
        if lockstep.num_needing_blocks(self.step):
            self._grow_all(lockstep.needing_blocks(self.step))
        if self._output_is_shared:
            self._cache_filled_blocks()
        out = SchedulerOutput(self.step)
        out.num_lockstep = out.num_decodes = out.total_num_scheduled_tokens = len(self._decoding)
        out.num_kv_tokens = lockstep.num_kv_tokens(self.step)
        self._in_flight = out
        self._num_executed_steps += 1
        if self.connector is not None:
            self.connector.note_uneventful()
        return out

    def _long_prefill_threshold(self) -> int:
        config = self.config
        if not config.long_prefill_token_threshold:
            return 0
        eligible = len(self.running) + self.num_waiting
        if eligible <= 1:
            return 0
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, config.max_num_batched_tokens // eligible)
        return threshold

    def _defers_prefills(self) -> bool:
        """Whether prefills are held back in this step so that decodes run uninterrupted."""
        interval = self.config.prefill_schedule_interval
        return (
            interval > 1
            and not self._prefill_capacity_bound
            and self._num_executed_steps + 1 - self._last_prefill_step < interval
            and any(not request.is_prefill_chunk for request in self.running.values())
        )

    def _finish_schedule(self, out: SchedulerOutput, *, prefill_admitted: bool) -> None:
        lockstep = self.lockstep
        out.num_lockstep = out.num_decodes = len(self._decoding)
        out.total_num_scheduled_tokens += out.num_lockstep
        out.num_kv_tokens = lockstep.num_kv_tokens(self.step) if self._decoding else 0
        out.finished_req_ids = self.finished_req_ids
        self.finished_req_ids = []
        out.preempted = self._preempted_since
        self._preempted_since = []
        if len(self.kv.groups) > 1:
            self._take_block_work(out)
        if self.connector is not None:
            out.kv_connector_metadata = self.connector.build_connector_meta(out)
        if self.fences.enabled and out.total_num_scheduled_tokens:
            self.fences.scheduled += 1
        for share in out.shares:
            self._advance(share, out)
        self._in_flight = out
        if out.total_num_scheduled_tokens:
            self._num_executed_steps += 1
        if out.prefill_scheduled or prefill_admitted:
            self._last_prefill_step = self._num_executed_steps
        out.made_progress |= bool(
            out.total_num_scheduled_tokens
            or out.preempted
            or out.finished_req_ids
            or out.kv_connector_metadata is not None
        )

    def _take_block_work(self, out: SchedulerOutput) -> None:
        """What the workers do with whole blocks before they compute."""
        out.boundary_states = self.kv.take_boundary_states()
        out.block_copies = self.kv.take_block_copies()
        out.blocks_to_zero = self.kv.take_blocks_to_zero()
        if out.block_copies:
            retained = [block_id for copy in out.block_copies for block_id in copy]
            fence = self.fences.scheduled + 1  # the copies run with the next step that has tokens
            if self.fences.has_passed(fence):
                self._blocks_changed()
                self.pool.free_each(retained)
            else:
                self.fences.free_later(np.array(retained, np.int64), fence, may_repeat=True)

    def _advance(self, share: Share, out: SchedulerOutput) -> None:
        """Count the share's tokens as computed (vLLM: _update_after_schedule)."""
        request = share.request
        if share.num_tokens == 1 or share.num_drafts:
            out.num_decodes += share.num_tokens
            out.num_kv_tokens += share.end
        else:
            out.num_prefill_tokens += share.num_tokens
        request.num_computed_tokens += share.num_tokens
        request.num_in_flight_tokens += share.num_tokens
        request.last_scheduled_seq = self.fences.scheduled
        share.num_rolled_back = request.num_rolled_back
        is_chunk = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        request.is_prefill_chunk = is_chunk
        share.samples = not is_chunk
        if not is_chunk:
            self.inflight_prefills.pop(request.request_id, None)
            if self._is_async:
                request.num_output_placeholders += 1 + share.num_drafts
                request.num_draft_tokens = self._num_spec_tokens
        if self.accounts is not None:
            self.accounts.note_computed(request, share.start, share.end - share.num_drafts)

    # =========================================================================================================
    # update_from_output()
    # =========================================================================================================

    def update_from_output(self, out: SchedulerOutput, model_output: ModelRunnerOutput) -> list[RequestOutput]:
        """Take in what a step brought. Raises EngineFatal where the real scheduler dies."""
        if self._in_flight is out:
            self._in_flight = None
        if self.fences.enabled and out.total_num_scheduled_tokens:
            self._pass_fence()
        reports = model_output.kv_connector_output
        if reports is None and not out.shares and self.lockstep.next_finish() != out.step:
            self.skipped = []
            self.next_output_step = out.step + 1
            self._in_step = False
            return []
        skip: dict[str, None] = {}
        if reports is not None:
            self._scan = Scan.UNKNOWN
            if reports.failed_recving:
                skip.update(dict.fromkeys(self.recovery.handle_failed_recving(reports.failed_recving)))
            if reports.invalid_block_ids:
                skip.update(dict.fromkeys(self.recovery.handle_invalid_blocks(reports.invalid_block_ids, out)))
        self.skipped = list(skip)
        if out.has_sync_kv_loads:
            self._note_sync_loads(out, skip)
        outputs: list[RequestOutput] = []
        for request, share in self._ending_shares(out):
            if share is not None and not self._takes_output(request, share, skip):
                if share.is_stale:
                    self.skipped.append(request.request_id)
                continue
            num_accepted = model_output.num_accepted.get(request.request_id, 0) if share is not None else 0
            output = self._process_sampled(request, share, num_accepted)
            if output is not None:
                outputs.append(output)
        self.next_output_step = out.step + 1
        failed: list[Request] = []
        if skip and not self.recovery.recompute:
            failed = self.finish_requests(skip, RequestStatus.FINISHED_ERROR)
        if reports is not None:
            self.unsent = outputs
            self._update_from_kv_xfer_finished(reports)
            self.unsent = []
        for output in outputs:
            self._send(output)
        self._in_step = False
        return [*outputs, *(RequestOutput(request, [], "error") for request in failed)] if failed else outputs

    def _note_sync_loads(self, out: SchedulerOutput, skip: Container[str]) -> None:
        """The step has waited for these: they are over with it."""
        for share in out.shares:
            if share.num_external_tokens and share.request.request_id not in skip:
                self.log.load_finished(share.request, share.num_external_tokens)

    def _send(self, output: RequestOutput) -> None:
        """The step is over without the engine having died of it: its outputs get out."""
        request = output.request
        if request.first_token_ns is None:
            request.first_token_ns = self.log.now_ns
            self.log.first_token(request)
        if output.finish_reason is not None:
            self.log.finished(request, output.finish_reason, output.output_hash)

    def _pass_fence(self) -> None:
        """A step has been processed: what waited for it may go on."""
        self.fences.processed += 1
        for blocks, may_repeat in self.fences.take_freeable():
            self._blocks_changed()
            if may_repeat:
                self.pool.free_each(blocks.tolist())
            else:
                self.pool.free_blocks(blocks)
        for request_id, num_external in self.fences.take_startable_loads():
            self._tell_connector(self.requests[request_id], num_external)

    def _takes_output(self, request: Request, share: Share, skip: Container[str]) -> bool:
        """Count the share as processed. Returns whether what it sampled is for the request as it is now."""
        if self.requests.get(request.request_id) is not request:
            return False
        request.num_in_flight_tokens -= share.num_tokens
        share.is_stale = request.num_stale_output_tokens > 0
        if share.is_stale:
            request.num_stale_output_tokens -= share.num_tokens
        if request.request_id in skip or request.status.is_finished:
            return False
        return not (share.is_stale and request.drop_stale_output)

    def _ending_shares(self, out: SchedulerOutput) -> list[tuple[Request, Share | None]]:
        """Requests whose output must be looked at, in running order: those with a share, and lockstep's last tokens."""
        explicit: list[tuple[Request, Share | None]] = [(share.request, share) for share in out.shares]
        if not out.num_lockstep:
            return explicit
        finishing = self.lockstep.finishing_in(out.step)
        if not finishing:
            return explicit
        for request in finishing:
            # Up to date as of this step's schedule(): its token is computed, its output not yet appended.
            self._leave_lockstep(request, in_flight=True, is_over=True)
            request.num_in_flight_tokens = 0
        return sorted([*explicit, *((request, None) for request in finishing)], key=lambda pair: pair[0].lockstep_order)

    def _process_sampled(self, request: Request, share: Share | None, num_accepted: int) -> RequestOutput | None:
        """Append what the step has sampled, stop or go on; a prefill chunk samples nothing."""
        is_stale = False
        num_drafts = 0
        if share is not None:
            if not share.samples:
                return None
            is_stale, num_drafts = share.is_stale, share.num_drafts
        if num_drafts and not is_stale:
            self._roll_back(request, num_drafts - num_accepted)
        was_running = request.status is RequestStatus.RUNNING
        had_placeholders = request.num_output_placeholders > 0
        tokens = self._append_tokens(request, share, 1 + num_accepted)
        if not is_stale:
            # Tokens behind a stop are given up.
            request.num_computed_tokens -= 1 + num_accepted - len(tokens)
            if had_placeholders:
                request.num_output_placeholders -= 1 + num_accepted
                if request.num_output_placeholders < 0:
                    raise EngineFatal("AssertionError")
            if was_running and (had_placeholders or self._num_spec_tokens):
                self._cache_computed(request, request.num_computed_tokens - request.num_in_flight_tokens)
        if not request.status.is_finished:
            if self._can_lockstep and self._may_join(request, share) and not self._must_be_shown(request):
                self._join_lockstep(request)
            return RequestOutput(request, tokens, None)
        self._remove_from_queues(request, was_running=was_running)
        output_hash = self.sampler.output_hash(request)
        self._free_request(request)
        return RequestOutput(request, tokens, _FINISH_REASONS[request.status], output_hash)

    def _may_join(self, request: Request, share: Share | None) -> bool:
        """With windows and states, the first step after a prompt still settles what the prompt has left behind."""
        if request.stop_token_ids:
            return False
        return self._is_simple or (share is not None and share.num_tokens == 1 and not share.admitted)

    @staticmethod
    def _roll_back(request: Request, num_rejected: int) -> None:
        """Drafts that were wrong have not been computed after all."""
        request.num_rolled_back += num_rejected
        if request.num_computed_tokens > 0:
            request.num_computed_tokens -= num_rejected
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= num_rejected

    def _append_tokens(self, request: Request, share: Share | None, count: int) -> list[int]:
        """Sample up to `count` tokens, as far as the request does not stop."""
        if request.attempts:
            self._forget_attempts(request)
        if request.taint and not request.output_taint:
            request.output_taint = request.taint
        tokens: list[int] = []
        for _ in range(count):
            position = request.num_tokens if self._num_spec_tokens or share is None else share.end
            token = self.sampler.sample(request, position)
            tokens.append(token)
            request.num_tokens += 1
            request.num_output_tokens += 1
            if token in request.stop_token_ids:
                request.status = RequestStatus.FINISHED_STOPPED
            elif request.num_tokens >= self.config.max_model_len or request.num_output_tokens >= request.max_tokens:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            if request.status.is_finished:
                break
        return tokens

    def _remove_from_queues(self, request: Request, *, was_running: bool) -> None:
        if was_running:
            del self.running[request.request_id]
            self._explicit.pop(request.request_id, None)
            return
        # Preempted, and finished by what was in flight.
        self.waiting.discard(request)
        self.kv_holding_waiting.discard(request)
        self.deferred_waiting.pop(request.request_id, None)

    def take_drafts(self, out: SchedulerOutput) -> None:
        """Without overlapping steps: the drafter has proposed what the next step verifies (vLLM: post_step)."""
        if not out.total_num_scheduled_tokens or out.skip_drafts:
            return
        for share in out.shares:
            request = share.request
            if self.requests.get(request.request_id) is request and not request.status.is_finished:
                request.num_draft_tokens = 0 if request.is_prefill_chunk else self._num_spec_tokens

    def _update_from_kv_xfer_finished(self, reports: KVConnectorOutput) -> None:
        self._num_reports_since += 1
        if self.connector is not None:
            self.connector.update_connector_output(reports)
        for request_id in reports.finished_recving:
            request = self.requests.get(request_id)
            if request is None:
                self._report_fits_nothing(f"finished_recving of unknown request {request_id}")
            elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                # Another child of a MultiConnector may say so, too, of a load that is not its own.
                is_news = request_id not in self.finished_recving
                self.finished_recving[request_id] = None
                if is_news and request_id not in self.failed_recving:
                    self.log.load_finished(request, request.num_external_tokens)
            elif request.status.is_finished:
                self._release(request)
            else:
                self._report_fits_nothing(f"finished_recving of {request_id}, which is {request.status.name}")
        for request_id in reports.finished_sending:
            request = self.requests.get(request_id)
            if request is None:
                self._report_fits_nothing(f"finished_sending of unknown request {request_id}")
            elif not request.status.is_finished:
                self._report_fits_nothing(f"finished_sending of {request_id}, which is {request.status.name}")
            else:
                self._release(request)
                self._try_livelocked_again()

    def _report_fits_nothing(self, what: str) -> None:
        if not self.rules.tolerates_reports:
            raise EngineFatal("AssertionError", what)
