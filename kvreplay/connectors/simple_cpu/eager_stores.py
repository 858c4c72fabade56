"""Which blocks of a step are stored (vLLM: manager.py, _prepare_eager_store_specs, _queue_finished_eager_store).

Only what earlier steps have computed for certain, so that a block is stored a step after the one that fills it, or when
its request ends. Tables are followed by what each step hands out, as in vLLM: they keep ids of blocks that have left a
window, which by then may hold somebody else's tokens. A block is stored under the keys that it has itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvreplay.connectors.simple_cpu.stores import StoreCounts, take
from kvreplay.connectors.simple_cpu.structs import Pairs
from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.request import Request
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.group_keys import group_of
from kvreplay.kv.managers.base import KVGroupManager
from kvreplay.kv.prefix_cache import NO_KEY
from kvreplay.kv.specs import MAMBA


@dataclass(slots=True)
class _Followed:
    request: Request
    tables: list[list[int]]
    next_index: list[int]
    """Per group: blocks below have been stored, or passed over."""


class EagerStores:
    """`gpu` and `cpu`: the same groups over either pool."""

    has_more = False
    needs_shares = True
    """What is generated is stored, too, each block in the step after it is full."""

    def __init__(self, gpu: KVCacheManager, cpu: KVCacheManager) -> None:
        self._gpu, self._cpu = gpu, cpu
        self._by_position = [
            manager
            for manager in cpu.managers
            if manager.spec.prefix_cacheable and not (manager.spec.kind == MAMBA and manager.spec.is_aligned_mamba)
        ]
        self._full = next(manager for manager in cpu.managers if manager.spec.is_full_attention)
        self._followed: dict[str, _Followed] = {}
        self._in_flight: set[int] = set()
        """Blocks of the GPU that are being stored."""
        self.counts = StoreCounts()

    # -- requests ---------------------------------------------------------------------------------------------

    def follow(self, request: Request) -> None:
        if request.request_id not in self._followed:
            self._followed[request.request_id] = self._afresh(request)

    def _afresh(self, request: Request) -> _Followed:
        count = len(self._cpu.groups)
        return _Followed(request, [[] for _ in range(count)], [0] * count)

    def forget(self, req_id: str) -> None:
        self._followed.pop(req_id, None)

    def forget_all(self) -> None:
        self._followed.clear()
        self._in_flight.clear()

    # -- a step -----------------------------------------------------------------------------------------------

    def note_uneventful(self) -> None: ...

    def of_step(self, out: SchedulerOutput) -> tuple[Pairs, list[str]]:
        """What is stored, with its place in the CPU's pool, and whose it is."""
        pairs = Pairs()
        owners: dict[str, None] = {}
        for req_id, states in out.boundary_states.items():
            gone = req_id not in self._followed or req_id in out.preempted or req_id in out.finished_req_ids
            for state in states:
                self.counts.handed_over += 1
                if not gone and self._is_storable(state.block_id):
                    if self._cpu.pool.num_free:
                        self._take(pairs, [(state.group, state.block_id)])
                        self.counts.stored_states += 1
                        owners[req_id] = None
                    else:
                        self.counts.refused += 1
        for req_id in out.preempted:
            followed = self._followed.get(req_id)
            if followed is not None:
                self._followed[req_id] = self._afresh(followed.request)
        for share in sorted(out.shares, key=_place):
            followed = self._followed.get(share.request.request_id)
            if followed is None:
                continue
            self._note_blocks(followed, share)
            chosen = self._select(followed, followed.tables, advances=True)
            if chosen:
                self._take(pairs, chosen)
                owners[share.request.request_id] = None
        return pairs, list(owners)

    def _note_blocks(self, followed: _Followed, share: Share) -> None:
        if share.admitted:
            followed.tables = [ids.tolist() for ids in self._gpu.block_arrays(share.request.request_id)]
            return
        for table, new in zip(followed.tables, share.new_blocks, strict=True):
            if len(new):
                table.extend(new.tolist())

    def at_end(self, request: Request, tables: Sequence[Sequence[int]]) -> Pairs:
        """What a request that ends has left to store; `tables`: its blocks now."""
        pairs = Pairs()
        followed = self._followed.get(request.request_id)
        if followed is None:
            return pairs
        chosen = self._select(followed, tables, advances=False)
        tail = self._prompt_tail(request, tables)
        if tail is not None and len(chosen) < self._cpu.pool.num_free and tail not in (block for _, block in chosen):
            chosen.append((self._full.group, tail))
        self._take(pairs, chosen)
        return pairs

    def note_ended(self, pairs: Pairs) -> None:
        self._in_flight.difference_update(pairs.gpu)

    def _take(self, pairs: Pairs, chosen: Sequence[tuple[int, int]]) -> None:
        take(pairs, [(self._owner_of(block_id), block_id) for _, block_id in chosen], self._gpu.pool, self._cpu.pool)
        self._in_flight.update(block_id for _, block_id in chosen)

    def _owner_of(self, block_id: int) -> int:
        """The group whose key the block has, and whose words: a table may still name what its window has left."""
        num_groups = len(self._gpu.groups)
        return group_of(int(self._gpu.pool.keys[block_id]), num_groups) if num_groups > 1 else 0

    def _is_storable(self, block_id: int) -> bool:
        if block_id == NULL_BLOCK_ID or block_id in self._in_flight:
            return False
        key = self._gpu.pool.keys[block_id : block_id + 1]
        return int(key[0]) != NO_KEY and not self._cpu.pool.find(key)[0]

    def _select(self, followed: _Followed, tables: Sequence[Sequence[int]], *, advances: bool) -> list[tuple[int, int]]:
        """(group, block) of what is certain, as far as there is room."""
        request = followed.request
        confirmed = request.num_computed_tokens - request.num_output_placeholders
        room = self._cpu.pool.num_free
        chosen: list[tuple[int, int]] = []
        for manager in self._by_position:
            if len(chosen) >= room:
                break
            table, start = tables[manager.group], followed.next_index[manager.group]
            ready = min(len(table), self._cpu.cacheable_tokens(manager, confirmed) // manager.block_size)
            index = start
            for index in range(start, ready):
                block_id = table[index] or self._kept(manager, request, index)
                if block_id and self._is_storable(block_id):
                    if len(chosen) >= room:
                        self.counts.refused += 1
                        break
                    chosen.append((manager.group, block_id))
            else:
                index = max(start, ready)
            if advances:
                followed.next_index[manager.group] = index
        return chosen

    def _kept(self, manager: KVGroupManager, request: Request, index: int) -> int:
        """The block that a window has left, where the prefix cache still has it."""
        unit = self._gpu.rules.hash_block_size
        place = (index + 1) * manager.block_size // unit - 1
        keys = request.content.block_keys[place : place + 1]
        if not len(keys) or (place + 1) * unit > request.num_tokens:
            return NULL_BLOCK_ID
        return int(self._gpu.pool.find(manager.pool_keys(keys))[0])

    def _prompt_tail(self, request: Request, tables: Sequence[Sequence[int]]) -> int | None:
        """The full-attention block in which a hit of the same prompt may end (vLLM: _find_fa_partial_tail_source)."""
        if not self._cpu.hits_inside_blocks:
            return None
        unit, size = self._cpu.rules.hash_block_size, self._full.block_size
        boundary = request.num_prompt_tokens // unit * unit
        table = tables[self._full.group]
        if not boundary or boundary > request.num_computed_tokens or boundary % size == 0:
            return None
        if boundary // size >= len(table):
            return None
        block_id = table[boundary // size]
        if block_id == NULL_BLOCK_ID or block_id in self._in_flight:
            return None
        keys = self._full.pool_keys(request.content.block_keys[boundary // unit - 1 : boundary // unit])
        if not self._gpu.pool.holds(block_id, int(keys[0])) or self._cpu.pool.find(keys)[0]:
            return None
        return block_id


def _place(share: Share) -> int:
    """New requests come first, then those that resume, then those that run (vLLM: yield_req_data, V2 model runner)."""
    return int(share.was_preempted) if share.admitted else 2
