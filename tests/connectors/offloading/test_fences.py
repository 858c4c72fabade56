"""Blocks that a store still reads are not overwritten: flushes, preemptions, resets, and ids that went stale."""

import pytest

from kvreplay.connectors.offloading.arrays import NO_KEYS
from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.ledger import Job, JobLedger
from kvreplay.connectors.offloading.structs import OffloadingOutput
from kvreplay.engine.request import RequestStatus
from kvreplay.errors import EngineFatal
from tests.connectors.offloading.desk import IDEAL, Desk, Settings, blocks_of, full, only_store, window


def storing(req_id: str = "r", num_tokens: int = 9, **settings: Settings) -> Desk:
    """A desk with a request whose prompt is being stored from blocks 1, 2, ..."""
    desk = Desk(**settings)
    desk.add(req_id, num_tokens)
    desk.ask(req_id)
    desk.admit(req_id, range(1, 4))
    return desk


class TestReuse:
    def test_a_running_requests_blocks_need_no_fence(self) -> None:
        assert not storing().connector.ledger.fences

    def test_once_it_has_ended_whoever_gets_one_flushes_the_store(self) -> None:
        desk = storing()
        desk.finish("r")
        assert sorted(desk.connector.ledger.fences) == [1, 2]
        desk.add("next", 3)
        desk.ask("next")
        desk.allocate("next", [2])
        assert desk.step(desk.run("next", 3, [2]), finished=["r"]).jobs_to_flush == {0}

    def test_other_blocks_do_not(self) -> None:
        desk = storing()
        desk.finish("r")
        desk.add("next", 3)
        desk.ask("next")
        desk.allocate("next", [3])
        assert not desk.step(desk.run("next", 3, [3]), finished=["r"]).jobs_to_flush

    def test_the_report_lifts_it(self) -> None:
        desk = storing()
        desk.finish("r")
        desk.report_all()
        assert not desk.connector.ledger.fences

    def test_a_store_made_at_the_end_is_flushed_at_once_if_its_blocks_have_gone_already(self) -> None:
        desk = Desk(offload_prompt_only=False)
        desk.add("r", 7)
        desk.ask("r")
        desk.admit("r", [1, 2])
        desk.report_all()
        desk.sample("r", 2)
        desk.finish("r")
        desk.add("next", 3)
        desk.ask("next")
        desk.allocate("next", [2])
        metadata = desk.step(desk.run("next", 3, [2]), finished=["r"])
        assert metadata.jobs_to_flush == {only_store(metadata).job_id}

    def test_a_copy_on_write_counts_as_a_reuse(self) -> None:
        desk = storing()
        desk.finish("r")
        assert desk.step(finished=["r"], copied_to=[2]).jobs_to_flush == {0}

    def test_so_does_a_block_for_a_request_that_only_decodes(self) -> None:
        desk = storing()
        desk.finish("r")
        desk.connector.note_allocated([1])
        assert desk.step(finished=["r"]).jobs_to_flush == {0}

    def test_a_windows_blocks_are_fenced_from_the_start(self) -> None:
        """They leave the window, and with it the request, while it runs."""
        desk = Desk(full(0), window(1, 4))
        desk.add("r", 9)
        desk.ask("r")
        desk.admit("r", [1, 2, 3], [11, 12, 13])
        assert sorted(desk.connector.ledger.fences) == [11, 12]


class TestPreemption:
    def test_all_of_its_stores_are_flushed(self) -> None:
        desk = Desk()
        desk.add("r", 14)
        desk.ask("r")
        desk.allocate("r", range(1, 5))
        desk.step(desk.run("r", 8, range(1, 5)))
        desk.step(desk.grow("r", 6, [], start=8))
        assert desk.step(preempted=["r"]).jobs_to_flush == {0, 1}

    def test_afterwards_everything_is_offered_again(self) -> None:
        desk = storing()
        desk.step(preempted=["r"])
        desk.report_all()
        desk.cpu.discard(desk.keys("r")[:1])
        desk.ask("r", 0)
        assert blocks_of(only_store(desk.admit("r", [5, 6, 7]))) == ([5], (1,), (0,))

    def test_one_that_loads_cannot_be_preempted(self) -> None:
        desk = Desk()
        desk.store("earlier", 9, [1, 2, 3])
        desk.add("r", 9)
        desk.ask("r")
        desk.allocate("r", [4, 5, 6], external=8)
        desk.step()
        with pytest.raises(EngineFatal, match=r"any_job\.is_store"):
            desk.step(preempted=["r"])

    def test_unless_the_step_waited_for_it(self) -> None:
        desk = Desk(sync_load_budget=8)
        desk.store("earlier", 9, [1, 2, 3])
        desk.add("r", 10)
        desk.ask("r")
        job = desk.allocate("r", [4, 5, 6], external=8)
        assert job is not None
        desk.step(desk.run("r", 2, [4, 5, 6], start=8))
        assert desk.step(preempted=["r"]).jobs_to_flush == {job.job_id}

    def test_a_reset_may_preempt_and_readmit_it_in_one_step(self) -> None:
        desk = Desk()
        desk.store("earlier", 9, [1, 2, 3])
        desk.add("r", 9)
        desk.ask("r")
        desk.allocate("r", [4, 5, 6], external=8)
        assert not desk.step(preempted=["r"]).jobs_to_flush


class TestStaleIds:
    """A window's table keeps the ids of blocks that have left it, and that others may have by now."""

    def desk(self, behaviour: OffloadBehaviour) -> Desk:
        """Request r, of 16 tokens and a window of 4, has stored all of its prompt and goes on; its block 11 is free."""
        desk = Desk(full(0), window(1, 4), behaviour=behaviour)
        desk.add("r", 16)
        desk.ask("r")
        desk.admit("r", range(1, 5), range(11, 15))
        desk.report_all()
        desk.sample("r")
        return desk

    def give_away(self, desk: Desk, block_id: int) -> None:
        desk.add("other", range(300, 303))
        desk.ask("other")
        desk.allocate("other", [30], [block_id])
        desk.step(desk.run("other", 3, [30], [block_id]), desk.grow("r", 1, [5], [15], start=16))

    @pytest.mark.parametrize(("behaviour", "is_stale"), [(VLLM_0_33, True), (IDEAL, False)])
    def test_after_a_reset_they_would_be_stored_again(self, behaviour: OffloadBehaviour, is_stale: bool) -> None:
        """In 0.33.0 only what is still to be offered is looked at, and after a reset that is everything."""
        desk = self.desk(behaviour)
        self.give_away(desk, 11)
        desk.connector.reset_cache()
        (job,) = desk.step(desk.grow("r", 1, [], [], start=17)).store_jobs.values()
        assert (11 in job.gpu.block_ids) == is_stale

    def test_what_is_still_to_be_offered_is_never_taken_from_others(self) -> None:
        desk = Desk(full(0), window(1, 4), num_chunks=1)
        desk.add("r", 16)
        desk.ask("r")
        desk.admit("r", range(1, 5), range(11, 15))
        assert desk.connector.num_allocation_failures == 1
        self.give_away(desk, 13)
        assert desk.connector.states["r"].groups[1].table.ids.tolist() == [11, 12, 0, 14, 15]


class TestReset:
    def test_everything_is_forgotten_and_what_is_in_flight_is_flushed(self) -> None:
        desk = storing()
        assert desk.connector.reset_cache()
        assert desk.num_stored() == 0
        metadata = desk.step(desk.run("r", 1, start=8))
        assert metadata.jobs_to_flush == {0}

    def test_a_running_request_offers_everything_again(self) -> None:
        desk = storing()
        desk.connector.reset_cache()
        assert blocks_of(only_store(desk.step(desk.grow("r", 1, [], start=8)))) == ([1, 2], (2,), (0,))

    def test_late_reports_are_counted_but_change_nothing(self) -> None:
        desk = storing()
        desk.connector.reset_cache()
        desk.step()
        assert desk.connector.has_pending_push_work()
        desk.report(0)
        assert not desk.connector.has_pending_push_work()
        assert desk.num_stored() == 0

    def test_a_request_that_has_ended_is_gone_with_it(self) -> None:
        desk = storing()
        desk.finish("r")
        desk.step(finished=["r"])
        desk.connector.reset_cache()
        assert not desk.connector.states

    def test_one_whose_end_was_not_announced_yet_is_ended(self) -> None:
        desk = storing()
        desk.finish("r")
        desk.connector.reset_cache()
        assert not desk.connector.states
        assert not desk.step(finished=["r"]).store_jobs

    def test_only_between_steps(self) -> None:
        desk = storing()
        desk.add("next", 3)
        desk.ask("next")
        desk.allocate("next", [5])
        with pytest.raises(EngineFatal, match="between steps only"):
            desk.connector.reset_cache()

    def test_those_waiting_for_a_load_need_not_wait_any_more(self) -> None:
        desk = Desk()
        desk.store("earlier", 9, [1, 2, 3])
        for req_id in ("r1", "r2"):
            desk.add(req_id, 9)
        desk.ask("r1")
        desk.allocate("r1", [4, 5, 6], external=8)
        desk.step()
        assert desk.ask("r2") is None
        desk.connector.reset_cache()
        assert desk.ask("r2") == 0


class TestReports:
    def test_one_too_many_kills_the_engine(self) -> None:
        with pytest.raises(EngineFatal):
            storing().report(0, times=2)

    def test_so_does_one_of_a_job_that_nobody_knows(self) -> None:
        with pytest.raises(EngineFatal, match="KeyError"):
            storing().report(7)

    def test_a_store_that_failed_leaves_no_chunk(self) -> None:
        desk = storing(behaviour=IDEAL)
        desk.connector.update_connector_output(OffloadingOutput(completed_jobs={0: 1}, failed_jobs={0: "no luck"}))
        assert desk.num_stored() == 0

    def test_a_load_that_failed_takes_its_chunks_with_it(self) -> None:
        desk = Desk(behaviour=IDEAL)
        desk.store("earlier", 9, [1, 2, 3])
        desk.add("r", 9)
        desk.ask("r")
        job = desk.allocate("r", [4, 5, 6], external=8)
        assert job is not None
        desk.step()
        desk.connector.update_connector_output(
            OffloadingOutput(completed_jobs={job.job_id: 1}, failed_jobs={job.job_id: "no luck"})
        )
        assert desk.num_stored() == 0
        desk.finish("r", RequestStatus.FINISHED_ERROR)
        desk.step(finished=["r"])
        assert not desk.connector.states


class TestLedger:
    def test_a_block_that_a_job_names_twice_kills_the_engine_at_its_end(self) -> None:
        ledger = JobLedger()
        job_id = ledger.open(Job("r", 1, NO_KEYS, is_store=True, num_blocks=2, fenced=[7, 7]))
        with pytest.raises(EngineFatal, match="7"):
            ledger.close(job_id, request_has_ended=False)
