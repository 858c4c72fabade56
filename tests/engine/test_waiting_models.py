"""Who is scanned first: the queue of those who hold blocks, and the older one of those who were passed over."""

import pytest

from kvreplay.connectors.scripted.connector import RequestScript
from kvreplay.engine.history.skipped_waiting import SkippedWaitingScheduler
from kvreplay.engine.scheduler import Scheduler
from tests.engine.bench import Bench, load


def behind_a_misfit(kind: type[Scheduler]) -> Bench:
    """Spec, 2.8: r1's lookup is pending, and then it needs 4 of 2 free blocks; r2 holds 5 that it has loaded."""
    bench = Bench(
        block_size=16,
        num_gpu_blocks=8,
        scripts={"r1": RequestScript(defer=1), "r2": load(80)},
        kind=kind,
        max_num_batched_tokens=128,
    )
    bench.add("r1", 64)
    bench.add("r2", 80)
    bench.step()
    bench.step(finished=["r2"])
    return bench


def test_a_finished_load_is_scanned_before_one_that_does_not_fit() -> None:
    bench = behind_a_misfit(Scheduler)
    assert bench.step() == {"r2": 1}


def test_in_the_older_model_it_stays_behind_for_ever() -> None:
    bench = behind_a_misfit(SkippedWaitingScheduler)
    assert bench.steps(20) == [{}] * 20
    assert bench.holding == ["r1", "r2"]


@pytest.mark.parametrize("kind", [Scheduler, SkippedWaitingScheduler])
def test_those_passed_over_come_before_newer_ones(kind: type[Scheduler]) -> None:
    bench = Bench(scripts={"a": RequestScript(defer=1)}, kind=kind, max_num_seqs=1)
    bench.add("a", 4)
    bench.add("b", 4, max_tokens=1)
    assert bench.step() == {"b": 4}
    bench.add("c", 4)
    assert bench.step() == {"a": 4}
