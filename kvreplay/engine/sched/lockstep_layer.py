"""The scheduler's requests that decode in lockstep: when that is exact, how their blocks grow, and how they leave."""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.request import Request
from kvreplay.engine.sched.state import Misfit, Scan, SchedulerState
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_table import BlockTable
from kvreplay.kv.prefix_cache import BlockIds


class LockstepLayer(SchedulerState):
    """Steps in which nobody is touched, and back."""

    @property
    def _must_step(self) -> bool:
        """Whether the connector has to see each step."""
        return self.connector is not None and self.connector.needs_every_step

    def _must_be_shown(self, request: Request) -> bool:
        """Whether the connector has to see each of this request's steps."""
        return self.connector is not None and self.connector.needs_share(request.request_id)

    def _lockstep_is_exact(self) -> bool:
        """Whether its members all get their token, whatever the order: the budget covers everyone who runs, or
        those who take more than a token come last; and nobody can be told to wait for blocks."""
        explicit = self._explicit
        if not explicit:
            return self.connector is None or not self.connector.has_pending_block_frees()
        if self.connector is not None and self.connector.has_pending_block_frees():
            return False
        wanted = sum(request.num_tokens - request.num_computed_tokens for request in explicit.values())
        if wanted + len(self._decoding) <= self._token_budget:
            return True
        first = next(iter(explicit.values()))
        last_member = next(request for request in reversed(self.running.values()) if request.lockstep_since is not None)
        if first.lockstep_order > last_member.lockstep_order:
            return True
        return self._chunks.block_size is not None and self._leaves_enough()

    def _leaves_enough(self) -> bool:
        """Whether chunks that end at a state's boundary would be the same if members came last, and leave them their
        tokens."""
        orders = sorted(request.lockstep_order for request in self.lockstep)
        budget = self.config.token_budget
        for request in self._explicit.values():
            start = request.num_computed_tokens
            num_after = len(orders) - bisect_left(orders, request.lockstep_order)
            reserved = budget - len(orders)
            if reserved <= 0:
                return False
            wanted = request.num_tokens - start
            num_tokens = self._chunks.aligned(request, start, min(wanted, reserved))
            if num_tokens != self._chunks.aligned(request, start, min(wanted, reserved + num_after)):
                return False
            budget -= num_tokens
        return True

    @property
    def can_coast(self) -> bool:
        """Whether the next steps give every member of lockstep one token and do nothing else.

        Until a member finishes, blocks run short, or something comes from outside.
        """
        return (
            bool(self._decoding)
            and not self._explicit
            and not self.finished_req_ids
            and not self._preempted_since
            and not self._must_step
            and self._scan_is_futile
            and self._lockstep_is_exact()
        )

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether `schedule()` would change nothing until something comes from outside."""
        if self.running or self.finished_req_ids or self._preempted_since:
            return False
        return self._scan_is_futile and not self._must_step

    @property
    def must_ask_again(self) -> bool:
        """Whether a queued request waits for a connector that may answer otherwise the next time it is asked."""
        if self._scan is Scan.IN_VAIN and not self._lookups_may_differ:
            return False
        if not self._asks_again and self._steps_are_alike:
            return False
        return self.num_waiting > 0 and len(self.running) < self.max_num_active

    @property
    def _scan_is_futile(self) -> bool:
        """Whether another scan of the queues would admit nobody and change nothing."""
        if not self.num_waiting or len(self.running) >= self.max_num_active:
            return True
        # A block that fills while coasting could be what the request that does not fit was waiting to hit.
        if self._scan is Scan.EXHAUSTED:
            return True
        if self._scan is Scan.IN_VAIN:
            return not self.running and not self._lookups_may_differ
        if self._scan is not Scan.BLOCKED:
            return False
        if self._decode_events is not None:
            return self._still_does_not_fit()  # members with windows give blocks back as they go
        return not self._output_is_shared

    @property
    def _lookups_may_differ(self) -> bool:
        """Whether the connector has news since the last scan."""
        return self.connector is not None and self.connector.lookup_version != self._lookup_version

    def _still_does_not_fit(self) -> bool:
        """Whether the first in the queue cannot have come to fit, whatever a lookup would find."""
        misfit = self._misfit
        if misfit is None or self.kv_holding_waiting or not self._full_sequence_must_fit:
            return False
        request = misfit.request
        if not self.waiting or self.waiting.peek() is not request or request.num_tokens != misfit.num_tokens:
            self._misfit = None
            return False
        return self._blocks_missing(misfit) > 0

    def _blocks_missing(self, misfit: Misfit) -> int:
        """At least so many more must be free before it fits; not above 0: it may fit."""
        # Whatever has been cached since may be a hit by now, and save a block in each group.
        inserted = self._num_inserted(ignores_generated=misfit.ignores_generated)
        saved = (inserted - misfit.num_inserted) * self._most_taken
        return misfit.least_blocks - saved - self.pool.num_free

    def _num_inserted(self, *, ignores_generated: bool) -> int:
        """Blocks that ever got a hash."""
        return self.pool.num_inserted - (self.kv.num_filled if ignores_generated else 0)

    def steps_until_shortage(self, step: int, limit: int) -> int:
        """How many steps from `step` on, up to `limit`, lockstep can take without running out of free blocks."""
        block_size = self.kv.block_size
        rounds, free = divmod(self.pool.num_free, len(self._decoding))
        steps = rounds * block_size
        if steps >= limit:
            return limit
        for offset in range(block_size):
            free -= self.lockstep.num_needing_blocks(step + offset)
            if free < 0:
                break
            steps += 1
        return min(steps, limit)

    def coast(self, num_steps: int) -> int:
        """Do `num_steps` steps of which `can_coast` and `steps_until_shortage` promised that they are uneventful.

        Returns the least number of blocks that were free after one of them.
        """
        first = self.step + 1
        least_free = self.pool.num_blocks
        self._in_step = True
        grow = self._growth
        for step, members in self.lockstep.growth(first, num_steps):
            self.step = step
            grow(members)
            if self.pool.num_free < least_free:
                least_free = self.pool.num_free
        self.step = first + num_steps - 1
        if self._output_is_shared:
            # Who leaves next would hash its own block first, whatever the order of those that the last step filled.
            self._cache_filled_blocks()
        self.next_output_step = self.step + 1
        self._in_step = False
        self._num_executed_steps += num_steps
        if self.connector is not None:
            self.connector.note_uneventful()
        return min(least_free, self.pool.num_free)

    def _join_lockstep(self, request: Request) -> None:
        del self._explicit[request.request_id]
        request.lockstep_keys = request.content.block_keys.data
        self.lockstep.join(request, self.step + 1)

    def _leave_lockstep(self, request: Request, *, in_flight: bool = False, is_over: bool = False) -> None:
        """Out of lockstep, counters up to date: as at the start of a step, or, `in_flight`, with the current step's
        token computed and its output outstanding. `is_over`: it gives its blocks back right away."""
        if in_flight and self._output_is_shared:
            # Whoever was admitted earlier has hashed what this step fills before.
            self._cache_filled_blocks()
        self.lockstep.leave(request, self.step if self._in_step else self.step + 1, in_flight=in_flight)
        request.is_prefill_chunk = False
        computed = request.num_computed_tokens
        self._cache_computed(request, computed)
        if self.contents is not None:
            self.contents.flush(request, is_over=is_over)

    def materialise_member(self, request: Request, out: SchedulerOutput) -> None:
        """Give one member a share of its own in the step in flight."""
        self.materialise_lockstep(out, holding=np.concatenate(self.kv.block_arrays(request.request_id)))

    def materialise_lockstep(self, out: SchedulerOutput, *, holding: BlockIds) -> None:
        """Give members that hold any of these blocks a share of their own in the step in flight."""
        is_held = self.pool.membership(holding)
        is_held[NULL_BLOCK_ID] = False
        members = [
            request
            for request in self.lockstep
            if any(np.count_nonzero(is_held[ids]) for ids in self.kv.block_arrays(request.request_id))
        ]
        if not members:
            return
        for request in members:
            self._leave_lockstep(request, in_flight=True)
            self._explicit[request.request_id] = request
            out.shares.append(Share(request, request.num_computed_tokens - 1, 1, False, False, self.kv.no_hit))
        out.num_lockstep -= len(members)
        out.shares.sort(key=lambda share: share.request.lockstep_order)
        self._explicit = dict(sorted(self._explicit.items(), key=lambda item: item[1].lockstep_order))

    def _dissolve_lockstep(self) -> None:
        for request in list(self.lockstep):
            self._leave_lockstep(request)
        self._explicit = {
            request_id: request for request_id, request in self.running.items() if request.lockstep_since is None
        }

    def _grow_all(self, members: list[Request]) -> None:
        """One more block for each of these members, whose blocks are full. There are enough."""
        self._growth(members)

    @property
    def _growth(self) -> Callable[[list[Request]], None]:
        if self.log.wants_blocks or not self.pool.enable_caching:
            return self._grow_openly
        return self._grow_telling if self._must_step else self._grow_quietly

    def _grow_telling(self, members: list[Request]) -> None:
        """As `_grow_quietly`, and the connector hears of the blocks."""
        self._grow_quietly(members)
        assert self.connector is not None
        tables = [self.kv.managers[0].tables[request.request_id] for request in members]
        self.connector.note_allocated([table.view[table.num_blocks - 1] for table in tables])

    def _grow_quietly(self, members: list[Request]) -> None:
        tables, pool = self.kv.managers[0].tables, self.pool
        has_hashed = False
        for request in members:
            table = tables[request.request_id]
            end = table.num_blocks
            if table.num_cached == end - 1:
                block_id = pool.cache_and_take_one(table.view[end - 1], request.lockstep_keys[end - 1])
                table.num_cached = end
                has_hashed = True
            else:
                if table.num_cached < end:
                    self._cache_filled(request, table)
                block_id = pool.take_one()
            if end < len(table.view):  # as `append` does
                table.view[end] = block_id
                table.num_blocks = end + 1
            else:
                table.append(block_id)
        if has_hashed and self._output_is_shared:
            self._blocks_changed()

    def _grow_openly(self, members: list[Request]) -> None:
        """The same where each block is an event of its own, or nothing is hashed."""
        taken: list[int] = []
        for request in members:
            table = self._table(request)
            if table.num_cached < table.num_blocks:
                self._cache_filled(request, table)
            block_id = self.pool.take_one()
            table.append(block_id)
            taken.append(block_id)
            if self.log.wants_blocks:
                self.log.blocks("block.allocated", request.request_id, 0, [block_id])
        if taken and self.connector is not None and self._must_step:
            self.connector.note_allocated(taken)

    def _cache_filled_blocks(self) -> None:
        """Hash the blocks that this step fills, before anyone is looked up in it."""
        members = self.lockstep.filling_blocks(self.step)
        if not members or not self.pool.enable_caching:
            return
        tables, pool, tells = self.kv.managers[0].tables, self.pool, self.log.wants_blocks
        is_shared = self._output_is_shared
        for request in members:
            table = tables[request.request_id]
            index = table.num_blocks - 1
            if table.num_cached == index and not tells:
                if is_shared:
                    self._blocks_changed()
                pool.cache_one(table.view[index], request.lockstep_keys[index])
                table.num_cached = index + 1
            elif table.num_cached <= index:
                self._cache_filled(request, table)

    def _cache_filled(self, request: Request, table: BlockTable) -> None:
        """The last block of a member is full: enter it under its key."""
        if not self.pool.enable_caching:
            return
        if self._output_is_shared:
            self._blocks_changed()
        index = table.num_blocks - 1
        if max(table.num_cached, 0) != index:
            self._cache_computed(request, table.num_blocks * self.kv.block_size)
            return
        block_id = table.view[index]
        self.pool.cache_one(block_id, request.lockstep_keys[index])
        table.num_cached = index + 1
        if self.log.wants_blocks:
            self.log.blocks("block.cached", request.request_id, 0, [block_id])
