"""Mooncake's public traces: JSON lines of timestamp, input_length, output_length and hash_ids.

Each id stands for 512 prompt tokens and the whole prefix before them; the last may stand for fewer.
(kvcache-ai/Mooncake, FAST25-release/traces)
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvreplay.errors import TraceError
from kvreplay.ids import NS_PER_MS, nanoseconds
from kvreplay.kv.content_index import mix64_arrays
from kvreplay.trace.workload import MAX_REQUEST_TOKENS, Arrival, Workload
from kvreplay.user_files import reason

Unit = Literal["ms", "s"]

HASH_TOKENS: Final = 512
_MAX_LINE_BYTES: Final = 1 << 24
_MAX_TIME_S: Final = 10 * 366 * 86_400
"""Longer than any trace: an instant in Unix time is told from one since the start."""
_PLAUSIBLE_PER_S: Final = 300
"""More requests per second than this, over a whole file, and its milliseconds are taken for seconds."""
_ENOUGH_REQUESTS: Final = 100
_IMPLAUSIBLE_GAP_S: Final = 120
"""Fewer requests than one in so many seconds, over a whole file, and its seconds are taken for milliseconds."""
_ENOUGH_TO_BE_SPARSE: Final = 12

_Length = Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
_Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Line(msgspec.Struct):
    timestamp: Annotated[int, Meta(ge=0, le=_MAX_TIME_S * 1000)]
    input_length: _Length
    output_length: _Length
    hash_ids: Annotated[list[_Id], Meta(max_length=MAX_REQUEST_TOKENS // HASH_TOKENS)]


class _LineInSeconds(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0, le=_MAX_TIME_S)]
    input_length: _Length
    output_length: _Length
    hash_ids: Annotated[list[_Id], Meta(max_length=MAX_REQUEST_TOKENS // HASH_TOKENS)]


def read_mooncake(path: Path, *, limit: int | None = None, unit: Unit | None = None) -> Workload:
    """The requests of a Mooncake file, plain or gzipped; the first `limit` of them.

    Timestamps are milliseconds unless `unit` says otherwise; without it, a file that looks like seconds is refused.
    Raises TraceError naming the line.
    """
    lines = list(_lines(path, limit, unit or "ms"))
    if not lines:
        raise TraceError(f"{path}: empty file, expected JSON lines")
    times_ns = _times_ns(path, lines, unit)
    ids = [np.array(line.hash_ids, np.uint64) for line in lines]
    hashes, offsets = _chained(ids)
    return Workload(
        tuple(
            Arrival(
                f"r{place:05}",
                time_ns,
                line.input_length,
                line.output_length,
                hashes[offsets[place] : offsets[place + 1]],
                HASH_TOKENS,
            )
            for place, (line, time_ns) in enumerate(zip(lines, times_ns, strict=True))
        )
    )


def _lines(path: Path, limit: int | None, unit: Unit) -> Iterator[_Line | _LineInSeconds]:
    kind: type[_Line | _LineInSeconds] = _Line if unit == "ms" else _LineInSeconds
    decoder = msgspec.json.Decoder(kind)
    before: float = 0
    count = 0
    with _opened(path) as file:
        for number, text in _numbered_lines(path, file):
            if count == limit:
                return
            line = _decoded(path, number, text, decoder)
            needed = -(-line.input_length // HASH_TOKENS)
            if len(line.hash_ids) != needed:
                raise TraceError(
                    f"{path}: line {number}: {len(line.hash_ids)} hash_ids, expected {needed} for an input_length of "
                    f"{line.input_length} (one for each {HASH_TOKENS} tokens)"
                )
            if line.timestamp < before:
                raise TraceError(
                    f"{path}: line {number}: timestamp {line.timestamp} after {before}, expected rising timestamps"
                )
            before = line.timestamp
            count += 1
            yield line


def _decoded(
    path: Path, number: int, text: bytes, decoder: msgspec.json.Decoder[_Line | _LineInSeconds]
) -> _Line | _LineInSeconds:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        hint = ""
        if "$.timestamp" in str(error) and decoder.type is _Line:
            hint = "; timestamps are milliseconds (--unit s if they are seconds)"
        raise TraceError(f"{path}: line {number}: {error}{hint}") from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
            raw.seek(0)
            if head == b"PAR1":
                raise TraceError(
                    f"{path}: a Parquet file, expected JSON lines of the Mooncake project; a trace needs no import "
                    "(kvreplay info says what it holds)"
                )
            if head[:2] == b"\x1f\x8b":
                with gzip.open(raw) as file:
                    yield cast(BinaryIO, file)
            else:
                yield raw
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error


def _numbered_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their number from 1; blank ones are skipped."""
    number = 1
    while True:
        try:
            text = file.readline(_MAX_LINE_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: line {number}: gzip stream damaged: {error}") from error
        if not text:
            return
        if len(text) == _MAX_LINE_BYTES:
            raise TraceError(f"{path}: line {number}: longer than {_MAX_LINE_BYTES} bytes")
        if text.strip():
            yield number, text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text
        number += 1


def _times_ns(path: Path, lines: list[_Line | _LineInSeconds], unit: Unit | None) -> list[int]:
    span = lines[-1].timestamp - lines[0].timestamp
    if unit == "s":
        if len(lines) >= _ENOUGH_TO_BE_SPARSE and span > len(lines) * _IMPLAUSIBLE_GAP_S:
            raise TraceError(
                f"{path}: {len(lines)} requests within {span:g} s, one in {span / len(lines):.0f} s: its timestamps "
                "seem to be milliseconds, expected seconds (without --unit s they are taken for milliseconds)"
            )
        return [nanoseconds(line.timestamp) for line in lines]
    span_s = span / 1000
    if unit is None and len(lines) >= _ENOUGH_REQUESTS and 0 < span_s < len(lines) / _PLAUSIBLE_PER_S:
        raise TraceError(
            f"{path}: {len(lines)} requests within {span_s:g} s: its timestamps seem to be seconds, expected "
            "milliseconds (--unit s if they are seconds, --unit ms if they are not)"
        )
    return [int(line.timestamp) * NS_PER_MS for line in lines]


def _chained(ids: list[NDArray[np.uint64]]) -> tuple[NDArray[np.uint64], list[int]]:
    """Hashes that are equal where all ids up to there are, in one array; and where each request's begin.

    Works on all requests at once, place by place, for there are many requests and few places.
    """
    counts = np.array([len(request) for request in ids])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    hashes = np.concatenate(ids)
    longest_first = np.argsort(-counts, kind="stable")
    begins = offsets[:-1][longest_first]
    num_longer = np.searchsorted(-counts[longest_first], -np.arange(counts.max()), "left")
    for place, count in enumerate(num_longer.tolist()):
        at = begins[:count] + place
        parents = hashes[at - 1] if place else 0
        hashes[at] = mix64_arrays(parents, hashes[at], place)
    return hashes, offsets.tolist()
