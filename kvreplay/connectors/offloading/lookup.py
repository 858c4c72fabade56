"""How far beyond the local hit a request's chunks are offloaded (vLLM: offloading/scheduler.py, _lookup).

The answer is one position at which every group can go on: full attention needs every chunk before it, a window its
last few. A group that can offer less makes the others look again. A chunk that is still being written defers the
answer, unless it turns out not to be needed.
"""

from collections.abc import Callable, Iterator
from typing import Final

from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.manager import LookupResult, OffloadingManager
from kvreplay.connectors.offloading.request_state import GroupState, RequestState

# Plain numbers: arrays are compared with them.
_MISS: Final = int(LookupResult.MISS)
_HIT: Final = int(LookupResult.HIT)
_PENDING: Final = int(LookupResult.HIT_PENDING)
_RETRY: Final = int(LookupResult.RETRY)

_FIRST_PART: Final = 256
"""Chunks that a scan asks about at once, if the first is there."""

Observer = Callable[[int, LookupResult], None]
"""Told of each key that a lookup needed, in order, and what the manager said."""


class ChunkLookup:
    """Looks a request up in all groups. `chunks_being_loaded`: None where nobody could hit what a load brings."""

    def __init__(
        self,
        layout: OffloadLayout,
        manager: OffloadingManager,
        chunks_being_loaded: set[int] | None,
        *,
        widens_drafters: bool = True,
        asks_states: bool = True,
    ) -> None:
        self.layout = layout
        self.manager = manager
        self.widens_drafters = widens_drafters
        asked = {index for index, group in enumerate(layout.groups) if asks_states or not group.is_aligned_state}
        self.order = tuple(index for index in layout.lookup_order if index in asked)
        self.windowed = tuple(index for index in layout.windowed if index in asked)
        self.chunks_being_loaded = chunks_being_loaded
        self.observer: Observer | None = None
        self._num_unknown = 0
        """Of this search: chunks of which the manager does not know yet."""
        self._is_plain = len(layout.groups) == 1 and not layout.windowed and not layout.groups[0].is_drafter

    def find(self, state: RequestState, max_new_tokens: int | None = None) -> int | None:
        """Tokens beyond the local hit that can be loaded; None: ask again later."""
        self._num_unknown, state.has_found = 0, False
        num_orders = state.context.num_orders
        hit = self._find(state, _limit_of(state, max_new_tokens))
        state.is_settled = not self._num_unknown and state.context.num_orders == num_orders
        return hit

    def _find(self, state: RequestState, limit: int | None) -> int | None:
        hit = self._find_plain(state, limit) if self._is_plain else _CompleteChunks(self, state).find(limit)
        state.partial_tail_boundary = None
        if hit is not None and self._is_being_loaded(state, hit):
            return None
        if hit is None or not self.layout.supports_partial_tail:
            return hit
        return _PartialTail(self, state, hit).find(limit)

    def _find_plain(self, state: RequestState, limit: int | None) -> int | None:
        """As `_CompleteChunks` where there is one group only, of full attention and no drafter's."""
        group_state = state.groups[0]
        size, num_keys = group_state.group.tokens_per_chunk, group_state.num_keys
        local, end = state.num_local_tokens, state.request.num_tokens
        group_state.lookup_hit_end = 0
        assert num_keys >= end // size, state.request
        if limit is not None:
            end = min(end, local + limit)
        end = min(end, num_keys * size)
        if state.max_load_tokens is not None:
            end -= end % size
        if end - local < size:
            return 0
        first = local // size
        num_hits = self.leading_hits(group_state.keys[first : -(-end // size)], state)
        group_state.lookup_hit_end = first + (num_hits or 0)
        if num_hits is None:
            return None
        hit = min(end, size * (first + num_hits)) - local
        return hit if hit >= size else 0

    def _is_being_loaded(self, state: RequestState, hit: int) -> bool:
        """Whether another request is loading a chunk of this hit: it will then be found on the GPU."""
        being_loaded = self.chunks_being_loaded
        if not hit or not being_loaded:
            return False
        start, end = state.num_local_tokens, state.num_local_tokens + hit
        for group_state in state.groups:
            group = group_state.group
            keys = group_state.keys[start // group.tokens_per_chunk : -(-end // group.tokens_per_chunk)]
            if group.is_windowed:
                keys = keys[-group.load_window_chunks(end) :]
            if not being_loaded.isdisjoint(keys.tolist()):
                return True
        return False

    # -- asking the manager -----------------------------------------------------------------------------------

    def ask(self, key: int, state: RequestState) -> LookupResult:
        result = self.manager.lookup(key, state.context)
        self._num_unknown += result is LookupResult.RETRY
        state.has_found |= result is not LookupResult.RETRY and result is not LookupResult.MISS
        if self.observer is not None:
            self.observer(key, result)
        return result

    def leading_hits(self, keys: Keys, state: RequestState) -> int | None:
        """Chunks there before the first that is missing; None: it depends on some that are not ready."""
        if self._may_ask_all(state):
            return self._leading_hits_at_once(keys, state)
        count, is_undecided = 0, False
        for result in self._results(keys, state):
            if result == _MISS:
                break
            is_undecided |= result != _HIT
            # What is not known yet does not end the scan, so that what lies behind it is asked for too.
            count += result != _RETRY
        return None if is_undecided else count

    def _leading_hits_at_once(self, keys: Keys, state: RequestState) -> int | None:
        """In ever longer parts: most scans end with the first, or not soon."""
        if len(keys) and self.manager.lookup(keys.item(0), state.context) == _MISS:
            return 0
        count = 0
        is_undecided = has_missed = False
        size = _FIRST_PART
        while count < len(keys) and not has_missed:
            # As bytes, which are searched faster than arrays.
            results = self.manager.lookup_many(keys[count : count + size], state.context).tobytes()
            num_hits = results.find(_MISS)
            has_missed = num_hits >= 0
            if not has_missed:
                num_hits = len(results)
            is_undecided |= results.count(_HIT, 0, num_hits) < num_hits
            count += num_hits
            size *= 8
        return None if is_undecided else count

    def last_window(self, keys: Keys, state: RequestState, *, window: int, first_window: int) -> int | None:
        """End of the last run of `window` chunks that are there, or length of the run that reaches the start.

        The first run from the right needs `first_window`. None: it depends on some that are not ready.
        """
        run, wanted = 0, first_window
        is_unknown = has_pending = False
        index = len(keys)
        for result in self._results(keys[::-1], state):
            index -= 1
            if result in (_HIT, _PENDING):
                run += 1
                has_pending |= result == _PENDING
            else:
                # A gap rules out the incomplete run to its right, and what was pending in it.
                is_unknown |= result == _RETRY
                run, has_pending, wanted = 0, False, window
            if run == wanted:
                return None if is_unknown or has_pending else index + wanted
        return None if is_unknown or has_pending else run

    def _may_ask_all(self, state: RequestState) -> bool:
        """About keys that the scan may not come to: nothing changes, and nobody looks."""
        return self.observer is None and self.manager.lookup_is_pure_for(state.context)

    def _results(self, keys: Keys, state: RequestState) -> Iterator[int]:
        """What the manager says of each key, as far as the caller reads on."""
        if self._may_ask_all(state):
            return iter(self.manager.lookup_many(keys, state.context).tolist())
        return (self.ask(key, state) for key in keys.tolist())


def _limit_of(state: RequestState, max_new_tokens: int | None) -> int | None:
    """The most that may be loaded beyond the local hit, where something limits it."""
    limits = [limit for limit in (max_new_tokens, state.max_load_tokens) if limit is not None]
    return min(limits) if limits else None


class _CompleteChunks:
    """One search for the longest hit of complete chunks.

    `end`: no hit can reach beyond it, as far as the groups visited so far say. A drafter gives up its last chunk,
    which is volatile, once; a group that then shortens the hit makes it do so again.
    """

    def __init__(self, lookup: ChunkLookup, state: RequestState) -> None:
        self.lookup = lookup
        self.state = state
        self.local = state.num_local_tokens
        self.end = state.request.num_tokens
        self.is_deferred = False
        self.settled_drafters: set[int] = set()
        for group_state in state.groups:
            group_state.lookup_hit_end = 0

    def find(self, limit: int | None) -> int | None:
        layout = self.lookup.layout
        if limit is not None:
            self.end = min(self.end, self.local + limit)
        if layout.windowed:
            # The last token is computed to sample from it, and its window must still be there.
            self.end -= 1
            if layout.state_size is not None:
                self.end -= self.end % layout.state_size
        groups: tuple[int, ...] | None = self.lookup.order
        hit = 0
        while groups:
            groups, hit = self._visit_all(groups, hit)
        if groups is None:
            return 0
        return None if self.is_deferred else hit

    def _visit_all(self, groups: tuple[int, ...], hit: int) -> tuple[tuple[int, ...] | None, int]:
        """One pass. Returns the groups to look at again (None: there is no hit), and the hit."""
        layout = self.lookup.layout
        again: tuple[int, ...] = ()
        saw_window = False
        for index in groups:
            group = layout.groups[index]
            if not self._visit(index):
                return None, 0
            new_hit = self.end - self.local
            if new_hit < group.tokens_per_chunk:
                return None, 0
            if new_hit < hit:
                if not group.is_drafter:
                    self.settled_drafters.clear()
                if self.is_deferred:
                    # Whether it must still be deferred shows when everyone has been asked about the shorter hit.
                    self.is_deferred = False
                    again = self.lookup.order
                elif saw_window and not again:
                    again = self.lookup.windowed
            saw_window |= group.is_windowed
            hit = new_hit
        return again, hit

    def _visit(self, index: int) -> bool:
        """Ask one group, which may pull `end` in. False: with it there is no hit."""
        state = self.state.groups[index]
        size = state.group.tokens_per_chunk
        assert len(state.keys) >= self.state.request.num_tokens // size, self.state.request
        self.end = min(self.end, len(state.keys) * size)
        if self.state.max_load_tokens is not None:
            self.end -= self.end % size
        if self.end - self.local < size:
            return False
        gives_up_one = state.group.is_drafter and index not in self.settled_drafters
        first = self.local // size
        num_hits = self._ask_group(state, first, gives_up_one=gives_up_one)
        if num_hits is None:
            self.is_deferred = True
            return True
        if num_hits == 0:
            return False
        if gives_up_one:
            num_hits -= 1
            self.settled_drafters.add(index)
        self.end = min(self.end, size * (first + num_hits))
        return True

    def _ask_group(self, state: GroupState, first: int, *, gives_up_one: bool) -> int | None:
        group, lookup = state.group, self.lookup
        size = group.tokens_per_chunk
        query_end = self.end
        if gives_up_one and (lookup.widens_drafters or group.is_windowed):
            query_end = min(self.end + size, len(state.keys) * size)
        num_chunks = min(-(-query_end // size), len(state.keys))
        keys = state.keys[first:num_chunks]
        if not group.is_windowed:
            num_hits = lookup.leading_hits(keys, self.state)
            state.lookup_hit_end = first + (num_hits or 0)
            return num_hits
        end = min(self.end, (num_chunks - gives_up_one) * size)
        return lookup.last_window(
            keys,
            self.state,
            window=group.window_chunks + gives_up_one,
            first_window=group.load_window_chunks(end) + gives_up_one,
        )


class _PartialTail:
    """One search for a hit that ends inside a block, where recurrent states are kept at hash boundaries.

    `complete`: where the hit of complete chunks ends. A boundary counts if every group has a block for it; one in the
    next block but one also needs the whole block between, the *bridge*, which drafters have popped.
    """

    def __init__(self, lookup: ChunkLookup, state: RequestState, hit: int) -> None:
        self.lookup = lookup
        self.layout = lookup.layout
        self.state = state
        self.hit = hit
        self.complete = state.num_local_tokens + hit
        self.block_size = self.layout.groups[0].tokens_per_block
        self.bridge_index = self.complete // self.block_size
        self.bridge_end = (self.bridge_index + 1) * self.block_size

    def find(self, limit: int | None) -> int | None:
        step = self.layout.tokens_per_hash
        highest = self._highest_boundary(limit)
        if highest <= self.complete:
            return self.hit
        is_pending = bridge_is_pending = False
        if highest >= self.bridge_end:
            highest, bridge_is_pending = self._ask_bridge(highest)
            is_pending = bridge_is_pending
        for boundary in range(highest, self.complete, -step):
            found, boundary_is_pending = self._ask_boundary(
                boundary, is_pending=bridge_is_pending and boundary >= self.bridge_end
            )
            if found:
                self.state.partial_tail_boundary = boundary
                return boundary - self.state.num_local_tokens
            is_pending |= boundary_is_pending
        return None if is_pending and self.hit == 0 else self.hit

    def _highest_boundary(self, limit: int | None) -> int:
        request, margin = self.state.request, self.layout.max_proof_margin
        num_blocks = 2 if margin else 1
        highest = min(request.num_prompt_tokens - 1, self.complete + num_blocks * self.block_size - 1)
        if margin:
            highest = min(highest, self.state.num_hashes * self.layout.tokens_per_hash - margin)
        if limit is not None:
            highest = min(highest, self.state.num_local_tokens + limit)
        return highest - highest % self.layout.tokens_per_hash

    def _ask_bridge(self, highest: int) -> tuple[int, bool]:
        """The highest boundary that the bridge allows, and whether a part of it is not ready."""
        unconfirmed: list[int] = []
        is_pending = False
        for group_state in self.state.groups:
            if group_state.group.is_aligned_state:
                continue
            key = int(group_state.keys[self.bridge_index])
            is_pending |= key in (self.lookup.chunks_being_loaded or ())
            if group_state.lookup_hit_end <= self.bridge_index:
                unconfirmed.append(key)
        for key in unconfirmed:
            result = self.lookup.ask(key, self.state)
            if result == _MISS:
                return self.bridge_end - self.layout.tokens_per_hash, is_pending
            is_pending |= result != _HIT
        return highest, is_pending

    def _ask_boundary(self, boundary: int, *, is_pending: bool) -> tuple[bool, bool]:
        """Whether all groups have it, and whether one that was asked is not ready."""
        for index, group_state in enumerate(self.state.groups):
            key = self.state.boundary_key(index, boundary + self.layout.proof_margin(group_state.group))
            result = self.lookup.ask(key, self.state)
            if result == _MISS:
                return False, is_pending
            is_pending |= result != _HIT
        return not is_pending, is_pending
