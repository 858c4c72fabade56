"""Workers of the OffloadingConnector on a bus, with real words in their blocks, and one catalogue row as a fault."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.structs import (
    GpuBlocks,
    OffloadingConnectorMetadata,
    OffloadingOutput,
    TransferJob,
)
from kvreplay.connectors.offloading.workers import OffloadingWorkers
from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import BlockIds, History, NullMemory, Provenance
from kvreplay.sim.bus import Bus
from kvreplay.sim.catalogue import FaultRow
from kvreplay.sim.envelope import Corruption, Delivery, Envelope
from kvreplay.sim.event_loop import EventLoop
from tests.connectors.offloading.desk import Settings, full

NUM_BLOCKS = 40
NUM_WORDS = 4
COPY_NS = 1_000
"""A job of one block of 1,000 bytes at a byte per nanosecond, without latency."""


class Memory(NullMemory):
    """One rank's GPU blocks: word w of block b of group g is 1000 g + 10 b + w at first."""

    def __init__(self, num_groups: int = 1) -> None:
        blocks = np.arange(NUM_BLOCKS, dtype=np.uint64)[:, np.newaxis] * np.uint64(10)
        words = np.arange(NUM_WORDS, dtype=np.uint64)
        self.groups = [blocks + words + np.uint64(1000 * group) for group in range(num_groups)]
        self.corrupted: dict[int, Provenance] = {}

    def read_blocks(self, group: int, block_ids: BlockIds) -> WordArray:
        words: WordArray = self.groups[group][np.asarray(block_ids, np.int64)]
        return words

    def write_blocks(self, group: int, block_ids: BlockIds, words: WordArray, *, provenance: Provenance | None) -> None:
        self.groups[group][np.asarray(block_ids, np.int64)] = words

    def mark_corrupted(self, block_id: int, provenance: Provenance) -> None:
        self.corrupted[block_id] = provenance

    def set_history(self, block_id: int, history: History) -> None:
        assert history.provenance is not None
        self.corrupted[block_id] = history.provenance

    def first_words(self, *block_ids: int, group: int = 0) -> list[int]:
        words: list[int] = self.groups[group][list(block_ids), 0].tolist()
        return words


def job(
    job_id: int,
    blocks: list[int],
    chunks: list[int],
    *,
    is_store: bool = False,
    is_sync: bool = False,
    sizes: tuple[int, ...] | None = None,
    firsts: tuple[int, ...] = (0,),
    failure: str | None = None,
) -> TransferJob:
    gpu = GpuBlocks(np.array(blocks, np.int64), (len(blocks),) if sizes is None else sizes, firsts)
    return TransferJob(job_id, f"r{job_id}", is_store, gpu, np.array(chunks, np.int32), is_sync, failure)


def store(job_id: int, blocks: list[int], chunks: list[int], **settings: Settings) -> TransferJob:
    return job(job_id, blocks, chunks, is_store=True, **settings)


class RowFault:
    """Applies a row to its n-th matching message, or to all."""

    def __init__(self, row: FaultRow, *, nth: int | None = 0, **settings: object) -> None:
        self.row = row
        self.kinds = frozenset({row.target})
        self.num_seen = 0
        self._nth = nth
        self._settings = {name: setting.default for name, setting in row.settings.items()} | settings

    def intercept(self, envelope: Envelope, now_ns: int) -> list[Delivery] | None:
        if self.row.selects is not None and not self.row.selects(envelope, self._settings):
            return None
        self.num_seen += 1
        if self._nth is not None and self.num_seen != self._nth + 1:
            return None
        if self.row.transform is not None:
            return self.row.transform(envelope, self._settings, 7)
        corruption = Corruption(draw=7, fault_spec=self.row.name, block=0)
        verbs: dict[str, Callable[[], list[Delivery]]] = {
            "drop": list,
            "delay": lambda: [Delivery(envelope, int(str(self._settings["delay"])))],
            "duplicate": lambda: [Delivery(envelope), Delivery(envelope)],
            "corrupt": lambda: [Delivery(replace(envelope, corruptions=(corruption,)))],
        }
        return verbs[self.row.verb]()

    def has_passed(self, kind: str, conversation: str) -> bool:
        return False

    def swallows(self, kind: str, conversation: str) -> bool:
        return False

    def hold(self, delivery: Delivery, release: Callable[[], None]) -> None:
        raise AssertionError("no row holds")


class Bench:
    """All ranks of one instance. A byte takes a nanosecond."""

    def __init__(
        self,
        *,
        num_ranks: int = 1,
        behaviour: OffloadBehaviour = VLLM_0_33,
        layout: OffloadLayout | None = None,
        is_replicated: bool = False,
        fault: RowFault | None = None,
        **settings: Settings,
    ) -> None:
        self.layout = layout or OffloadLayout(groups=(full(),), tokens_per_hash=4)
        blocks_per_chunk = self.layout.blocks_per_chunk
        self.config = OffloadingConfig(
            **{
                "cpu_bytes_to_use": 4096 * 64 * num_ranks,
                "blocks_per_chunk": blocks_per_chunk,
                "store_bytes_per_s": 1_000_000_000,
                "load_bytes_per_s": 1_000_000_000,
                "copy_latency": 0.0,
                **settings,
            }
        )
        self.loop = EventLoop()
        self.bus = Bus(self.loop)
        self.bus.interceptor = fault
        self.memories = [Memory(len(self.layout.groups)) for _ in range(num_ranks)]
        self.num_woken = 0
        self.workers = OffloadingWorkers(
            "E0",
            config=self.config,
            layout=self.layout,
            behaviour=behaviour,
            bus=self.bus,
            memories=self.memories,
            num_words=NUM_WORDS,
            on_report=self._wake,
            is_replicated=is_replicated,
        )

    def _wake(self) -> None:
        self.num_woken += 1

    def step(
        self, *jobs: TransferJob, flush: tuple[int, ...] = (), has_forward: bool = True, compute_until_ns: int = 0
    ) -> int:
        """One step's orders; until when it is blocked."""
        metadata = OffloadingConnectorMetadata(
            {order.job_id: order for order in jobs if not order.is_store},
            {order.job_id: order for order in jobs if order.is_store},
            set(flush),
            has_forward,
        )
        self.workers.handle_preemptions(metadata)
        return self.workers.start_load_kv(metadata, compute_until_ns)

    def stored(self, *jobs: TransferJob) -> None:
        """Two steps, and all the time that the copies need."""
        self.step(*jobs)
        self.step()
        self.run()

    def run(self, until_ns: int | None = None) -> None:
        self.loop.run_until_quiescent(until_ns)
        if until_ns is not None:
            self.loop.now_ns = max(self.loop.now_ns, until_ns)

    def collect(self) -> OffloadingOutput:
        return self.workers.get_finished(()) or OffloadingOutput()

    def completed(self) -> dict[int, int]:
        return self.collect().completed_jobs

    def cpu_words(self, *places: int, rank: int = 0) -> npt.NDArray[np.uint64]:
        return self.workers.ranks[rank].buffers.read(np.array(places, np.int64), NUM_WORDS)
