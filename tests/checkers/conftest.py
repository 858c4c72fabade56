"""Traces written by hand."""

from collections.abc import Callable

import polars as pl
import pytest

from kvreplay.events import Event
from kvreplay.trace.schema import MEMORY_SCHEMA

_EMPTY = pl.DataFrame(MEMORY_SCHEMA.empty_table())


@pytest.fixture
def frame_of() -> Callable[..., pl.DataFrame]:
    """Events, in order, as the frame of a trace; `cause_handle` is the place of the event that caused another."""

    def build(*events: Event) -> pl.DataFrame:
        rows = [{**event._asdict(), "seq": seq, "cause_seq": event.cause_handle} for seq, event in enumerate(events)]
        return pl.DataFrame({name: [row[name] for row in rows] for name in _EMPTY.columns}, schema=dict(_EMPTY.schema))

    return build
