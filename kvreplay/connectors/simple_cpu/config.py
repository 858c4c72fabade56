"""Settings: vLLM's names; speeds are ours."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from kvreplay.errors import ConfigError

_COPY_BYTES_PER_S: Final = 40_000_000_000
"""As for the offloading connector: what copies get of PCIe 5.0 x16."""
_DISK_BYTES_PER_S: Final = 5_000_000_000
"""As for its storage tier: a fast NVMe drive."""
_CPU_BYTES: Final = 8 << 30
_DISK_BYTES: Final = 100 << 30
_DISK_PAGE: Final = 4096
MAX_BLOCKS: Final = 1 << 24
"""Of the second pool: more would take gigabytes to keep track of."""

Backend = Literal["cpu", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCpuConfig:
    """Sizes in bytes, times in seconds; `cpu_bytes_to_use` is shared out among the ranks. Every rank has a stream for
    either direction, which copies one event after another."""

    cpu_bytes_to_use: int = _CPU_BYTES
    cpu_bytes_to_use_per_rank: int | None = None
    """Instead of the rank's share."""
    num_cpu_blocks: int | None = None
    """Fewer than the bytes would hold; None: as many as those. One is the null block."""
    lazy_offload: bool = False
    """Store what the GPU's free queue is about to lose, instead of all that requests compute."""
    kv_offload_backend: Backend = "cpu"
    """`disk`: a file for each rank in the place of the CPU's memory, and a thread for either direction."""
    disk_capacity_bytes: int = _DISK_BYTES
    """Of each rank's file."""
    use_page_cache: bool = False
    """Else blocks must be whole pages of the disk."""
    disk_bytes_per_s: int = _DISK_BYTES_PER_S
    copy_bytes_per_s: int = _COPY_BYTES_PER_S
    copy_latency: float = 20e-6

    def __post_init__(self) -> None:
        if self.kv_offload_backend not in get_args(Backend):
            raise ConfigError(f"connector.kv_offload_backend must be cpu or disk, got {self.kv_offload_backend!r}")
        for name in ("cpu_bytes_to_use", "copy_bytes_per_s", "disk_capacity_bytes", "disk_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"connector.{name} must be > 0, got {getattr(self, name)}")
        for name in ("cpu_bytes_to_use_per_rank", "num_cpu_blocks"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"connector.{name} must be > 0, got {value}")
        if self.copy_latency < 0:
            raise ConfigError(f"connector.copy_latency must be >= 0, got {self.copy_latency}")

    @property
    def is_on_disk(self) -> bool:
        return self.kv_offload_backend == "disk"

    @property
    def bytes_per_s(self) -> int:
        return self.disk_bytes_per_s if self.is_on_disk else self.copy_bytes_per_s

    def num_blocks(self, block_bytes: int, num_ranks: int = 1) -> int:
        """Of the second pool; `block_bytes`: of a block on a rank.

        Raises ConfigError where they do not suffice for one beside the null block, or do not suit the disk.
        """
        name, rank_bytes = "cpu_bytes_to_use", self.cpu_bytes_to_use // num_ranks
        if self.is_on_disk:
            name, rank_bytes = "disk_capacity_bytes", self.disk_capacity_bytes
            if block_bytes % _DISK_PAGE and not self.use_page_cache:
                raise ConfigError(
                    f"connector.kv_offload_backend: a rank's blocks of {block_bytes:,} bytes are not whole pages of "
                    f"{_DISK_PAGE:,}, which a disk needs without connector.use_page_cache"
                )
        elif self.cpu_bytes_to_use_per_rank is not None:
            name, rank_bytes = "cpu_bytes_to_use_per_rank", self.cpu_bytes_to_use_per_rank
        held = rank_bytes // block_bytes
        if held < 2:
            of_rank = " of a rank" if num_ranks > 1 else ""
            raise ConfigError(
                f"connector.{name}: {rank_bytes:,} bytes{of_rank} hold no two blocks of {block_bytes:,}, one of which "
                "is the null block"
            )
        if self.num_cpu_blocks is None:
            if held > MAX_BLOCKS:
                raise ConfigError(
                    f"connector.{name}: {rank_bytes:,} bytes are {held:,} blocks of this model, and at most "
                    f"{MAX_BLOCKS:,} are kept track of"
                )
            return held
        most = min(held, MAX_BLOCKS)
        if not 2 <= self.num_cpu_blocks <= most:
            raise ConfigError(
                f"connector.num_cpu_blocks must be in [2, {most}], what {name} holds, got {self.num_cpu_blocks}"
            )
        return self.num_cpu_blocks
