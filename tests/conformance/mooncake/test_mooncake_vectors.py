"""Vectors recorded from vLLM's own MooncakeConnector: ours does the same, and what differs is named."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kvreplay.conformance.mooncake_frames import replay_frames
from kvreplay.conformance.mooncake_vectors import replay_transcript
from kvreplay.conformance.vector import UnsupportedVectorError
from kvreplay.errors import ConfigError
from kvreplay.transport import held
from kvreplay.transport.zmq_sockets import ZmqSockets

HERE = Path(__file__).parent
GIVEN = sorted((HERE / "vectors").glob("*.json"))
MORE = sorted((HERE / "more").glob("*.json"))
EMPTY_GROUP = HERE / "more" / "two_groups_one_empty.json"
"""A write in which a group has nothing to send: over sockets it was once refused as malformed."""
FIXTURES: dict[str, Any] = json.loads((HERE / "fixtures.json").read_text())


def transcript(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((HERE / "vectors" / f"{name}.json").read_text())
    return document


def check(path: Path, over: str) -> None:
    try:
        found = replay_transcript(json.loads(path.read_text()), over)
    except UnsupportedVectorError as reason:
        pytest.skip(str(reason))
    assert found == []


@pytest.mark.parametrize("path", GIVEN + MORE, ids=lambda path: path.stem)
def test_our_connector_does_what_vllms_did(path: Path) -> None:
    check(path, "virtual")


class TestOverSockets:
    @pytest.mark.parametrize("path", [*GIVEN, EMPTY_GROUP], ids=lambda path: path.stem)
    def test_our_connector_does_what_vllms_did(self, path: Path) -> None:
        check(path, "zmq")

    @pytest.mark.slow
    @pytest.mark.parametrize("path", MORE, ids=lambda path: path.stem)
    def test_and_what_it_did_in_more_scenarios(self, path: Path) -> None:
        check(path, "zmq")

    @pytest.mark.parametrize("name", ["ok_p_first", "ok_basic"])
    def test_it_is_sockets_that_carry_it(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ZmqSockets, "send", lambda self, socket, frames: True)
        monkeypatch.setattr(held, "_LOST_S", 0.05)
        assert "wire:D0>P0#1[0]" in [found.field for found in replay_transcript(transcript(name), "zmq")]


def test_frames_are_encoded_and_decoded_alike() -> None:
    assert replay_frames(FIXTURES) == []


class TestDifferences:
    @pytest.mark.parametrize(
        ("lane", "change", "field"),
        [
            ("wire", {"hex": "00"}, "wire:D0>P0#1[0].hex"),
            ("wire", {"type": "PULL_NOLAYOUT"}, "wire:D0>P0#1[0].type"),
            ("engine", {"call": "initialise"}, "engine:P0[0].call"),
            ("lookup", {"n": 47}, "lookup[0].n"),
            ("finished", {"delay_free": False}, "finished[0].delay_free"),
            ("until", {"met": False}, "until[0].met"),
            ("http", {"code": 500}, "http[0].code"),
            ("act", {"do": ["step", "D"]}, "act[0].do"),
        ],
    )
    def test_the_first_one_is_named(self, lane: str, change: dict[str, Any], field: str) -> None:
        document = transcript("ok_p_first")
        event = next(event for event in document["events"] if event["lane"] == lane)
        event.update(change)
        first = replay_transcript(document)[0]
        assert (first.step, first.field) == (event["i"], field)
        assert first.expected == next(iter(change.values()))

    def test_a_state_of_a_transfer_that_ours_was_never_in(self) -> None:
        document = transcript("ok_p_first")
        event = next(event for event in document["events"] if event["lane"] == "entries")
        event["p"]["P0"]["X1"]["sent"] = 7
        (found,) = replay_transcript(document)
        assert (found.step, found.field) == (event["i"], "entries.P0")

    def test_what_is_left_over(self) -> None:
        document = transcript("f01_timeout")
        document["final"]["P_entries"]["P0"] = {}
        assert [found.field for found in replay_transcript(document)] == ["final.P_entries.P0.X1"]

    def test_a_line_that_ours_does_not_log(self) -> None:
        document = transcript("f01_timeout")
        line = next(event for event in document["events"] if event["lane"] == "log" and event["lvl"] == "WARNING")
        document["events"].append(deepcopy(line))
        assert [found.field for found in replay_transcript(document)] == ["log:P0loop[2]"]

    def test_a_frame(self) -> None:
        document = deepcopy(FIXTURES)
        document["responses"][0]["fields"]["ok_reqs"] = ["d2"]
        assert [found.field for found in replay_frames(document)] == [
            "responses[0].hex",
            "responses[0].map",
            "responses[0].fields",
        ]

    def test_a_decoder_that_is_too_patient(self) -> None:
        document = deepcopy(FIXTURES)
        document["decode_response"][0] = {"hex": document["decode_response"][0]["hex"], "error": "DecodeError"}
        assert [found.field for found in replay_frames(document)] == [
            "decode_response[0].error",
            "decode_response[0].ok",
        ]


class TestFreedom:
    """What a recording leaves open may have been either way."""

    def test_times_are_not_compared(self) -> None:
        document = transcript("f01_timeout")
        for event in document["events"]:
            event["t"] = 99.9
        assert replay_transcript(document) == []

    def test_whether_a_reply_behind_the_last_one_found_a_socket_is_not_compared(self) -> None:
        document = json.loads((HERE / "more" / "rep_inject_after.json").read_text())
        last = [event for event in document["events"] if event["lane"] == "wire" and event["dir"] == "rep"][-1]
        last["delivered"] = not last["delivered"]
        last.pop("why", None)
        assert replay_transcript(document) == []

    def test_a_batch_may_be_answered_in_any_order(self) -> None:
        document = transcript("x_two_d_one_id")
        for event in document["events"]:
            fields = event.get("fields")
            if event["lane"] == "wire" and event["dir"] == "rep" and fields.get("ok_reqs"):
                fields["ok_reqs"].reverse()
        assert replay_transcript(document) == []


class TestBrokenVectors:
    def test_without_events(self) -> None:
        document = transcript("ok_p_first")
        del document["events"]
        with pytest.raises(ConfigError, match=r"^events: expected a list$"):
            replay_transcript(document)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"do": [["fly", "P"]]}, r"^scenario\.do\[0\]: unknown action 'fly'$"),
            ({"do": [["step"]]}, r"^scenario\.do\[0\]: action 'step': "),
            ({"do": [["p_alloc", "p9"]]}, r"^scenario: no request 'p9' in requests$"),
            ({"P": {"tp": "two"}}, r"^scenario: Expected `int`, got `str` - at `\$\.tp`$"),
            ({"D": {"colour": 1}}, r"^scenario: Object contains unknown field `colour`$"),
            ({"P": {"kernel_block_size": 6}}, r"^scenario: kernel_block_size \(6\) must divide block_size \(16\)$"),
        ],
    )
    def test_a_scenario_that_nobody_can_play(self, change: dict[str, Any], message: str) -> None:
        document = transcript("ok_p_first")
        document["scenario"].update(change)
        with pytest.raises(ConfigError, match=message):
            replay_transcript(document)

    def test_a_frame_that_is_no_hex(self) -> None:
        with pytest.raises(ConfigError, match=r"^requests\[0\]\.hex: "):
            replay_frames({"requests": [{"fields": {}, "hex": "zz"}]})
