"""What a KV cache group needs, and how a pool is cut into blocks (vLLM: v1/kv_cache_interface.py)."""

from dataclasses import dataclass
from typing import Final

from kvreplay.errors import ConfigError

FULL: Final = "full"
SLIDING_WINDOW: Final = "sliding_window"

GROUP_KINDS: Final = (FULL, SLIDING_WINDOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one spec and one block table.

    `block_size` and `sliding_window` in tokens; `bytes_per_token` summed over the group's layers on one rank.
    """

    kind: str = FULL
    block_size: int = 16
    sliding_window: int | None = None
    bytes_per_token: int = 0

    def __post_init__(self) -> None:
        if self.kind not in GROUP_KINDS:
            raise ConfigError(f"model.groups: kind must be one of {', '.join(GROUP_KINDS)}, got {self.kind!r}")
        if self.block_size <= 0:
            raise ConfigError(f"model.groups: block_size must be > 0, got {self.block_size}")
        if (self.kind == SLIDING_WINDOW) != (self.sliding_window is not None):
            raise ConfigError("model.groups: sliding_window is needed by, and only by, kind 'sliding_window'")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ConfigError(f"model.groups: sliding_window must be > 0, got {self.sliding_window}")

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.bytes_per_token
