"""Who a worker is: instance, incarnation, rank, and the addresses that follow."""

from dataclasses import dataclass, field

from kvreplay.connectors.mooncake import addresses
from kvreplay.connectors.mooncake.ranks import Ranks
from kvreplay.ids import InstanceId


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """`incarnation` counts the restarts of the instance; a restart has new ports, and mostly a new engine id."""

    instance: InstanceId
    incarnation: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    configured_engine_id: str | None = None
    """An engine id that survives restarts; None: one per incarnation."""

    engine_id: str = field(init=False)
    address: str = field(init=False)
    rpc_port: int = field(init=False)
    memory_address: str = field(init=False)
    session: str = field(init=False)

    def __post_init__(self) -> None:
        rank = self.ranks.rank
        port = addresses.rpc_port(rank, self.incarnation)
        derived = {
            "engine_id": self.configured_engine_id or addresses.engine_id_of(self.instance, self.incarnation),
            "address": addresses.worker_address(self.instance, rank, self.incarnation),
            "rpc_port": port,
            "memory_address": addresses.memory_address(self.instance, port),
            "session": f"{self.instance}:{port}",
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
