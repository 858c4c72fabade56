"""Recurrent states, which the scheduler hands over when they are complete (vLLM: _build_partial_tail_store_jobs).

A state at the end of a chunk is stored by itself. One inside a block, a *partial tail*, is only of use together with
what the other groups hold of that block, so all of it is one offer. Either is offered in its own step only.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvreplay.connectors.offloading.arrays import ChunkIds, Keys
from kvreplay.connectors.offloading.behaviour import OffloadBehaviour
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.manager import OffloadingManager
from kvreplay.connectors.offloading.request_state import RequestState
from kvreplay.connectors.offloading.stores import StoreBuilder
from kvreplay.connectors.offloading.structs import GpuBlocks, Handoff, OffloadStep, TransferJob
from kvreplay.errors import engine_asserts

_engine_asserts = partial(engine_asserts, where="_build_partial_tail_store_jobs")


class _StateOffer(NamedTuple):
    """One state under its key. `group_index`: of its group in the layout; `place`: where its table has the block."""

    key: int
    group_index: int
    block_id: int
    place: int


class HandoffStores:
    def __init__(
        self,
        layout: OffloadLayout,
        manager: OffloadingManager,
        stores: StoreBuilder,
        behaviour: OffloadBehaviour,
        on_allocation_failure: Callable[[str], None],
    ) -> None:
        self._layout = layout
        self._manager = manager
        self._stores = stores
        self._skips_beyond_cap = behaviour.partial_tail_cap == "skip"
        self._on_allocation_failure = on_allocation_failure
        self._nothing = [0] * len(layout.groups)
        self._one_of = [tuple(row) for row in np.eye(len(layout.groups), dtype=np.int64).tolist()]
        """By group: the sizes of a copy of one block of it."""
        self._index_of = {group.group_id: index for index, group in enumerate(layout.groups)}
        self._state_groups = {group.group_id for group in layout.groups if group.is_aligned_state}

    def build(self, step: OffloadStep, states: dict[str, RequestState]) -> Iterator[TransferJob]:
        """All aligned states first, request after request; then all partial tails."""
        for req_id, handoffs in step.handoffs.items():
            state = states.get(req_id)
            if state is not None:
                yield from self._aligned(state, handoffs)
        if not self._layout.supports_partial_tail:
            return
        block_size = self._layout.groups[0].tokens_per_block
        for req_id, handoffs in step.handoffs.items():
            tails = [handoff for handoff in handoffs if handoff.boundary % block_size]
            if tails:
                job = self._partial_tail(states[req_id], tails, step)
                if job is not None:
                    yield job

    # -- at the end of a chunk --------------------------------------------------------------------------------

    def _aligned(self, state: RequestState, handoffs: Sequence[Handoff]) -> Iterator[TransferJob]:
        limit = self._stores.storable_tokens(state, state.request.num_tokens)
        offers: list[_StateOffer] = []
        for handoff in handoffs:
            index = self._index_of.get(handoff.group_id)
            if index is None or not handoff.block_id or handoff.boundary > limit:
                continue
            group = self._layout.groups[index]
            if handoff.boundary % group.tokens_per_chunk:
                continue
            # Of its hashes, not of the keys that have been noticed: those lag behind where nothing else is stored.
            key = state.boundary_key(index, handoff.boundary)
            place = handoff.boundary // group.tokens_per_block - 1
            offers.append(_StateOffer(key, index, handoff.block_id, place))
        keys = np.array([offer.key for offer in offers], np.int64)
        chunk_ids = self._manager.prepare_each(keys, state.context) if len(offers) > 1 else None
        for number, (_, index, block_id, place) in enumerate(offers):
            one = slice(number, number + 1)
            if chunk_ids is not None:
                yield self._open(state, keys[one], chunk_ids[one], index, block_id, place)
                continue
            job = self._offer(state, keys[one], [index], [block_id], place)
            if job is not None:
                yield job

    def _open(
        self, state: RequestState, keys: Keys, chunk_ids: ChunkIds, index: int, block_id: int, place: int
    ) -> TransferJob:
        """The store of one block of one group, at that place of its table."""
        places = self._nothing.copy()
        places[index] = place
        gpu = GpuBlocks(np.array([block_id], np.int64), self._one_of[index], tuple(places))
        return self._stores.open(state, keys, gpu, chunk_ids, fenced=(block_id,))

    def _offer(
        self, state: RequestState, keys: Keys, indices: list[int], block_ids: list[int], place: int
    ) -> TransferJob | None:
        """Offer one block of each of these groups, at that place of their tables."""
        plan = self._manager.prepare_store(keys, state.context)
        if plan is None:
            self._on_allocation_failure(state.request.request_id)
            return None
        if not len(plan.keys):
            return None
        takes_all = len(plan.keys) == len(keys)
        accepted = range(len(keys)) if takes_all else np.isin(keys, plan.keys).nonzero()[0].tolist()
        sizes = self._nothing.copy()
        places = self._nothing.copy()
        for which in accepted:
            sizes[indices[which]] = 1
            places[indices[which]] = place
        source = [block_ids[which] for which in accepted]
        gpu = GpuBlocks(np.array(source, np.int64), tuple(sizes), tuple(places))
        return self._stores.open(state, plan.keys, gpu, plan.chunk_ids, fenced=tuple(source))

    # -- inside a block ---------------------------------------------------------------------------------------

    def _partial_tail(self, state: RequestState, tails: list[Handoff], step: OffloadStep) -> TransferJob | None:
        layout, request = self._layout, state.request
        if layout.max_proof_margin and not state.loaded_from_offload:
            # Its drafter's tail is in the prefix cache.
            return None
        boundary = tails[0].boundary
        _engine_asserts(all(tail.boundary == boundary for tail in tails), "len(boundaries) == 1")
        # A limit of 0 is no limit here.
        limit = min(request.num_prompt_tokens, state.max_offload_tokens or request.num_prompt_tokens)
        if boundary > limit and self._skips_beyond_cap:
            return None
        _engine_asserts(boundary % layout.tokens_per_hash == 0, "boundary % self.config.tokens_per_hash == 0")
        _engine_asserts(boundary <= limit, "boundary <= max_boundary")
        if not self._has_proof(state, boundary, step):
            return None
        source = {tail.group_id: tail.block_id for tail in tails}
        _engine_asserts(self._state_groups <= source.keys(), "self._cow_source_groups.issubset(cow_blocks)")
        place = boundary // layout.groups[0].tokens_per_block
        block_ids = self._blocks_of_tail(state, source, place)
        if block_ids is None:
            return None
        _engine_asserts(all(block_ids), "all(block_id != 0 for block_id in block_ids)")
        keys = [
            state.boundary_key(index, boundary + layout.proof_margin(group))
            for index, group in enumerate(layout.groups)
        ]
        return self._offer(state, np.array(keys, np.int64), list(range(len(keys))), block_ids, place)

    def _has_proof(self, state: RequestState, boundary: int, step: OffloadStep) -> bool:
        """Whether the tokens past the boundary that a drafter group is keyed by are there at the end of this step."""
        margin = self._layout.max_proof_margin
        if not margin:
            return True
        request = state.request
        share = next((share for share in step.requests if share.request_id == request.request_id), None)
        num_computed = request.num_computed_tokens if share is None else share.num_computed_tokens
        after = num_computed + (0 if share is None else share.num_scheduled_tokens)
        return boundary + margin <= min(after, request.num_prompt_tokens)

    def _blocks_of_tail(self, state: RequestState, source: dict[int, int], place: int) -> list[int] | None:
        """The state's block where it was handed over, else that of the table; None: a table does not reach so far."""
        block_ids = []
        for group_state in state.groups:
            if group_state.group.is_aligned_state:
                block_ids.append(source[group_state.group.group_id])
            elif place < len(group_state.table):
                block_ids.append(int(group_state.table.ids[place]))
            else:
                return None
        return block_ids
