"""Ranks copy: in three queues, each in order, with real words, and report when every rank is done."""

import dataclasses

import numpy as np
import pytest

from kvreplay.connectors.offloading.behaviour import VLLM_0_33, OffloadBehaviour
from kvreplay.connectors.offloading.catalogue import ROWS
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.errors import EngineFatal
from kvreplay.sim.catalogue import FaultRow
from kvreplay.sim.event_loop import FOREVER_NS
from tests.connectors.offloading.bench import COPY_NS, Bench, RowFault, job, store
from tests.connectors.offloading.desk import IDEAL, Settings, full, window

ROW: dict[str, FaultRow] = {row.name: row for row in ROWS}


def bench_with(
    fault: str, *, behaviour: OffloadBehaviour = VLLM_0_33, nth: int | None = 0, **settings: Settings
) -> Bench:
    return Bench(fault=RowFault(ROW[fault], nth=nth), behaviour=behaviour, **settings)


class TestWords:
    def test_there_and_back(self) -> None:
        bench = Bench()
        bench.step(store(0, [3, 5], [7, 2]))
        bench.step()
        bench.run()
        bench.step(job(1, [10, 11], [2, 7]))
        bench.run()
        assert bench.memories[0].first_words(10, 11) == [50, 30]

    def test_every_rank_has_its_own(self) -> None:
        bench = Bench(num_ranks=2)
        bench.memories[1].groups[0] += np.uint64(500)
        bench.step(store(0, [3], [0]))
        bench.step(job(1, [10], [0]))
        bench.run()
        assert [memory.first_words(10) for memory in bench.memories] == [[30], [530]]

    def test_where_all_have_the_same_the_first_stores_for_all(self) -> None:
        bench = Bench(num_ranks=2, is_replicated=True)
        bench.step(store(0, [3], [0]))
        assert bench.completed() == {0: 1}
        bench.step(job(1, [10], [0]))
        bench.run()
        assert [memory.first_words(10) for memory in bench.memories] == [[30], [30]]
        assert bench.completed() == {0: 1, 1: 2}

    def test_a_load_that_starts_inside_a_chunk_skips_its_first_blocks(self) -> None:
        """Six blocks from place 2 on, chunks of four: the last two of the first chunk and all of the second."""
        bench = Bench(layout=OffloadLayout(groups=(full(blocks_per_chunk=4),), tokens_per_hash=4))
        bench.stored(store(0, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1]))
        bench.step(job(1, [20, 21, 22, 23, 24, 25], [0, 1], firsts=(2,)))
        bench.run()
        assert bench.memories[0].first_words(20, 21, 22, 23, 24, 25) == [30, 40, 50, 60, 70, 80]

    def test_groups_come_one_after_another(self) -> None:
        bench = Bench(layout=OffloadLayout(groups=(full(0), window(1, 4)), tokens_per_hash=4))
        bench.stored(store(0, [1, 2, 3], [0, 1, 2], sizes=(2, 1), firsts=(0, 5)))
        bench.step(job(1, [30, 31], [2, 1], sizes=(1, 1), firsts=(0, 0)))
        bench.run()
        assert bench.memories[0].first_words(30, group=0) == [1030]
        assert bench.memories[0].first_words(31, group=1) == [20]

    def test_what_a_store_reads_is_what_is_there_when_it_ends(self) -> None:
        bench = Bench()
        bench.step(store(0, [3], [0]))
        bench.step()
        bench.run(COPY_NS // 2)
        bench.memories[0].groups[0][3] = np.uint64(99)
        bench.run()
        assert bench.cpu_words(0)[0].tolist() == [99, 99, 99, 99]

    def test_a_null_block_is_not_written(self) -> None:
        bench = Bench()
        bench.step(store(0, [3, 4], [0, 1]))
        bench.step(job(1, [0, 20], [0, 1]))
        bench.run()
        assert bench.memories[0].first_words(0, 20) == [0, 40]

    @pytest.mark.parametrize("chunks", [[0], [0, 1, 2]])
    def test_chunks_that_do_not_match_the_blocks_kill_the_worker(self, chunks: list[int]) -> None:
        bench = Bench()
        bench.step(job(1, [10, 11], chunks))
        with pytest.raises(EngineFatal, match="transfer_async"):
            bench.run()


class TestOrder:
    def test_a_slow_head_hides_those_behind_it(self) -> None:
        bench = Bench()
        bench.step(job(0, [1, 2, 3, 4], [0, 1, 2, 3]), job(1, [5], [4]))
        bench.run(4 * COPY_NS - 1)
        assert not bench.workers.has_report()
        bench.run()
        assert list(bench.completed()) == [0, 1]
        assert bench.loop.now_ns == 5 * COPY_NS

    def test_stores_never_block_loads(self) -> None:
        bench = Bench()
        bench.step(store(0, [1, 2, 3, 4], [0, 1, 2, 3]))
        bench.step(job(1, [5], [4]))
        bench.run(COPY_NS)
        assert list(bench.completed()) == [1]

    def test_synchronous_loads_have_a_queue_of_their_own_and_block_the_step(self) -> None:
        bench = Bench()
        bench.step(job(0, [1, 2, 3, 4], [0, 1, 2, 3]))
        assert bench.step(job(1, [5, 6], [4, 5], is_sync=True)) == 2 * COPY_NS

    def test_stores_start_with_the_next_step(self) -> None:
        bench = Bench()
        bench.step(store(0, [1], [0]))
        bench.run(5 * COPY_NS)
        assert not bench.workers.has_report()
        bench.step()
        bench.run()
        assert bench.loop.now_ns == 6 * COPY_NS
        assert bench.completed() == {0: 1}

    def test_asynchronous_loads_start_when_the_forward_pass_before_them_is_over(self) -> None:
        bench = Bench()
        bench.step(job(0, [1], [0]), compute_until_ns=300)
        bench.run()
        assert bench.loop.now_ns == COPY_NS + 300

    def test_the_ranks_report_one_by_one(self) -> None:
        bench = Bench(num_ranks=2)
        bench.step(job(0, [1], [0]))
        bench.run()
        output = bench.collect()
        assert (output.completed_jobs, output.finished_recving) == ({0: 2}, ["r0"])

    def test_whoever_sleeps_is_woken(self) -> None:
        bench = Bench()
        bench.step(job(0, [1], [0]))
        bench.run()
        assert bench.num_woken == 1


class TestFlushes:
    def test_the_step_waits_for_what_must_be_over(self) -> None:
        bench = Bench()
        bench.step(store(0, [1, 2], [0, 1]), store(1, [3], [2]))
        assert bench.step(flush=(0,)) == 2 * COPY_NS

    def test_and_for_what_is_before_it(self) -> None:
        bench = Bench()
        bench.step(store(0, [1, 2], [0, 1]), store(1, [3], [2]))
        assert bench.step(flush=(1,)) == 3 * COPY_NS

    def test_its_words_are_read_before_the_step_overwrites_them(self) -> None:
        bench = Bench()
        bench.step(store(0, [3], [0]))
        bench.step(flush=(0,))
        bench.memories[0].groups[0][3] = np.uint64(99)
        bench.run()
        assert bench.cpu_words(0)[0].tolist() == [30, 31, 32, 33]

    def test_one_of_this_very_step_is_started_for_it(self) -> None:
        bench = Bench()
        assert bench.step(store(0, [3], [0]), flush=(0,)) == COPY_NS

    def test_one_that_is_over_is_not_waited_for(self) -> None:
        bench = Bench()
        assert bench.step(flush=(3,)) == 0


class TestStepsWithoutTokens:
    def test_their_stores_are_kept(self) -> None:
        bench = Bench()
        bench.step(store(0, [1], [0]), has_forward=False)
        bench.step()
        bench.run()
        assert bench.completed() == {0: 1}

    def test_before_41945_they_were_lost(self) -> None:
        bench = Bench(behaviour=dataclasses.replace(VLLM_0_33, no_forward="drop"))
        bench.step(store(0, [1], [0]), has_forward=False)
        bench.step()
        bench.run()
        assert bench.completed() == {}


class TestFailedCopies:
    def test_the_engine_dies_of_a_load(self) -> None:
        bench = bench_with("offload.load-dma-fail")
        bench.step(job(0, [1], [0]))
        bench.run()
        with pytest.raises(EngineFatal, match=r"get_finished: transfer_result\.success"):
            bench.collect()

    def test_or_of_one_that_is_not_even_taken(self) -> None:
        bench = bench_with("offload.submit-refused")
        with pytest.raises(EngineFatal, match="start_kv_transfers: success"):
            bench.step(job(0, [1], [0]))

    def test_or_the_request_fails(self) -> None:
        bench = bench_with("offload.load-dma-fail", behaviour=IDEAL)
        bench.step(job(0, [1], [0]))
        bench.run()
        output = bench.collect()
        assert (output.finished_recving, output.failed_recving) == (["r0"], ["r0"])
        assert output.failed_jobs == {0: "injected copy failure"}
        assert bench.workers.failure_reason("r0") == "injected copy failure"
        assert bench.workers.failure_reason("r0") is None

    def test_one_rank_is_enough_for_that(self) -> None:
        bench = bench_with("offload.load-dma-fail", behaviour=IDEAL, num_ranks=2)
        bench.step(job(0, [1], [0]))
        bench.run()
        output = bench.collect()
        assert (output.completed_jobs, output.failed_recving) == ({0: 2}, ["r0"])

    def test_a_synchronous_load_makes_its_blocks_invalid(self) -> None:
        bench = bench_with("offload.load-dma-fail", behaviour=IDEAL)
        bench.step(job(0, [0, 7], [0, 1], is_sync=True))
        bench.run()
        output = bench.collect()
        assert (output.invalid_block_ids, output.finished_recving) == ([7], [])

    def test_a_store_is_reported_as_failed(self) -> None:
        bench = bench_with("offload.store-dma-fail", behaviour=IDEAL)
        bench.step(store(0, [1], [0]))
        bench.step()
        bench.run()
        assert bench.collect().failed_jobs == {0: "injected copy failure"}

    def test_the_engine_dies_of_a_store(self) -> None:
        bench = bench_with("offload.store-dma-fail")
        bench.step(store(0, [1], [0]))
        bench.step()
        bench.run()
        with pytest.raises(EngineFatal, match="success"):
            bench.collect()

    def test_a_load_that_can_only_fail_is_not_begun(self) -> None:
        bench = Bench(behaviour=IDEAL)
        bench.step(job(0, [1], [], failure="an offloaded chunk is gone"))
        assert bench.collect().failed_jobs == {0: "an offloaded chunk is gone"}


class TestSlowCopies:
    def test_a_slow_one_delays_those_behind_it(self) -> None:
        bench = bench_with("offload.load-slow")
        bench.step(job(0, [1], [0]), job(1, [2], [1]))
        bench.run()
        assert bench.loop.now_ns == 1_000_000_000 + 2 * COPY_NS

    def test_a_slow_store_makes_a_flush_slow(self) -> None:
        bench = bench_with("offload.store-slow")
        bench.step(store(0, [1], [0]))
        assert bench.step(flush=(0,)) == 1_000_000_000 + COPY_NS

    def test_one_that_never_ends_blocks_a_flush_for_ever(self) -> None:
        bench = bench_with("offload.copy-hang")
        bench.step(store(0, [1], [0]))
        assert bench.step(flush=(0,)) == FOREVER_NS

    def test_unless_it_is_given_up(self) -> None:
        bench = bench_with("offload.copy-hang", behaviour=IDEAL)
        bench.step(store(0, [1], [0]), store(1, [2], [1]))
        assert bench.step(flush=(0,)) == 10_000_000_000 + COPY_NS
        bench.run()
        output = bench.collect()
        assert output.completed_jobs == {0: 1, 1: 1}
        assert output.failed_jobs == {0: "copy timed out"}

    def test_so_is_one_behind_it_only_late(self) -> None:
        """It starts when the first is given up, 10 s and the time of its copy after its start."""
        bench = bench_with("offload.copy-hang", behaviour=IDEAL)
        bench.step(store(0, [1], [0]), store(1, [2], [1]))
        assert bench.step(flush=(1,)) == 10_000_000_000 + 2 * COPY_NS
        bench.run()
        assert bench.collect().failed_jobs == {0: "copy timed out"}
        assert bench.cpu_words(1)[0].tolist() == [20, 21, 22, 23]

    def test_a_lost_completion_hides_those_behind_it(self) -> None:
        bench = bench_with("offload.done-lost")
        bench.step(job(0, [1], [0]), job(1, [2], [1]))
        bench.run()
        assert bench.completed() == {}

    def test_unless_the_copy_is_given_up(self) -> None:
        bench = bench_with("offload.done-lost", behaviour=IDEAL)
        bench.stored(store(0, [1], [0]), store(1, [2], [1]))
        output = bench.collect()
        assert output.completed_jobs == {0: 1, 1: 1}
        assert output.failed_jobs == {0: "copy timed out"}


class TestForeignBytes:
    def test_a_store_that_escapes_its_flush_reads_what_others_wrote(self) -> None:
        bench = bench_with("offload.late-read")
        bench.step(store(0, [3], [0]))
        assert bench.step(flush=(0,)) == 0
        bench.memories[0].groups[0][3] = np.uint64(99)
        bench.run()
        assert bench.cpu_words(0)[0].tolist() == [99, 99, 99, 99]

    def test_where_that_is_checked_it_is_given_up_instead(self) -> None:
        bench = bench_with("offload.late-read", behaviour=IDEAL)
        bench.step(store(0, [3], [0]))
        bench.step(flush=(0,))
        bench.run()
        assert bench.collect().failed_jobs == {0: "not read before its blocks were given away"}

    @pytest.mark.parametrize("fault", ["offload.load-corrupt", "offload.store-corrupt"])
    def test_damage_reaches_the_gpu_and_is_named(self, fault: str) -> None:
        bench = bench_with(fault)
        bench.stored(store(0, [3], [0]))
        bench.step(job(1, [10], [0]))
        bench.run()
        (memory,) = bench.memories
        assert memory.first_words(10) != [30]
        assert memory.corrupted[10].fault_spec == fault
        assert memory.first_words(3) == [30]

    def test_a_checksum_finds_it_on_its_way_into_the_tier(self) -> None:
        bench = bench_with("offload.store-corrupt", behaviour=IDEAL)
        bench.stored(store(0, [3], [0]))
        assert bench.collect().failed_jobs == {0: "checksum mismatch"}

    def test_a_checksum_finds_it_and_it_is_not_written(self) -> None:
        bench = bench_with("offload.load-corrupt", behaviour=IDEAL)
        bench.stored(store(0, [3], [0]))
        bench.step(job(1, [10], [0]))
        bench.run()
        output = bench.collect()
        assert (bench.memories[0].first_words(10), output.failed_recving) == ([100], ["r1"])
        assert output.failed_jobs == {1: "checksum mismatch"}

    def test_a_chunk_that_is_stored_anew_is_good_again(self) -> None:
        bench = bench_with("offload.store-corrupt")
        bench.stored(store(0, [3], [0]), store(1, [4], [0]))
        bench.step(job(2, [10], [0]))
        bench.run()
        assert bench.memories[0].first_words(10) == [40]
        assert not bench.memories[0].corrupted


class TestReports:
    def test_a_lost_one_is_missing_for_good(self) -> None:
        bench = bench_with("offload.ack-lost", num_ranks=2)
        bench.step(job(0, [1], [0]))
        bench.run()
        assert bench.collect().finished_recving == []

    def test_or_repeated(self) -> None:
        bench = bench_with("offload.ack-lost", behaviour=IDEAL, num_ranks=2)
        bench.step(job(0, [1], [0]))
        bench.run()
        output = bench.collect()
        assert (output.completed_jobs, output.finished_recving) == ({0: 2}, ["r0"])
        assert bench.loop.now_ns >= 1_000_000_000

    def test_a_late_one_makes_the_others_wait(self) -> None:
        bench = bench_with("offload.ack-late", num_ranks=2)
        bench.step(job(0, [1], [0]))
        bench.run(COPY_NS)
        assert bench.collect().finished_recving == []
        bench.run()
        assert bench.collect().finished_recving == ["r0"]

    @pytest.mark.parametrize(("behaviour", "count"), [(VLLM_0_33, 2), (IDEAL, 1)])
    def test_one_that_comes_twice_is_counted_twice_or_once(self, behaviour: OffloadBehaviour, count: int) -> None:
        bench = bench_with("offload.ack-duplicate", behaviour=behaviour)
        bench.step(job(0, [1], [0]))
        bench.run()
        assert bench.completed() == {0: count}

    def test_whoever_watches_in_vain_changes_nothing(self) -> None:
        times = []
        for fault in (None, *(RowFault(row, nth=99) for row in ROWS if row.target in ("copy.job", "copy.done"))):
            bench = Bench(fault=fault)
            bench.step(job(0, [1], [0]), store(1, [2], [1]))
            bench.step(job(2, [1], [0]))
            bench.run()
            times.append((bench.loop.now_ns, bench.completed()))
        assert len({str(each) for each in times}) == 1


def test_a_dead_process_copies_and_reports_nothing() -> None:
    bench = Bench()
    bench.step(store(0, [3], [0]))
    bench.step(job(1, [10], [0]))
    bench.workers.shutdown()
    bench.run()
    assert not bench.workers.has_report()
    assert bench.memories[0].first_words(10) == [100]
    assert bench.cpu_words(0)[0].tolist() == [0, 0, 0, 0]


def test_a_chunks_words_can_be_taken_out_and_put_elsewhere() -> None:
    bench = Bench(num_ranks=2)
    bench.step(store(0, [3], [0]))
    bench.step()
    bench.run()
    bench.workers.put_chunk(5, bench.workers.take_chunk(0))
    assert bench.cpu_words(5, rank=1)[0].tolist() == [30, 31, 32, 33]


def test_what_was_moved_is_counted() -> None:
    bench = Bench()
    bench.step(store(0, [3, 4], [0, 1]))
    bench.step(job(1, [10], [0]))
    bench.run()
    queues = bench.workers.ranks[0].queues
    assert queues.num_bytes == {"S": 2000, "L": 1000, "Y": 0}
    assert queues.busy_ns == {"S": 2000, "L": 1000, "Y": 0}
