"""What a connector has done, for the report: a row per store, and counters and gauges for the samples of usage."""

from collections.abc import Collection, Mapping, Sequence

from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.storage_tier import StorageTier
from kvreplay.connectors.offloading.structs import TransferJob
from kvreplay.connectors.offloading.worker import LOADS, STORES, SYNC_LOADS
from kvreplay.connectors.offloading.workers import OffloadingWorkers
from kvreplay.engine.log import EngineLog


class OffloadAccounts:
    """Of one engine. Bytes and times are summed over its ranks."""

    def __init__(self, log: EngineLog, cpu: CPUOffloadingManager, tiers: Sequence[StorageTier]) -> None:
        self.workers: OffloadingWorkers | None = None
        self.num_refused = 0
        """Offers for which the CPU tier had no room."""
        self._log = log
        self._cpu = cpu
        self._tiers = tiers
        self._flushed: set[int] = set()
        """Jobs; one whose end is never told may be asked for again, step after step."""
        self._evictions_told = 0
        self._tier_evictions_told = 0
        self._num_discarded = 0

    # -- what the scheduler's half tells ----------------------------------------------------------------------

    def step_built(self, stores: Mapping[int, TransferJob], flushed: Collection[int]) -> None:
        """A step's orders to the workers."""
        self._flushed.update(flushed)
        for job in stores.values():
            self._emit("store.started", job.job_id, job.req_id, len(job.gpu.block_ids), None)

    def store_ended(self, job_id: int, req_id: str, num_blocks: int, failure: str | None) -> None:
        kind = "store.finished" if failure is None else "store.failed"
        self._emit(kind, job_id, req_id, num_blocks, failure)

    def _emit(self, kind: str, job_id: int, req_id: str, num_blocks: int, cause: str | None) -> None:
        self._log.store(kind, req_id, f"job {job_id}", num_blocks, cause)

    # -- samples ----------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """Gauges and counters by the names that `usage` rows have; evictions are told on the way."""
        cpu = self._cpu
        self._tell_evictions()
        values = {
            "cpu_chunks": cpu.chunks.num_chunks - cpu.chunks.num_free,
            "num_cpu_chunks": cpu.chunks.num_chunks,
            "flushed_jobs": len(self._flushed),
            "refused_offers": self.num_refused,
        }
        if self.workers is not None:
            queues = [rank.queues for rank in self.workers.ranks]
            for direction, names in (("store", (STORES,)), ("load", (LOADS, SYNC_LOADS))):
                values[f"{direction}_bytes"] = sum(each.num_bytes[name] for each in queues for name in names)
                values[f"{direction}_ns"] = sum(each.busy_ns[name] for each in queues for name in names)
        return values

    def _tell_evictions(self) -> None:
        self._log.evicted(self._cpu.num_evicted - self._evictions_told, 0, "capacity", tier="CPU")
        self._evictions_told = self._cpu.num_evicted
        self._log.evicted(self._cpu.num_discarded - self._num_discarded, 0, "load-failure", tier="CPU")
        self._num_discarded = self._cpu.num_discarded
        of_tiers = sum(tier.num_evicted for tier in self._tiers)
        self._log.evicted(of_tiers - self._tier_evictions_told, 0, "capacity", tier="STORAGE")
        self._tier_evictions_told = of_tiers
