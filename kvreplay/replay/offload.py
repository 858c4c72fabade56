"""An instance's offloading connector with all that it is made of."""

from collections.abc import Collection, Mapping, Sequence

from kvreplay.checkers.hit_attainable import short_window, withheld_hit
from kvreplay.checkers.store_content import StoreContent
from kvreplay.connectors.offloading.accounts import OffloadAccounts
from kvreplay.connectors.offloading.behaviour import offload_behaviour
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.offloading.cpu_buffers import ChunkContents
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.groups import engine_layout, num_chunks, rank_layout
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.manager import OffloadingManager
from kvreplay.connectors.offloading.manager_bus import ManagerOverBus
from kvreplay.connectors.offloading.request_state import RequestState
from kvreplay.connectors.offloading.scheduler import OffloadingScheduler
from kvreplay.connectors.offloading.storage_tier import StorageTier
from kvreplay.connectors.offloading.structs import TransferJob
from kvreplay.connectors.offloading.tiering import TieringOffloadingManager
from kvreplay.connectors.offloading.workers import OffloadingWorkers
from kvreplay.ids import nanoseconds
from kvreplay.kv.memory import KVMemory
from kvreplay.replay.findings import LiveFindings
from kvreplay.replay.tier_owner import TierOwner


class Offload:
    """Both halves. `start_workers` follows when the ranks' memories exist.

    `num_parts`: into so many different parts the ranks cut a block. `is_replicated`: all hold the same, and keep one
    copy of it.
    """

    def __init__(
        self,
        owner: TierOwner,
        *,
        config: OffloadingConfig,
        findings: LiveFindings,
        num_ranks: int = 1,
        num_parts: int = 1,
        is_replicated: bool = False,
    ) -> None:
        instance, kv, bus = owner.instance, owner.kv, owner.bus
        self._instance = instance
        self._config = config
        self._behaviour = offload_behaviour(owner.behaviour.switches)
        self._bus = bus
        self._on_report = owner.on_report
        self._num_ranks = num_ranks
        self._is_replicated = is_replicated
        self._kv = kv
        self._findings = findings
        self._workers: OffloadingWorkers | None = None
        self._short_hits: dict[str, None] = {}
        """Requests of which HIT-ATTAINABLE has been told."""
        self._drafters = frozenset(group for group, spec in enumerate(kv.groups) if spec.is_eagle)
        layout = engine_layout(
            kv,
            config,
            num_workers=num_ranks,
            every_group_drafts=self._behaviour.eagle_lookup == "narrow" and kv.rules.drops_eagle_block,
        )
        self._layout = rank_layout(layout, num_parts)
        space = KeySpace(len(self._layout.groups), owner.num_keys, owner.names)
        self._store_content = StoreContent(self._layout, space, kv)
        self.cpu = CPUOffloadingManager(
            num_chunks(self._layout, config, is_replicated=is_replicated),
            space,
            eviction_policy=config.eviction_policy,
            store_threshold=config.store_threshold,
            max_tracker_size=config.max_tracker_size,
        )
        self.tiers: list[StorageTier] = []
        self._manager = ManagerOverBus(self._tiered(), instance, bus)
        self.accounts = OffloadAccounts(owner.log, self.cpu, self.tiers)
        loop = bus.loop
        self.scheduler = OffloadingScheduler(
            self._layout,
            self._manager,
            space,
            behaviour=self._behaviour,
            now_ns=lambda: loop.now_ns,
            wake_at=self._wake_at,
            lookup_timeout_ns=nanoseconds(config.lookup_timeout),
            observer=self,
            mirrors_states=False,
            has_drafter=kv.rules.drops_eagle_block,
            held_blocks=kv.block_arrays,
        )

    def _wake_at(self, time_ns: int) -> None:
        self._bus.loop.call_at(time_ns, self._lookups_may_differ)

    def _lookups_may_differ(self) -> None:
        self.scheduler.note_news()
        self._on_report()

    def _tier_job_ended(self, is_promotion: bool) -> None:  # noqa: FBT001 - what a tier tells
        self.scheduler.note_news(is_promotion=is_promotion)
        self._on_report()

    def _tiered(self) -> OffloadingManager:
        config = self._config
        if config.spec_name != "TieringOffloadingSpec":
            return self.cpu
        chunk_bytes = max(group.bytes_per_block * group.blocks_per_chunk for group in self._layout.groups)
        self.tiers = [
            StorageTier(
                self._instance,
                0,
                config=config,
                chunk_bytes=chunk_bytes * (1 if self._is_replicated else self._num_ranks),
                memory=self,
                bus=self._bus,
                on_report=self._tier_job_ended,
            )
        ]
        return TieringOffloadingManager(self.cpu, self.tiers, protects_found=self._behaviour.promotions == "request")

    def start_workers(self, memories: Sequence[KVMemory], num_words: int) -> OffloadingWorkers:
        """`num_words`: of a rank's part of the widest block, 0 where contents are not checked."""
        assert len(memories) == self._num_ranks
        self._workers = OffloadingWorkers(
            self._instance,
            config=self._config,
            layout=self._layout,
            behaviour=self._behaviour,
            bus=self._bus,
            memories=memories,
            num_words=num_words,
            on_report=self._on_report,
            is_replicated=self._is_replicated,
        )
        self.accounts.workers = self._workers
        return self._workers

    # -- StepObserver -----------------------------------------------------------------------------------------

    def step_built(self, stores: Mapping[int, TransferJob], flushed: Collection[int]) -> None:
        self.accounts.step_built(stores, flushed)
        if not self._layout.windowed:
            return  # no table keeps ids of blocks that its request no longer has
        for job_id, job in stores.items():
            if job_id in flushed:
                continue
            keys = self.scheduler.ledger.jobs[job_id].keys
            content = self.scheduler.states[job.req_id].request.content
            for block in self._store_content.foreign_blocks(job, keys, content):
                self._findings.foreign_store(self._instance, job.req_id, f"job {job_id}", block)

    def store_ended(self, job_id: int, req_id: str, num_blocks: int, failure: str | None) -> None:
        self.accounts.store_ended(job_id, req_id, num_blocks, failure)

    def looked_up(self, state: RequestState, hit: int) -> None:
        request_id = state.request.request_id
        if request_id in self._short_hits:
            return
        scheduler = self.scheduler
        window = short_window(state, hit, self._layout, scheduler.stores.masks, scheduler.lookup)
        if window is not None:
            self._short_hits[request_id] = None
            self._findings.short_window(self._instance, request_id, window)
            return
        if self._kv.rules.drops_eagle_block:
            withheld = withheld_hit(state, hit, self._drafters, scheduler.lookup)
            if withheld is not None:
                self._short_hits[request_id] = None
                self._findings.withheld_hit(self._instance, request_id, withheld)

    def usage(self) -> dict[str, int]:
        """What is sampled of it."""
        self.accounts.num_refused = self.scheduler.num_allocation_failures
        return self.accounts.usage()

    def close(self) -> None:
        """The process is gone."""
        self._manager.close()
        for tier in self.tiers:
            tier.close()
        if self._workers is not None:
            self._workers.shutdown()

    # -- the tier's memory, which secondary tiers copy from and to --------------------------------------------

    def take_chunk(self, chunk_id: int) -> Sequence[ChunkContents]:
        assert self._workers is not None
        return self._workers.take_chunk(chunk_id)

    def put_chunk(self, chunk_id: int, contents: Sequence[ChunkContents]) -> None:
        assert self._workers is not None
        self._workers.put_chunk(chunk_id, contents)
