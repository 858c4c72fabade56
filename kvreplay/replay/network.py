"""How long a message takes from one instance to another: latency, bandwidth, and earlier bytes in the way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvreplay.errors import ConfigError
from kvreplay.ids import NS_PER_S, NS_PER_US
from kvreplay.sim.bus import owner_of
from kvreplay.sim.envelope import BOOTSTRAP_REGISTER, BOOTSTRAP_REGISTERED, Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """One direction between two instances. `name` says where the numbers come from, for the report."""

    name: str = "custom"
    latency_ns: int
    bandwidth_bytes_per_s: int

    def __post_init__(self) -> None:
        if self.latency_ns < 0:
            raise ConfigError(f"network.latency_ns must be >= 0, got {self.latency_ns}")
        if self.bandwidth_bytes_per_s <= 0:
            raise ConfigError(f"network.bandwidth_bytes_per_s must be > 0, got {self.bandwidth_bytes_per_s}")

    def transfer_ns(self, size_bytes: int) -> int:
        """How long the link is busy with so many bytes, rounded up."""
        return -(-size_bytes * NS_PER_S // self.bandwidth_bytes_per_s)


_START_UP: Final = frozenset({BOOTSTRAP_REGISTER, BOOTSTRAP_REGISTERED})
"""An instance comes up in no time: clients begin when all are there."""


class LinkNetwork:
    """A link per (source instance, destination instance), each first in, first out.

    Messages without bytes (control) pay latency only and overtake a transfer; between parts of one instance
    everything is instant.
    """

    def __init__(self, link: LinkTiming, instance_of: Callable[[str], str] = owner_of) -> None:
        self._link = link
        self._instance_of = instance_of
        self._instances: dict[str, str] = {}
        self._busy_until_ns: dict[tuple[str, str], int] = {}

    def transit_ns(self, envelope: Envelope, now_ns: int) -> int:
        source, destination = self._instance(envelope.source), self._instance(envelope.destination)
        if source == destination:
            return 0
        if not envelope.size_bytes:
            return self._link.latency_ns if envelope.kind not in _START_UP else 0
        pair = (source, destination)
        start_ns = max(now_ns, self._busy_until_ns.get(pair, 0))
        end_ns = start_ns + self._link.transfer_ns(envelope.size_bytes)
        self._busy_until_ns[pair] = end_ns
        return end_ns - now_ns + self._link.latency_ns

    def _instance(self, address: str) -> str:
        instance = self._instances.get(address)
        if instance is None:
            instance = self._instances[address] = self._instance_of(address)
        return instance


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPreset:
    link: LinkTiming
    source: str
    """Which public numbers it comes from, and how."""


_RPC_LATENCY_NS: Final = 100 * NS_PER_US
_MEASURED: Final = (
    "The Mooncake project's README: its transfer engine moves 40 GB (LLaMA3-70B KV of 128k tokens) at {speed} over "
    "{nics} RoCE, {share} of the line rate. Latency: 100 us, an assumption for one small message through two Python "
    "processes and a data-centre TCP path; the RDMA write itself is faster."
)

NETWORK_PRESETS: Final[dict[str, NetworkPreset]] = {
    "8x400g-roce": NetworkPreset(
        link=LinkTiming(name="8x400g-roce", latency_ns=_RPC_LATENCY_NS, bandwidth_bytes_per_s=190_000_000_000),
        source=_MEASURED.format(speed="190 GB/s", nics="8 x 400 Gb/s", share="48 %"),
    ),
    "4x200g-roce": NetworkPreset(
        link=LinkTiming(name="4x200g-roce", latency_ns=_RPC_LATENCY_NS, bandwidth_bytes_per_s=87_000_000_000),
        source=_MEASURED.format(speed="87 GB/s", nics="4 x 200 Gb/s", share="87 %"),
    ),
}
