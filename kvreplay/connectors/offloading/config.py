"""The OffloadingConnector's settings: vLLM's names (kv_connector_extra_config), and vLLM 0.33.0's defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.errors import ConfigError

_COPY_BYTES_PER_S: Final = 40_000_000_000
"""PCIe 5.0 x16 carries 64 GB/s each way; what copies of a megabyte get of it is our assumption, two thirds. vLLM's blog
of 2026-01-08 on the connector compares ways to copy, and why the unit is a block of all layers."""

_MEMORY_PAGE: Final = 4096

MAX_CHUNKS: Final = 1 << 24
"""Of one tier: as for the blocks of a pool, what is kept of each fits into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingConfig:
    """Sizes in bytes, times in seconds. `cpu_bytes_to_use` is the whole server's; it has no default in vLLM either.

    Chunks are `blocks_per_chunk` blocks, or `block_size` tokens. `tier_bytes`: a secondary tier of that size, with
    `spec_name = "TieringOffloadingSpec"`; None: it never fills. The copy speeds are of one rank and one direction.
    """

    cpu_bytes_to_use: int
    blocks_per_chunk: int | None = None
    block_size: int | None = None
    spec_name: Literal["CPUOffloadingSpec", "TieringOffloadingSpec"] = "CPUOffloadingSpec"
    eviction_policy: Literal["lru", "arc"] = "lru"
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    offload_prompt_only: bool = True
    sync_load_budget_bytes: int = 0
    store_bytes_per_s: int = _COPY_BYTES_PER_S
    load_bytes_per_s: int = _COPY_BYTES_PER_S
    copy_latency: float = 20e-6
    """From one copy's submission, or the end of the one before it, to its first byte."""
    copy_timeout: float = 10.0
    """`ideal` only: a copy that takes longer has failed."""
    report_timeout: float = 1.0
    """`ideal` only: a worker whose report has not been noticed repeats it after so long."""
    lookup_timeout: float = 5.0
    """`ideal` only: a request does not wait longer for a lookup to be decided."""
    tier_bytes: int | None = None
    tier_bytes_per_s: int = 5_000_000_000
    tier_latency: float = 1e-3

    def __post_init__(self) -> None:
        for name in (
            "cpu_bytes_to_use",
            "store_bytes_per_s",
            "load_bytes_per_s",
            "max_tracker_size",
            "tier_bytes_per_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"connector.{name} must be > 0, got {getattr(self, name)}")
        for name in ("store_threshold", "sync_load_budget_bytes", "copy_latency", "tier_latency"):
            if getattr(self, name) < 0:
                raise ConfigError(f"connector.{name} must be >= 0, got {getattr(self, name)}")
        for name in ("copy_timeout", "report_timeout", "lookup_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"connector.{name} must be > 0, got {getattr(self, name)}")
        self._check_chunks()
        if self.store_threshold >= 2 and self.spec_name == "TieringOffloadingSpec":
            raise ConfigError("connector.store_threshold >= 2 is not supported with TieringOffloadingSpec")

    def _check_chunks(self) -> None:
        if self.blocks_per_chunk is not None and self.block_size is not None:
            raise ConfigError("connector: specify only one of block_size and blocks_per_chunk")
        for name in ("blocks_per_chunk", "block_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"connector.{name} must be > 0, got {value}")

    def chunk_blocks(self, block_sizes: Sequence[int]) -> int:
        """How many blocks a chunk has; `block_sizes`: tokens of a block, by group."""
        if self.block_size is None:
            return self.blocks_per_chunk or 1
        if len(set(block_sizes)) != 1:
            raise ConfigError(
                "connector.block_size: all KV cache groups must have the same block size; use blocks_per_chunk"
            )
        if self.block_size % block_sizes[0]:
            raise ConfigError(
                f"connector.block_size ({self.block_size}) must be a multiple of the KV cache block size "
                f"({block_sizes[0]})"
            )
        return self.block_size // block_sizes[0]

    def num_chunks(self, groups: Sequence[OffloadGroup], num_ranks: int) -> int:
        """How many chunks fit. A slot takes one of any group in whole pages of memory, and each rank's part of it."""
        largest = max(group.bytes_per_block for group in groups)
        if largest <= 0:
            raise ConfigError("model.groups: bytes_per_token or state_bytes is needed to turn CPU memory into chunks")
        slot_bytes = largest * num_ranks * groups[0].blocks_per_chunk
        num_chunks = self.cpu_bytes_to_use // (-(-slot_bytes // _MEMORY_PAGE) * _MEMORY_PAGE)
        if not num_chunks:
            raise ConfigError(
                f"connector.cpu_bytes_to_use: {self.cpu_bytes_to_use} bytes hold no chunk of {slot_bytes} bytes"
            )
        if num_chunks > MAX_CHUNKS:
            raise ConfigError(
                f"connector.cpu_bytes_to_use: {self.cpu_bytes_to_use} bytes are {num_chunks} chunks of this model, "
                f"and at most {MAX_CHUNKS} are kept track of"
            )
        return num_chunks

    def sync_load_budget(self, groups: Sequence[OffloadGroup]) -> int:
        """Tokens that a step may load and wait for. Windows and states are overestimated, as vLLM does."""
        per_token = sum(group.bytes_per_block // group.tokens_per_block for group in groups)
        return self.sync_load_budget_bytes // per_token if per_token else 0

    def layout(
        self,
        groups: Sequence[OffloadGroup],
        *,
        tokens_per_hash: int,
        num_workers: int,
        retention_interval: int | None,
        enable_prefix_caching: bool,
        fine_grained_hits: bool = False,
    ) -> OffloadLayout:
        return OffloadLayout(
            groups=tuple(groups),
            tokens_per_hash=tokens_per_hash,
            num_workers=num_workers,
            retention_interval=retention_interval,
            sync_load_budget=self.sync_load_budget(groups),
            offload_prompt_only=self.offload_prompt_only,
            enable_prefix_caching=enable_prefix_caching,
            fine_grained_hits=fine_grained_hits,
        )
