"""Who a worker is: instance, incarnation, rank, and the addresses that follow."""

from dataclasses import dataclass, field

from kvreplay.connectors.mooncake import addresses
from kvreplay.connectors.mooncake.ranks import Ranks
from kvreplay.ids import InstanceId


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """`incarnation` counts the restarts of the instance; a restart has new ports, and mostly a new engine id.

    What follows from these can be given: the addresses of a worker that is not in a cluster of kvreplay's.
    """

    instance: InstanceId
    incarnation: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    configured_engine_id: str | None = None
    """An engine id that survives restarts; None: one per incarnation."""

    hostname: str = ""
    """Its transfer engine's host."""
    rpc_port: int = 0
    """Its transfer engine's port."""
    address: str = ""
    """Where it takes pulls, replies and completions, on the bus."""

    engine_id: str = field(init=False)
    memory_address: str = field(init=False)
    session: str = field(init=False)
    origin: str = field(init=False)
    """Names its exchanges: stable, and different for each rank."""

    def __post_init__(self) -> None:
        rank = self.ranks.rank
        hostname = self.hostname or self.instance
        port = self.rpc_port or addresses.rpc_port(rank, self.incarnation)
        engine_id = self.configured_engine_id or addresses.engine_id_of(self.instance, self.incarnation)
        derived = {
            "engine_id": engine_id,
            "hostname": hostname,
            "rpc_port": port,
            "address": self.address or addresses.worker_address(self.instance, rank, self.incarnation),
            "memory_address": addresses.memory_address(hostname, port),
            "session": f"{hostname}:{port}",
            "origin": engine_id if self.ranks.num_ranks == 1 else f"{engine_id}/{rank}",
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
