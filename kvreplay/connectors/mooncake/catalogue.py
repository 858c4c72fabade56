"""What can go wrong around the Mooncake connector: its rows of the fault catalogue.

Sources: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py and mooncake_utils.py (0.33.0),
vllm#50984, and Mooncake's transfer_engine_py.cpp. An end of a pull is its consumer (`instance`) or its producer
(`peer`).
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from math import ceil
from random import Random
from typing import Any, Final

import msgspec

from kvreplay.connectors.mooncake.catalogue_ranks import PEERS, RANKS, WRITES
from kvreplay.connectors.mooncake.catalogue_setup import MISFITS, PRODUCERS, STARTS
from kvreplay.connectors.mooncake.plan import WriteSegment
from kvreplay.connectors.mooncake.structs import (
    BootstrapAnswer,
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    WriteData,
    decode_response,
)
from kvreplay.events import Event
from kvreplay.ids import NS_PER_MS, NS_PER_S
from kvreplay.sim.catalogue import DURATION, SHARE, FaultRow, Setting, Settings
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    BOOTSTRAP_QUERY,
    PULL_REPLY,
    PULL_REQUEST,
    WRITE_DATA,
    Corruption,
    Delivery,
    Envelope,
)
from kvreplay.sim.rng import stable_hash

_NEEDS: Final = "mooncake"
_UNDECODABLE: Final = b"\xc1"
"""The one byte that msgpack never uses."""

_REPLY: Final = Setting(
    default="all", choices=("all", "first", "last"), doc="which replies of the conversation: last is the terminal one"
)
_SHARE: Final = Setting(default=None, none="one", unit=SHARE, doc="how many of the pull's requests, rounded up")
_MESSAGE: Final = Setting(default="injected error", doc="err_msg of the reply")


# -- replies ---------------------------------------------------------------------------------------------


def _response(envelope: Envelope) -> MooncakeXferResponse | None:
    """A reply's content, or None where another fault has left no reply that can be read."""
    if not isinstance(envelope.payload, bytes):
        response: MooncakeXferResponse = envelope.payload
        return response
    try:
        return decode_response(envelope.payload)
    except msgspec.MsgspecError:
        return None


def _is_chosen_reply(envelope: Envelope, settings: Settings) -> bool:
    if settings["reply"] == "first":
        return envelope.reply_index == 0
    return settings["reply"] == "all" or _is_last_reply(envelope, settings)


def _is_last_reply(envelope: Envelope, settings: Settings) -> bool:
    response = _response(envelope)
    return response is None or response.status != MooncakeXferResponseStatus.CONTINUE


def _names_completed(envelope: Envelope, settings: Settings) -> bool:
    response = _response(envelope)
    return response is not None and bool(response.ok_reqs)


def _drawn_completed(envelope: Envelope, settings: Settings, draw: int) -> tuple[str, ...]:
    """The requests of this reply that are among those drawn from the whole pull."""
    wanted = [name for name in settings["requests"] if fnmatchcase(name, settings["request"] or "*")]
    share = settings["share"]
    count = 1 if share is None else ceil(share * len(wanted))
    drawn = sorted(wanted, key=lambda name: stable_hash(draw, name))[:count]
    response = _response(envelope)
    completed = response.ok_reqs or [] if response is not None else []
    return tuple(name for name in completed if name in drawn)


def _with(envelope: Envelope, **changes: Any) -> Envelope:  # noqa: ANN401 - fields of the response
    response = _response(envelope)
    assert response is not None, "selected by its content"
    return replace(envelope, payload=msgspec.structs.replace(response, **changes))


def _without_drawn(envelope: Envelope, settings: Settings, draw: int) -> tuple[Envelope, tuple[str, ...]]:
    """The reply without its drawn requests, and these."""
    drawn = _drawn_completed(envelope, settings, draw)
    response = _response(envelope)
    assert response is not None, "selected by its content"
    ok_reqs = [name for name in response.ok_reqs or [] if name not in drawn]
    return _with(envelope, ok_reqs=ok_reqs or None), drawn


def _fail_drawn(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    rest, drawn = _without_drawn(envelope, settings, draw)
    err_reqs = [*(rest.payload.err_reqs or []), *drawn]
    return [Delivery(_with(rest, err_reqs=err_reqs, err_msg=settings["message"]))]


def _omit_drawn(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return [Delivery(_without_drawn(envelope, settings, draw)[0])]


def _name_stranger(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    response = _response(envelope)
    assert response is not None, "selected by its content"
    return [Delivery(_with(envelope, ok_reqs=[*(response.ok_reqs or []), f"unknown-{draw:016x}"]))]


def _announce_twice(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    """The reply as a CONTINUE first, so that the second naming arrives before the conversation is over."""
    return [Delivery(_with(envelope, status=MooncakeXferResponseStatus.CONTINUE))]


def _garble(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return [Delivery(replace(envelope, payload=_UNDECODABLE))]


def _error_after(envelope: Envelope, settings: Settings) -> bool:
    return bool(envelope.reply_index >= settings["replies"])


def _all_of_pull(envelope: Envelope, settings: Settings, draw: int) -> tuple[str, ...]:
    """What is not settled when the conversation breaks; what earlier replies have settled is among it."""
    requests: tuple[str, ...] = settings["requests"]
    return requests


def _fail_reply(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return [Delivery(replace(envelope, payload=_error(settings)))]


def _error(settings: Settings) -> MooncakeXferResponse:
    return MooncakeXferResponse(MooncakeXferResponseStatus.ERROR, err_msg=settings["message"])


# -- pulls -----------------------------------------------------------------------------------------------


def _answered(envelope: Envelope, kind: str, payload: object) -> Delivery:
    """A request's answer, given before it reaches whom it was meant for."""
    return Delivery(
        replace(
            envelope,
            kind=kind,
            source=envelope.destination,
            destination=envelope.source,
            payload=payload,
            reply_index=0,
            size_bytes=0,
        )
    )


def _refuse_pull(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return [_answered(envelope, PULL_REPLY, _error(settings))]


def _is_release_only(envelope: Envelope, settings: Settings) -> bool:
    pull = envelope.payload
    return isinstance(pull, MooncakeXferMetadata) and not any(any(blocks) for _, blocks in pull.req_blocks.values())


def _release(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    pull: MooncakeXferMetadata = envelope.payload
    response = MooncakeXferResponse(MooncakeXferResponseStatus.FINISH, ok_reqs=list(pull.req_blocks))
    return [_answered(envelope, PULL_REPLY, response)]


def _is_early_attempt(envelope: Envelope, settings: Settings) -> bool:
    return bool(envelope.attempt < settings["times"])


def _relies_on_layout(envelope: Envelope, settings: Settings) -> bool:
    """A first attempt without the layout, or the one after it, which has it."""
    if isinstance(envelope.payload, bytes):
        return False
    pull: MooncakeXferMetadata = envelope.payload
    return _is_early_attempt(envelope, settings) and (envelope.attempt > 0 or not pull.kv_caches_base_addr)


def _miss_layout(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    status = MooncakeXferResponseStatus.LAYOUT_MISS
    return [_answered(envelope, PULL_REPLY, MooncakeXferResponse(status, err_msg="unknown layout_id"))]


# -- bootstrap -------------------------------------------------------------------------------------------

_ANSWERS: Final[Mapping[str, BootstrapAnswer]] = {
    "refused": BootstrapAnswer(status=0, error="refused"),
    "404": BootstrapAnswer(status=404, body=b'{"detail":"Not Found"}'),
    "500": BootstrapAnswer(status=500, body=b"Internal Server Error"),
    "garbage": BootstrapAnswer(status=200, body=b"<html>"),
    "missing-engine": BootstrapAnswer(status=200, body=b"{}"),
}


def _answer_query(how: str, envelope: Envelope) -> list[Delivery]:
    if how == "hang":
        return []
    return [_answered(envelope, BOOTSTRAP_ANSWER, _ANSWERS[how])]


def _fail_query(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return _answer_query(settings["how"], envelope)


def _refuse_query(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return _answer_query("refused", envelope)


def _fail_query_with_status(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return _answer_query(settings["status"], envelope)


def _garble_answer(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return _answer_query("garbage", envelope)


def _hide_engine(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return _answer_query("missing-engine", envelope)


def _found_no_engine(event: Event) -> bool:
    """A batch that had waited for another batch's query."""
    return event.status == "failed" and "not found from bootstrap server" in (event.cause or "")


_UNANSWERED: Final = {"pull.settled": _found_no_engine}


# -- engine writes ---------------------------------------------------------------------------------------


def _may_hit(segment: WriteSegment, settings: Settings) -> bool:
    """Whether a fault with these keys may hit the blocks of this segment."""
    request, group = settings["request"], settings["group"]
    return (group is None or segment.group == group) and (request is None or fnmatchcase(segment.request_id, request))


def _has_candidates(envelope: Envelope, settings: Settings) -> bool:
    data: WriteData = envelope.payload
    return any(len(segment.block_ids) and _may_hit(segment, settings) for segment in data.segments)


def _hit_blocks(envelope: Envelope, settings: Settings, draw: int) -> list[int]:
    """The numbers of the blocks of the write that are hit."""
    data: WriteData = envelope.payload
    candidates: list[int] = []
    start = 0
    for segment in data.segments:
        end = start + len(segment.block_ids)
        if _may_hit(segment, settings):
            candidates.extend(range(start, end))
        start = end
    count = min(settings.get("blocks", 1), len(candidates))
    return sorted(Random(draw).sample(candidates, count))


def _owners(envelope: Envelope, numbers: list[int]) -> tuple[str, ...]:
    """The requests whose blocks these are."""
    data: WriteData = envelope.payload
    ends = list(accumulate(len(segment.block_ids) for segment in data.segments))
    return tuple(dict.fromkeys(data.segments[bisect_right(ends, number)].request_id for number in numbers))


def _corrupt_owners(envelope: Envelope, settings: Settings, draw: int) -> tuple[str, ...]:
    return _owners(envelope, _hit_blocks(envelope, settings, draw))


def _corrupt(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    corruptions = tuple(
        Corruption(draw=draw, fault_spec="", block=number) for number in _hit_blocks(envelope, settings, draw)
    )
    return [Delivery(replace(envelope, corruptions=(*envelope.corruptions, *corruptions)))]


def _num_written(data: WriteData, settings: Settings) -> int:
    """At least one block is missing."""
    return min(int(settings["share"] * data.num_blocks), data.num_blocks - 1)


def _unwritten_owners(envelope: Envelope, settings: Settings, draw: int) -> tuple[str, ...]:
    data: WriteData = envelope.payload
    return _owners(envelope, list(range(_num_written(data, settings), data.num_blocks)))


def _write_part(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    data: WriteData = envelope.payload
    left = num_written = _num_written(data, settings)
    segments: list[WriteSegment] = []
    for segment in data.segments:
        count = min(left, len(segment.block_ids))
        segments.append(
            segment._replace(source_block_ids=segment.source_block_ids[:count], block_ids=segment.block_ids[:count])
        )
        left -= count
    written = replace(data, segments=tuple(segments), num_blocks=num_written)
    return [Delivery(replace(envelope, payload=written))]


def _return_failure(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return [Delivery(replace(envelope, write_result=settings["ret"]))]


# -- arrivals --------------------------------------------------------------------------------------------


def _forget_param(params: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != settings["key"]}


# -- rows ------------------------------------------------------------------------------------------------

_FAILS_OR_RECOMPUTES: Final = "the requests fail, or their prompts are computed on the consumer, by policy"

_SHORT_NAMES: Final = (
    FaultRow(
        name="timeout",
        models="every reply to a pull is lost (receive_kv_from_single_worker: 540 s per reply)",
        verb="drop",
        target=PULL_REPLY,
        survives=f"after the receive timeout {_FAILS_OR_RECOMPUTES}; blocks come back",
        whole_conversation=True,
        short_name=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="error-response",
        models="the producer answers ERROR to the pull, and never serves it (send_kv_to_decode)",
        verb="replace",
        target=PULL_REQUEST,
        survives=f"at once {_FAILS_OR_RECOMPUTES}; the producer's blocks expire",
        settings={"message": _MESSAGE},
        transform=_refuse_pull,
        short_name=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="partial-error",
        models="some requests of a pull come back in err_reqs (process_pulling_result)",
        verb="partial",
        target=PULL_REPLY,
        survives="only the listed requests fail or are recomputed; the others keep what they got",
        settings={"share": _SHARE, "message": _MESSAGE},
        transform=_fail_drawn,
        opened_by=PULL_REQUEST,
        victims=_drawn_completed,
        selects=_names_completed,
        whole_conversation=True,
        short_name=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="bootstrap-failure",
        models="the consumer cannot find the producer's ranks (GET /query of the bootstrap server)",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{_FAILS_OR_RECOMPUTES}; the next batch asks again",
        settings={
            "how": Setting(default="refused", choices=("hang", *_ANSWERS), doc="what the consumer gets on each attempt")
        },
        transform=_fail_query,
        whole_conversation=True,
        short_name=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="slow",
        models="a congested link: the engine write takes longer (batch_transfer_sync_write)",
        verb="delay",
        target=WRITE_DATA,
        survives="the load is late, nothing else; past the engine's deadline as mooncake.engine-ret",
        settings={"delay": Setting(default=10 * NS_PER_S, unit=DURATION, doc="how much longer it takes")},
        short_name=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="corrupt",
        models="a destination block has other bytes than were sent, the status is OK: no checksum on the wire",
        verb="corrupt",
        target=WRITE_DATA,
        survives="no token is computed from it; only profile ideal can tell",
        transform=_corrupt,
        victims=_corrupt_owners,
        selects=_has_candidates,
        short_name=True,
        needs=_NEEDS,
    ),
)

_BOOTSTRAP: Final = (
    FaultRow(
        name="mooncake.bootstrap-refused",
        models="nobody listens at the bootstrap address: three tries, 0.1 s apart",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{_FAILS_OR_RECOMPUTES} unless a try succeeds; the next batch asks again",
        settings={"times": Setting(default=3, unit="attempts", minimum=1, doc="how many tries are refused")},
        transform=_refuse_query,
        selects=_is_early_attempt,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-hang",
        models="the bootstrap server takes the query and never answers: three tries of 30 s",
        verb="drop",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{_FAILS_OR_RECOMPUTES}; the next batch asks again",
        settings={"times": Setting(default=3, unit="attempts", minimum=1, doc="how many tries hang")},
        selects=_is_early_attempt,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-slow",
        models="the bootstrap server's answer is late",
        verb="delay",
        target=BOOTSTRAP_ANSWER,
        survives="the pull starts late; an answer to a try that is over changes nothing",
        settings={"delay": Setting(default=10 * NS_PER_S, unit=DURATION, doc="how much later it arrives")},
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-http-error",
        models="the bootstrap server answers with an error status: not tried again",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{_FAILS_OR_RECOMPUTES}; the next batch asks again",
        settings={"status": Setting(default="500", choices=("404", "500"), doc="HTTP status")},
        transform=_fail_query_with_status,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-bad-json",
        models="the bootstrap answer is no JSON: not tried again",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{_FAILS_OR_RECOMPUTES}; the next batch asks again",
        transform=_garble_answer,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-engine-missing",
        models="the bootstrap answer lacks the engine id: the producer has restarted",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{_FAILS_OR_RECOMPUTES}; the next batch asks again",
        transform=_hide_engine,
        whole_conversation=True,
        needs=_NEEDS,
    ),
)

_PULLS: Final = (
    FaultRow(
        name="mooncake.conn-refused",
        models="the pull never reaches the producer: its socket is gone, ZeroMQ keeps reconnecting",
        verb="drop",
        target=PULL_REQUEST,
        survives=f"after the receive timeout {_FAILS_OR_RECOMPUTES}; the producer's blocks expire",
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.release-only-fail",
        models="a pull without blocks, which only lets the producer free its own, is answered ERROR",
        verb="replace",
        target=PULL_REQUEST,
        survives="nothing is reported of it; the producer's blocks expire",
        settings={"message": _MESSAGE},
        transform=_refuse_pull,
        selects=_is_release_only,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.release-only-ok",
        models="a pull without blocks is answered with success: a request that nobody waits for is reported, or one "
        "that runs (before 0.33.0)",
        verb="replace",
        target=PULL_REQUEST,
        survives="nothing is reported of it; the producer's blocks expire",
        transform=_release,
        selects=_is_release_only,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.layout-miss",
        models="the producer has forgotten the consumer's memory layout: asked once, it is sent again",
        verb="replace",
        target=PULL_REQUEST,
        survives="once: nothing is seen of it; twice: as error-response",
        settings={"times": Setting(default=1, unit="attempts", minimum=1, doc="how often in one pull")},
        transform=_miss_layout,
        selects=_relies_on_layout,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.missing-params",
        models="a request arrives without a transfer parameter: parked with no pull started",
        verb="arrival",
        target="arrival",
        survives="the prompt is computed where it arrived",
        settings={
            "key": Setting(
                default="remote_engine_id",
                choices=("transfer_id", "remote_engine_id", "remote_bootstrap_addr"),
                doc="the one that is missing",
            )
        },
        rewrite=_forget_param,
        needs=_NEEDS,
    ),
)

_REPLIES: Final = (
    FaultRow(
        name="mooncake.resp-lost",
        models="replies of the producer are lost after it has served the pull",
        verb="drop",
        target=PULL_REPLY,
        survives=f"after the receive timeout {_FAILS_OR_RECOMPUTES}; blocks come back",
        settings={"reply": _REPLY},
        selects=_is_chosen_reply,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-delayed",
        models="a reply is late: before the consumer gives up, or (as by default) after",
        verb="delay",
        target=PULL_REPLY,
        survives="a late success counts as such, one past the timeout changes nothing any more",
        settings={
            "delay": Setting(default=600 * NS_PER_S, unit=DURATION, doc="how much later it arrives"),
            "reply": replace(_REPLY, default="last"),
        },
        selects=_is_chosen_reply,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-duplicate",
        models="one producer names the same requests twice",
        verb="duplicate",
        target=PULL_REPLY,
        survives="the second time changes nothing",
        settings={"delay": Setting(default=NS_PER_MS, unit=DURATION, doc="how much later the second time")},
        transform=_announce_twice,
        selects=_names_completed,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-reordered",
        models="replies of one pull overtake each other",
        verb="reorder",
        target=PULL_REPLY,
        survives="each request ends by what was said of it; a CONTINUE after the end changes nothing",
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-omit",
        models="the producer's lists lack a request: expired between ready and send",
        verb="partial",
        target=PULL_REPLY,
        survives="what is not named when the pull is over fails or is recomputed",
        settings={"share": _SHARE},
        transform=_omit_drawn,
        opened_by=PULL_REQUEST,
        victims=_drawn_completed,
        selects=_names_completed,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-unknown-id",
        models="the producer names a request that the pull does not have",
        verb="replace",
        target=PULL_REPLY,
        survives="the stranger is ignored, the others complete",
        transform=_name_stranger,
        selects=_names_completed,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-error",
        models="the producer fails while it serves the pull, and answers ERROR for what is left",
        verb="replace",
        target=PULL_REPLY,
        survives="only requests that no earlier reply has settled fail or are recomputed",
        settings={
            "replies": Setting(default=0, unit="replies", doc="how many good ones come before"),
            "message": _MESSAGE,
        },
        transform=_fail_reply,
        victims=_all_of_pull,
        opened_by=PULL_REQUEST,
        selects=_error_after,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-partial-err",
        models="a batch of the pull fails on the producer: its requests come back in err_reqs",
        verb="partial",
        target=PULL_REPLY,
        survives="only the listed requests fail or are recomputed",
        settings={"share": _SHARE, "message": replace(_MESSAGE, default="P num blocks less than D")},
        transform=_fail_drawn,
        opened_by=PULL_REQUEST,
        victims=_drawn_completed,
        selects=_names_completed,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-garbage",
        models="a reply cannot be decoded",
        verb="replace",
        target=PULL_REPLY,
        survives="requests that no earlier reply has settled fail or are recomputed",
        transform=_garble,
        victims=_all_of_pull,
        opened_by=PULL_REQUEST,
        needs=_NEEDS,
    ),
)

_WRITES: Final = (
    FaultRow(
        name="mooncake.engine-ret",
        models="the engine write fails (batch_transfer_sync_write returns -1)",
        verb="replace",
        target=WRITE_DATA,
        survives=f"{_FAILS_OR_RECOMPUTES}; the producer's blocks expire",
        settings={"ret": Setting(default=-1, minimum=-1000, doc="what it returns; 0 is success")},
        transform=_return_failure,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-slow",
        models="the engine write outlasts its deadline, 30 s and 1 ns per byte: -1, and the bytes land late",
        verb="delay",
        target=WRITE_DATA,
        survives="late bytes never reach a block that has another owner by then",
        settings={"delay": Setting(default=60 * NS_PER_S, unit=DURATION, doc="how much longer it takes")},
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-hang",
        models="the engine write never ends by itself",
        verb="drop",
        target=WRITE_DATA,
        survives=f"after the engine's deadline {_FAILS_OR_RECOMPUTES}",
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-corrupt",
        models="bytes of several destination blocks change, the write returns 0",
        verb="corrupt",
        target=WRITE_DATA,
        survives="no token is computed from them; only profile ideal can tell",
        settings={"blocks": Setting(default=1, unit="blocks", minimum=1, doc="how many")},
        transform=_corrupt,
        victims=_corrupt_owners,
        selects=_has_candidates,
        needs=_NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-partial",
        models="only some descriptors of the write are carried out, it returns 0",
        verb="partial",
        target=WRITE_DATA,
        survives="no token is computed from what was never written; only profile ideal can tell",
        settings={"share": Setting(default=0.5, unit=SHARE, doc="the blocks that are written, from the first on")},
        transform=_write_part,
        victims=_unwritten_owners,
        needs=_NEEDS,
    ),
)

ROWS: Final[tuple[FaultRow, ...]] = (
    *_SHORT_NAMES,
    *_BOOTSTRAP,
    *_PULLS,
    *_REPLIES,
    *_WRITES,
    *PEERS,
    *WRITES,
    *RANKS,
    *PRODUCERS,
    *MISFITS,
    *STARTS,
)
