"""Settings: vLLM's names; speeds are ours."""

from dataclasses import dataclass
from typing import Final

from kvreplay.errors import ConfigError

_COPY_BYTES_PER_S: Final = 40_000_000_000
"""As for the offloading connector: what copies get of PCIe 5.0 x16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleCpuConfig:
    """`cpu_bytes_to_use` in bytes, times in seconds. One thread copies both ways, one job after another."""

    cpu_bytes_to_use: int
    copy_bytes_per_s: int = _COPY_BYTES_PER_S
    copy_latency: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("cpu_bytes_to_use", "copy_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"connector.{name} must be > 0, got {getattr(self, name)}")
        if self.copy_latency < 0:
            raise ConfigError(f"connector.copy_latency must be >= 0, got {self.copy_latency}")
