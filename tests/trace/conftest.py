"""A small workload, and a file that holds it."""

from pathlib import Path

import numpy as np
import pytest

from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.workload import Arrival, ClientAbort, Workload, write_workload


@pytest.fixture
def small_workload() -> Workload:
    hashes = np.array([11, 2**64 - 1, 13], np.uint64)
    return Workload(
        (
            Arrival("a", 0, 10, 3, hashes, 4),
            Arrival("b", 5, 8, 1, hashes[:2], 4, priority=-1, params={"session": "s", "turn": 0}),
            Arrival("c", 5, 1, 2, hashes[2:], 4, params={"kv_transfer_params": {"do_remote_decode": True}}),
        ),
        (ClientAbort("b", 9), ClientAbort("c", 9)),
    )


@pytest.fixture
def small_trace(tmp_path: Path, small_workload: Workload) -> Path:
    path = tmp_path / "small.parquet"
    write_workload(path, small_workload, TraceMetadata(source={"tool": "test"}, seed=7))
    return path
