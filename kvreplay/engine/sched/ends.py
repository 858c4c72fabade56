"""How a request ends or gives way: finished, aborted, failed, preempted; and what becomes of its blocks."""

from collections.abc import Iterable

import numpy as np

from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.sched.hybrid_growth import HybridLockstepLayer
from kvreplay.engine.sched.state import Scan
from kvreplay.errors import EngineFatal
from kvreplay.kv.cache_manager import BlocksOfRequest
from kvreplay.kv.prefix_cache import BlockIds


class EndsLayer(HybridLockstepLayer):
    """Requests leave, blocks come back."""

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside: a client's abort, a failed load. Unknown and finished ids are ignored.

        They go in order of arrival (the real one iterates a set).
        """
        wanted = dict.fromkeys(request_ids)  # a client may ask twice
        found = [self.requests[request_id] for request_id in wanted if request_id in self.requests]
        requests = sorted(
            (request for request in found if not request.status.is_finished),
            key=lambda request: request.arrival_order,
        )
        # One after another, each with both of vLLM's passes, so that the order of frees is that of arrival.
        for request in requests:
            self._finish(request, status)
        return requests

    def release_unseen(self, request: Request) -> None:
        """The API server has refused it. If another engine keeps blocks for it, the connector lets go of those (vLLM:
        notify_kv_transfer_request_rejected, which adds it as aborted already)."""
        params, rules = request.kv_transfer_params or {}, self.rules
        is_told = (rules.releases_rejected and params.get("do_remote_prefill")) or (
            rules.answers_refused and params.get("do_remote_decode")
        )
        if self.connector is None or not is_told:
            return
        self.requests[request.request_id] = request
        self.connector.on_new_request(request)
        request.status = RequestStatus.FINISHED_ABORTED
        self._free_request(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request_id = request.request_id
        self._blocks_changed()
        self._ready_holding.pop(request_id, None)
        self.livelocked.pop(request_id, None)
        if request.lockstep_since is not None:
            self._leave_lockstep(request, in_flight=self._in_flight is not None, is_over=True)
        if self.running.pop(request_id, None) is None:
            self.waiting.discard(request)
            self.kv_holding_waiting.discard(request)
            self.deferred_waiting.pop(request_id, None)
        self._explicit.pop(request_id, None)
        delay_free = False
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            # A load that has not started yet will not be reported.
            never_started = self.fences.cancel_load(request_id)
            delay_free = not (never_started or request_id in self.finished_recving or self.rules.frees_aborted_loads)
            self.finished_recving.pop(request_id, None)
            self.failed_recving.pop(request_id, None)
        request.status = status
        if status is RequestStatus.FINISHED_ABORTED:
            self.log.aborted(request)
        else:
            self.log.failed(request, request.load_error or "KV load failure")
        self._free_request(request, delay_free=delay_free)

    def _free_request(self, request: Request, *, delay_free: bool = False) -> None:
        self._blocks_changed()  # even if it keeps its blocks: it needs no more, and nobody may be running any longer
        self.inflight_prefills.pop(request.request_id, None)
        if self.connector is not None:
            computed, in_flight = request.num_computed_tokens, request.num_in_flight_tokens
            tails = self.kv.take_finished_tails(request.request_id, computed, in_flight) if self._is_producer else []
            self.kv.remove_skipped_blocks(request.request_id, max(0, computed - in_flight))
            if tails and self.on_partial_tails is not None:
                delay_free |= self.on_partial_tails(request, tails)
            blocks = BlocksOfRequest(self.kv, request.request_id, computed)
            delay_free |= self.connector.request_finished(request, blocks)
        self.finished_req_ids.append(request.request_id)
        if not delay_free:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._free_blocks_of(request)
        del self.requests[request.request_id]

    def _free_blocks_of(self, request: Request) -> tuple[BlockIds, ...]:
        self._blocks_changed()
        freed = self._give_back(request)
        if self.contents is not None:
            self.contents.on_blocks_freed(request, freed)
        if self.log.wants_blocks:
            for group, block_ids in enumerate(freed):
                self.log.blocks("block.freed", request.request_id, group, block_ids)
        return freed

    def _give_back(self, request: Request) -> tuple[BlockIds, ...]:
        """Free its blocks, or let them wait for steps in flight that may still write into them."""
        if self.fences.has_passed(request.last_scheduled_seq):
            return self.kv.free(request.request_id)
        freed = self.kv.pop_blocks_for_free(request.request_id)
        # All groups as one list, backwards: the last group's blocks come back first.
        self.fences.free_later(np.concatenate(freed)[::-1].copy(), self.fences.scheduled)
        return freed

    def reset_prefix_cache(self, *, reset_running: bool = False, reset_connector: bool = False) -> bool:
        """Forget all hashes; only possible while no block is in use, which `reset_running` tries to bring about.

        `reset_connector`: what a connector has cached goes too, whether or not the hashes could be forgotten.
        """
        if reset_running:
            self._dissolve_lockstep()
            for request in reversed(list(self.running.values())):
                self._preempt(request, drop_stale_output=True)
        cached = self.pool.count_by_group(np.arange(self.pool.num_blocks))
        done = self.kv.reset_prefix_cache()
        if reset_running and not done and not self.rules.refuses_reset:
            raise EngineFatal(
                "RuntimeError",
                "Failed to reset KV cache even when all the running requests are preempted and moved to the waiting "
                "queue.",
            )
        if done:
            self._blocks_changed()
            self.log.evicted_by_group(cached, "reset")
        return (self.reset_connector_cache() and done) if reset_connector else done

    def evict_free(self, num_blocks: int) -> int:
        """Take the hash from up to so many blocks that nobody holds, in the order in which they would be reused.
        Returns how many lost one."""
        self._blocks_changed()
        free = self.pool.free_queue()
        chosen = free[self.pool.is_cached(free)][:num_blocks]
        self.log.evicted_by_group(self.pool.count_by_group(chosen), "injected")
        return len(self.pool.evict_blocks(chosen.tolist()))

    def reset_connector_cache(self) -> bool:
        """What the connector has cached is forgotten, where it caches anything."""
        self._blocks_changed()
        if self.connector is None:
            return False
        self._dissolve_lockstep()  # it may want to see requests again that it had been done with
        return self.connector.reset_cache()

    def preempt(self, request_id: str) -> bool:
        """Preempt one running request from outside, between steps. False if it does not run."""
        request = self.running.get(request_id)
        if request is None:
            return False
        if request.lockstep_since is not None:
            self._leave_lockstep(request, is_over=True)
        self._preempt(request)
        return True

    def give_up_blocks(self, request: Request) -> None:
        """A request that waits, with what it has loaded, to go on has lost it: it waits as if it were new."""
        self._free_blocks_of(request)
        self.inflight_prefills.pop(request.request_id, None)
        self._ready_holding.pop(request.request_id, None)
        self.deferred_waiting.pop(request.request_id, None)
        self.kv_holding_waiting.discard(request)
        self.waiting.prepend(request)

    def drop_in_flight(self, request: Request) -> None:
        """What steps in flight compute for a request is for nothing: it goes on elsewhere."""
        request.num_output_placeholders = 0
        request.num_draft_tokens = 0
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True

    def preempt_for_recovery(self, request: Request) -> None:
        """A running request has lost what it needs to go on; nothing of the step in progress is for it."""
        self._preempt(request, drop_stale_output=True)

    def _preempt(self, victim: Request, *, drop_stale_output: bool = False) -> None:
        """Take back everything a running request holds; it will be looked up afresh.

        What steps in flight bring is delivered all the same, unless `drop_stale_output`.
        """
        assert victim.status is RequestStatus.RUNNING, victim
        del self.running[victim.request_id]
        self._explicit.pop(victim.request_id, None)
        computed = victim.num_computed_tokens
        freed = self._free_blocks_of(victim)
        self.inflight_prefills.pop(victim.request_id, None)
        victim.lost_computed_handle = self.log.preempted(victim, computed, sum(len(ids) for ids in freed))
        victim.lost_computed_end = max(victim.lost_computed_end, computed)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.is_prefill_chunk = False
        victim.num_draft_tokens = 0
        # A share that is being dropped stays dropped: its positions have been sampled again.
        victim.drop_stale_output = drop_stale_output or (
            victim.drop_stale_output and victim.num_stale_output_tokens > 0
        )
        victim.num_stale_output_tokens = victim.num_in_flight_tokens
        victim.num_output_placeholders = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._count_attempt(victim)
        self.waiting.prepend(victim)
        self._scan = Scan.UNKNOWN
        self._preempted_since.append(victim.request_id)
