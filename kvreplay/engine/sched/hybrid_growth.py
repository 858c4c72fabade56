"""Lockstep with windows, states and several groups: a member is looked at only where its blocks change.

Between such steps a decoding request takes, gives back and hashes nothing in any group. In them it does what a request
outside lockstep does, in the same order.
"""

from collections.abc import Callable
from typing import Final

from kvreplay.engine.lockstep import EventLockstep
from kvreplay.engine.request import Request
from kvreplay.engine.sched.lockstep_layer import LockstepLayer
from kvreplay.kv.cache_manager import DecodeEvents, Slots

_ENOUGH: Final = 1 << 62
"""Nobody waits for blocks: no number of them that come makes a difference."""


class HybridLockstepLayer(LockstepLayer):
    """Windows, states and several groups grow their own way; one group of full attention as the layer below says."""

    @property
    def _growth(self) -> Callable[[list[Request]], None]:
        return super()._growth if self._decode_events is None else self._grow_by_events

    def _grow_by_events(self, members: list[Request]) -> None:
        """There are enough blocks for all."""
        if self.connector is None and not self.log.wants_blocks and self.kv.leaves_unseen:
            self._grow_unseen(members)
        else:
            for request in members:
                done = self._grow_one(request)
                assert done, request
        if members:
            self._note_growth()

    def _grow_unseen(self, members: list[Request]) -> None:
        """Nobody must hear of each block, or see what a window leaves behind."""
        lockstep = self.lockstep
        assert isinstance(lockstep, EventLockstep)
        step, decode_step, settle = self.step, self.kv.decode_step, lockstep.settle
        for request in members:
            settle(request, step)
            done = decode_step(request, request.lockstep_keys, request.num_computed_tokens)
            assert done, request

    def _can_grow(self, request: Request) -> bool:
        """What the member's step does to its blocks is done, if there are enough of them now."""
        if self._decode_events is None:
            return self.pool.num_free > 0
        done = self._grow_one(request)
        if done:
            self._note_growth()
        return done

    def _grow_one(self, request: Request) -> bool:
        lockstep, kv = self.lockstep, self.kv
        assert isinstance(lockstep, EventLockstep)
        lockstep.settle(request, self.step)
        num_computed = request.num_computed_tokens
        if self.contents is not None and kv.must_flush(
            request.request_id, num_computed, loads=self.connector is not None
        ):
            self.contents.flush(request)
        if self.log.wants_blocks or self._must_step:
            return self._grow_one_openly(request, num_computed)
        return kv.decode_step(request, request.content.block_keys, num_computed)

    def _grow_one_openly(self, request: Request, num_computed: int) -> bool:
        """For those who must hear of each block."""
        new_blocks = self.kv.allocate_slots(
            request.request_id, Slots(num_computed_tokens=num_computed, num_tokens=request.num_tokens, num_new_tokens=1)
        )
        if new_blocks is None:
            return False
        self._note_allocated(request, new_blocks)
        if self.connector is not None and self._must_step:
            for block_ids in new_blocks:
                self.connector.note_allocated(block_ids.tolist())
        self._cache_computed(request, num_computed + 1)
        return True

    def _note_growth(self) -> None:
        if not self._still_does_not_fit():
            self._blocks_changed()
        if self.kv.has_mamba and not self._is_scheduling:
            # Before members write into them, which they may do long before the next step that is scheduled openly. In
            # such a one the workers do it, once a connector has read what its stores still need of these blocks.
            blocks = self.kv.take_blocks_to_zero()
            if blocks and self.contents is not None:
                self.contents.zero(blocks)

    def steps_until_shortage(self, step: int, limit: int) -> int:
        events, lockstep = self._decode_events, self.lockstep
        if events is None:
            return super().steps_until_shortage(step, limit)
        assert isinstance(lockstep, EventLockstep)
        free = self.pool.num_free
        missing, per_hash = _ENOUGH, 0
        misfit = self._misfit
        if misfit is not None and self.num_waiting and len(self.running) < self.max_num_active:
            missing = self._blocks_missing(misfit)
            per_hash = 0 if misfit.ignores_generated and self.kv.counts_filled else self._most_taken
        freed = _freed(events, per_hash)
        most = lockstep.most_changes(limit)
        if free >= most * max(events.takes) and missing > most * max(freed):
            return limit
        for at, counts in lockstep.changes(step, limit):
            for count, takes, frees in zip(counts, events.takes, freed, strict=True):
                free -= count * takes
                missing += count * (takes - frees)
            if free < 0 or missing <= 0:
                return at - step
        return limit


def _freed(events: DecodeEvents, per_hash: int) -> list[int]:
    """For each place, how many blocks more there may be for the request that does not fit. `per_hash`: those that a
    hit on one more block saves it."""
    return [gives + per_hash * hashes for gives, hashes in zip(events.gives, events.hashes, strict=True)]
