"""KVOutputAggregator: what the scheduler hears of several ranks, and when."""

from kvreplay.engine.aggregator import KVOutputAggregator
from kvreplay.engine.connector import KVConnectorOutput


def received(*request_ids: str, failed: tuple[str, ...] = (), invalid: tuple[int, ...] = ()) -> KVConnectorOutput:
    return KVConnectorOutput(
        finished_recving=list(request_ids), failed_recving=list(failed), invalid_block_ids=list(invalid)
    )


def test_a_request_is_done_when_every_rank_has_said_so() -> None:
    aggregator = KVOutputAggregator(2)
    assert not aggregator.aggregate([received("d1"), None])
    assert aggregator.aggregate([None, received("d1")]).finished_recving == ["d1"]
    assert not aggregator.aggregate([received("d1"), None]), "what was said before is not counted again"


def test_sending_and_receiving_are_counted_apart() -> None:
    aggregator = KVOutputAggregator(2)
    sent = KVConnectorOutput(finished_sending=["r"])
    assert not aggregator.aggregate([sent, received("r")])
    total = aggregator.aggregate([received("r"), sent])
    assert (total.finished_sending, total.finished_recving) == (["r"], ["r"])


def test_bad_blocks_are_passed_on_at_once_and_once() -> None:
    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate([received(invalid=(4, 5)), received(invalid=(5, 6))]).invalid_block_ids == [4, 5, 6]


def test_a_failed_request_waits_for_the_last_rank() -> None:
    """Only then may its blocks be given away."""
    aggregator = KVOutputAggregator(2)
    first = aggregator.aggregate([received("d1", failed=("d1",)), None])
    assert (first.failed_recving, first.finished_recving) == ([], [])
    last = aggregator.aggregate([None, received("d1")])
    assert (last.failed_recving, last.finished_recving) == (["d1"], ["d1"])
    assert aggregator.aggregate([received("d1"), received("d1")]).failed_recving == []


def test_a_rank_that_reports_twice_counts_twice() -> None:
    """As in vLLM: the request is done though the other rank is not."""
    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate([received("d1", "d1"), None]).finished_recving == ["d1"]
