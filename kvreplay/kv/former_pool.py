"""What a prefix cache would hold if it had never lost anything: for lookups that tell what evictions have cost."""

from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.prefix_cache import BlockIds, Keys


class FormerPool(BlockPool):
    """A view of another pool's cache. Only its lookups mean anything, and the blocks that they name do not."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(2, enable_caching=pool.enable_caching)
        self._pool = pool

    def find(self, keys: Keys) -> BlockIds:
        return self._pool.find_former(keys)

    def _holds(self, key: int) -> bool:
        return self._pool.is_or_was_cached(key)
