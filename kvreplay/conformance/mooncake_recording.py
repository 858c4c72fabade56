"""What a recorded transcript must have for a comparison with it: the fields that the comparison reads, lane by lane."""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from kvreplay.conformance.vector import Json
from kvreplay.errors import ConfigError


class _Meta(Struct, frozen=True):
    side: str
    meta: dict[str, Json]


class _EngineCall(Struct, frozen=True):
    """`n` is only there for writes."""

    who: str
    call: str
    n: int | None = None
    desc: list[list[int]] = []


class _Frame(Struct, frozen=True):
    conn: str
    dir: str
    type: str | None
    fields: Json
    hex: str


class _Line(Struct, frozen=True):
    lvl: str
    src: str
    msg: str
    args: list[Json] | dict[str, Json] | None = None
    th: str = ""


class _Heard(Struct, frozen=True, forbid_unknown_fields=True):
    finished_sending: list[str] = []
    finished_recving: list[str] = []
    failed_recving: list[str] = []
    invalid_block_ids: list[int] = []


class _Reported(_Heard, frozen=True, forbid_unknown_fields=True):
    stats: dict[str, int | list[int]] = {}


class _Report(Struct, frozen=True):
    side: str
    workers: dict[str, _Reported]
    aggregated: _Heard = _Heard()


class _Entries(Struct, frozen=True):
    p: dict[str, dict[str, Json]]


class _Output(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request: str
    tokens: list[int]
    reason: str | None


class _After(Struct, frozen=True):
    req: dict[str, Json]


class _Sched(Struct, frozen=True):
    side: str
    out: list[_Output] = []
    after: _After | None = None


class _Answer(Struct, frozen=True):
    n: int


class _Crash(Struct, frozen=True):
    msg: str


_LANES: Final[Mapping[str, type[Struct]]] = {
    "meta": _Meta,
    "engine": _EngineCall,
    "wire": _Frame,
    "log": _Line,
    "report": _Report,
    "entries": _Entries,
    "sched": _Sched,
    "http": _Answer,
    "crash": _Crash,
}
Document: TypeAlias = Mapping[str, Any]


def check_transcript(document: Document) -> None:
    """Raises ConfigError unless everything that a comparison looks at is there."""
    for name, kind in (("scenario", dict), ("events", list), ("final", dict)):
        if not isinstance(document.get(name), kind):
            raise ConfigError(f"{name}: expected {'an object' if kind is dict else 'a list'}")
    for index, event in enumerate(document["events"]):
        if not isinstance(event, dict) or not isinstance(event.get("lane"), str):
            raise ConfigError(f"events[{index}]: expected an object with a lane")
        form = _LANES.get(event["lane"])
        if form is not None:
            _check_event(event, form, f"events[{index}]")


def _check_event(event: Json, form: type[Struct], where: str) -> None:
    try:
        read = msgspec.convert(event, form)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    if isinstance(read, _EngineCall) and read.call == "write" and read.n is None:
        raise ConfigError(f"{where}: a write needs n, its number")
    if isinstance(read, _Frame):
        try:
            msgspec.msgpack.decode(bytes.fromhex(read.hex))
        except (ValueError, msgspec.MsgspecError) as error:
            if read.dir == "rep" and isinstance(read.fields, dict):
                raise ConfigError(f"{where}: hex: {error}") from error
