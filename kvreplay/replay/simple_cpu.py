"""An instance's SimpleCPUOffloadConnector with all that it is made of."""

from kvreplay.connectors.offloading.manager_bus import is_watched, manager_address
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.connectors.simple_cpu.scheduler import SimpleCpuScheduler
from kvreplay.connectors.simple_cpu.structs import CopyJob, FoundBlocks
from kvreplay.connectors.simple_cpu.workers import SimpleCpuWorkers
from kvreplay.events import Event
from kvreplay.kv.memory import KVMemory
from kvreplay.replay.tier_owner import TierOwner
from kvreplay.sim.envelope import LOOKUP, Answer, Envelope


class SimpleCpu:
    """Both halves. `start_workers` follows when the rank's memory exists."""

    def __init__(self, owner: TierOwner, *, config: SimpleCpuConfig) -> None:
        instance, kv, bus, behaviour = owner.instance, owner.kv, owner.bus, owner.behaviour
        self._instance, self._config, self._behaviour = instance, config, behaviour
        self._bus, self._log, self._on_report = bus, owner.log, owner.on_report
        self._block_bytes = kv.groups[0].page_bytes
        self._num_blocks = config.cpu_bytes_to_use // self._block_bytes
        self._evictions_told = 0
        self._address = manager_address(instance)
        bus.serve(self._address, lambda envelope: Answer(payload=envelope.payload.evicts))
        self._workers: SimpleCpuWorkers | None = None
        self.scheduler = SimpleCpuScheduler(
            kv,
            self._num_blocks,
            owner.num_keys,
            looks_again=behaviour["simple_cpu_lookup"] == "again",
            observer=self,
        )

    def start_workers(self, memory: KVMemory, num_words: int) -> SimpleCpuWorkers:
        self._workers = SimpleCpuWorkers(
            self._instance,
            config=self._config,
            block_bytes=self._block_bytes,
            num_blocks=self._num_blocks,
            num_words=num_words,
            survives_errors=self._behaviour["simple_cpu_copy_error"] == "fails",
            bus=self._bus,
            memory=memory,
            on_report=self._on_report,
        )
        return self._workers

    def close(self) -> None:
        """The process is gone; its workers are shut down by whoever has them."""
        self._bus.silence(self._address)

    # -- JobObserver ------------------------------------------------------------------------------------------

    def started(self, job: CopyJob) -> None:
        self._emit("store.started", job, None)

    def ended(self, job: CopyJob, failure: str | None) -> None:
        self._emit("store.finished" if failure is None else "store.failed", job, failure)

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

    def _emit(self, kind: str, job: CopyJob, cause: str | None) -> None:
        log = self._log
        num_blocks, name = len(job.gpu_blocks), f"job {job.number}"
        log.sink.emit(
            Event(kind, log.now_ns, log.instance, log.step, job.req_id, name, num_blocks=num_blocks, cause=cause)
        )

    def usage(self) -> dict[str, int]:
        """Gauges and counters, by the names of an offloading connector's."""
        pool = self.scheduler.pool
        self._log.evicted(pool.num_evicted - self._evictions_told, 0, "capacity", tier="CPU")
        self._evictions_told = pool.num_evicted
        workers = self._workers
        assert workers is not None
        return {
            "cpu_chunks": pool.num_cached_keys,
            "num_cpu_chunks": self._num_blocks,
            "refused_offers": self.scheduler.num_refused,
            "store_bytes": workers.num_bytes[True],
            "store_ns": workers.busy_ns[True],
            "load_bytes": workers.num_bytes[False],
            "load_ns": workers.busy_ns[False],
        }
