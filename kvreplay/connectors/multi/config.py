"""Which connectors an engine has, and in which order they are asked."""

from dataclasses import dataclass, field
from typing import Literal

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.offloading.config import OffloadingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiConfig:
    """`connectors`: in the order of vLLM's list of that name. Each one's options stand beside it."""

    offloading: OffloadingConfig
    mooncake: MooncakeConfig = field(default_factory=MooncakeConfig)
    connectors: Literal["mooncake,offloading", "offloading,mooncake"] = "mooncake,offloading"

    @property
    def order(self) -> list[str]:
        return self.connectors.split(",")
