"""OUTPUT-EQUAL: a finished request's output is the one that right contents give."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvreplay.checkers.finding import OUTPUT_EQUAL, Finding
from kvreplay.checkers.frames import client_ends, rows_of

DigestsOf: TypeAlias = Callable[[Sequence[str], NDArray[np.int64]], Sequence[int] | NDArray[np.uint64]]
"""(request ids, output tokens of each) → the digest of the right output of each."""

_COLUMNS: Final = ("time_ns", "instance", "request_id", "num_tokens", "output_hash")


def check_output_equal(frame: pl.DataFrame, expected: Mapping[str, int] | DigestsOf) -> list[Finding]:
    """Compare every finished output with `expected`.

    A mapping holds the digests of full outputs: only ends that the client sees are compared, and only for the
    requests in it. A function is asked for every finished leg, that of a producer included.
    """
    if isinstance(expected, Mapping):
        ends = client_ends(frame).filter(pl.col("kind") == "request.finished").select(*_COLUMNS).collect()
        ends = ends.filter(pl.col("request_id").is_in(list(expected)))
        digests: Sequence[int] | NDArray[np.uint64] = [expected[name] for name in ends["request_id"]]
    else:
        ends = rows_of(frame, ["request.finished"], *_COLUMNS).collect()
        digests = expected(ends["request_id"].to_list(), ends["num_tokens"].to_numpy())
    right = pl.Series("right", np.asarray(digests, dtype=np.uint64))
    wrong = ends.with_columns(right).filter(pl.col("output_hash").ne_missing(pl.col("right")))
    return [
        Finding(
            OUTPUT_EQUAL,
            row["time_ns"],
            "finished with an output that right contents do not give",
            instance=row["instance"],
            request_id=row["request_id"],
        )
        for row in wrong.iter_rows(named=True)
    ]
