"""An instance's SimpleCPUOffloadConnector with all that it is made of."""

from collections.abc import Sequence

from kvreplay.connectors.offloading.context import MEDIA
from kvreplay.connectors.offloading.manager_bus import is_watched, manager_address
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.connectors.simple_cpu.scheduler import SimpleCpuScheduler
from kvreplay.connectors.simple_cpu.structs import CopyEvent, FoundBlocks
from kvreplay.connectors.simple_cpu.workers import SimpleCpuWorkers
from kvreplay.events import TIER_GAUGES
from kvreplay.kv.memory import KVMemory
from kvreplay.kv.specs import rank_block_bytes
from kvreplay.replay.tier_owner import TierOwner
from kvreplay.sim.envelope import LOOKUP, Answer, Envelope


class SimpleCpu:
    """Both halves. `start_workers` follows when the ranks' memories exist.

    `max_num_batched_tokens`: of a step. `num_parts`: into so many different parts the ranks cut a block.
    """

    def __init__(
        self,
        owner: TierOwner,
        *,
        config: SimpleCpuConfig,
        max_num_batched_tokens: int,
        num_ranks: int = 1,
        num_parts: int = 1,
    ) -> None:
        instance, kv, bus, behaviour = owner.instance, owner.kv, owner.bus, owner.behaviour
        self._instance, self._config, self._behaviour = instance, config, behaviour
        self._bus, self._log, self._on_report = bus, owner.log, owner.on_report
        self._block_bytes = rank_block_bytes(kv.groups, num_parts)
        self._num_blocks = config.num_blocks(self._block_bytes, num_ranks)
        self._num_ranks = num_ranks
        self._medium = MEDIA[-1] if config.is_on_disk else MEDIA[0]
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
            lazy_batch_tokens=max_num_batched_tokens if config.lazy_offload else None,
            medium=self._medium,
        )

    def start_workers(self, memories: Sequence[KVMemory], num_words: Sequence[Sequence[int]]) -> SimpleCpuWorkers:
        """`num_words`: of a block, for each rank and group; 0 where contents are not checked."""
        assert len(memories) == self._num_ranks
        self._workers = SimpleCpuWorkers(
            self._instance,
            config=self._config,
            block_bytes=self._block_bytes,
            num_blocks=self._num_blocks,
            num_words=num_words,
            survives_errors=self._behaviour["simple_cpu_copy_error"] == "fails",
            bus=self._bus,
            memories=memories,
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
        request_id = event.req_ids[0] if len(event.req_ids) == 1 else None
        self._log.store(kind, request_id, f"store {event.number}", len(event.pairs), cause)

    def usage(self) -> dict[str, int]:
        """Gauges and counters, by the names of an offloading connector's."""
        pool = self.scheduler.pool
        self._log.evicted(pool.num_evicted - self._evictions_told, 0, "capacity", tier=self._medium)
        self._evictions_told = pool.num_evicted
        assert self._workers is not None
        workers, gauge = self._workers, TIER_GAUGES[self._medium]
        return {
            gauge: pool.num_cached_keys,
            f"num_{gauge}": self._num_blocks - 1,  # one is the null block
            "refused_offers": self.scheduler.stores.counts.refused,
            "store_bytes": workers.num_bytes(is_store=True),
            "store_ns": workers.busy_ns(is_store=True),
            "load_bytes": workers.num_bytes(is_store=False),
            "load_ns": workers.busy_ns(is_store=False),
        }
