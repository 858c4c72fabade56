"""Rows about what a producer replies to a pull."""

from dataclasses import replace
from fnmatch import fnmatchcase
from math import ceil
from typing import Any, Final

import msgspec

from kvreplay.connectors.mooncake.catalogue.common import (
    FAILS_OR_RECOMPUTES,
    MESSAGE,
    NEEDS,
    error_response,
)
from kvreplay.connectors.mooncake.structs import (
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    decode_response,
)
from kvreplay.ids import NS_PER_MS, NS_PER_S
from kvreplay.sim.catalogue import DURATION, SHARE, FaultRow, Setting, Settings
from kvreplay.sim.envelope import (
    PULL_REPLY,
    PULL_REQUEST,
    Delivery,
    Envelope,
)
from kvreplay.sim.rng import stable_hash

_UNDECODABLE: Final = b"\xc1"
"""The one byte that msgpack never uses."""

_REPLY: Final = Setting(
    default="all", choices=("all", "first", "last"), doc="which replies of the conversation: last is the terminal one"
)
_SHARE: Final = Setting(default=None, none="one", unit=SHARE, doc="how many of the pull's requests, rounded up")


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
    return [Delivery(replace(envelope, payload=error_response(settings)))]


REPLIES: Final = (
    FaultRow(
        name="timeout",
        models="every reply to a pull is lost (receive_kv_from_single_worker: 540 s per reply)",
        verb="drop",
        target=PULL_REPLY,
        survives=f"after the receive timeout {FAILS_OR_RECOMPUTES}; blocks come back",
        whole_conversation=True,
        short_name=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="partial-error",
        models="some requests of a pull come back in err_reqs (process_pulling_result)",
        verb="partial",
        target=PULL_REPLY,
        survives="only the listed requests fail or are recomputed; the others keep what they got",
        settings={"share": _SHARE, "message": MESSAGE},
        transform=_fail_drawn,
        opened_by=PULL_REQUEST,
        victims=_drawn_completed,
        selects=_names_completed,
        whole_conversation=True,
        short_name=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-lost",
        models="replies of the producer are lost after it has served the pull",
        verb="drop",
        target=PULL_REPLY,
        survives=f"after the receive timeout {FAILS_OR_RECOMPUTES}; blocks come back",
        settings={"reply": _REPLY},
        selects=_is_chosen_reply,
        whole_conversation=True,
        needs=NEEDS,
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
        needs=NEEDS,
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
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-reordered",
        models="replies of one pull overtake each other",
        verb="reorder",
        target=PULL_REPLY,
        survives="each request ends by what was said of it; a CONTINUE after the end changes nothing",
        whole_conversation=True,
        needs=NEEDS,
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
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-unknown-id",
        models="the producer names a request that the pull does not have",
        verb="replace",
        target=PULL_REPLY,
        survives="the stranger is ignored, the others complete",
        transform=_name_stranger,
        selects=_names_completed,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-error",
        models="the producer fails while it serves the pull, and answers ERROR for what is left",
        verb="replace",
        target=PULL_REPLY,
        survives="only requests that no earlier reply has settled fail or are recomputed",
        settings={
            "replies": Setting(default=0, unit="replies", doc="how many good ones come before"),
            "message": MESSAGE,
        },
        transform=_fail_reply,
        victims=_all_of_pull,
        opened_by=PULL_REQUEST,
        selects=_error_after,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.resp-partial-err",
        models="a batch of the pull fails on the producer: its requests come back in err_reqs",
        verb="partial",
        target=PULL_REPLY,
        survives="only the listed requests fail or are recomputed",
        settings={"share": _SHARE, "message": replace(MESSAGE, default="P num blocks less than D")},
        transform=_fail_drawn,
        opened_by=PULL_REQUEST,
        victims=_drawn_completed,
        selects=_names_completed,
        whole_conversation=True,
        needs=NEEDS,
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
        needs=NEEDS,
    ),
)
