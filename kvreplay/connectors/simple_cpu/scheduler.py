"""The scheduler's half: which blocks are in the CPU's pool, and which are on their way (vLLM: manager.py).

The CPU's pool is a second prefix cache for the same groups, with a lookup of its own. All that a step stores is one
event, and so is all that it loads. Whatever is copied is held on both sides until the copy is reported.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from kvreplay.connectors.simple_cpu.eager_stores import EagerStores
from kvreplay.connectors.simple_cpu.lazy_stores import LazyStores
from kvreplay.connectors.simple_cpu.stores import Stores
from kvreplay.connectors.simple_cpu.structs import CopyEvent, Pairs, SimpleCpuMetadata, SimpleCpuOutput
from kvreplay.engine.connector import KVConnectorOutput, PlainSchedulerHalf, RequestBlocks
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request
from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.lookup import Hit
from kvreplay.kv.prefix_cache import NO_KEY, BlockIds
from kvreplay.kv.specs import cdiv


class StoreObserver(Protocol):
    """Is told of stores and of what becomes of them."""

    def started(self, event: CopyEvent) -> None: ...

    def ended(self, event: CopyEvent, failure: str | None) -> None: ...

    def loses_found(self, req_id: str) -> bool:
        """Whether what a lookup has just found is evicted before it can be loaded, as far as nobody holds it."""
        ...


class _Found(NamedTuple):
    """What a lookup has found beyond `num_computed` tokens: blocks of the CPU per group, null where none is needed."""

    hit: Hit
    num_tokens: int
    num_computed: int

    @property
    def blocks(self) -> BlockIds:
        ids: BlockIds = np.concatenate(self.hit)
        real: BlockIds = ids[ids != NULL_BLOCK_ID]
        return real


class _Load:
    __slots__ = ("event", "pairs")

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.event: int | None = None
        """None until the workers are told."""


class SimpleCpuScheduler(PlainSchedulerHalf):
    """`lazy_batch_tokens`: store what the free queue is about to lose, as far ahead as a batch of so many tokens may
    need blocks; None: store what requests have computed. `stops_circles`: see `LazyStores`.
    `medium`: what the second pool is in.

    `looks_again`: what a lookup has found is not pinned, but looked up once more when the request gets its blocks, as
    before vllm#42289. `forgives_lost_keys`: a block that has lost its hash while it was stored is not entered, instead
    of being fatal.
    """

    requires_kv_delivery = False
    lookup_is_pure = True

    def __init__(
        self,
        kv: KVCacheManager,
        num_blocks: int,
        num_keys: int,
        *,
        looks_again: bool,
        forgives_lost_keys: bool,
        observer: StoreObserver,
        lazy_batch_tokens: int | None = None,
        stops_circles: bool = True,
        medium: str = "CPU",
    ) -> None:
        self._kv = kv
        self.cpu = kv.over(BlockPool(num_blocks, num_keys), allows_hits_inside_blocks=lazy_batch_tokens is None)
        """Its pool's block 0 is the null block."""
        self.stores: Stores = EagerStores(kv, self.cpu)
        if lazy_batch_tokens is not None:
            self.stores = LazyStores(kv, self.cpu, lazy_batch_tokens, stops_circles=stops_circles)
        self.lookup_version = 0
        self._looks_again = looks_again
        self._forgives_lost_keys = forgives_lost_keys
        self._observer = observer
        self._medium = medium
        self._found: dict[str, _Found] = {}
        """Request → what its last lookup has found; pinned, unless it is looked up again."""
        self._loads: dict[str, _Load] = {}
        self._load_events: dict[int, list[str]] = {}
        self._store_events: dict[int, CopyEvent] = {}
        self._abandoned: dict[int, CopyEvent] = {}
        """Stores that a reset has disowned."""
        self._left_at_end: list[tuple[str, Pairs]] = []
        """What requests that have ended still store, with the next step."""
        self._num_loads = self._num_stores = 0

    @property
    def pool(self) -> BlockPool:
        return self.cpu.pool

    # -- requests ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        pass

    def needs_share(self, request_id: str) -> bool:
        return self.stores.needs_shares

    @property
    def needs_every_step(self) -> bool:  # type: ignore[override]
        return self.stores.has_more

    def note_uneventful(self) -> None:
        self.stores.note_uneventful()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._unpin(request.request_id)
        found = self._find(request, num_computed_tokens)
        if found is None:
            return 0, False
        blocks = found.blocks
        if not self._looks_again:
            self.pool.touch(blocks)
        self._found[request.request_id] = found
        if self._observer.loses_found(request.request_id):
            self.pool.evict_blocks(blocks[self.pool.ref_counts[blocks] == 0].tolist())
        return found.num_tokens, True

    def _find(self, request: Request, num_computed: int) -> _Found | None:
        """A token must be left to compute, and a hit that ends inside a block is left alone."""
        if request.skip_reading_prefix_cache or num_computed % self._kv.block_size:
            return None
        if any(num_computed % (spec.attention_chunk_size or 1) for spec in self.cpu.groups):
            return None  # chunks are counted from the start of what is looked up
        unit = self.cpu.rules.hash_block_size
        keys = request.content.block_keys[num_computed // unit : request.num_tokens // unit]
        most = request.num_tokens - 1 - num_computed
        if not len(keys) or most <= 0:
            return None
        found = self.cpu.lookup.find(keys, most)
        return _Found(found.hit, found.num_tokens, num_computed) if found.num_tokens > 0 else None

    def _unpin(self, req_id: str) -> None:
        found = self._found.pop(req_id, None)
        if found is not None and not self._looks_again:
            self._free(found)

    def _free(self, found: _Found) -> None:
        self.pool.free_blocks(found.blocks)
        self.lookup_version += 1

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        req_id = request.request_id
        self.stores.follow(request)
        if not num_external_tokens:
            self._unpin(req_id)
            return
        found = self._found.pop(req_id, None)
        if found is None:
            return
        if self._looks_again:
            again = self._find(request, found.num_computed)
            num_again = again.num_tokens if again is not None else 0
            if num_again != num_external_tokens or again is None:
                raise EngineFatal("AssertionError", f"Expected {num_external_tokens} hit tokens, got {num_again}")
            found = again
        unit = self.cpu.rules.hash_block_size
        if num_external_tokens % unit:
            message = f"num_external_tokens={num_external_tokens} is not aligned to hash_block_size={unit}"
            raise EngineFatal("AssertionError", message)
        pairs = self._pairs(found, blocks, num_external_tokens)
        self.pool.touch(pairs.cpu_ids)
        if not self._looks_again:
            self._free(found)
        self._kv.pool.touch(pairs.gpu_ids)
        assert req_id not in self._loads, req_id
        self._loads[req_id] = _Load(pairs)

    def _pairs(self, found: _Found, blocks: RequestBlocks, num_external_tokens: int) -> Pairs:
        pairs = Pairs()
        for manager, table, hit in zip(self.cpu.managers, blocks.get_block_ids(), found.hit, strict=True):
            if not manager.spec.prefix_cacheable:
                continue
            first = found.num_computed // manager.block_size
            for index, cpu_block in enumerate(hit[: cdiv(num_external_tokens, manager.block_size)].tolist()):
                if cpu_block != NULL_BLOCK_ID:
                    pairs.add(manager.group, table[first + index], cpu_block)
        return pairs

    def get_load_source(self, request_id: str) -> str | None:
        return self._medium

    def request_finished(self, request: Request, blocks: RequestBlocks) -> bool:
        """What is being copied has a reference of its own."""
        req_id = request.request_id
        left = self.stores.at_end(request, blocks.get_block_ids())
        if len(left):
            self._left_at_end.append((req_id, left))
            self.lookup_version += 1
        self._unpin(req_id)
        load = self._loads.get(req_id)
        if load is not None and load.event is None:
            self._end_load(req_id)
        self.stores.forget(req_id)
        return False

    # -- steps ------------------------------------------------------------------------------------------------

    def build_connector_meta(self, out: SchedulerOutput) -> SimpleCpuMetadata | None:
        store, load = self._build_store(out), self._build_load()
        if store is None and load is None and not out.preempted:
            return None
        return SimpleCpuMetadata(load, store, must_flush=bool(out.preempted))

    def _build_store(self, out: SchedulerOutput) -> CopyEvent | None:
        pairs, owners = self.stores.of_step(out)
        for req_id, left in self._left_at_end:
            pairs.extend(left)
            owners.append(req_id)
        self._left_at_end.clear()
        if not len(pairs):
            return None
        event = CopyEvent(self._num_stores, True, tuple(owners), pairs)
        self._num_stores += 1
        self._store_events[event.number] = event
        self._observer.started(event)
        self.lookup_version += 1
        return event

    def _build_load(self) -> CopyEvent | None:
        req_ids = [req_id for req_id, load in self._loads.items() if load.event is None]
        if not req_ids:
            return None
        pairs = Pairs()
        for req_id in req_ids:
            load = self._loads[req_id]
            load.event = self._num_loads
            pairs.extend(load.pairs)
        self._load_events[self._num_loads] = req_ids
        self._num_loads += 1
        return CopyEvent(self._num_loads - 1, False, tuple(req_ids), pairs)

    # -- reports ----------------------------------------------------------------------------------------------

    def has_pending_push_work(self) -> bool:
        return bool(self._left_at_end or self._store_events or self._abandoned)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for req_id in output.finished_recving:
            self._end_load(req_id)
        if isinstance(output, SimpleCpuOutput):
            for number in output.stored:
                self._end_store(number, output.failed)

    def _end_load(self, req_id: str) -> None:
        load = self._loads.pop(req_id, None)
        if load is None:
            return
        if load.event is not None:
            waiting = self._load_events[load.event]
            waiting.remove(req_id)
            if not waiting:
                del self._load_events[load.event]
        self.pool.free_blocks(load.pairs.cpu_ids)
        self._kv.pool.free_blocks(load.pairs.gpu_ids)
        self.lookup_version += 1

    def _end_store(self, number: int, failed: Mapping[int, str]) -> None:
        self.lookup_version += 1
        event = self._store_events.pop(number, None)
        if event is None:
            self._release(self._abandoned.pop(number).pairs)
            return
        self.stores.note_ended(event.pairs)
        failure = failed.get(number)
        if failure is None:
            self._enter(event.pairs)
        self._release(event.pairs)
        self._observer.ended(event, failure)

    def _enter(self, pairs: Pairs) -> None:
        """What has been copied can be hit from now on, under the keys that the GPU's blocks have."""
        gpu, cpu = pairs.gpu_ids, pairs.cpu_ids
        has_key = self._kv.pool.keys[gpu] != NO_KEY
        if not has_key.all():
            if not self._forgives_lost_keys:
                raise EngineFatal("AssertionError")
            gpu, cpu = gpu[has_key], cpu[has_key]
        self.pool.cache_copies(cpu, self._kv.pool, gpu)

    def _release(self, pairs: Pairs) -> None:
        self.pool.free_blocks(pairs.cpu_ids)
        if len(set(pairs.gpu)) == len(pairs):
            self._kv.pool.free_blocks(pairs.gpu_ids)
        else:
            self._kv.pool.free_each(pairs.gpu)

    def reset_cache(self) -> bool:
        """Stores under way are disowned, and held until they are reported; only then can the pool be emptied."""
        for req_id in list(self._found):
            self._unpin(req_id)
        self._abandoned.update(self._store_events)
        self._store_events.clear()
        for _, left in self._left_at_end:
            self._release(left)
        self._left_at_end.clear()
        self.stores.forget_all()
        for req_id in [req_id for req_id, load in self._loads.items() if load.event is None]:
            self._end_load(req_id)
        self.lookup_version += 1
        return not self._abandoned and not self._loads and self.pool.reset()
