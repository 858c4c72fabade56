"""Two runs of one workload, step by step: the first step in which they differ, and in what."""

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final, TypeAlias, TypeGuard

from kvreplay.conformance.vector import Json
from kvreplay.errors import KvReplayError

Step: TypeAlias = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of one step; None for what one side leaves out."""

    step: int | None
    field: str
    expected: Json
    got: Json


FIELD_ORDER: Final = (
    "bug",
    "error",
    *("add", "abort", "reset", "lookup", "alloc", "preempted", "evict", "evict_inv"),
    *("new", "resumed", "run", "total", "spec", "skip_drafts", "cow", "zero", "boundary", "tails", "fin_prev"),
    *("sync_load", "abort_mid", "upd_of", "deliver", "acc", "out"),
    "after",
    *("running", "waiting", "kvhold", "deferred", "free", "cached", "failed", "recvd", "req", "fq", "ref"),
)
"""Of a step, and of what is after it: causes before their effects. Fields not named here come last."""

_RANK: Final = {name: rank for rank, name in enumerate(FIELD_ORDER)}

_REQUEST_ROW: Final = ("status", "num_computed", "num_tokens", "num_preemptions", "blocks")
_SCHEDULED_ROW: Final = ("id", "computed_before", "scheduled", "blocks")
_ROWS: Final[Mapping[str, Sequence[str]]] = {
    "lookup": ("id", "local", "external", "async"),
    "alloc": ("id", "external", "blocks"),
    "new": _SCHEDULED_ROW,
    "resumed": _SCHEDULED_ROW,
    "run": _SCHEDULED_ROW,
    "acc": ("id", "accepted"),
    "out": ("id", "tokens", "finish"),
}
"""The columns of the fields that list one row a request."""

_SIGNIFICANT_MESSAGE: Final = 40


def first_differences(expected: Iterable[Step], got: Iterable[Step]) -> list[Difference]:
    """Every field in which the first unequal step differs, causes first; empty if the runs are equal.

    `got` is taken no further than that step. A step that fails with a bug of ours differs in `bug`, and nothing else.
    """
    for index, (left, right) in enumerate(zip_longest(expected, _guarded(got))):
        if left is None:
            return [Difference(index, "end", "the run has ended", "one more step")]
        if right is None:
            return [Difference(index, "end", "one more step", "the run has ended")]
        found = list(step_differences(left, right))
        if found:
            return found
    return []


def _guarded(steps: Iterable[Step]) -> Iterator[Step]:
    iterator = iter(steps)
    while True:
        try:
            step = next(iterator)
        except StopIteration:
            return
        except KvReplayError:
            raise
        except Exception as bug:
            yield {"bug": described(bug)}
            return
        yield step


def described(bug: Exception) -> str:
    """One of ours, in a line: what it says and where."""
    *_, frame = traceback.extract_tb(bug.__traceback__)
    return f"{type(bug).__name__}: {bug} ({Path(frame.filename).name}:{frame.lineno})"


def step_differences(expected: Step, got: Step) -> Iterator[Difference]:
    step = expected.get("k")
    if "bug" in got:
        yield Difference(step, "bug", None, got["bug"])
        return
    for name in _in_order({**expected, **got}):
        left, right = expected.get(name), got.get(name)
        if name == "error":
            if not is_same_error(left, right):
                yield Difference(step, name, left, right)
        elif left != right:
            yield from _narrowed(step, name, left, right)


def is_same_error(expected: Json, got: Json) -> bool:
    """Of an engine's death, where it was, the exception's type, and the start of its message count."""
    if not isinstance(expected, Mapping) or not isinstance(got, Mapping):
        return bool(expected == got)
    if any(expected.get(part) != got.get(part) for part in ("where", "type")):
        return False
    left, right = str(expected.get("msg", "")), str(got.get("msg", ""))
    start = min(len(left), len(right), _SIGNIFICANT_MESSAGE)
    return not left or (start > 0 and left[:start] == right[:start])


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (_RANK.get(name, len(_RANK)), name))


def _narrowed(step: int | None, name: str, expected: Json, got: Json) -> Iterator[Difference]:
    """The smallest parts that differ and have a name: of `after` the request's row, of a row its column."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key in _in_order({**expected, **got}):
            left, right = expected.get(key), got.get(key)
            if left == right:
                continue
            if name == "after.req" and _is_row(left, _REQUEST_ROW) and _is_row(right, _REQUEST_ROW):
                yield from _columns(step, f"{name}.{key}", _REQUEST_ROW, left, right)
            else:
                yield from _narrowed(step, f"{name}.{key}", left, right)
    elif name in _ROWS and _have_same_ids(expected, got, _ROWS[name]):
        for left, right in zip(expected, got, strict=True):
            yield from _columns(step, f"{name}.{left[0]}", _ROWS[name], left, right)
    else:
        yield Difference(step, name, expected, got)


def _columns(
    step: int | None, name: str, columns: Sequence[str], expected: Sequence[Json], got: Sequence[Json]
) -> Iterator[Difference]:
    for column, left, right in zip(columns, expected, got, strict=True):
        if left != right:
            yield Difference(step, f"{name}.{column}", left, right)


def _is_row(value: Json, columns: Sequence[str]) -> TypeGuard[list[Json]]:
    return isinstance(value, list) and len(value) == len(columns)


def _have_same_ids(expected: Json, got: Json, columns: Sequence[str]) -> bool:
    if not isinstance(expected, list) or not isinstance(got, list) or len(expected) != len(got):
        return False
    pairs = zip(expected, got, strict=True)
    return all(_is_row(left, columns) and _is_row(right, columns) and left[0] == right[0] for left, right in pairs)
