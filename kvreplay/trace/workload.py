"""What clients did, as a run needs it: arrivals and aborts, in order."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvreplay.errors import TraceError
from kvreplay.events import Event
from kvreplay.kv.content_index import text_hash
from kvreplay.trace.reader import Trace
from kvreplay.trace.schema import TraceMetadata, canonical_json
from kvreplay.trace.writer import TraceWriter

MAX_REQUEST_TOKENS: Final = 1 << 24
"""Prompt or output of one request. Beyond any model's context; keeps a wrong number from eating the memory."""

_COLUMNS: Final = (
    "seq",
    "time_ns",
    "instance",
    "kind",
    "request_id",
    "transfer_id",
    "prompt_tokens",
    "output_tokens",
    "priority",
    "prefix_hashes",
    "prefix_hash_tokens",
    "params",
)


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A client's request. Its prompt is known by `prefix_hashes`, one per `prefix_hash_tokens` tokens."""

    request_id: str
    time_ns: int
    prompt_tokens: int
    output_tokens: int
    prefix_hashes: NDArray[np.uint64]
    prefix_hash_tokens: int
    priority: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)

    def event(self) -> Event:
        return Event(
            "request.arrived",
            self.time_ns,
            request_id=self.request_id,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            priority=self.priority,
            prefix_hashes=self.prefix_hashes,  # type: ignore[arg-type]  # a sequence to all who read it
            prefix_hash_tokens=self.prefix_hash_tokens,
            params=canonical_json(self.params) if self.params else None,
        )


@dataclass(frozen=True, slots=True)
class ClientAbort:
    request_id: str
    time_ns: int

    def event(self) -> Event:
        return Event("request.aborted", self.time_ns, request_id=self.request_id)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """All requests of a run, by time. Every abort names one of them."""

    arrivals: tuple[Arrival, ...]
    aborts: tuple[ClientAbort, ...] = ()

    def events(self) -> Iterator[Event]:
        """The rows that a trace keeps of it, arrivals first; a sink puts them in order."""
        for arrival in self.arrivals:
            yield arrival.event()
        for abort in self.aborts:
            yield abort.event()

    def limited(self, limit: int | None) -> "Workload":
        """The first `limit` requests, and what happens to them."""
        if limit is None or limit >= len(self.arrivals):
            return self
        arrivals = self.arrivals[:limit]
        kept = {arrival.request_id for arrival in arrivals}
        return Workload(arrivals, tuple(abort for abort in self.aborts if abort.request_id in kept))


def write_workload(path: Path, workload: Workload, metadata: TraceMetadata) -> str:
    """Write a trace that holds nothing but the workload. Returns its fingerprint."""
    with TraceWriter(path, metadata) as writer:
        for event in workload.events():
            writer.emit(event)
        return writer.fingerprint()


def read_workload(trace: Trace, limit: int | None = None) -> Workload:
    """What the clients did in this trace; from its instances' arrivals if it is a recording without clients.

    Raises TraceError for a request that cannot be replayed.
    """
    table = trace.rows(("request.arrived", "request.aborted"), _COLUMNS)
    is_client = table["instance"].is_null()
    is_arrival = pc.equal(table["kind"], "request.arrived")
    if not pc.any(pc.and_(is_client, is_arrival)).as_py():
        if not pc.any(is_arrival).as_py():
            raise TraceError(f"{trace.path}: no request arrives in it, expected request.arrived rows")
        table, is_arrival = _joined_legs(table)
    else:
        table, is_arrival = table.filter(is_client), is_arrival.filter(is_client)
    arrivals = _arrivals(trace.path, table.filter(is_arrival))
    aborts = _aborts(trace.path, table.filter(pc.invert(is_arrival)), arrivals)
    return Workload(tuple(arrivals), tuple(aborts)).limited(limit)


# -- rows to records ----------------------------------------------------------------------------------------------


class _Rows:
    """Arrival rows as arrays, and the one way to complain about one of them."""

    def __init__(self, path: Path, table: pa.Table) -> None:
        self.path = path
        self.table = table
        self.seqs = table["seq"].to_numpy()

    def refuse(self, is_bad: NDArray[np.bool_], name: str, expected: str) -> None:
        """Raise for the first row marked bad."""
        places = np.flatnonzero(is_bad)
        if len(places):
            place = int(places[0])
            value = self.table[name][place].as_py()
            found = f"{len(value)} values" if isinstance(value, list) else json.dumps(value)
            raise TraceError(
                f"{self.path}: row with seq {self.seqs[place]}: column {name!r}: {found}, expected {expected}"
            )

    def integers(self, name: str, *, at_least: int, at_most: int, default: int | None = None) -> NDArray[np.int64]:
        column = self.table[name]
        if default is None:
            self.refuse(column.is_null().to_numpy(), name, "a number")
        values: NDArray[np.int64] = pc.fill_null(column, default or 0).to_numpy().astype(np.int64)
        self.refuse((values < at_least) | (values > at_most), name, f"{at_least} to {at_most}")
        return values


def _arrivals(path: Path, table: pa.Table) -> list[Arrival]:
    rows = _Rows(path, table)
    request_ids = _request_ids(rows)
    prompts = rows.integers("prompt_tokens", at_least=1, at_most=MAX_REQUEST_TOKENS)
    outputs = rows.integers("output_tokens", at_least=1, at_most=MAX_REQUEST_TOKENS)
    priorities = rows.integers("priority", at_least=-(2**31), at_most=2**31 - 1, default=0)
    hashes, offsets, chunks = _prefixes(rows, prompts)
    texts = table["params"].to_pylist()
    no_hashes = np.diff(offsets) == 0
    return [
        Arrival(
            request_id,
            time_ns,
            prompt_tokens,
            output_tokens,
            hashes[begin:end] if begin < end else np.array([text_hash(request_id)], np.uint64),
            chunk,
            priority,
            _params(rows, place, texts[place]),
        )
        for place, (request_id, time_ns, prompt_tokens, output_tokens, begin, end, chunk, priority) in enumerate(
            zip(
                request_ids,
                table["time_ns"].to_pylist(),
                prompts.tolist(),
                outputs.tolist(),
                offsets[:-1].tolist(),
                offsets[1:].tolist(),
                np.where(no_hashes, prompts, chunks).tolist(),
                priorities.tolist(),
                strict=True,
            )
        )
    ]


def _request_ids(rows: _Rows) -> list[str]:
    column = rows.table["request_id"]
    rows.refuse(column.is_null().to_numpy(), "request_id", "a name")
    request_ids: list[str] = column.to_pylist()
    seen: set[str] = set()
    is_repeated = np.zeros(len(request_ids), np.bool_)
    for place, request_id in enumerate(request_ids):
        is_repeated[place] = request_id in seen
        seen.add(request_id)
    rows.refuse(is_repeated, "request_id", "a name that no earlier request has")
    return request_ids


def _prefixes(
    rows: _Rows, prompts: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """All hashes in one array, where each request's begin, and how many tokens one stands for."""
    column = rows.table["prefix_hashes"].combine_chunks()
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    values = column.flatten()
    if values.null_count:
        raise TraceError(f"{rows.path}: column 'prefix_hashes': holds nulls, expected numbers")
    chunks = rows.integers("prefix_hash_tokens", at_least=0, at_most=MAX_REQUEST_TOKENS, default=0)
    rows.refuse((counts > 0) & (chunks == 0), "prefix_hash_tokens", "at least 1")
    needed = -(-prompts // np.maximum(chunks, 1))
    rows.refuse((counts > 0) & (counts != needed), "prefix_hashes", "one for each prefix_hash_tokens of the prompt")
    return values.to_numpy(), np.concatenate([[0], np.cumsum(counts)]), chunks


def _params(rows: _Rows, place: int, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(
            f"{rows.path}: row with seq {rows.seqs[place]}: column 'params': expected a JSON object: {error}"
        ) from error


def _aborts(path: Path, table: pa.Table, arrivals: list[Arrival]) -> Iterator[ClientAbort]:
    rows = _Rows(path, table)
    known = {arrival.request_id for arrival in arrivals}
    request_ids = table["request_id"].to_pylist()
    is_unknown = np.array([request_id not in known for request_id in request_ids], np.bool_)
    rows.refuse(is_unknown, "request_id", "a request that arrives in this trace")
    for request_id, time_ns in zip(request_ids, table["time_ns"].to_pylist(), strict=True):
        yield ClientAbort(request_id, time_ns)


# -- recordings without clients -----------------------------------------------------------------------------------


def _joined_legs(table: pa.Table) -> tuple[pa.Table, pa.BooleanArray]:
    """One arrival per request of a recording, in order of time, and the client's aborts.

    The legs of a pair have one transfer id. The leg with the longer output serves the client: its row is taken, at
    the time of the earlier leg. An abort that an instance carried out is the client's if it names that leg.
    """
    kinds, request_ids = table["kind"].to_pylist(), table["request_id"].to_pylist()
    transfer_ids, outputs = table["transfer_id"].to_pylist(), table["output_tokens"].to_pylist()
    arrived = [place for place, kind in enumerate(kinds) if kind == "request.arrived"]
    times = table["time_ns"].to_numpy().copy()
    legs: dict[tuple[str, str | None], list[int]] = {}
    for place in arrived:
        transfer_id = transfer_ids[place]
        key = ("request", request_ids[place]) if transfer_id is None else ("transfer", transfer_id)
        legs.setdefault(key, []).append(place)
    serving = [max(places, key=lambda place: outputs[place] or 0) for places in legs.values()]
    for place, places in zip(serving, legs.values(), strict=True):
        times[place] = times[places[0]]
    aborted = _first_aborts(kinds, request_ids, {request_ids[place] for place in serving})
    chosen = sorted([*serving, *aborted], key=lambda place: (times[place], place))
    table = table.set_column(table.schema.get_field_index("time_ns"), "time_ns", pa.array(times)).take(chosen)
    return table, pc.equal(table["kind"], "request.arrived")


def _first_aborts(kinds: list[str], request_ids: list[str], served: set[str]) -> list[int]:
    first: dict[str, int] = {}
    for place, kind in enumerate(kinds):
        if kind == "request.aborted" and request_ids[place] in served:
            first.setdefault(request_ids[place], place)
    return list(first.values())
