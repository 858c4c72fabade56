"""What can go wrong around SimpleCPUOffloadConnector. It reports no failures at all."""

from dataclasses import replace
from typing import Final

from kvreplay.connectors.simple_cpu.structs import FoundBlocks
from kvreplay.connectors.simple_cpu.workers import CopyTask
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, FaultRow, Setting, Settings
from kvreplay.sim.envelope import COPY_JOB, LOOKUP, Delivery, Envelope

_NEEDS: Final = "simple_cpu"


def _is_copy(envelope: Envelope, settings: Settings) -> bool:
    return isinstance(envelope.payload, CopyTask)


def _evict(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    found: FoundBlocks = envelope.payload
    return [Delivery(replace(envelope, payload=found._replace(evicts=True)))]


def _raise(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    task: CopyTask = envelope.payload
    return [Delivery(replace(envelope, payload=task._replace(raises=True)))]


ROWS: Final = (
    FaultRow(
        name="simple-cpu.copy-raises",
        models="an exception in a rank's copy thread, which dies of it: no later copy ever completes (with a disk: "
        "none of that direction)",
        verb="replace",
        target=COPY_JOB,
        survives="a load's request fails or is computed, a store's blocks are forgotten; the thread goes on",
        transform=_raise,
        selects=_is_copy,
        lasts=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="simple-cpu.evict-between",
        models="the CPU's pool evicts between lookup and load what nobody holds (vllm#39702)",
        verb="replace",
        target=LOOKUP,
        survives="what was found is pinned: nothing is lost",
        transform=_evict,
        needs=_NEEDS,
    ),
    FaultRow(
        name="simple-cpu.copy-slow",
        models="a copy takes long, and all behind it that go the same way wait",
        verb="delay",
        target=COPY_JOB,
        survives="requests that load start late; a preemption waits",
        settings={"delay": Setting(default=NS_PER_S, unit=DURATION, doc="how much longer it takes")},
        selects=_is_copy,
        needs=_NEEDS,
    ),
)
