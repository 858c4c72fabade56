"""The reports of an engine's worker ranks, as one (vLLM: distributed/kv_transfer/kv_connector/utils.py,
KVOutputAggregator).

A request has been sent, or received, when every rank has said so. Blocks that could not be loaded are passed on in the
step in which a rank reports them; a whole request's failure waits for the last rank, because only then may its blocks
be given away.
"""

from collections.abc import Iterable, Sequence

from kvreplay.engine.connector import KVConnectorOutput


class KVOutputAggregator:
    """`num_ranks`: how many have to report each request. An engine with a single worker has no aggregator."""

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks > 0, num_ranks
        self._num_ranks = num_ranks
        self._sending: dict[str, int] = {}
        self._recving: dict[str, int] = {}
        """Request → ranks that have not reported it yet."""
        self._failed: dict[str, None] = {}
        """Requests that failed on some rank and are not complete on all."""

    def aggregate(self, outputs: Iterable[KVConnectorOutput | None]) -> KVConnectorOutput:
        """One step's reports, None for a rank that has nothing to say."""
        total = KVConnectorOutput()
        invalid: dict[int, None] = {}
        for output in outputs:
            if output is None:
                continue
            total.finished_sending += self._completed(output.finished_sending, self._sending)
            total.finished_recving += self._completed(output.finished_recving, self._recving)
            self._failed.update(dict.fromkeys(output.failed_recving))
            invalid.update(dict.fromkeys(output.invalid_block_ids))
        total.invalid_block_ids = list(invalid)
        total.failed_recving = [request_id for request_id in self._failed if request_id in total.finished_recving]
        for request_id in total.failed_recving:
            del self._failed[request_id]
        return total

    def _completed(self, request_ids: Sequence[str], remaining: dict[str, int]) -> list[str]:
        """Those that the last rank has now reported."""
        completed: list[str] = []
        for request_id in request_ids:
            left = remaining.get(request_id, self._num_ranks) - 1
            if left:
                remaining[request_id] = left
            else:
                remaining.pop(request_id, None)
                completed.append(request_id)
        return completed
