"""An instance's SimpleCPUOffloadConnector with all that it is made of."""

from kvreplay.connectors.offloading.manager_bus import is_watched, manager_address
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.connectors.simple_cpu.scheduler import SimpleCpuScheduler
from kvreplay.connectors.simple_cpu.structs import CopyEvent, FoundBlocks
from kvreplay.connectors.simple_cpu.workers import SimpleCpuWorkers
from kvreplay.events import Event
from kvreplay.kv.block_rows import words_per_block
from kvreplay.kv.memory import KVMemory
from kvreplay.kv.specs import block_bytes
from kvreplay.replay.tier_owner import TierOwner
from kvreplay.sim.envelope import LOOKUP, Answer, Envelope


class SimpleCpu:
    """Both halves. `start_workers` follows when the rank's memory exists."""

    def __init__(self, owner: TierOwner, *, config: SimpleCpuConfig) -> None:
        instance, kv, bus, behaviour = owner.instance, owner.kv, owner.bus, owner.behaviour
        self._instance, self._config, self._behaviour = instance, config, behaviour
        self._bus, self._log, self._on_report = bus, owner.log, owner.on_report
        self._block_bytes = block_bytes(kv.groups)
        self._num_blocks = config.num_blocks(self._block_bytes)
        self._groups = kv.groups
        self._evictions_told = 0
        self._address = manager_address(instance)
        bus.serve(self._address, lambda envelope: Answer(payload=envelope.payload.evicts))
        self._workers: SimpleCpuWorkers | None = None
        self.scheduler = SimpleCpuScheduler(
            kv,
            self._num_blocks,
            owner.num_keys,
            looks_again=behaviour["simple_cpu_lookup"] == "again",
            forgives_lost_keys=behaviour["simple_cpu_lost_hash"] == "forgets",
            observer=self,
        )

    def start_workers(self, memory: KVMemory, *, has_words: bool) -> SimpleCpuWorkers:
        """`has_words`: contents are checked."""
        self._workers = SimpleCpuWorkers(
            self._instance,
            config=self._config,
            block_bytes=self._block_bytes,
            num_blocks=self._num_blocks,
            num_words=[words_per_block(group) if has_words else 0 for group in self._groups],
            survives_errors=self._behaviour["simple_cpu_copy_error"] == "fails",
            bus=self._bus,
            memory=memory,
            on_report=self._on_report,
        )
        return self._workers

    def close(self) -> None:
        """The process is gone; its workers are shut down by whoever has them."""
        self._bus.silence(self._address)

    # -- StoreObserver ----------------------------------------------------------------------------------------

    def started(self, event: CopyEvent) -> None:
        self._emit("store.started", event, None)

    def ended(self, event: CopyEvent, failure: str | None) -> None:
        self._emit("store.finished" if failure is None else "store.failed", event, failure)

    def loses_found(self, req_id: str) -> bool:
        if not is_watched(self._bus, LOOKUP):
            return False
        answer = self._bus.ask(
            Envelope(
                kind=LOOKUP,
                source=f"{self._instance}/scheduler",
                destination=self._address,
                payload=FoundBlocks(req_id),
                request_ids=(req_id,),
                conversation=f"{self._address}/{req_id}",
            )
        )
        return bool(answer.payload)

    def _emit(self, kind: str, event: CopyEvent, cause: str | None) -> None:
        """A step stores for all of its requests at once: named is who is alone."""
        log = self._log
        request_id = event.req_ids[0] if len(event.req_ids) == 1 else None
        name = f"store {event.number}"
        log.sink.emit(
            Event(kind, log.now_ns, log.instance, log.step, request_id, name, num_blocks=len(event.pairs), cause=cause)
        )

    def usage(self) -> dict[str, int]:
        """Gauges and counters, by the names of an offloading connector's."""
        pool = self.scheduler.pool
        self._log.evicted(pool.num_evicted - self._evictions_told, 0, "capacity", tier="CPU")
        self._evictions_told = pool.num_evicted
        assert self._workers is not None
        stores, loads = self._workers.streams[True], self._workers.streams[False]
        return {
            "cpu_chunks": pool.num_cached_keys,
            "num_cpu_chunks": self._num_blocks - 1,  # one is the null block
            "refused_offers": self.scheduler.stores.counts.refused,
            "store_bytes": stores.num_bytes,
            "store_ns": stores.busy_ns,
            "load_bytes": loads.num_bytes,
            "load_ns": loads.busy_ns,
        }
