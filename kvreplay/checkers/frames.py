"""Questions about a trace's rows that several checkers and the summary ask."""

from collections.abc import Sequence

import polars as pl

from kvreplay.events import TERMINAL_KINDS

_TEXTS = ("kind", "instance", "request_id", "transfer_id", "peer", "status", "cause")


def rows_of(frame: pl.DataFrame, kinds: Sequence[str], *columns: str) -> pl.LazyFrame:
    """The rows of these kinds in the trace's order, dictionary columns as plain strings."""
    texts = [pl.col(name).cast(pl.String) for name in _TEXTS if name in columns]
    return frame.lazy().filter(pl.col("kind").is_in(list(kinds))).select(*columns).with_columns(*texts)


def routes(frame: pl.DataFrame) -> pl.LazyFrame:
    """request_id → `serving`, the instance that answers the client (D of a pair), and `producer`.

    The last routing counts.
    """
    return (
        rows_of(frame, ["request.routed"], "request_id", "instance", "peer")
        .rename({"instance": "serving", "peer": "producer"})
        .unique("request_id", keep="last", maintain_order=True)
    )


def client_ends(frame: pl.DataFrame) -> pl.LazyFrame:
    """request_id → the row that ends it for its client: the first terminal one on its serving instance, or a
    rejection by nobody. What ends on the producer of a pair does not count.
    """
    columns = ("seq", "time_ns", "kind", "instance", "request_id", "num_tokens", "cause", "output_hash")
    here = pl.col("serving").is_null() | (pl.col("instance") == pl.col("serving"))
    return (
        rows_of(frame, TERMINAL_KINDS, *columns)
        .filter(pl.col("instance").is_not_null() | (pl.col("kind") == "request.rejected"))
        .join(routes(frame), on="request_id", how="left", maintain_order="left")
        .filter(here | pl.col("instance").is_null())
        .unique("request_id", keep="first", maintain_order=True)
    )
