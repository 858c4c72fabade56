"""The Mooncake connector's settings, under vLLM's names and with vLLM 0.33.0's defaults."""

from dataclasses import dataclass
from typing import Final

from kvreplay.errors import ConfigError
from kvreplay.ids import NS_PER_S, InstanceId, nanoseconds

BOOTSTRAP_ATTEMPTS: Final = 3
BOOTSTRAP_RETRY_NS: Final = NS_PER_S // 10
RECEIVE_TIMEOUT_MARGIN_S: Final = 60
"""What a consumer waits for a reply beyond the time for which a producer may keep it waiting."""
ORPHAN_TIMEOUT_NS: Final = 60 * NS_PER_S
"""What vllm#51236 waits for a request that a pull has asked for and nobody has announced."""
MAX_PEER_LAYOUTS: Final = 1024
"""Consumers' layouts that a producer remembers; the one not used for longest goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """Times in seconds. The first two are VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and VLLM_MOONCAKE_CONNECTOR_TIMEOUT."""

    kv_role: str | None = None
    """`kv_both`: every instance produces and consumes; None: each has the role of its place."""
    abort_request_timeout: float = 480
    """A producer waits so long for a request to be ready, and keeps a finished one's blocks so long; below 0: not at
    all."""
    connector_timeout: float = 30.0
    """Each attempt of a bootstrap query may take so long."""
    receive_timeout: float | None = None
    """A consumer waits so long for each reply; None: the abort timeout + 60, as vLLM does."""
    num_workers: int = 10
    """Threads of a producer for engine writes; it services twice as many pulls at a time."""
    transfer_timeout: float = 30.0
    """An engine write may take so long, and 1 ns per byte (MC_TRANSFER_TIMEOUT)."""
    protocol: str = "rdma"
    device_name: str = ""
    bootstrap_port: int = 8998
    bootstrap_server_address: str | None = None
    """`host:port` of a bootstrap server of its own for all producers, each a data-parallel rank of it; None: each has
    one."""

    def __post_init__(self) -> None:
        if self.kv_role not in (None, "kv_both"):
            raise ConfigError(f"connector.kv_role must be kv_both, or not given, got {self.kv_role!r}")
        for name in ("connector_timeout", "transfer_timeout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"connector.{name} must be >= 0, got {getattr(self, name)}")
        if self.receive_timeout is not None and self.receive_timeout <= 0:
            raise ConfigError(f"connector.receive_timeout must be > 0, got {self.receive_timeout}")
        if self.num_workers <= 0:
            raise ConfigError(f"connector.num_workers must be > 0, got {self.num_workers}")
        if not 1 <= self.bootstrap_port <= 65535:
            raise ConfigError(f"connector.bootstrap_port must be in [1, 65535], got {self.bootstrap_port}")
        if self.bootstrap_server_address is not None:
            host, _, port = self.bootstrap_server_address.rpartition(":")
            if not host or not port.isdecimal() or not set(host).isdisjoint("/#: "):
                raise ConfigError(
                    f"connector.bootstrap_server_address must be HOST:PORT, got {self.bootstrap_server_address!r}"
                )

    def bootstrap_server_of(self, instance: InstanceId) -> str:
        """`host:port` where this producer registers, and where it can be asked for."""
        return self.bootstrap_server_address or f"{instance}:{self.bootstrap_port}"

    @property
    def num_sender_tasks(self) -> int:
        return 2 * self.num_workers

    @property
    def abort_request_timeout_ns(self) -> int:
        return nanoseconds(self.abort_request_timeout)

    @property
    def connector_timeout_ns(self) -> int:
        return nanoseconds(self.connector_timeout)

    @property
    def transfer_timeout_ns(self) -> int:
        return nanoseconds(self.transfer_timeout)

    @property
    def receive_timeout_ns(self) -> int:
        if self.receive_timeout is not None:
            return nanoseconds(self.receive_timeout)
        return nanoseconds(self.abort_request_timeout + RECEIVE_TIMEOUT_MARGIN_S)
