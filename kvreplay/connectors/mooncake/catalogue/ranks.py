"""Rows of the fault catalogue about several ranks, about writes that are not atomic, and about a producer's listener.

Sources as in `catalogue`, and vllm/distributed/kv_transfer/kv_connector/utils.py (KVOutputAggregator).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvreplay.connectors.mooncake.catalogue.common import FAILS_OR_RECOMPUTES, NEEDS
from kvreplay.connectors.mooncake.rank_group import RankReport
from kvreplay.connectors.mooncake.structs import (
    STRAY_FRAMES,
    BootstrapAnswer,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    WriteData,
)
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, FaultRow, Setting, Settings
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    PULL_REPLY,
    PULL_REQUEST,
    RANK_REPORT,
    WRITE_DATA,
    Delivery,
    Envelope,
)
from kvreplay.sim.rng import stable_hash

_DEAD: Final = "/stale"
"""Ends an address at which nobody listens."""


# -- peers of one request ---------------------------------------------------------------------------------


def _is_chosen_peer(envelope: Envelope, settings: Settings) -> bool:
    """Exactly one of the peers that one request is pulled from, the same whenever it is asked."""
    if envelope.num_peers < 2:
        return False
    request = envelope.conversation.rpartition("/")[0]
    return stable_hash("peer", request) % envelope.num_peers == envelope.peer_index


def _fail_peer(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    """An ERROR for its pull: at once, before any other peer can answer, or after all others have."""
    answer = replace(
        envelope,
        kind=PULL_REPLY,
        source=envelope.destination,
        destination=envelope.source,
        payload=MooncakeXferResponse(MooncakeXferResponseStatus.ERROR, err_msg=settings["message"]),
        reply_index=0,
        size_bytes=0,
    )
    return [Delivery(answer, 0 if settings["order"] == "first" else settings["delay"])]


# -- bootstrap answers ------------------------------------------------------------------------------------


def _engines_of(envelope: Envelope) -> dict[str, Any] | None:
    """What an answer says, or None where it says nothing that can be read."""
    answer: BootstrapAnswer = envelope.payload
    if answer.error is not None or answer.status != 200:
        return None
    try:
        engines = json.loads(answer.body or b"")
    except ValueError:
        return None
    return engines if isinstance(engines, dict) else None


def _says_ranks(envelope: Envelope, settings: Settings) -> bool:
    return bool(_engines_of(envelope))


def _lacks_rank(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    engines = _engines_of(envelope) or {}
    for engine in engines.values():
        ranks = sorted(engine["worker_addr"], key=int)
        if ranks:
            del engine["worker_addr"][ranks[0 if settings["which"] == "first" else -1]]
    return [Delivery(_saying(envelope, engines))]


def _points_nowhere(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    engines = _engines_of(envelope) or {}
    for engine in engines.values():
        for stages in engine["worker_addr"].values():
            stages.update({stage: address + _DEAD for stage, address in stages.items()})
    return [Delivery(_saying(envelope, engines))]


def _saying(envelope: Envelope, engines: Mapping[str, Any]) -> Envelope:
    return replace(envelope, payload=BootstrapAnswer(body=json.dumps(engines).encode()))


def _point_nowhere(params: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    return {name: "http://nowhere:8998" if name == "remote_bootstrap_addr" else value for name, value in params.items()}


# -- writes -----------------------------------------------------------------------------------------------


def _land_late(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    """The call returns with some of its descriptors carried out; the others follow."""
    data: WriteData = envelope.payload
    count = settings["landed"]
    returns = replace(data, lands=slice(0, count))
    follows = replace(data, lands=slice(count, None), returns=False)
    return [
        Delivery(replace(envelope, payload=returns, write_result=settings["ret"])),
        Delivery(replace(envelope, payload=follows), settings["delay"]),
    ]


def _raise(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    data: WriteData = envelope.payload
    return [Delivery(replace(envelope, payload=replace(data, lands=slice(0, 0), raises=settings["message"])))]


def _owed_by_pull(envelope: Envelope, settings: Settings, draw: int) -> tuple[str, ...]:
    """The exception ends the whole pull."""
    data: WriteData = envelope.payload
    return data.owed


# -- the listener -----------------------------------------------------------------------------------------


def _send_stray(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    """A message of three frames, the identity among them, arrives before the pull."""
    stray = replace(envelope, kind=STRAY_FRAMES, source="stranger", payload=(b"", b""), request_ids=())
    return [Delivery(stray), Delivery(envelope)]


# -- reports of ranks -------------------------------------------------------------------------------------


def _is_report(envelope: Envelope, settings: Settings) -> bool:
    """In an engine with several connectors the others' ranks report, too."""
    return isinstance(envelope.payload, RankReport)


def _speak_for_next(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    """The report comes in the name of the next rank, too, which may not be done."""
    report: RankReport = envelope.payload
    forged = RankReport((report.rank + 1) % envelope.num_peers, report.number, report.output)
    return [Delivery(envelope), Delivery(replace(envelope, payload=forged))]


PEERS: Final = (
    FaultRow(
        name="mooncake.peer-one-of-k",
        models="of several producer ranks that a request is pulled from, one answers ERROR",
        verb="replace",
        target=PULL_REQUEST,
        survives="one failure is reported; completion waits for every peer, so that no write finds other owners",
        settings={
            "order": Setting(default="first", choices=("first", "last"), doc="whether it answers before the others"),
            "delay": Setting(default=5 * NS_PER_S, unit=DURATION, doc="how late it answers with order=last"),
            "message": Setting(default="injected error", doc="err_msg of the reply"),
        },
        transform=_fail_peer,
        selects=_is_chosen_peer,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.peer-silent-one-of-k",
        models="of several producer ranks that a request is pulled from, one never answers",
        verb="drop",
        target=PULL_REPLY,
        survives=f"after the receive timeout {FAILS_OR_RECOMPUTES}",
        selects=_is_chosen_peer,
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-partial-ranks",
        models="the bootstrap answer lacks a tensor parallel rank: without the first the pull is lost, without the "
        "last a part of every block is not transferred",
        verb="replace",
        target=BOOTSTRAP_ANSWER,
        survives=f"it is noticed, the server asked again, and {FAILS_OR_RECOMPUTES}",
        settings={"which": Setting(default="last", choices=("first", "last"), doc="the rank that is missing")},
        transform=_lacks_rank,
        selects=_says_ranks,
        whole_conversation=True,
        lasts=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-stale-addr",
        models="the bootstrap answer has addresses of before the producer's restart",
        verb="replace",
        target=BOOTSTRAP_ANSWER,
        survives=f"{FAILS_OR_RECOMPUTES}, and the server is asked again",
        transform=_points_nowhere,
        selects=_says_ranks,
        whole_conversation=True,
        lasts=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.mixed-bootstrap-addr",
        models="a request arrives with a dead bootstrap address; others of its step and engine share its fate",
        verb="arrival",
        target="arrival",
        survives=f"{FAILS_OR_RECOMPUTES}",
        rewrite=_point_nowhere,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.listener-dead",
        models="a stray message of three frames ends the producer's listener: it stays up and answers no pull any more",
        verb="replace",
        target=PULL_REQUEST,
        survives=f"it is ignored, or else {FAILS_OR_RECOMPUTES} after the receive timeout",
        transform=_send_stray,
        lasts=True,
        needs=NEEDS,
    ),
)

LANDING: Final = (
    FaultRow(
        name="mooncake.engine-late",
        models="the engine write fails at its deadline, and its bytes land after that (Mooncake frees the batch while "
        "slices are in flight)",
        verb="replace",
        target=WRITE_DATA,
        survives="late bytes never reach a block that has another owner by then",
        settings={
            "delay": Setting(default=60 * NS_PER_S, unit=DURATION, doc="how much later they land"),
            "landed": Setting(default=0, unit="descriptors", doc="how many are carried out in time"),
            "ret": Setting(default=-1, minimum=-1000, doc="what the call returns; 0 is success"),
        },
        transform=_land_late,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-raise",
        models="the engine call raises: the producer answers ERROR, and counts the transfer as being sent for ever",
        verb="replace",
        target=WRITE_DATA,
        survives=f"{FAILS_OR_RECOMPUTES}; the producer's blocks expire",
        settings={"message": Setting(default="injected error", doc="the exception's text, which is the reply's")},
        transform=_raise,
        victims=_owed_by_pull,
        lasts=True,
        needs=NEEDS,
    ),
)

RANKS: Final = (
    FaultRow(
        name="mooncake.rank-silent",
        models="a worker rank's report is lost: the request is never complete",
        verb="drop",
        target=RANK_REPORT,
        selects=_is_report,
        survives="it is reported again",
        lasts=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.rank-late",
        models="a worker rank's report comes late",
        verb="delay",
        target=RANK_REPORT,
        selects=_is_report,
        survives="the request is complete when the last rank has reported",
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.rank-duplicate",
        models="a worker rank reports twice, which counts twice: another may still be receiving",
        verb="duplicate",
        target=RANK_REPORT,
        selects=_is_report,
        survives="it counts once",
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.rank-early",
        models="a worker rank is reported before it is done",
        verb="replace",
        target=RANK_REPORT,
        selects=_is_report,
        survives="its own report counts",
        transform=_speak_for_next,
        needs=NEEDS,
    ),
)
