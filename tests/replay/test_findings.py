"""LiveFindings: what the instances of a run report becomes `violation` rows."""

import numpy as np
import pytest

from kvreplay.engine.connector_memory import LateWrite
from kvreplay.engine.suspects import WrongBlock
from kvreplay.events import Event
from kvreplay.ids import NS_PER_S
from kvreplay.kv.cache_manager import Slots
from kvreplay.kv.memory import Provenance
from kvreplay.replay.findings import LiveFindings
from kvreplay.sim.event_loop import EventLoop
from tests.list_sink import ListSink
from tests.scenarios.stage import play, request, single, workload

BROUGHT = Provenance("xfer-a", "a", "corrupt", 3)


class Stage:
    def __init__(self) -> None:
        self.loop = EventLoop()
        self.sink = ListSink()
        self.findings = LiveFindings(self.loop, self.sink)
        played = play(single(), workload(request("a")))
        self.instance = played.cluster.nodes[0].instance

    def at(self, seconds: float) -> None:
        self.loop.now_ns = round(seconds * NS_PER_S)

    @property
    def told(self) -> list[Event]:
        return self.sink.events


@pytest.fixture
def stage() -> Stage:
    return Stage()


class TestWrongBlocks:
    def test_a_finding_has_request_block_group_transfer_and_fault(self, stage: Stage) -> None:
        stage.at(2)
        stage.findings.wrong_block(stage.instance, WrongBlock(7, 0, "r", 12, BROUGHT))
        (event,) = stage.told
        assert (event.kind, event.time_ns, event.instance, event.status) == ("violation", 2 * NS_PER_S, "E0", "CONTENT")
        assert (event.request_id, event.block_ids, event.group, event.transfer_id) == ("r", [7], 0, "xfer-a")
        assert event.cause == "read wrong contents from position 12 on, brought by xfer-a for a"
        assert event.cause_handle == 3

    def test_nobody_may_be_to_blame(self, stage: Stage) -> None:
        stage.findings.wrong_block(stage.instance, WrongBlock(7, 0, "r", 12, None))
        (event,) = stage.told
        assert (event.transfer_id, event.cause_handle) == (None, None)
        assert event.cause == "read wrong contents from position 12 on"


class TestLateWrites:
    def test_into_a_block_with_another_owner(self, stage: Stage) -> None:
        stage.findings.late_write(stage.instance, LateWrite(7, 0, "b", Provenance("xfer-a", "a")))
        (event,) = stage.told
        assert (event.status, event.request_id, event.block_ids, event.transfer_id) == ("FENCE", "b", [7], "xfer-a")
        assert event.cause == "a write for a landed in a block that belongs to b by now"

    @pytest.mark.parametrize("owner", [None, "a"])
    def test_into_a_free_block_or_its_own_does_no_harm(self, stage: Stage, owner: str | None) -> None:
        stage.findings.late_write(stage.instance, LateWrite(7, 0, owner, Provenance("xfer-a", "a")))
        assert stage.told == []


class TestRecounts:
    def test_a_sound_pool_has_no_finding(self, stage: Stage) -> None:
        stage.findings.recount(stage.instance)
        stage.findings.check_drained(stage.instance)
        assert stage.told == []

    def test_a_pool_that_has_come_apart_is_told(self, stage: Stage) -> None:
        stage.instance.scheduler.pool.ref_counts[3] = 1
        stage.findings.recount(stage.instance)
        assert {event.status for event in stage.told} == {"CONSERVATION"}

    def test_an_idle_instance_is_recounted_but_not_at_every_idle_moment(self, stage: Stage) -> None:
        told_at = []
        stage.instance.scheduler.pool.ref_counts[3] = 1
        for minute in range(60):
            stage.at(60 * minute)
            before = len(stage.told)
            stage.findings.idle(stage.instance)
            if len(stage.told) > before:
                told_at.append(minute)
        assert told_at[0] == 0
        assert 2 <= len(told_at) <= 12

    def test_what_is_held_at_the_end_is_told_by_its_holder(self, stage: Stage) -> None:
        scheduler = stage.instance.scheduler
        taken = scheduler.kv.allocate_slots("r", Slots(num_computed_tokens=0, num_tokens=8, num_new_tokens=8))
        assert taken is not None
        stage.findings.check_drained(stage.instance)
        (event,) = stage.told
        assert (event.request_id, event.cause) == ("r", "2 blocks still held at the end")
        assert event.block_ids == [int(np.concatenate(taken)[0])]
