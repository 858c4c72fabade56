"""NULL-BLOCK: block 0 stands for "no block": it is never written, failed, evicted, cached or freed.

Whether the pool itself has freed or cached it is seen in a snapshot (`conservation`).
"""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import NULL_BLOCK, Finding
from kvreplay.checkers.frames import rows_of
from kvreplay.events import DETAIL_RUN
from kvreplay.ids import NULL_BLOCK_ID

DETAIL: Final = DETAIL_RUN
"""At this level it sees failed loads only; with `--detail blocks` the rest."""

_ACTS: Final = {
    "load.failed": "named by a failed load",
    "block.cached": "entered into the prefix cache",
    "block.invalidated": "reported as failed to load",
}
"""What only real blocks undergo. Rows of blocks given and given back are whole tables, placeholders included."""


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
