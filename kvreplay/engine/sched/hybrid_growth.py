"""Lockstep with windows, states and several groups: a member is looked at only where its blocks change.

Between such steps a decoding request takes, gives back and hashes nothing in any group. In them it does what a request
outside lockstep does, in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvreplay.engine.lockstep import EventLockstep
from kvreplay.engine.request import Request
from kvreplay.kv.cache_manager import DecodeEvents

_ENOUGH: Final = 1 << 62
"""Nobody waits for blocks: no number of them that come makes a difference."""

if TYPE_CHECKING:
    from kvreplay.engine.sched.lockstep_layer import LockstepLayer


class HybridGrowth:
    def __init__(self, scheduler: LockstepLayer, lockstep: EventLockstep, events: DecodeEvents) -> None:
        self._scheduler = scheduler
        self._lockstep = lockstep
        self._takes, self._gives, self._hashes = events.takes, events.gives, events.hashes
        self._most_takes = max(events.takes)
        self.most_taken = len(scheduler.kv.groups)
        """Blocks that one member takes in one step, at most."""

    def grow_all(self, members: list[Request]) -> None:
        """There are enough blocks for all."""
        scheduler = self._scheduler
        if scheduler.connector is None and not scheduler.log.wants_blocks and scheduler.kv.leaves_unseen:
            self._grow_quietly(members)
        else:
            for request in members:
                done = self._step(request)
                assert done, request
        if members:
            self._end()

    def _grow_quietly(self, members: list[Request]) -> None:
        """Nobody must hear of each block, or see what a window leaves behind."""
        scheduler = self._scheduler
        step, decode_step, settle = scheduler.step, scheduler.kv.decode_step, self._lockstep.settle
        for request in members:
            settle(request, step)
            done = decode_step(request, request.lockstep_keys, request.num_computed_tokens)
            assert done, request

    def grow(self, request: Request) -> bool:
        """What the member's step does to its blocks. False if the pool is too small now."""
        done = self._step(request)
        if done:
            self._end()
        return done

    def _step(self, request: Request) -> bool:
        scheduler = self._scheduler
        kv = scheduler.kv
        self._lockstep.settle(request, scheduler.step)
        num_computed = request.num_computed_tokens
        if scheduler.on_member_grows is not None and kv.must_flush(
            request.request_id, num_computed, loads=scheduler.connector is not None
        ):
            scheduler.on_member_grows(request)
        if scheduler.log.wants_blocks or scheduler._must_step:
            return self._grow_openly(request, num_computed)
        return kv.decode_step(request, request.content.block_keys, num_computed)

    def _grow_openly(self, request: Request, num_computed: int) -> bool:
        """For those who must hear of each block."""
        scheduler = self._scheduler
        new_blocks = scheduler.kv.allocate_slots(
            request.request_id, num_computed_tokens=num_computed, num_tokens=request.num_tokens, num_new_tokens=1
        )
        if new_blocks is None:
            return False
        scheduler._note_allocated(request, new_blocks)
        if scheduler.connector is not None and scheduler._must_step:
            for block_ids in new_blocks:
                scheduler.connector.note_allocated(block_ids.tolist())
        scheduler._cache_computed(request, num_computed + 1)
        return True

    def _end(self) -> None:
        scheduler = self._scheduler
        if not scheduler._still_does_not_fit():
            scheduler._blocks_changed()
        if scheduler.kv.has_mamba:
            # Before the member writes into them, which it may do long before the next step that is scheduled openly.
            blocks = scheduler.kv.take_blocks_to_zero()
            if blocks and scheduler.on_blocks_to_zero is not None:
                scheduler.on_blocks_to_zero(blocks)

    def steps_until_shortage(self, step: int, limit: int) -> int:
        """How many steps from `step` on, up to `limit`, can be taken whatever members give back, or hash, in them."""
        scheduler, lockstep = self._scheduler, self._lockstep
        free = scheduler.pool.num_free
        missing, per_hash = _ENOUGH, 0
        misfit = scheduler._misfit
        if misfit is not None and scheduler.num_waiting and len(scheduler.running) < scheduler.max_num_active:
            missing = scheduler._blocks_missing(misfit)
            per_hash = 0 if misfit.ignores_generated and scheduler.kv.counts_filled else self.most_taken
        most = lockstep.most_changes(limit)
        if free >= most * self._most_takes and missing > most * self._most_freed(per_hash):
            return limit
        freed = [gives + per_hash * hashes for gives, hashes in zip(self._gives, self._hashes, strict=True)]
        for at, counts in lockstep.changes(step, limit):
            for count, takes, frees in zip(counts, self._takes, freed, strict=True):
                free -= count * takes
                missing += count * (takes - frees)
            if free < 0 or missing <= 0:
                return at - step
        return limit

    def _most_freed(self, per_hash: int) -> int:
        return max(gives + per_hash * hashes for gives, hashes in zip(self._gives, self._hashes, strict=True))
