"""TraceWriter and MemoryTrace: order, numbers, fingerprints, and what is left on the disk."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvreplay.errors import TraceError
from kvreplay.events import DETAIL_BLOCKS, DETAIL_RUN, DETAIL_STEPS, KINDS, Event
from kvreplay.trace import writer as writer_module
from kvreplay.trace.columns import NUM_FIELDS
from kvreplay.trace.reader import read_trace
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.writer import MemoryTrace, TraceWriter, check_output

ROOT = Path(__file__).parents[2]
METADATA = TraceMetadata(source={"tool": "test"}, seed=7)
_NAMES = st.sampled_from([None, "d0", "p0", "p1", "é"])
_SMALL = st.one_of(st.none(), st.integers(0, 3))


@st.composite
def events(draw: st.DrawFn) -> Event:
    return Event(
        draw(st.sampled_from([kind for kind in KINDS if kind != "run.summary"])),
        draw(st.integers(0, 5)),
        draw(_NAMES),
        draw(_SMALL),
        request_id=draw(_NAMES),
        peer=draw(_NAMES),
        rank=draw(_SMALL),
        block_ids=draw(st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=3))),
        num_tokens=draw(_SMALL),
        status=draw(st.sampled_from([None, "", "ok"])),
        prefix_hashes=draw(st.one_of(st.none(), st.lists(st.integers(0, 2**64 - 1), max_size=2))),
        output_hash=draw(st.one_of(st.none(), st.integers(0, 2**64 - 1))),
    )


EVENT_LISTS = st.lists(events(), max_size=25)


def write_events(path: Path, rows: Sequence[Event], detail: int = DETAIL_BLOCKS) -> str:
    with TraceWriter(path, METADATA, detail) as writer:
        for event in rows:
            writer.emit(event)
        return writer.fingerprint()


ONE_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)


def in_order(rows: list[Event]) -> list[Event]:
    """The definition of a trace's order."""
    return sorted(
        rows,
        key=lambda event: (
            event.time_ns,
            event.instance is not None,
            event.instance or "",
            event.step is not None,
            event.step or 0,
        ),
    )


@ONE_PATH
@given(rows=EVENT_LISTS)
def test_a_file_holds_exactly_the_events_in_order(tmp_path: Path, rows: list[Event]) -> None:
    path = tmp_path / "t.parquet"
    write_events(path, rows)
    found = read_trace(path).scan().collect().to_dicts()
    assert [row["seq"] for row in found] == list(range(len(rows)))
    for row, event in zip(found, in_order(rows), strict=True):
        for name in set(Event._fields) - {"cause_handle"}:
            assert row[name] == getattr(event, name), name


@ONE_PATH
@given(rows=EVENT_LISTS, sizes=st.tuples(*[st.integers(1, 8)] * 3))
def test_bytes_and_fingerprint_do_not_depend_on_how_rows_come_in(
    tmp_path: Path, rows: list[Event], sizes: tuple[int, int, int]
) -> None:
    """Buffers of any size, a watermark that follows closely or not at all: the same file."""
    rows.sort(key=lambda event: event.time_ns)
    group_rows = sizes[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "_ROW_GROUP_ROWS", group_rows)
        whole = write_events(tmp_path / "whole.parquet", rows)
        patch.setattr(writer_module, "_CELLS", sizes[0] * NUM_FIELDS)
        patch.setattr(writer_module, "_FLUSH_ROWS", sizes[1])
        with TraceWriter(tmp_path / "pieces.parquet", METADATA, DETAIL_BLOCKS) as writer:
            for event in rows:
                writer.advance(event.time_ns)
                writer.emit(event)
        assert writer.fingerprint() == whole
    assert (tmp_path / "pieces.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_what_an_instance_reports_late_is_in_order_though_it_is_still_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1 has reported up to 9 when D0, which coasted from 0 on, reports what it did; then both are up to 9."""
    monkeypatch.setattr(writer_module, "_CELLS", 4 * NUM_FIELDS)
    monkeypatch.setattr(writer_module, "_FLUSH_ROWS", 4)
    memory = MemoryTrace(METADATA)
    for instance, times in (("D1", (2, 4, 6, 8)), ("D0", (1, 3))):
        for time_ns in times:
            memory.emit(Event("usage", time_ns, instance, status="steps", num_tokens=time_ns))
    memory.advance(9)
    assert memory.frame()["time_ns"].to_list() == [1, 2, 3, 4, 6, 8]


@ONE_PATH
@given(rows=EVENT_LISTS)
def test_the_fingerprint_is_the_same_at_every_detail_and_wherever_it_is_computed(
    tmp_path: Path, rows: list[Event]
) -> None:
    path = tmp_path / "t.parquet"
    fingerprint = write_events(path, rows)
    assert read_trace(path).fingerprint() == fingerprint
    for detail in (DETAIL_RUN, DETAIL_STEPS):
        assert write_events(path, rows, detail) == fingerprint
    memory = MemoryTrace(METADATA)
    for event in rows:
        if KINDS[event.kind].detail == DETAIL_RUN:
            memory.emit(event)
    assert memory.fingerprint() == fingerprint
    write_events(path, rows, DETAIL_RUN)
    assert memory.frame().equals(read_trace(path).frame())


@pytest.mark.parametrize(
    "change",
    [{"time_ns": 6}, {"instance": None}, {"num_tokens": None}, {"num_tokens": 1}, {"status": "a"}, {"cause": "b"}],
)
def test_the_fingerprint_tells_any_difference(change: dict[str, Any]) -> None:
    event = Event("load.finished", 5, "d0", 3, "r", num_tokens=0, status="ab")
    fingerprints = set()
    for other in (event, event._replace(**change)):
        memory = MemoryTrace(METADATA)
        memory.emit(other)
        fingerprints.add(memory.fingerprint())
    assert len(fingerprints) == 2


def test_the_summary_may_contain_the_fingerprint() -> None:
    memory = MemoryTrace(METADATA)
    memory.emit(Event("load.finished", 5, "d0", 3, "r"))
    fingerprint = memory.fingerprint()
    memory.emit(Event("run.summary", 5, cause=fingerprint))
    assert memory.fingerprint() == fingerprint
    assert memory.frame(["kind", "cause"]).rows() == [("load.finished", None), ("run.summary", fingerprint)]


def test_a_cause_is_named_by_its_number_however_late_its_effect_comes() -> None:
    memory = MemoryTrace(METADATA)
    fault = memory.emit(Event("fault.injected", 9, "d0"))
    memory.emit(Event("request.parked", 3, "d0"))
    memory.emit(Event("load.failed", 9, "a0", cause_handle=fault))
    memory.settle()
    memory.emit(Event("violation", 10, cause_handle=fault))
    memory.emit(Event("violation", 10, cause_handle=-1))
    rows = memory.frame(["kind", "seq", "cause_seq"]).rows()
    assert rows == [
        ("request.parked", 0, None),
        ("load.failed", 1, 2),
        ("fault.injected", 2, None),
        ("violation", 3, 2),
        ("violation", 4, None),
    ]


def test_an_event_before_the_settled_past_is_a_bug_in_the_caller() -> None:
    memory = MemoryTrace(METADATA)
    memory.emit(Event("lookup", 5))
    memory.settle()
    memory.emit(Event("lookup", 4))
    with pytest.raises(AssertionError, match=r"^an event of 4 ns comes after 5 ns"):
        memory.settle()


def test_lists_may_be_arrays() -> None:
    memory = MemoryTrace(METADATA)
    memory.emit(Event("load.failed", 0))
    memory.emit(Event("load.failed", 1, block_ids=np.array([1, 2])))  # type: ignore[arg-type]
    memory.emit(Event("load.failed", 2, block_ids=[3]))
    memory.emit(Event("load.failed", 3, num_tokens=np.int64(4)))  # type: ignore[arg-type]
    assert memory.frame(["block_ids"])["block_ids"].to_list() == [None, [1, 2], [3], None]


# -- the disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_run_leaves_the_old_output_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("old")

    def interrupted() -> None:
        with TraceWriter(path, METADATA) as writer:
            writer.emit(Event("lookup", 1))
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("moment", ["__init__", "close"])
def test_nor_does_one_that_is_interrupted_while_the_file_is_opened_or_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(pq.ParquetWriter, moment, interrupted)
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t.parquet", METADATA) as writer:
        writer.emit(Event("lookup", 1))
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.parquet").symlink_to(tmp_path / "t.parquet")
    write_events(tmp_path / "link.parquet", [Event("lookup", 1)])
    assert (tmp_path / "link.parquet").is_symlink()
    assert read_trace(tmp_path / "t.parquet").num_rows == 1


_FULL_DISK = """
import resource, sys
from pathlib import Path
from typing import Any
from kvreplay.errors import TraceError
from kvreplay.events import Event
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.writer import TraceWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    with TraceWriter(Path(sys.argv[1]), TraceMetadata(source={})) as writer:
        for number in range(20_000):
            writer.emit(Event("lookup", number, request_id=str(number * 7919 % 104729)))
except TraceError as error:
    sys.stdout.write(str(error))
"""


def test_a_full_disk_is_one_line_and_leaves_the_old_output(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("old")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FULL_DISK, path], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"{path}: cannot be written: file too large"
    assert done.stderr == ""
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


_DETERMINISM = """
import sys
from pathlib import Path
from typing import Any
from kvreplay.events import Event
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.writer import TraceWriter

with TraceWriter(Path(sys.argv[1]), TraceMetadata(source={"b": 1, "a": {"d": 2, "c": 3}})) as writer:
    for number in range(500):
        for kind in ("lookup", "load.finished"):
            name = f"i{number % 7}"
            writer.emit(Event(kind, number, name, number % 3, f"r{number % 11}", status=f"s{number % 5}"))
"""


def test_processes_with_different_hash_seeds_write_the_same_bytes(tmp_path: Path) -> None:
    outputs = []
    for seed in ("0", "1"):
        path = tmp_path / f"{seed}.parquet"
        subprocess.run(
            [sys.executable, "-c", _DETERMINISM, path],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        outputs.append(path.read_bytes())
    assert outputs[0] == outputs[1]


def _missing_folder(folder: Path) -> Path:
    return folder / "missing" / "t.parquet"


def _the_input(folder: Path) -> Path:
    (folder / "link.parquet").symlink_to(folder / "input.parquet")
    return folder / "link.parquet"


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (_missing_folder, "no such folder: .*missing$"),
        (lambda folder: folder, "is a folder, expected a file name$"),
        (_the_input, "is the input itself; write to another file$"),
        (lambda _: Path("/dev/null"), "is not a regular file$"),
    ],
)
def test_an_output_that_cannot_work_is_refused_before_the_run(
    tmp_path: Path, output: Callable[[Path], Path], text: str
) -> None:
    source = tmp_path / "input.parquet"
    source.write_text("")
    path = output(tmp_path)
    with pytest.raises(TraceError, match=f"^{path}: {text}"):
        check_output(path, [source])


def test_a_new_and_an_existing_file_are_fine_outputs(tmp_path: Path) -> None:
    (tmp_path / "old.parquet").write_text("")
    check_output(tmp_path / "old.parquet", [tmp_path / "input.parquet"])
    check_output(tmp_path / "new.parquet")
