"""Scratch blocks: one per request for all of its life, never cached (vLLM: CircularBufferManager)."""

from collections.abc import Sequence

from kvreplay.kv.managers.base import NO_BLOCKS, CachedRequest, DecodeEvent, JointLookup, KVGroupManager, Need
from kvreplay.kv.prefix_cache import BlockIds, Keys


class CircularBufferManager(KVGroupManager):
    def find_longest_cache_hit(
        self, group: JointLookup, keys: Keys, max_length: int, *, drop_eagle_block: bool
    ) -> tuple[list[BlockIds], int]:
        return group.none()

    def num_blocks_to_allocate(self, request_id: str, hit: BlockIds, need: Need) -> int:
        table = self.tables.get(request_id)
        return 0 if table is not None and table.num_blocks else 1

    def add_local_computed_blocks(self, request_id: str, hit: BlockIds, num_local: int, num_external: int) -> None:
        pass

    def allocate_external_computed_blocks(
        self, request_id: str, num_local: int, num_external: int, *, zero: bool
    ) -> BlockIds:
        return self._extend_to(request_id, 1, zero=zero)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, main_tokens: int) -> BlockIds:
        return self._extend_to(request_id, 1, zero=True)

    def cache_blocks(self, request: CachedRequest, keys: Keys, num_tokens: int, boundaries: Sequence[int]) -> BlockIds:
        return NO_BLOCKS

    def decode_events(self, caching_unit: int) -> list[DecodeEvent]:
        return []

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        pass
