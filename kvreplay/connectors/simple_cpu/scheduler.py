"""The scheduler's half: which blocks are in the CPU's pool, and which are on their way (vLLM: manager.py)."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from kvreplay.connectors.simple_cpu.structs import CopyJob, SimpleCpuMetadata, SimpleCpuOutput
from kvreplay.engine.connector import KVConnectorOutput, PlainSchedulerHalf, RequestBlocks
from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.request import Request
from kvreplay.errors import EngineFatal
from kvreplay.kv.block_pool import BlockIds, BlockPool
from kvreplay.kv.cache_manager import KVCacheManager


class JobObserver(Protocol):
    """Is told of stores and of what becomes of them."""

    def started(self, job: CopyJob) -> None: ...

    def ended(self, job: CopyJob, failure: str | None) -> None: ...

    def loses_found(self, req_id: str) -> bool:
        """Whether what a lookup has just found is evicted before it can be loaded, as far as nobody holds it."""
        ...


class SimpleCpuScheduler(PlainSchedulerHalf):
    """For one group of full attention. `looks_again`: what a lookup has found is not pinned, but looked up once more
    when the request gets its blocks, as before vllm#42289."""

    requires_kv_delivery = False
    lookup_is_pure = True

    def __init__(
        self, kv: KVCacheManager, num_blocks: int, num_keys: int, *, looks_again: bool, observer: JobObserver
    ) -> None:
        self.pool = BlockPool(num_blocks + 1, num_keys)
        """Of the CPU; its block 0 is never used."""
        self.lookup_version = 0
        self.num_refused = 0
        """Blocks for which there was no room, because all others are in use."""
        self._kv = kv
        self._looks_again = looks_again
        self._observer = observer
        self._next_number = 0
        self._found: dict[str, BlockIds] = {}
        """Request → CPU blocks that its last lookup has found; pinned, unless they are looked up again."""
        self._num_looked_at: dict[str, int] = {}
        """Request → its first blocks that have been dealt with."""
        self._new_loads: list[CopyJob] = []
        self._jobs: dict[int, CopyJob] = {}
        self._keys: dict[int, BlockIds] = {}
        """Store → the keys of its blocks, under which they can be found when it is over."""
        self._on_their_way: set[int] = set()

    # -- requests ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        pass

    def needs_share(self, request_id: str) -> bool:
        return True  # what it generates is stored, too

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._unpin(request.request_id)
        found = self._find(request, num_computed_tokens)
        if not len(found):
            return 0, False
        if not self._looks_again:
            self.pool.touch(found)
        self._found[request.request_id] = found
        if self._observer.loses_found(request.request_id):
            self.pool.evict_blocks(found[self.pool.ref_counts[found] == 0].tolist())
        return len(found) * self._kv.block_size, True

    def _find(self, request: Request, num_computed_tokens: int) -> BlockIds:
        """A token must be left to compute, and a hit that ends inside a block is left alone."""
        block_size = self._kv.block_size
        if num_computed_tokens % block_size:
            return self.pool.find_prefix(request.content.block_keys[:0])
        first, end = num_computed_tokens // block_size, (request.num_tokens - 1) // block_size
        return self.pool.find_prefix(request.content.block_keys[first:end])

    def _unpin(self, req_id: str) -> None:
        found = self._found.pop(req_id, None)
        if found is not None and not self._looks_again:
            self.pool.free_blocks(found[::-1].copy())
            self.lookup_version += 1

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        req_id, block_size = request.request_id, self._kv.block_size
        if not num_external_tokens:
            self._unpin(req_id)
            return
        table = np.array(blocks.get_block_ids()[0], np.int64)
        first = len(table) - num_external_tokens // block_size
        if self._looks_again:
            del self._found[req_id]
            found = self._find(request, first * block_size)
            if len(found) * block_size != num_external_tokens:
                raise EngineFatal(
                    "AssertionError", f"Expected {num_external_tokens} hit tokens, got {len(found) * block_size}"
                )
            self.pool.touch(found)
        else:
            found = self._found.pop(req_id)
        self._num_looked_at[req_id] = len(table)
        self._new_loads.append(self._open(req_id, table[first:], found, is_store=False))

    def get_load_source(self, request_id: str) -> str | None:
        return "CPU"

    def request_finished(self, request: Request, blocks: RequestBlocks) -> bool:
        """What is being copied has a reference of its own."""
        self._unpin(request.request_id)
        self._num_looked_at.pop(request.request_id, None)
        return False

    # -- steps ------------------------------------------------------------------------------------------------

    def build_connector_meta(self, out: SchedulerOutput) -> SimpleCpuMetadata | None:
        for req_id in out.preempted:
            self._num_looked_at.pop(req_id, None)
        stores = [job for share in out.shares if (job := self._store(share)) is not None]
        loads, self._new_loads = self._new_loads, []
        if not (loads or stores or out.preempted):
            return None
        return SimpleCpuMetadata(loads, stores, must_flush=bool(out.preempted))

    def _store(self, share: Share) -> CopyJob | None:
        """What is full at the end of this share and not in the CPU's pool, as far as there is room."""
        request = share.request
        first = self._num_looked_at.get(request.request_id, 0)
        end = min(share.end, request.num_tokens) // self._kv.block_size
        if end <= first:
            return None
        self._num_looked_at[request.request_id] = end
        keys = request.content.block_keys[first:end]
        is_new = (self.pool.find(keys) == 0) & [key not in self._on_their_way for key in keys.tolist()]
        keys, gpu_blocks = keys[is_new], self._kv.block_arrays(request.request_id)[0][first:end][is_new]
        room = min(len(keys), self.pool.num_free)
        self.num_refused += len(keys) - room
        if not room:
            return None
        keys, gpu_blocks = keys[:room], gpu_blocks[:room].copy()
        job = self._open(request.request_id, gpu_blocks, self.pool.get_new_blocks(room), is_store=True)
        self._kv.pool.touch(gpu_blocks)
        self._keys[job.number] = keys
        self._on_their_way.update(keys.tolist())
        self._observer.started(job)
        self.lookup_version += 1
        return job

    def _open(self, req_id: str, gpu_blocks: BlockIds, cpu_blocks: BlockIds, *, is_store: bool) -> CopyJob:
        job = CopyJob(self._next_number, req_id, is_store, gpu_blocks, cpu_blocks)
        self._next_number += 1
        self._jobs[job.number] = job
        return job

    # -- reports ----------------------------------------------------------------------------------------------

    def has_pending_push_work(self) -> bool:
        return bool(self._jobs)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if isinstance(output, SimpleCpuOutput):
            for number in output.done:
                self._end(self._jobs.pop(number), output.failed)

    def _end(self, job: CopyJob, failed: Mapping[int, str]) -> None:
        failure = failed.get(job.number)
        self.lookup_version += 1
        if job.is_store:
            keys = self._keys.pop(job.number)
            self._on_their_way.difference_update(keys.tolist())
            if failure is None:
                self.pool.cache(job.cpu_blocks, keys)
            self._kv.pool.free_blocks(job.gpu_blocks[::-1].copy())
            self._observer.ended(job, failure)
        # The head of a prefix is to outlive its tail.
        self.pool.free_blocks(job.cpu_blocks[::-1].copy())

    def reset_cache(self) -> bool:
        return self.pool.reset()
