"""A law seen broken: the record that every checker makes, and its way into a trace and out of it."""

from typing import Final, NamedTuple

import polars as pl

from kvreplay.events import Event

AGREE: Final = "AGREE"
CONSERVATION: Final = "CONSERVATION"
CONTENT: Final = "CONTENT"
EXACTLY_ONCE: Final = "EXACTLY-ONCE"
FENCE: Final = "FENCE"
HIT_ATTAINABLE: Final = "HIT-ATTAINABLE"
NO_FATAL: Final = "NO-FATAL"
NULL_BLOCK: Final = "NULL-BLOCK"
OUTPUT_EQUAL: Final = "OUTPUT-EQUAL"
PROGRESS: Final = "PROGRESS"
RANK_AGREE: Final = "RANK-AGREE"
STORE_CONTENT: Final = "STORE-CONTENT"


class Finding(NamedTuple):
    """One breach of one law. Unknown places are None; `cause_seq` is the row of the fault that led to it."""

    checker: str
    time_ns: int
    detail: str
    instance: str | None = None
    request_id: str | None = None
    block_id: int | None = None
    group: int | None = None
    transfer_id: str | None = None
    cause_seq: int | None = None

    def to_event(self, cause_handle: int | None = None, found_ns: int | None = None) -> Event:
        """The `violation` row that says the same; `cause_handle` is that of the fault, where it is known.

        `found_ns`: when it was found, if not when the law was broken.
        """
        return Event(
            "violation",
            self.time_ns if found_ns is None else found_ns,
            num_tokens=None if found_ns is None else self.time_ns,
            instance=self.instance,
            request_id=self.request_id,
            transfer_id=self.transfer_id,
            group=self.group,
            block_ids=None if self.block_id is None else [self.block_id],
            status=self.checker,
            cause=self.detail,
            cause_handle=cause_handle,
        )


_COLUMNS: Final = (
    pl.col("status").cast(pl.String).fill_null("?"),
    pl.coalesce("num_tokens", "time_ns").alias("time_ns"),
    pl.col("cause").cast(pl.String).fill_null(""),
    pl.col("instance").cast(pl.String),
    pl.col("request_id").cast(pl.String),
    pl.col("block_ids"),
    pl.col("group"),
    pl.col("transfer_id").cast(pl.String),
    pl.col("cause_seq"),
)


def recorded_findings(frame: pl.DataFrame) -> list[Finding]:
    """The findings that live checkers left in a trace as `violation` rows, one per block that a row names."""
    rows = frame.lazy().filter(pl.col("kind") == "violation").select(*_COLUMNS)
    # An empty list explodes to null, as a missing one does.
    return [Finding(*row) for row in rows.explode("block_ids").collect().rows()]
