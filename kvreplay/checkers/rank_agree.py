"""RANK-AGREE: a load is complete when every rank has received its part, and good only if every rank's is."""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import RANK_AGREE, Finding
from kvreplay.checkers.frames import rows_of
from kvreplay.events import DETAIL_RUN

DETAIL: Final = DETAIL_RUN

_COLUMNS: Final = ("seq", "time_ns", "kind", "instance", "request_id", "rank", "status", "num_blocks")
_REQUEST: Final = ["instance", "request_id"]


def check_rank_agree(frame: pl.DataFrame) -> list[Finding]:
    """Pulls that are open, or have failed unheard, when the scheduler takes their request's load for complete.

    A pull is one rank's with one of its peers; `rank` numbers those of a request over all of them.
    """
    rows = rows_of(frame, ["pull.sent", "pull.settled", "load.finished", "load.failed"], *_COLUMNS).collect()
    if rows["rank"].null_count() == len(rows):
        return []  # one rank has nobody to disagree with
    finished = rows.filter(pl.col("kind") == "load.finished").unique(_REQUEST, keep="first", maintain_order=True)
    before = rows.join(
        finished.select(*_REQUEST, finished_seq="seq", finished_ns="time_ns"), on=_REQUEST, maintain_order="left"
    ).filter(pl.col("seq") < pl.col("finished_seq"))
    heard = before.filter(pl.col("kind") == "load.failed").select(_REQUEST)
    # A pull of no blocks only tells the producer to let go; what is loaded comes from elsewhere.
    releases = before.filter(pl.col("rank").is_not_null(), pl.col("num_blocks") == 0).select(*_REQUEST, "rank")
    last = (
        before.filter(pl.col("rank").is_not_null())
        .unique([*_REQUEST, "rank"], keep="last", maintain_order=True)
        .join(heard, on=_REQUEST, how="anti", maintain_order="left")
        .join(releases, on=[*_REQUEST, "rank"], how="anti", maintain_order="left")
    )
    wrong = last.filter((pl.col("kind") == "pull.sent") | (pl.col("status") == "failed"))
    return [
        Finding(
            RANK_AGREE,
            row["finished_ns"],
            f"complete though pull {row['rank']} of it {_STATES[row['kind']]}",
            instance=row["instance"],
            request_id=row["request_id"],
        )
        for row in wrong.sort("finished_seq", "rank", maintain_order=True).iter_rows(named=True)
    ]


_STATES: Final = {"pull.sent": "is still open", "pull.settled": "has failed"}
