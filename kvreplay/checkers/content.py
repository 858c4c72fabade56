"""CONTENT: what a request reads, or another hits, are the contents that its tokens have.

Found live, where the buffers are, when wrong contents lead to a token or are hit by another request: once per
fault and destination block. Here they are only read back from the trace's `violation` rows.
"""

from typing import Final

import polars as pl

from kvreplay.checkers.finding import CONTENT, Finding, recorded_findings
from kvreplay.events import DETAIL_RUN

DETAIL: Final = DETAIL_RUN


def check_content(frame: pl.DataFrame) -> list[Finding]:
    return recorded_findings(frame, CONTENT)
