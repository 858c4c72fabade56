"""The scheduler's rules, one sentence each. Blocks of 4 tokens; numbers in brackets are of the specification."""

import pytest

from kvreplay.connectors.scripted.connector import RequestScript
from kvreplay.errors import EngineFatal
from tests.engine.bench import Bench, deferred, load, sync_load


class TestBudget:
    def test_a_prompt_over_the_budget_is_computed_in_chunks(self) -> None:
        bench = Bench(max_num_batched_tokens=8, max_num_seqs=8)
        bench.add("a", 18)
        assert bench.steps(4) == [{"a": 8}, {"a": 8}, {"a": 2}, {"a": 1}]

    def test_a_chunk_samples_no_token(self) -> None:
        bench = Bench(max_num_batched_tokens=8, max_num_seqs=8)
        bench.add("a", 12)
        bench.schedule()
        assert bench.update() == {}
        bench.schedule()
        assert bench.update() == {"a": None}

    def test_running_requests_come_first_in_order_of_admission(self) -> None:
        bench = Bench(max_num_batched_tokens=8, max_num_seqs=8)
        bench.add("a", 4)
        bench.add("b", 3)
        bench.step()
        bench.add("c", 12)
        assert list(bench.step().items()) == [("a", 1), ("b", 1), ("c", 6)]

    def test_without_chunked_prefill_a_prompt_over_the_rest_of_the_budget_waits(self) -> None:
        bench = Bench(max_num_batched_tokens=8, max_num_seqs=8, enable_chunked_prefill=False)
        bench.add("a", 6)
        bench.add("b", 4)
        assert bench.steps(2) == [{"a": 6}, {"a": 1, "b": 4}]

    def test_a_token_budget_below_the_batch_budget_counts(self) -> None:
        bench = Bench(max_num_batched_tokens=32, max_num_scheduled_tokens=8)
        bench.add("a", 18)
        assert bench.step() == {"a": 8}

    def test_a_long_prefill_is_held_back_only_while_another_is_eligible(self) -> None:
        """[2.1] budget 32, threshold 10: alone 32 of 50, together 10 each."""
        bench = Bench(max_num_batched_tokens=32, long_prefill_token_threshold=10, num_gpu_blocks=60)
        bench.add("a", 50)
        assert bench.step() == {"a": 32}
        bench = Bench(max_num_batched_tokens=32, long_prefill_token_threshold=10, num_gpu_blocks=60)
        bench.add("a", 50)
        bench.add("b", 50)
        assert bench.step() == {"a": 10, "b": 10}

    def test_no_more_run_than_slots_and_nobody_is_looked_up_beyond_them(self) -> None:
        """[trap 20]"""
        bench = Bench(max_num_seqs=2, has_connector=True)
        for name in "abc":
            bench.add(name, 4)
        bench.step()
        assert (bench.running, bench.waiting) == (["a", "b"], ["c"])
        assert [lookup[0] for lookup in bench.lookups] == ["a", "b"]
        bench.step()
        assert bench.lookups == []

    def test_max_num_active_seqs_is_a_lower_limit(self) -> None:
        bench = Bench(max_num_seqs=4, max_num_active_seqs=1)
        bench.add("a", 4)
        bench.add("b", 4)
        bench.step()
        assert bench.running == ["a"]


class TestEnds:
    def test_the_last_token_ends_a_request_and_frees_its_blocks_tail_first(self) -> None:
        bench = Bench(num_gpu_blocks=8)
        bench.add("a", 10, max_tokens=2)
        bench.step()
        bench.schedule()
        assert bench.update() == {"a": "length"}
        assert bench.free_queue == [3, 4, 5, 6, 7, 2, 1]
        assert bench.scheduler.finished_req_ids == ["a"]

    def test_a_stop_token_ends_it_before_a_length_does(self) -> None:
        bench = Bench()
        bench.add("a", 4, max_tokens=2, stop=(1001,))
        bench.step()
        bench.schedule()
        assert bench.update() == {"a": "stop"}

    def test_the_models_length_ends_it(self) -> None:
        bench = Bench(max_model_len=6)
        bench.add("a", 4)
        assert len(bench.steps(2)) == 2
        assert bench.events("request.finished")[0].num_tokens == 2

    def test_an_abort_frees_at_once_and_unknown_or_ended_ones_are_ignored(self) -> None:
        bench = Bench()
        bench.add("a", 10)
        bench.step()
        bench.abort("a", "b", "a")
        bench.abort("a")
        assert bench.num_free == 19
        assert not bench.scheduler.requests
        assert len(bench.events("request.aborted")) == 1

    def test_an_abort_within_a_step_drops_its_token(self) -> None:
        bench = Bench()
        bench.add("a", 4)
        bench.add("b", 4)
        bench.schedule()
        bench.abort("a")
        assert bench.update() == {"b": None}

    def test_ended_ids_are_told_once_in_the_next_step(self) -> None:
        bench = Bench()
        bench.add("a", 4, max_tokens=1)
        bench.add("b", 4)
        bench.step()
        told = []
        for _ in range(2):
            bench.schedule()
            assert bench.output is not None
            told.append(bench.output.finished_req_ids)
            bench.update()
        assert told == [["a"], []]


class TestPrefixCache:
    def test_the_same_prompt_in_the_same_step_hits_what_is_scheduled_already(self) -> None:
        bench = Bench()
        bench.add("a", range(10))
        bench.add("b", range(10))
        assert bench.step() == {"a": 10, "b": 2}
        assert bench.blocks("b") == [1, 2, 4]

    def test_a_full_local_hit_computes_the_whole_last_block(self) -> None:
        """[trap 6]"""
        bench = Bench()
        bench.add("a", range(8), max_tokens=1)
        bench.step()
        bench.add("b", range(8))
        assert bench.step() == {"b": 4}
        assert bench.blocks("b") == [1, 3]

    def test_a_later_turn_hits_what_was_generated(self) -> None:
        bench = Bench()
        bench.add("a", range(4), max_tokens=6)
        bench.steps(6)
        bench.add("b", [*range(4), 1000, 1001, 1002, 1003, 1004])
        assert bench.step() == {"b": 1}

    def test_freed_blocks_are_reused_unhashed_first(self) -> None:
        """[trap 23]"""
        bench = Bench(num_gpu_blocks=8)
        bench.add("a", 10, max_tokens=1)
        bench.step()
        bench.add("b", 10)
        bench.step()
        assert bench.blocks("b") == [3, 4, 5]

    def test_a_reset_needs_an_idle_pool(self) -> None:
        bench = Bench()
        bench.add("a", 8)
        bench.step()
        assert not bench.scheduler.reset_prefix_cache()
        assert bench.hashed == [1, 2]
        assert bench.scheduler.reset_prefix_cache(reset_running=True)
        assert bench.hashed == []
        assert bench.waiting == ["a"]


class TestPreemption:
    def test_the_last_admitted_gives_way_to_itself(self) -> None:
        """[2.7, G15] 5 usable blocks, two prompts of 8: the second needs a block for its ninth token."""
        bench = Bench(num_gpu_blocks=6)
        bench.add("1", 8)
        bench.add("2", 8)
        bench.step()
        assert (bench.blocks("1"), bench.blocks("2")) == ([1, 2], [3, 4])
        assert bench.step() == {"1": 1}
        assert bench.blocks("1") == [1, 2, 5]
        assert bench.free_queue == [4, 3]
        assert (bench.status("2"), bench.waiting) == ("PREEMPTED", ["2"])
        assert bench.step() == {"1": 1}, "its two hits are free blocks themselves: 2 + 1 > 2"

    def test_nobody_is_admitted_in_a_step_that_preempted(self) -> None:
        """[trap 18]"""
        bench = Bench(num_gpu_blocks=6)
        bench.add("1", 8)
        bench.add("2", 8)
        bench.step()
        bench.add("3", 2)
        assert bench.step() == {"1": 1}
        assert bench.num_free == 2

    def test_an_earlier_one_takes_the_blocks_of_the_last(self) -> None:
        bench = Bench(num_gpu_blocks=6)
        bench.add("1", 8)
        bench.add("2", 11)
        bench.step()
        assert bench.step() == {"1": 1}
        assert bench.blocks("1") == [1, 2, 5]
        (preempted,) = bench.events("request.preempted")
        assert (preempted.request_id, preempted.num_tokens, preempted.num_blocks) == ("2", 11, 3)

    def test_it_keeps_its_output_and_computes_it_again(self) -> None:
        """[trap 43]"""
        bench = Bench(num_gpu_blocks=6, enable_prefix_caching=False)
        bench.add("1", 7, max_tokens=4)
        bench.add("2", 7)
        bench.steps(3)
        assert bench.status("2") == "PREEMPTED"
        bench.steps(1)
        assert bench.step() == {"2": 9}
        assert bench.scheduler.requests["2"].num_output_tokens == 3

    def test_it_goes_to_the_front_of_the_queue(self) -> None:
        bench = Bench(num_gpu_blocks=6)
        bench.add("1", 8)
        bench.add("2", 8)
        bench.step()
        bench.add("3", 8)
        bench.step()
        assert bench.waiting == ["2", "3"]

    def test_a_request_that_outgrew_the_pool_blocks_the_queue(self) -> None:
        """[2.8] A real deployment's start-up check keeps this from happening."""
        bench = Bench(num_gpu_blocks=6)
        bench.add("1", 18)
        bench.steps(5)
        bench.add("2", 2)
        assert bench.steps(3) == [{}, {}, {}]
        assert bench.waiting == ["1", "2"]

    def test_one_can_be_preempted_from_outside(self) -> None:
        bench = Bench()
        bench.add("a", 8)
        bench.step()
        assert bench.scheduler.preempt("a")
        assert not bench.scheduler.preempt("a")
        assert bench.num_free == 19


class TestAdmission:
    def test_a_prompt_that_can_never_finish_now_is_not_started(self) -> None:
        """[G17] 9 usable blocks, budget 8, two prompts of 20 tokens."""
        bench = Bench(num_gpu_blocks=10, max_num_batched_tokens=8, max_num_seqs=8)
        bench.add("1", 20)
        bench.add("2", 20)
        assert bench.steps(4) == [{"1": 8}, {"1": 8}, {"1": 4}, {"1": 1}]
        assert bench.waiting == ["2"]

    def test_unless_that_gate_is_off(self) -> None:
        bench = Bench(num_gpu_blocks=10, max_num_batched_tokens=8, max_num_seqs=8, scheduler_reserve_full_isl=False)
        bench.add("1", 20)
        bench.add("2", 20)
        assert bench.steps(3) == [{"1": 8}, {"1": 8}, {"1": 4, "2": 4}]

    def test_a_head_that_does_not_fit_holds_up_everyone_behind_it(self) -> None:
        """[trap 17]"""
        bench = Bench(num_gpu_blocks=6)
        bench.add("1", 8)
        bench.step()
        bench.add("2", 16)
        bench.add("3", 2)
        bench.step()
        assert bench.waiting == ["2", "3"]
        assert not bench.scheduler.deferred_waiting

    def test_a_watermark_applies_only_while_something_runs(self) -> None:
        bench = Bench(num_gpu_blocks=10, watermark=0.5)
        bench.add("1", 32)
        assert bench.step() == {"1": 32}, "8 of 9 blocks"
        bench.add("2", 2)
        assert bench.step() == {"1": 1}

    def test_those_skipped_keep_their_order_in_front_of_newer_ones(self) -> None:
        """[G18, trap 19] 1 and 3 are asked again later, 2 loads, 4 is computed; then 2 is there and 3 has nothing."""
        bench = Bench(
            num_gpu_blocks=30,
            max_num_batched_tokens=12,
            max_num_seqs=12,
            scripts={"1": deferred(2), "2": load(8), "3": deferred(1)},
        )
        for name in "1234":
            bench.add(name, 9)
        assert bench.step(finished=["2"]) == {"4": 9}
        assert (bench.running, bench.waiting, bench.holding) == (["4"], ["1", "3"], ["2"])
        assert sorted(bench.scheduler.deferred_waiting) == ["1", "2", "3"]
        bench.add("5", 9)
        assert bench.step() == {"4": 1, "2": 1, "3": 9, "5": 1}
        assert (bench.running, bench.waiting) == (["4", "2", "3", "5"], ["1"])


class TestAsyncLoads:
    """G1 to G5: a prompt of 18 tokens, 16 of them held outside."""

    @staticmethod
    def parked(*, recompute: bool = False, max_num_seqs: int = 16) -> Bench:
        bench = Bench(scripts={"r": load(16)}, recompute=recompute, max_num_seqs=max_num_seqs)
        bench.add("r", 18)
        assert bench.step() == {}
        return bench

    def test_it_parks_with_blocks_but_no_hashes_slot_or_budget(self) -> None:
        bench = self.parked()
        assert (bench.blocks("r"), bench.num_free, bench.hashed) == ([1, 2, 3, 4], 15, [])
        assert (bench.status("r"), bench.computed("r")) == ("WAITING_FOR_REMOTE_KVS", 16)
        assert (bench.running, bench.holding) == ([], ["r"])

    def test_it_waits_for_ever_without_a_report(self) -> None:
        """[trap 2]"""
        bench = self.parked()
        assert bench.steps(5) == [{}] * 5
        assert bench.scheduler.has_requests

    def test_a_finished_load_is_hashed_when_it_is_promoted_and_the_rest_computed(self) -> None:
        bench = self.parked()
        bench.step(finished=["r"])
        assert bench.hashed == []
        assert bench.step() == {"r": 2}
        assert (bench.blocks("r"), bench.num_free) == ([1, 2, 3, 4, 5], 14)
        assert bench.hashed == [1, 2, 3, 4]

    def test_a_load_of_everything_computes_the_last_token_again(self) -> None:
        """[G11, trap 6]"""
        bench = Bench(block_size=16, scripts={"r": load(32)})
        bench.add("r", 32)
        bench.step(finished=["r"])
        assert bench.step() == {"r": 1}
        assert (bench.blocks("r"), bench.hashed) == ([1, 2], [1, 2])

    def test_a_bad_block_cuts_it_back_to_the_valid_prefix(self) -> None:
        """[G2] under recompute it keeps all its blocks."""
        bench = self.parked(recompute=True)
        bench.step(invalid=[3], finished=["r"])
        assert (bench.computed("r"), list(bench.scheduler.failed_recving)) == (8, ["r"])
        assert bench.step() == {"r": 10}
        assert bench.blocks("r") == [1, 2, 3, 4, 5]
        assert bench.hashed == [1, 2, 3, 4]

    def test_a_bad_first_block_frees_all_and_asks_the_connector_again(self) -> None:
        """[G3, traps 7 and 32]"""
        bench = self.parked(recompute=True)
        bench.step(invalid=[1], finished=["r"])
        assert bench.computed("r") == 0
        assert bench.step() == {"r": 18}
        assert bench.blocks("r") == [4, 3, 2, 1, 5]
        assert bench.lookups == [["r", 0, 0, False]]

    def test_under_fail_the_client_hears_at_once_and_the_blocks_come_back_with_the_load(self) -> None:
        """[G4]"""
        bench = self.parked()
        bench.schedule()
        assert bench.update(invalid=[3]) == {"r": "error"}
        assert bench.num_free == 15
        bench.step(finished=["r"])
        assert bench.num_free == 19
        assert not bench.scheduler.requests

    def test_failed_and_finished_in_one_report_free_in_the_same_step(self) -> None:
        """[G5, trap 35]"""
        bench = self.parked()
        bench.schedule()
        assert bench.update(failed=["r"], finished=["r"]) == {"r": "error"}
        assert bench.num_free == 19

    def test_a_failed_request_starts_afresh_under_recompute(self) -> None:
        bench = self.parked(recompute=True)
        bench.step(failed=["r"], finished=["r"])
        assert bench.step() == {"r": 18}
        assert bench.blocks("r") == [4, 3, 2, 1, 5]

    @pytest.mark.parametrize("recompute", [False, True])
    def test_a_failure_without_completion_parks_for_ever(self, recompute: bool) -> None:
        """[trap 1]"""
        bench = self.parked(recompute=recompute)
        bench.step(invalid=[3])
        bench.steps(5)
        assert (bench.num_free, list(bench.scheduler.requests)) == (15, ["r"])

    def test_the_lowest_bad_block_of_several_reports_counts(self) -> None:
        bench = self.parked(recompute=True)
        bench.step(invalid=[4])
        assert bench.computed("r") == 12
        bench.step(invalid=[2])
        bench.step(invalid=[3])
        assert bench.computed("r") == 4

    def test_a_bad_local_hit_is_hit_again(self) -> None:
        """[trap 8] 8 tokens are local, 8 more come from outside; block 1 is reported."""
        bench = Bench(scripts={"r": load(16)}, recompute=True)
        bench.add("first", range(8), max_tokens=1)
        bench.step()
        bench.add("r", range(18))
        bench.step()
        assert bench.blocks("r") == [1, 2, 3, 4]
        bench.step(invalid=[1], finished=["r"])
        assert bench.computed("r") == 0
        assert bench.step() == {"r": 10}
        assert bench.blocks("r") == [1, 2, 4, 3, 5]

    def test_reservations_keep_what_others_in_flight_still_need(self) -> None:
        """[G9, trap 21] A holds 1 of 4 blocks of 16; B's load of 4 with 6 free is refused."""
        bench = Bench(num_gpu_blocks=8, block_size=16, scripts={"a": load(16), "b": load(64)})
        bench.add("a", 64)
        bench.add("b", 80)
        bench.step()
        assert (bench.blocks("a"), bench.status("b"), bench.blocks("b")) == ([1], "WAITING", [])
        assert bench.num_free == 6

    def test_a_finished_load_is_reached_behind_a_head_that_cannot_fit(self) -> None:
        """[G10]"""
        bench = Bench(num_gpu_blocks=8, block_size=16, scripts={"1": deferred(1), "2": load(80)})
        bench.add("1", 64)
        bench.add("2", 81)
        bench.add("3", 16, max_tokens=1)
        assert bench.step() == {"3": 16}
        assert (bench.blocks("2"), bench.num_free) == ([1, 2, 3, 4, 5], 2)
        assert bench.step(finished=["2"]) == {}
        assert bench.num_free == 2
        assert bench.step() == {"2": 1}
        assert bench.waiting == ["1"]

    def test_it_takes_a_lookup_and_so_a_free_slot_and_some_budget(self) -> None:
        """[trap 20]"""
        bench = Bench(max_num_seqs=1, scripts={"r": load(16)})
        bench.add("a", 4)
        bench.add("r", 18)
        bench.step()
        assert bench.waiting == ["r"]

    def test_an_abort_waits_for_the_load(self) -> None:
        """[G12, 1.5] 17 free, the request kept; the completion frees it, a second one kills the engine."""
        bench = Bench(block_size=16, scripts={"r": load(32)})
        bench.add("r", 40)
        bench.step()
        bench.abort("r")
        assert (bench.num_free, bench.status("r")) == (17, "FINISHED_ABORTED")
        assert not bench.scheduler.has_unfinished_requests
        assert bench.scheduler.has_requests
        bench.step(finished=["r"])
        assert (bench.num_free, list(bench.scheduler.requests)) == (19, [])
        bench.schedule()
        with pytest.raises(EngineFatal, match=r"^AssertionError"):
            bench.update(finished=["r"])

    def test_an_abort_after_the_load_frees_at_once(self) -> None:
        bench = self.parked()
        bench.step(finished=["r"])
        bench.abort("r")
        assert bench.num_free == 19

    def test_a_completion_twice_before_promotion_is_harmless(self) -> None:
        bench = self.parked(max_num_seqs=1)
        bench.schedule()
        bench.update(finished=["r", "r"])
        assert bench.step() == {"r": 2}

    def test_a_completion_after_promotion_kills_the_engine(self) -> None:
        """[trap 3]"""
        bench = self.parked()
        bench.step(finished=["r"])
        bench.schedule()
        with pytest.raises(EngineFatal, match=r"^AssertionError: finished_recving of r, which is RUNNING$"):
            bench.update(finished=["r"])

    def test_a_completion_of_a_stranger_kills_the_engine(self) -> None:
        """[trap 4]"""
        bench = Bench(has_connector=True)
        bench.schedule()
        with pytest.raises(EngineFatal, match=r"^AssertionError: finished_recving of unknown request stranger$"):
            bench.update(finished=["stranger"])

    def test_a_sent_report_of_a_stranger_kills_the_engine(self) -> None:
        bench = Bench(has_connector=True)
        bench.schedule()
        with pytest.raises(EngineFatal, match=r"^AssertionError: finished_sending of unknown request stranger$"):
            bench.update(sent=["stranger"])

    def test_a_sent_report_of_a_running_request_kills_the_engine(self) -> None:
        bench = Bench(has_connector=True)
        bench.add("r", 4)
        bench.schedule()
        with pytest.raises(EngineFatal, match=r"^AssertionError: finished_sending of r, which is RUNNING$"):
            bench.update(sent=["r"])

    def test_more_external_tokens_than_the_prompt_has_kill_the_engine(self) -> None:
        bench = Bench(scripts={"r": RequestScript(tokens=99)})
        bench.add("r", 8)
        with pytest.raises(EngineFatal, match=r"^AssertionError$"):
            bench.schedule()


class TestSyncLoads:
    """[4.4] Two prompts of 18 tokens share 8; the first loads 16, the second hits the 8 in the same step."""

    PREFIX = tuple(range(8))

    def sharing(self, *, recompute: bool, second: int = 0) -> Bench:
        bench = Bench(num_gpu_blocks=30, scripts={"1": sync_load(16), "2": sync_load(second)}, recompute=recompute)
        bench.add("1", [*self.PREFIX, *range(100, 110)])
        bench.add("2", [*self.PREFIX, *range(200, 210)])
        return bench

    def test_it_runs_in_the_step_of_its_load_and_its_blocks_are_hashed_before_it(self) -> None:
        bench = self.sharing(recompute=True)
        assert bench.schedule() == {"1": 2, "2": 10}
        assert (bench.blocks("1"), bench.blocks("2")) == ([1, 2, 3, 4, 5], [1, 2, 6, 7, 8])
        assert bench.hashed == [1, 2, 3, 4, 6, 7]
        assert bench.output is not None
        assert bench.output.has_sync_kv_loads

    def test_a_shared_bad_block_is_left_to_the_first_to_compute_again(self) -> None:
        """[G6, traps 11 and 12]"""
        bench = self.sharing(recompute=True)
        bench.schedule()
        assert bench.update(invalid=[2]) == {}, "both samples are dropped [trap 37]"
        assert (bench.computed("1"), bench.computed("2")) == (4, 8)
        assert bench.hashed == [1, 2, 3, 4, 6, 7], "nothing is evicted under recompute"
        assert bench.step() == {"1": 14, "2": 10}
        assert bench.num_free == 21

    def test_under_fail_both_end_and_what_was_built_on_it_is_evicted_but_for_the_sharers_own(self) -> None:
        """[G7, trap 9]"""
        bench = self.sharing(recompute=False)
        bench.schedule()
        assert bench.update(invalid=[2]) == {"1": "error", "2": "error"}
        assert bench.hashed == [1, 6, 7]
        assert bench.num_free == 29
        assert [(event.num_blocks, event.cause) for event in bench.events("block.evicted")] == [(3, "load-failure")]

    def test_the_sharers_own_blocks_are_hit_again_once_the_prefix_is_back(self) -> None:
        """[trap 9] 6 and 7 were computed on top of the failed load."""
        bench = self.sharing(recompute=False)
        bench.schedule()
        bench.update(invalid=[2])
        bench.add("c", self.PREFIX, max_tokens=1)
        bench.step()
        bench.add("d", [*self.PREFIX, *range(200, 210)])
        assert bench.step() == {"d": 2}
        assert bench.blocks("d")[2:4] == [6, 7]

    def test_a_sharer_with_a_bad_block_of_its_own_is_cut_back_to_that(self) -> None:
        """[G8] block 2 is shared, block 7 is the second's."""
        bench = self.sharing(recompute=True, second=16)
        bench.schedule()
        assert bench.blocks("2") == [1, 2, 6, 7, 8]
        bench.update(invalid=[2, 7])
        assert (bench.computed("1"), bench.computed("2")) == (4, 12)
        assert [event.num_tokens for event in bench.events("load.failed")] == [12, 4]

    def test_a_sharer_goes_on_alone_on_bad_data_if_the_first_is_aborted(self) -> None:
        """[trap 11]"""
        bench = self.sharing(recompute=True)
        bench.schedule()
        bench.update(invalid=[2])
        bench.abort("1")
        assert bench.step() == {"2": 10}
        assert bench.blocks("2") == [1, 2, 6, 7, 8]

    def test_a_third_can_hit_bad_blocks_before_they_are_written_again(self) -> None:
        """[trap 10] threshold 10: the owner restarts at 0 and computes 10, another is admitted at 40."""
        bench = Bench(
            num_gpu_blocks=40,
            scripts={"1": sync_load(40)},
            recompute=True,
            long_prefill_token_threshold=10,
            max_num_batched_tokens=64,
        )
        bench.add("1", range(42))
        bench.schedule()
        bench.update(invalid=[1])
        bench.add("2", [*range(40), 7])
        assert bench.step() == {"1": 10, "2": 1}
        assert bench.blocks("2")[:10] == bench.blocks("1")[:10]

    def test_a_request_level_failure_of_a_running_request_is_ignored(self) -> None:
        """[trap 15]"""
        bench = self.sharing(recompute=False)
        bench.schedule()
        assert bench.update(failed=["1"]) == {"1": None, "2": None}

    def test_unknown_and_null_blocks_concern_nobody(self) -> None:
        bench = self.sharing(recompute=False)
        bench.schedule()
        assert bench.update(invalid=[0, 29]) == {"1": None, "2": None}

    def test_what_this_step_computes_cannot_be_bad(self) -> None:
        bench = self.sharing(recompute=False)
        bench.schedule()
        assert bench.update(invalid=[5, 6, 7, 8]) == {"1": None, "2": None}


class TestDelayedFrees:
    def test_blocks_wait_for_the_send(self) -> None:
        """[G22] 10 tokens, one output token."""
        bench = Bench(scripts={"r": RequestScript(delay_free=True)})
        bench.add("r", 10, max_tokens=1)
        bench.schedule()
        assert bench.update() == {"r": "length"}
        assert (bench.num_free, bench.status("r")) == (16, "FINISHED_LENGTH_CAPPED")
        bench.step(sent=["r"])
        assert bench.num_free == 19
        assert (bench.free_queue[0], bench.free_queue[-2:]) == (3, [2, 1])
        assert not bench.scheduler.requests

    def test_they_still_serve_hits(self) -> None:
        bench = Bench(scripts={"r": RequestScript(delay_free=True)})
        bench.add("r", range(9), max_tokens=1)
        bench.step()
        bench.add("s", range(9))
        assert bench.step() == {"s": 1}
        bench.step(sent=["r"])
        assert bench.blocks("s")[:2] == [1, 2]
        assert bench.pool.ref_counts[[1, 2]].tolist() == [1, 1]

    def test_an_engine_without_requests_keeps_stepping_for_them(self) -> None:
        bench = Bench(scripts={"r": RequestScript(delay_free=True)})
        bench.add("r", 4, max_tokens=1)
        bench.steps(3)
        assert not bench.scheduler.has_unfinished_requests
        assert bench.scheduler.has_requests


class TestSlidingWindow:
    """A window of 8 tokens, blocks of 4."""

    def test_blocks_go_back_as_the_window_moves_on(self) -> None:
        bench = Bench(window=8, max_num_batched_tokens=12, max_num_seqs=8, num_gpu_blocks=30)
        bench.add("a", 40)
        tables = []
        for _ in range(5):
            bench.step()
            tables.append(bench.blocks("a"))
        assert tables == [
            [1, 2, 3],
            [0, 2, 3, 4, 5, 6],
            [0, 0, 0, 0, 5, 6, 7, 8, 9],
            [0] * 7 + [8, 9, 10],
            [0] * 8 + [9, 10, 11],
        ]

    def test_a_load_gets_the_windows_blocks_only(self) -> None:
        """[trap 29]"""
        bench = Bench(window=8, scripts={"r": load(48)})
        bench.add("r", 50)
        bench.step(finished=["r"])
        assert bench.blocks("r") == [0] * 10 + [1, 2]
        assert bench.step() == {"r": 2}
        assert bench.blocks("r") == [0] * 10 + [1, 2, 3]

    def test_a_report_of_the_null_block_hits_whoever_has_one(self) -> None:
        """The null block is in every table whose window has moved: [4.4, hazard]."""
        bench = Bench(window=8, num_gpu_blocks=30, scripts={"r": sync_load(20)}, recompute=True)
        bench.add("r", 24)
        bench.schedule()
        bench.update(invalid=[0])
        assert bench.computed("r") == 0

    def test_sparse_retention_keeps_only_what_a_resend_hits(self) -> None:
        """[trap 24] 32 of 50 tokens in common are no hit, the whole prompt again is."""
        bench = Bench(window=8, num_gpu_blocks=40, retention_interval=0)
        bench.add("a", range(50), max_tokens=1)
        bench.step()
        bench.add("b", [*range(32), *range(900, 918)], max_tokens=1)
        assert bench.step() == {"b": 50}
        bench.add("c", range(50))
        assert bench.step() == {"c": 2}


class TestInterval:
    def test_prefills_are_held_back_between_their_steps(self) -> None:
        bench = Bench(prefill_schedule_interval=3)
        bench.add("a", 4)
        bench.step()
        bench.add("b", 4)
        assert bench.steps(3) == [{"a": 1}, {"a": 1}, {"a": 1, "b": 4}]
