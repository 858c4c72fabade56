"""What to store, and from which blocks (vLLM: offloading/scheduler.py, _build_store_jobs).

Chunks are offered to the manager as they fill, in the order of the request's table. A request's index moves on only if
the offer was dealt with: when there is no room it is made again in the next step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.arrays import NO_KEYS, ChunkIds, Keys, Mask
from kvreplay.connectors.offloading.behaviour import OffloadBehaviour
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.connectors.offloading.ledger import Job, JobLedger
from kvreplay.connectors.offloading.manager import OffloadingManager, StorePlan
from kvreplay.connectors.offloading.reachable import Horizon, StoreMask
from kvreplay.connectors.offloading.request_state import GroupState, RequestState
from kvreplay.connectors.offloading.structs import GpuBlocks, TransferJob
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.errors import EngineFatal
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import SLIDING_WINDOW

Indices = NDArray[np.int64]
_NO_BLOCKS: BlockIds = np.empty(0, np.int64)
_NO_CHUNKS: Indices = np.empty(0, np.int64)


class _Range(NamedTuple):
    """Chunks [start, end) of a group are looked at.

    `horizon`: where its last segment ends, in chunks; None: unknown. `reconsiders`: `start` may lie below what has
    been offered, because the request has ended elsewhere than was expected.
    """

    start: int
    end: int
    horizon: int | None
    reconsiders: bool
    prompt_horizon: int


class _Offer(NamedTuple):
    """Chunks that one group offers. `chunks`: None where they follow each other from `start` on, all blocks real."""

    start: int
    chunks: Indices | None
    keys: Keys


class StoreBuilder:
    """`on_allocation_failure` is told of each offer that found no room. `mirrored`: groups with followed tables."""

    def __init__(
        self,
        layout: OffloadLayout,
        manager: OffloadingManager,
        ledger: JobLedger,
        space: KeySpace,
        behaviour: OffloadBehaviour,
        on_allocation_failure: Callable[[str], None],
        mirrored: Sequence[int],
    ) -> None:
        self._layout = layout
        self._mirrored = tuple(mirrored)
        self._manager = manager
        self._ledger = ledger
        self._space = space
        self._on_allocation_failure = on_allocation_failure
        self._clamps_aborted = behaviour.abort_clamp == "blocks"
        self._keeps_last_at_end = behaviour.eagle_lookup == "narrow"
        self._nothing = [0] * len(layout.groups)
        of_tables = [layout.groups[index] for index in mirrored]
        self._ends_matter = any(group.is_windowed or group.is_drafter for group in of_tables)
        """Whether a request's end has more to offer than its last step: of windows and drafters."""
        self._is_plain = len(of_tables) == 1 and not self._ends_matter
        """Tables of one group are followed, and all of it counts."""
        self.masks = tuple(
            StoreMask(
                group,
                layout.alignment_tokens,
                layout.retention_interval,
                covers_lookup=behaviour.window_mask == "lookup",
            )
            for group in layout.groups
        )

    def storable_tokens(self, state: RequestState, num_tokens: int) -> int:
        """How much of `num_tokens` may be stored at all."""
        num = min(num_tokens, state.request.num_tokens)
        if state.max_offload_tokens is not None:
            num = min(num, state.max_offload_tokens)
        return min(num, state.request.num_prompt_tokens) if self._layout.offload_prompt_only else num

    def is_settled(self, state: RequestState) -> bool:
        """Whether there will be nothing more to offer before the request ends."""
        return self._layout.offload_prompt_only and state.settled_tokens == state.storable_prompt_tokens

    def build(self, state: RequestState, num_computed: int) -> TransferJob | None:
        """Offer what is complete at the end of a step; the copy of what was accepted. `num_computed`: tokens that a
        request which runs on has then."""
        request = state.request
        has_ended = request.status.is_finished
        num_tokens = self.storable_tokens(state, self._tokens_at_end(request) if has_ended else num_computed)
        if num_tokens == state.settled_tokens and not (has_ended and self._ends_matter):
            return None
        if self._is_plain:
            return self._build_plain(state, num_tokens, has_ended=has_ended)
        return self._build_any(state, num_tokens)

    def _build_plain(self, state: RequestState, num_tokens: int, *, has_ended: bool) -> TransferJob | None:
        """As `_build_any` where tables of one group are followed, and all of it counts."""
        group_state = state.mirrored[0]
        size = group_state.group.blocks_per_chunk
        start = group_state.next_stored_chunk_idx
        end = group_state.storable_chunks(
            num_tokens, holds_back_last=False, clamps_to_blocks=self._clamps_aborted or not has_ended
        )
        if end <= start:
            state.settled_tokens = num_tokens
            return None
        blocks = group_state.table.ids[start * size : end * size]
        if len(blocks) < (end - start) * size or np.count_nonzero(blocks) < len(blocks):
            return self._build_any(state, num_tokens)
        keys = group_state.run(start, end)
        plan = self._manager.prepare_store(keys, state.context)
        if plan is None:
            self._on_allocation_failure(state.request.request_id)
            return None
        group_state.next_stored_chunk_idx = end
        state.settled_tokens = num_tokens
        if not len(plan.keys):
            return None
        first = 0 if len(plan.keys) == len(keys) else plan.first
        if first < 0:
            return self._job(state, [_Offer(start, None, keys)], plan)
        self._check_others(state)
        sizes, places = self._nothing.copy(), self._nothing.copy()
        sizes[self._mirrored[0]] = len(blocks) - first * size
        places[self._mirrored[0]] = (start + first) * size
        gpu = GpuBlocks(blocks[first * size :].copy(), tuple(sizes), tuple(places))
        return self.open(state, plan.keys, gpu, plan.chunk_ids, fenced=(), deferred_fence=gpu.block_ids)

    def _build_any(self, state: RequestState, num_tokens: int) -> TransferJob | None:
        ranges = [self._range(state, group_state, num_tokens) for group_state in state.mirrored]
        offers = [
            self._offer(state, index, chunks_range) for index, chunks_range in zip(self._mirrored, ranges, strict=True)
        ]
        offered = _joined([offer.keys for offer in offers])
        plan = self._manager.prepare_store(offered, state.context) if len(offered) else None
        if plan is None and len(offered):
            self._on_allocation_failure(state.request.request_id)
            return None
        self._advance(state, ranges)
        state.settled_tokens = num_tokens
        if plan is None or not len(plan.keys):
            return None
        return self._job(state, offers, plan)

    def _tokens_at_end(self, request: Request) -> int:
        """Tokens whose KV is there. The last sampled token's slot is never written."""
        if request.status is RequestStatus.FINISHED_ABORTED and self._clamps_aborted:
            return request.num_computed_tokens
        return max(request.num_prompt_tokens, request.num_tokens - 1)

    def _storable_chunks(self, state: RequestState, group_state: GroupState, num_tokens: int) -> int:
        """A drafter's trailing chunk may be rewritten while its request decodes; at the end it is stored too."""
        request = state.request
        has_ended = request.status.is_finished
        is_volatile = (
            group_state.group.is_drafter
            and num_tokens > request.num_prompt_tokens
            and (self._keeps_last_at_end or not has_ended)
        )
        return group_state.storable_chunks(
            num_tokens, holds_back_last=is_volatile, clamps_to_blocks=self._clamps_aborted or not has_ended
        )

    def _advance(self, state: RequestState, ranges: list[_Range]) -> None:
        # Never back: at the end of an aligned prompt a drafter has one chunk less to store.
        for group_state, chunks_range in zip(state.mirrored, ranges, strict=True):
            group_state.next_stored_chunk_idx = max(group_state.next_stored_chunk_idx, chunks_range.end)

    # -- which chunks -----------------------------------------------------------------------------------------

    def _range(self, state: RequestState, group_state: GroupState, num_tokens: int) -> _Range:
        group = group_state.group
        has_ended = state.request.status.is_finished
        end = self._storable_chunks(state, group_state, num_tokens)
        start = group_state.next_stored_chunk_idx
        prompt_horizon = state.storable_prompt_tokens // group.tokens_per_chunk
        segment = self._segment_blocks(group)
        reconsiders = has_ended and end != prompt_horizon and segment is not None
        if reconsiders:
            assert segment is not None
            end_block = end * group.blocks_per_chunk
            start = min(start, (end_block - end_block % segment) // group.blocks_per_chunk)
        return _Range(
            start, end, self._horizon(group, end, prompt_horizon, has_ended=has_ended), reconsiders, prompt_horizon
        )

    def _segment_blocks(self, group: OffloadGroup) -> int | None:
        """Blocks from one possible end of a hit to the next, where the request's own end makes a difference."""
        alignment = self._layout.alignment_tokens
        if (
            self._layout.retention_interval is not None
            or alignment is None
            or group.is_drafter
            or group.kind != SLIDING_WINDOW
            or alignment % group.tokens_per_block
        ):
            return None
        return alignment // group.tokens_per_block

    def _horizon(self, group: OffloadGroup, end: int, prompt_horizon: int, *, has_ended: bool) -> int | None:
        if self._layout.retention_interval is not None or group.is_drafter:
            return None
        if has_ended:
            return end
        # The frontier of decoding is no end at which somebody could hit.
        return prompt_horizon if end <= prompt_horizon else None

    def _offer(self, state: RequestState, index: int, chunks_range: _Range) -> _Offer:
        group_state = state.groups[index]
        group, start, end = group_state.group, chunks_range.start, chunks_range.end
        if group.is_aligned_state or end <= start:
            return _Offer(start, _NO_CHUNKS, NO_KEYS)
        size = group.blocks_per_chunk
        blocks = group_state.table.ids[start * size : end * size]
        if len(blocks) != (end - start) * size:
            raise EngineFatal("AssertionError", "_build_store_jobs: keys and block ids differ in number")
        if not group.is_windowed and blocks.all():
            return _Offer(start, None, group_state.keys[start:end])
        wanted = self._is_wanted(state, index, chunks_range, blocks.reshape(-1, size))
        chunks = start + np.flatnonzero(wanted)
        return _Offer(start, chunks, group_state.keys[chunks])

    def _is_wanted(self, state: RequestState, index: int, chunks_range: _Range, blocks: BlockIds) -> Mask:
        """Which chunks of the range to offer; `blocks` has a row for each."""
        wanted: Mask = blocks[:, -1] != 0
        if not state.groups[index].group.is_windowed:
            return wanted
        reachable = self._reachable(state, index, chunks_range, chunks_range.horizon)
        if chunks_range.reconsiders:
            expected = self._reachable(state, index, chunks_range, chunks_range.prompt_horizon).any(axis=1)
            is_old = np.arange(chunks_range.start, chunks_range.end) < state.groups[index].next_stored_chunk_idx
            wanted &= ~(is_old & expected)
        # Of a chunk with a reachable null block a part would never be written.
        wanted &= reachable.any(axis=1) & ~((blocks == 0) & reachable).any(axis=1)
        return wanted

    def _reachable(self, state: RequestState, index: int, chunks_range: _Range, horizon: int | None) -> Mask:
        size = self._layout.blocks_per_chunk
        start, end = chunks_range.start * size, chunks_range.end * size
        boundaries: tuple[int, ...] = ()
        if self._layout.retention_interval is not None:
            boundaries = (state.request.num_prompt_tokens - 1,)
            if state.shared_prefix_boundary:  # a drafter would keep a block behind 0, too
                boundaries += (state.shared_prefix_boundary,)
        final = None if horizon is None else horizon * size
        mask = self.masks[index].blocks(start, end, Horizon(final, boundaries))
        return (np.ones(end - start, np.bool_) if mask is None else mask).reshape(-1, size)

    # -- the copy ---------------------------------------------------------------------------------------------

    def _job(self, state: RequestState, offers: list[_Offer], plan: StorePlan) -> TransferJob:
        self._check_others(state)
        takes_all = len(plan.keys) == sum(len(offer.keys) for offer in offers)
        sources: list[tuple[BlockIds, int]] = [(_NO_BLOCKS, 0)] * len(state.groups)
        for index, offer in zip(self._mirrored, offers, strict=True):
            is_accepted = None if takes_all else ~self._space.not_among(offer.keys, plan.keys)
            sources[index] = self._source(state.groups[index], offer, is_accepted)
        gpu = GpuBlocks(
            _joined([blocks for blocks, _ in sources]),
            tuple([len(blocks) for blocks, _ in sources]),
            tuple([first for _, first in sources]),
        )
        fenced, deferred = _NO_BLOCKS, gpu.block_ids
        if self._layout.windowed:
            kinds: dict[bool, list[BlockIds]] = {True: [], False: []}
            for group, (blocks, _) in zip(self._layout.groups, sources, strict=True):
                kinds[group.is_windowed].append(blocks)
            fenced, deferred = _joined(kinds[True]), _joined(kinds[False])
        return self.open(state, plan.keys, gpu, plan.chunk_ids, fenced=fenced, deferred_fence=deferred)

    def _check_others(self, state: RequestState) -> None:
        for job_id in state.jobs:
            if not self._ledger.jobs[job_id].tolerates_others:
                raise EngineFatal("AssertionError", "_build_store_jobs: a load is pending")

    def _source(self, group_state: GroupState, offer: _Offer, is_accepted: Mask | None) -> tuple[BlockIds, int]:
        """Blocks of the chunks that were accepted (None: all), and the first one's place in the table."""
        size = group_state.group.blocks_per_chunk
        chunks = offer.chunks
        if chunks is None:
            num_chunks = len(offer.keys)
            if is_accepted is None:
                first = offer.start * size
                return group_state.table.ids[first : first + num_chunks * size].copy(), first
            chunks = np.arange(offer.start, offer.start + num_chunks)
        if is_accepted is not None:
            chunks = chunks[is_accepted]
        if not len(chunks):
            return _NO_BLOCKS, 0
        places = chunks if size == 1 else (chunks[:, np.newaxis] * size + np.arange(size)).ravel()
        blocks = group_state.table.ids[places]
        is_real = blocks != 0
        return blocks[is_real], int(places[is_real][0]) if is_real.any() else 0

    def open(
        self,
        state: RequestState,
        keys: Keys,
        gpu: GpuBlocks,
        chunk_ids: ChunkIds,
        *,
        fenced: Sequence[int] | BlockIds,
        deferred_fence: Sequence[int] | BlockIds = (),
    ) -> TransferJob:
        """Enter a store into the books."""
        req_id = state.request.request_id
        job_id = self._ledger.open(
            Job(
                req_id,
                self._layout.num_workers,
                keys,
                is_store=True,
                num_blocks=len(gpu.block_ids),
                fenced=fenced,
                deferred_fence=deferred_fence,
            )
        )
        state.jobs[job_id] = None
        return TransferJob(job_id, req_id, True, gpu, chunk_ids)


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """One after the other."""
    if len(parts) > 1:
        parts = [part for part in parts if len(part)]
    if not parts:
        return _NO_BLOCKS
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
