"""What to load, and into which blocks (vLLM: offloading/scheduler.py, update_state_after_alloc)."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvreplay.connectors.offloading.arrays import NO_KEYS, Keys
from kvreplay.connectors.offloading.behaviour import OffloadBehaviour
from kvreplay.connectors.offloading.context import OffloadPolicy
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.connectors.offloading.ledger import Job, JobLedger
from kvreplay.connectors.offloading.load_boundary import BOUNDARIES
from kvreplay.connectors.offloading.manager import OffloadingManager
from kvreplay.connectors.offloading.request_state import RequestState
from kvreplay.connectors.offloading.structs import GpuBlocks, TransferJob
from kvreplay.errors import engine_asserts
from kvreplay.kv.prefix_cache import BlockIds

_engine_asserts = partial(engine_asserts, where="update_state_after_alloc")


class _GroupLoad(NamedTuple):
    """One group's part: what goes into which blocks, and where in the table the first of them is."""

    keys: Keys
    block_ids: BlockIds
    start: int


class LoadBuilder:
    """Turns an admission with external tokens into a load, and pins its chunks."""

    def __init__(
        self, layout: OffloadLayout, manager: OffloadingManager, ledger: JobLedger, behaviour: OffloadBehaviour
    ) -> None:
        self._layout = layout
        self._manager = manager
        self._ledger = ledger
        self._boundary = BOUNDARIES[behaviour.boundary]
        self._tolerates_missing = behaviour.missing_chunk == "miss"

    def build(
        self,
        state: RequestState,
        tables: Sequence[BlockIds],
        unhashed: Sequence[Sequence[int]],
        total: int,
        *,
        is_sync: bool,
    ) -> TransferJob:
        """Fill the request's blocks up to `total` tokens. `unhashed`: by group, its real blocks without a hash."""
        boundary = state.partial_tail_boundary
        _engine_asserts(boundary is None or boundary == total, "partial_tail_boundary == num_cached_tokens")
        state.loaded_from_offload = True
        loads = []
        for index, group in enumerate(self._layout.groups):
            table = tables[group.group_id]
            start = self._start(state, group, table, unhashed[group.group_id], total, is_sync=is_sync)
            loads.append(self._group_load(state, index, table, start, total))
        state.partial_tail_boundary = None
        return self._open(state, loads, is_sync=is_sync)

    def _start(
        self,
        state: RequestState,
        group: OffloadGroup,
        table: BlockIds,
        unhashed: Sequence[int],
        total: int,
        *,
        is_sync: bool,
    ) -> int:
        """The first block to load into."""
        end = -(-total // group.tokens_per_block)
        _engine_asserts(len(table) >= end, "len(group_blocks) >= num_gpu_blocks")
        start = self._boundary.start(
            table,
            unhashed,
            local=state.num_local_tokens,
            tokens_per_block=group.tokens_per_block,
            end=end,
            is_sync=is_sync,
        )
        if group.is_windowed:
            limit = group.window_chunks * group.blocks_per_chunk + 1
            _engine_asserts(end - start <= limit, "num_pending_gpu_blocks <= sliding_window_size_in_chunks")
        return start

    def _group_load(self, state: RequestState, index: int, table: BlockIds, start: int, total: int) -> _GroupLoad:
        group_state = state.groups[index]
        group = group_state.group
        end = -(-total // group.tokens_per_block)
        num_chunks = -(-total // group.tokens_per_chunk)
        keys = NO_KEYS
        if start < end:
            keys = self._keys(state, index, start // group.blocks_per_chunk, num_chunks)
        if state.policy is OffloadPolicy.CHUNK_LEVEL:
            # What is loaded is there already.
            group_state.next_stored_chunk_idx = num_chunks
        return _GroupLoad(keys, table[start:end], start)

    def _keys(self, state: RequestState, index: int, first: int, num_chunks: int) -> Keys:
        """Of chunks from `first` on; a hit that ends inside a block has a last key of its own."""
        group_state = state.groups[index]
        boundary = state.partial_tail_boundary
        end = num_chunks if boundary is None else num_chunks - 1
        _engine_asserts(len(group_state.keys) >= end, "len(offload_keys) >= end_chunk_idx")
        keys = group_state.keys[first:end]
        if boundary is None:
            return keys
        return np.append(keys, state.boundary_key(index, boundary + self._layout.proof_margin(group_state.group)))

    def _open(self, state: RequestState, loads: Sequence[_GroupLoad], *, is_sync: bool) -> TransferJob:
        req_id = state.request.request_id
        keys = loads[0].keys if len(loads) == 1 else np.concatenate([load.keys for load in loads])
        failure = None
        if self._tolerates_missing and not self._manager.can_load(keys):
            keys, failure = NO_KEYS, "an offloaded chunk is gone"
        chunk_ids = self._manager.prepare_load(keys, state.context)
        gpu = GpuBlocks(
            np.concatenate([load.block_ids for load in loads]),
            tuple([len(load.block_ids) for load in loads]),
            tuple([load.start for load in loads]),
        )
        _engine_asserts(not state.jobs, "not req_status.transfer_jobs")
        job_id = self._ledger.open(
            Job(
                req_id,
                self._layout.num_workers,
                keys,
                is_store=False,
                num_blocks=len(gpu.block_ids),
                is_sync_load=is_sync,
            )
        )
        state.jobs[job_id] = None
        return TransferJob(job_id, req_id, False, gpu, chunk_ids, is_sync, failure)
