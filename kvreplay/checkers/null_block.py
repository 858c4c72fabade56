"""NULL-BLOCK: block 0 stands for "no block": it is never given, written, failed, evicted, cached or freed."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import NULL_BLOCK, Finding
from kvreplay.checkers.frames import rows_of
from kvreplay.events import DETAIL_RUN
from kvreplay.ids import NULL_BLOCK_ID

DETAIL: Final = DETAIL_RUN
"""At this level it sees failed loads only; with `--detail blocks` all the rest."""

_ACTS: Final = {
    "load.failed": "failed by a load",
    "block.allocated": "given to a request",
    "block.cached": "entered into the prefix cache",
    "block.freed": "given back",
    "block.invalidated": "reported as failed to load",
}


def check_null_block(frame: pl.DataFrame) -> list[Finding]:
    rows = (
        rows_of(frame, list(_ACTS), "time_ns", "kind", "instance", "request_id", "group", "block_ids")
        .filter(pl.col("block_ids").list.contains(NULL_BLOCK_ID))
        .collect()
    )
    return [
        Finding(
            NULL_BLOCK,
            row["time_ns"],
            f"the null block was {_ACTS[row['kind']]}",
            instance=row["instance"],
            request_id=row["request_id"],
            block_id=NULL_BLOCK_ID,
            group=row["group"],
        )
        for row in rows.iter_rows(named=True)
    ]
