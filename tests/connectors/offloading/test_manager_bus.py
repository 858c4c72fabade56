"""Faults between the scheduler and its manager: no room, evicted between lookup and load, pending, undecided."""

import numpy as np
import pytest

from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.catalogue import ROWS
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.manager_bus import ManagerOverBus
from kvreplay.errors import EngineFatal
from kvreplay.sim.bus import Bus
from kvreplay.sim.event_loop import EventLoop
from tests.connectors.offloading.bench import RowFault
from tests.connectors.offloading.desk import IDEAL, Clock, Desk

ROW = {row.name: row for row in ROWS}


def desk_with(
    fault: str | None, behaviour: OffloadBehaviour = VLLM_0_33, *, clock: Clock | None = None, nth: int | None = None
) -> Desk:
    """Chunks of an earlier request are stored before the fault sets in."""
    bus = Bus(EventLoop())
    cpu = CPUOffloadingManager(20, KeySpace(1))
    desk = Desk(manager=ManagerOverBus(cpu, "E0", bus), behaviour=behaviour, clock=clock)
    desk.cpu = cpu
    desk.store("earlier", 9, [1, 2, 3])
    if fault is not None:
        bus.interceptor = RowFault(ROW[fault], nth=nth)
    desk.add("r", 13)
    return desk


def test_without_faults_nothing_changes() -> None:
    desk = desk_with(None)
    assert desk.connector.lookup_is_pure
    assert desk.ask("r") == 8


def test_a_fault_that_never_comes_changes_nothing_either() -> None:
    desk = desk_with("offload.evict-between", nth=99)
    assert not desk.connector.lookup_is_pure
    assert desk.ask("r") == 8


def test_an_offer_for_which_there_is_no_room_is_made_again() -> None:
    desk = desk_with("offload.alloc-fail", nth=0)
    desk.ask("r", 8)
    assert not desk.admit("r", [4, 5, 6, 7], start=8).store_jobs
    assert desk.connector.num_allocation_failures == 1
    desk.sample("r")
    assert desk.step(desk.grow("r", 1, [], start=13)).store_jobs


def test_a_chunk_evicted_between_lookup_and_load_kills_the_engine() -> None:
    desk = desk_with("offload.evict-between", nth=0)
    assert desk.ask("r") == 8
    with pytest.raises(EngineFatal, match="not found in cache"):
        desk.allocate("r", [4, 5, 6, 7], external=8)


def test_or_fails_the_load() -> None:
    desk = desk_with("offload.evict-between", IDEAL, nth=0)
    desk.ask("r")
    job = desk.allocate("r", [4, 5, 6, 7], external=8)
    assert job is not None
    assert job.failure == "an offloaded chunk is gone"


@pytest.mark.parametrize("fault", ["offload.evict-between", "offload.not-ready-hit"])
def test_neither_has_anything_to_act_on_where_nothing_is_found(fault: str) -> None:
    bus = Bus(EventLoop())
    bus.interceptor = seen = RowFault(ROW[fault], nth=None)
    desk = Desk(manager=ManagerOverBus(CPUOffloadingManager(20, KeySpace(1)), "E0", bus), behaviour=VLLM_0_33)
    desk.add("r", 13)
    assert desk.ask("r") == 0
    assert seen.num_seen == 0


def test_nor_an_eviction_where_somebody_else_reads_what_is_found() -> None:
    desk = desk_with(None)
    keys = desk.keys("r")[:2]
    desk.cpu.prepare_load(keys, desk.connector.states["r"].context)
    assert not any(map(desk.cpu.can_discard, keys.tolist()))
    desk.cpu.complete_load(keys, desk.connector.states["r"].context)
    assert all(map(desk.cpu.can_discard, keys.tolist()))


@pytest.mark.parametrize("behaviour", [VLLM_0_33, IDEAL])
def test_a_chunk_still_being_written_is_taken_for_ready(behaviour: OffloadBehaviour) -> None:
    desk = desk_with("offload.not-ready-hit", behaviour)
    context = desk.connector.states["r"].context
    key = int(desk.keys("r")[2])
    desk.cpu.prepare_store(np.array([key]), context)
    assert desk.ask("r") == 12
    if behaviour is VLLM_0_33:
        with pytest.raises(EngineFatal, match="not ready for reading"):
            desk.allocate("r", [4, 5, 6, 7], external=12)
    else:
        job = desk.allocate("r", [4, 5, 6, 7], external=12)
        assert job is not None
        assert job.failure is not None


def test_a_lookup_that_is_never_decided_is_asked_again_for_ever() -> None:
    desk = desk_with("offload.lookup-pending-forever")
    assert [desk.ask("r") for _ in range(5)] == [None] * 5


def test_or_for_so_long() -> None:
    clock = Clock()
    desk = desk_with("offload.lookup-pending-forever", IDEAL, clock=clock)
    assert desk.ask("r") is None
    clock.now_ns = clock.alarms[0]
    assert desk.ask("r") == 0


def test_a_dead_instances_manager_is_gone() -> None:
    bus = Bus(EventLoop())
    manager = ManagerOverBus(CPUOffloadingManager(4, KeySpace(1)), "E0", bus)
    manager.close()
    ManagerOverBus(CPUOffloadingManager(4, KeySpace(1)), "E0", bus)
