"""Wire structures: the bytes of the real ones, both ways, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvreplay.connectors.mooncake.structs import (
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    decode_request,
    decode_response,
    encode,
)

FIXTURES = json.loads((Path(__file__).parent / "fixtures.json").read_text())


def named(section: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in FIXTURES[section]]


def as_request(fields: dict[str, Any]) -> MooncakeXferMetadata:
    return msgspec.convert(fields, MooncakeXferMetadata)


@pytest.mark.parametrize("case", named("requests"))
def test_a_pull_has_the_real_bytes(case: dict[str, Any]) -> None:
    request = as_request(case["fields"])
    assert encode(request).hex() == case["hex"]
    assert decode_request(bytes.fromhex(case["hex"])) == request


@pytest.mark.parametrize("case", named("responses"))
def test_a_reply_has_the_real_bytes(case: dict[str, Any]) -> None:
    response = msgspec.convert(case["fields"], MooncakeXferResponse)
    assert encode(response).hex() == case["hex"]
    assert decode_response(bytes.fromhex(case["hex"])) == response


@pytest.mark.parametrize("case", named("decode_request"))
def test_a_pull_is_read_or_refused_as_by_the_real_one(case: dict[str, Any]) -> None:
    frame = bytes.fromhex(case["hex"])
    if "ok" in case:
        assert decode_request(frame) == as_request(case["ok"])
        return
    with pytest.raises(msgspec.MsgspecError) as caught:
        decode_request(frame)
    assert (type(caught.value).__name__, str(caught.value)) == (case["error"], case["msg"])


@pytest.mark.parametrize("case", named("decode_response"))
def test_a_reply_is_read_or_refused_as_by_the_real_one(case: dict[str, Any]) -> None:
    frame = bytes.fromhex(case["hex"])
    if "ok" in case:
        expected = {**case["ok"], "status": MooncakeXferResponseStatus(case["ok"]["status"])}
        assert msgspec.structs.asdict(decode_response(frame)) == expected
        return
    with pytest.raises(msgspec.MsgspecError) as caught:
        decode_response(frame)
    assert (type(caught.value).__name__, str(caught.value)) == (case["error"], case["msg"])
