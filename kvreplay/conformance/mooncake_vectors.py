"""Mooncake vectors: transcripts of scenarios, and frames.

A transcript is `{"format": 1, "oracle": "vllm X", "scenario": {...}, "events": [...], "final": {...}}`, with what was
there at the start: what vLLM's own MooncakeConnector did, producer and consumer, over real sockets with scripted
faults. `replay_transcript` has ours play the same scenario in virtual time, and compares.
"""

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Final

from kvreplay.conformance.compare import Difference, described
from kvreplay.conformance.mooncake_canonical import Freedom, canonical, differences
from kvreplay.conformance.mooncake_driver import Played, play
from kvreplay.conformance.mooncake_recording import check_transcript
from kvreplay.conformance.mooncake_scenario import Scenario, read_scenario
from kvreplay.conformance.mooncake_side import Conditions
from kvreplay.conformance.mooncake_wire import Timing
from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.connectors.mooncake import log
from kvreplay.errors import KvReplayError
from kvreplay.ids import NS_PER_MS

_MAX_PERMUTED: Final = 4
_TIMINGS: Final = (
    Timing(),
    *(Timing(http_ns=(30 + extra) * NS_PER_MS) for extra in (3, 6, 9, 12, 15)),
    Timing(last_peer_first=True),
    Timing(stagger_ns=0),
    Timing(stagger_ns=40 * NS_PER_MS),
    Timing(connect_ns=8 * NS_PER_MS),
    Timing(connect_ns=NS_PER_MS, http_ns=2 * NS_PER_MS, work_ns=6 * NS_PER_MS),
    Timing(connect_ns=NS_PER_MS, http_ns=10 * NS_PER_MS),
    Timing(connect_ns=15 * NS_PER_MS, http_ns=60 * NS_PER_MS),
    Timing(repeat_ns=0, forward_ns=0),
    Timing(work_ns=NS_PER_MS // 10),
    *(Timing(serves_in_turn=True, http_ns=each * NS_PER_MS) for each in (15, 30, 50)),
)
"""The recorder's own times, and others about as likely: where two threads race, either may have won."""


def replay_transcript(document: Mapping[str, Json], over: str = "virtual") -> list[Difference]:
    """What our connector does differently, the earliest first; empty if nothing. `over`: the transport.

    A scenario over which it fails with a bug of ours differs in `bug`, and nothing else.

    Raises ConfigError for a broken vector, and UnsupportedVectorError for what is not modelled.
    """
    check_transcript(document)
    scenario = read_scenario(document["scenario"])
    if over != "virtual" and _names_other_memory(scenario):
        raise UnsupportedVectorError("a pull edited to name other memory than its sender's: nobody takes such a write")
    freedom = Freedom(
        several_requests=sum(name.startswith("d") for name in scenario.requests) > 1,
        several_workers=any(side.tp * side.pp > 1 for side in scenario.sides.values()),
    )
    expected = canonical(document, freedom)
    best: list[Difference] | None = None
    for conditions in _conditions(document):
        try:
            played = play(scenario, conditions, over)
        except KvReplayError:
            raise
        except Exception as bug:
            return [Difference(None, "bug", None, described(bug))]
        found = differences(
            expected, canonical(transcript_of(scenario, played), freedom), played.transcript.entry_states
        )
        if not found:
            return []
        best = best or found
    assert best is not None
    return best


def _names_other_memory(scenario: Scenario) -> bool:
    """The recorder's engine copies from address to address, whatever session it is told; a real one does not."""
    session = (("remote_hostname", str), ("remote_port", int))
    for edit in (rule.get("set", {}) for rule in scenario.wire if rule.get("dir") == "req"):
        addresses = edit.get("kv_caches_base_addr")
        if isinstance(addresses, list) and len(set(addresses)) < len(addresses):
            return True  # one region under another's name
        if any(isinstance(edit.get(name), kind) for name, kind in session):
            return True
    return False


def transcript_of(scenario: Scenario, played: Played) -> dict[str, Json]:
    return {**played.head, "events": played.transcript.events, "final": played.final}


def _conditions(document: Mapping[str, Json]) -> Iterator[Conditions]:
    """What the recording may have run under; the likely first."""
    joint = frozenset(_joint_failures(document))
    for timing in _TIMINGS:
        for drop_order in _drop_orders(document):
            for reverses_polls in (False, True) if _has_joint_ends(document) else (False,):
                for reads_both in _duplicates_read(document):
                    yield Conditions(timing, drop_order, joint, reverses_polls, reads_both)


def _reports(document: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """Worker, and what a poll of it reported."""
    for event in document["events"]:
        if event["lane"] == "report":
            yield from event["workers"].items()


def _joint_failures(document: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    for worker, report in _reports(document):
        if "invalid_block_ids" in report or "failed_recving" in report:
            yield from ((worker, request_id) for request_id in report.get("finished_recving", ()))


def _has_joint_ends(document: Mapping[str, Json]) -> bool:
    ends = ("finished_sending", "finished_recving")
    return any(len(report.get(name, ())) > 1 for _, report in _reports(document) for name in ends)


def _duplicates_read(document: Mapping[str, Json]) -> list[frozenset[str]]:
    """Where a worker may have found a pull and its duplicate together: the first has served what the second looked up.

    Whether the second frame is there when the loop wakes for the first is a race with the socket's own thread.
    """
    rules = document["scenario"].get("wire", ())
    if not any(rule.get("dir") == "req" and rule.get("act") == "dup" for rule in rules):
        return [frozenset()]
    lines = (event for event in document["events"] if event.get("msg") == log.EXPIRED_BEFORE_SENDING)
    workers = frozenset(str(event.get("th")).removesuffix("loop") for event in lines)
    return [workers, frozenset()] if workers else [workers]


def _drop_orders(document: Mapping[str, Json]) -> list[tuple[int, ...]]:
    """vLLM goes through the transfers dropped in one step as through a set: any order will do."""
    sizes = [
        len(meta["not_processed"])
        for event in document["events"]
        if isinstance(meta := event.get("meta"), Mapping) and "not_processed" in meta
    ]
    largest = min(max(sizes, default=0), _MAX_PERMUTED)
    return list(permutations(range(largest))) if largest > 1 else [()]
