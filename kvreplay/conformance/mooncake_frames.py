"""Frames of the Mooncake protocol, encoded and decoded by vLLM's own structures.

`requests` and `responses`: the fields that were given, the map that is on the wire, and its bytes. `decode_request` and
`decode_response`: bytes, and either every field of what they decode to (`ok`) or the exception (`error`, `msg`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvreplay.conformance.compare import Difference
from kvreplay.conformance.vector import Json
from kvreplay.connectors.mooncake.structs import (
    MooncakeXferMetadata,
    MooncakeXferResponse,
    decode_request,
    decode_response,
    encode,
)
from kvreplay.errors import ConfigError

Message = MooncakeXferMetadata | MooncakeXferResponse
_Decode = Callable[[bytes], Message]

_ENCODED: Final[Mapping[str, tuple[type[Message], _Decode]]] = {
    "requests": (MooncakeXferMetadata, decode_request),
    "responses": (MooncakeXferResponse, decode_response),
}
_DECODED: Final[Mapping[str, _Decode]] = {"decode_request": decode_request, "decode_response": decode_response}


def replay_frames(document: Mapping[str, Json]) -> list[Difference]:
    """Every frame that ours encodes or decodes differently. Raises ConfigError for a broken document."""
    found: list[Difference] = []
    for section, (kind, decode) in _ENCODED.items():
        for index, case in _cases(document, section, ("fields", "hex")):
            found += _compare_encoded(f"{section}[{index}]", case, kind, decode)
    for section, decode in _DECODED.items():
        for index, case in _cases(document, section, ("hex",)):
            found += _compare_decoded(f"{section}[{index}]", case, decode)
    return found


def _cases(document: Mapping[str, Json], section: str, needed: Sequence[str]) -> Iterator[tuple[int, Json]]:
    cases = document.get(section, [])
    if not isinstance(cases, list):
        raise ConfigError(f"{section}: expected a list")
    for index, case in enumerate(cases):
        for name in needed:
            if not isinstance(case, dict) or name not in case:
                raise ConfigError(f"{section}[{index}]: expected an object with {name}")
        yield index, case


def _frame(name: str, case: Mapping[str, Json]) -> bytes:
    try:
        return bytes.fromhex(case["hex"])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}.hex: {error}") from error


def _compare_encoded(name: str, case: Mapping[str, Json], kind: type[Message], decode: _Decode) -> Iterator[Difference]:
    frame = _frame(name, case)
    try:
        message = msgspec.convert(case["fields"], kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}.fields: {error}") from error
    encoded = encode(message)
    if encoded != frame:
        yield Difference(None, f"{name}.hex", case["hex"], encoded.hex())
    on_wire = msgspec.msgpack.decode(encoded)
    if "map" in case and on_wire != case["map"]:
        yield Difference(None, f"{name}.map", case["map"], on_wire)
    decoded = _outcome(decode, frame)
    if decoded != _outcome(lambda _: message, frame):
        yield Difference(None, f"{name}.fields", case["fields"], decoded)


def _compare_decoded(name: str, case: Mapping[str, Json], decode: _Decode) -> Iterator[Difference]:
    outcome = _outcome(decode, _frame(name, case))
    expected = {part: case[part] for part in ("ok", "error", "msg") if part in case}
    for part in dict.fromkeys((*expected, *outcome)):
        if expected.get(part) != outcome.get(part):
            yield Difference(None, f"{name}.{part}", expected.get(part), outcome.get(part))


def _outcome(decode: _Decode, frame: bytes) -> dict[str, Any]:
    """Every field of the message, or the exception."""
    try:
        message = decode(frame)
    except msgspec.MsgspecError as error:
        return {"error": type(error).__name__, "msg": str(error)}
    return {"ok": msgspec.json.decode(msgspec.json.encode(msgspec.structs.asdict(message)))}
