"""Workloads: from a trace, from a recording's legs, and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvreplay.errors import TraceError
from kvreplay.events import Event
from kvreplay.trace.reader import read_trace
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.workload import Arrival, ClientAbort, Workload, read_workload
from kvreplay.trace.writer import TraceWriter


def workload_of(path: Path, events: Sequence[Event]) -> Workload:
    with TraceWriter(path, TraceMetadata(source={})) as writer:
        for event in events:
            writer.emit(event)
    return read_workload(read_trace(path))


def plain(arrival: Arrival) -> tuple[Any, ...]:
    return tuple(value if name != "prefix_hashes" else value.tolist() for name, value in fields(arrival))


def fields(arrival: Arrival) -> list[tuple[str, Any]]:
    return [(name, getattr(arrival, name)) for name in Arrival.__slots__]


def test_a_workload_comes_back_as_it_was_written(small_trace: Path, small_workload: Workload) -> None:
    found = read_workload(read_trace(small_trace))
    assert [plain(arrival) for arrival in found.arrivals] == [plain(arrival) for arrival in small_workload.arrivals]
    assert found.aborts == small_workload.aborts


def test_a_limit_keeps_the_first_requests_and_their_aborts(small_trace: Path) -> None:
    workload = read_workload(read_trace(small_trace), limit=2)
    assert [arrival.request_id for arrival in workload.arrivals] == ["a", "b"]
    assert workload.aborts == (ClientAbort("b", 9),)


def test_what_instances_did_is_no_part_of_a_replays_workload(tmp_path: Path, small_workload: Workload) -> None:
    events = [
        *small_workload.events(),
        Event("request.arrived", 6, "d0", request_id="a", prompt_tokens=10, output_tokens=3),
        Event("request.aborted", 9, "d0", request_id="b"),
    ]
    workload = workload_of(tmp_path / "t.parquet", events)
    assert len(workload.arrivals) == 3
    assert len(workload.aborts) == 2


def leg(time_ns: int, instance: str, request_id: str, output_tokens: int, transfer_id: str | None = None) -> Event:
    return Event(
        "request.arrived",
        time_ns,
        instance,
        request_id=request_id,
        transfer_id=transfer_id,
        prompt_tokens=20,
        output_tokens=output_tokens,
    )


def test_a_recordings_legs_are_joined_by_transfer_id(tmp_path: Path) -> None:
    workload = workload_of(
        tmp_path / "t.parquet",
        [
            leg(10, "p0", "x-prefill", 1, "t1"),
            leg(11, "d0", "y", 5),
            leg(12, "d0", "x", 9, "t1"),
            Event("request.aborted", 30, "p0", request_id="x-prefill"),
            Event("request.aborted", 31, "d0", request_id="x"),
            Event("request.aborted", 32, "d0", request_id="x"),
        ],
    )
    assert [(one.request_id, one.time_ns, one.output_tokens) for one in workload.arrivals] == [
        ("x", 10, 9),
        ("y", 11, 5),
    ]
    assert workload.aborts == (ClientAbort("x", 31),)


GOOD = Event("request.arrived", 0, request_id="a", prompt_tokens=10, output_tokens=3)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (GOOD._replace(request_id=None), "column 'request_id': null, expected a name"),
        (GOOD._replace(prompt_tokens=None), "column 'prompt_tokens': null, expected a number"),
        (GOOD._replace(prompt_tokens=0), "column 'prompt_tokens': 0, expected 1 to 16777216"),
        (GOOD._replace(output_tokens=-1), "column 'output_tokens': -1, expected 1 to 16777216"),
        (GOOD._replace(output_tokens=2**31 - 1), "column 'output_tokens': 2147483647, expected 1 to 16777216"),
        (GOOD._replace(prefix_hashes=[1]), "column 'prefix_hash_tokens': null, expected at least 1"),
        (
            GOOD._replace(prefix_hashes=[1, 2], prefix_hash_tokens=4),
            "column 'prefix_hashes': 2 values, expected one for each prefix_hash_tokens of the prompt",
        ),
        (GOOD._replace(params="[1]"), "column 'params': expected a JSON object: "),
        (GOOD._replace(params="{"), "column 'params': expected a JSON object: "),
        (GOOD._replace(params="[" * 10_000), "column 'params': expected a JSON object: "),
    ],
)
def test_a_request_that_cannot_be_replayed_is_named(tmp_path: Path, event: Event, text: str) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(TraceError, match=f"^{path}: row with seq 1: {text}"):
        workload_of(path, [GOOD._replace(request_id="first"), event])


def test_two_requests_of_one_name_are_refused(tmp_path: Path) -> None:
    text = """: row with seq 1: column 'request_id': "a", expected a name that no earlier request has$"""
    with pytest.raises(TraceError, match=text):
        workload_of(tmp_path / "t.parquet", [GOOD, GOOD])


def test_an_abort_of_nobody_is_refused(tmp_path: Path) -> None:
    events = [GOOD, Event("request.aborted", 3, request_id="b")]
    with pytest.raises(TraceError, match=r""""b", expected a request that arrives in this trace$"""):
        workload_of(tmp_path / "t.parquet", events)


def test_prompts_without_hashes_share_nothing(tmp_path: Path) -> None:
    workload = workload_of(tmp_path / "t.parquet", [GOOD, GOOD._replace(request_id="b", time_ns=1)])
    assert [one.prefix_hash_tokens for one in workload.arrivals] == [10, 10]
    assert workload.arrivals[0].prefix_hashes != workload.arrivals[1].prefix_hashes


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r": no request arrives in it, expected request.arrived rows$"):
        workload_of(tmp_path / "t.parquet", [Event("lookup", 0, "d0")])
