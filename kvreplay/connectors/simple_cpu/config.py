"""Settings: vLLM's names; speeds are ours."""

from dataclasses import dataclass
from typing import Final

from kvreplay.errors import ConfigError

_COPY_BYTES_PER_S: Final = 40_000_000_000
"""As for the offloading connector: what copies get of PCIe 5.0 x16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCpuConfig:
    """`cpu_bytes_to_use` in bytes, times in seconds. A stream for either direction copies one event after another."""

    cpu_bytes_to_use: int
    num_cpu_blocks: int | None = None
    """Fewer than the bytes would hold; None: as many as those. One is the null block."""
    copy_bytes_per_s: int = _COPY_BYTES_PER_S
    copy_latency: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("cpu_bytes_to_use", "copy_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"connector.{name} must be > 0, got {getattr(self, name)}")
        if self.num_cpu_blocks is not None and self.num_cpu_blocks <= 0:
            raise ConfigError(f"connector.num_cpu_blocks must be > 0, got {self.num_cpu_blocks}")
        if self.copy_latency < 0:
            raise ConfigError(f"connector.copy_latency must be >= 0, got {self.copy_latency}")

    def num_blocks(self, block_bytes: int) -> int:
        """Of the CPU's pool. Raises ConfigError where they do not suffice for one beside the null block."""
        held = self.cpu_bytes_to_use // block_bytes
        if held < 2:
            raise ConfigError(
                f"connector.cpu_bytes_to_use: {self.cpu_bytes_to_use:,} bytes hold no two blocks of {block_bytes:,}, "
                "one of which is the null block"
            )
        if self.num_cpu_blocks is None:
            return held
        if not 2 <= self.num_cpu_blocks <= held:
            raise ConfigError(
                f"connector.num_cpu_blocks must be in [2, {held}], what cpu_bytes_to_use holds, "
                f"got {self.num_cpu_blocks}"
            )
        return self.num_cpu_blocks
