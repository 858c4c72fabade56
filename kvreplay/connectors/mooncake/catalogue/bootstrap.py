"""Rows about the bootstrap server, whom a consumer asks where a producer's ranks are."""

from collections.abc import Mapping
from typing import Final

from kvreplay.connectors.mooncake.catalogue.common import (
    FAILS_OR_RECOMPUTES,
    NEEDS,
    answered,
    is_early_attempt,
)
from kvreplay.connectors.mooncake.structs import (
    BootstrapAnswer,
)
from kvreplay.events import Event
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, FaultRow, Setting, Settings
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    BOOTSTRAP_QUERY,
    Delivery,
    Envelope,
)

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
    return [answered(envelope, BOOTSTRAP_ANSWER, _ANSWERS[how])]


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


BOOTSTRAP: Final = (
    FaultRow(
        name="bootstrap-failure",
        models="the consumer cannot find the producer's ranks (GET /query of the bootstrap server)",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{FAILS_OR_RECOMPUTES}; the next batch asks again",
        settings={
            "how": Setting(default="refused", choices=("hang", *_ANSWERS), doc="what the consumer gets on each attempt")
        },
        transform=_fail_query,
        whole_conversation=True,
        short_name=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-refused",
        models="nobody listens at the bootstrap address: three tries, 0.1 s apart",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{FAILS_OR_RECOMPUTES} unless a try succeeds; the next batch asks again",
        settings={"times": Setting(default=3, unit="attempts", minimum=1, doc="how many tries are refused")},
        transform=_refuse_query,
        selects=is_early_attempt,
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-hang",
        models="the bootstrap server takes the query and never answers: three tries of 30 s",
        verb="drop",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{FAILS_OR_RECOMPUTES}; the next batch asks again",
        settings={"times": Setting(default=3, unit="attempts", minimum=1, doc="how many tries hang")},
        selects=is_early_attempt,
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-slow",
        models="the bootstrap server's answer is late",
        verb="delay",
        target=BOOTSTRAP_ANSWER,
        survives="the pull starts late; an answer to a try that is over changes nothing",
        settings={"delay": Setting(default=10 * NS_PER_S, unit=DURATION, doc="how much later it arrives")},
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-http-error",
        models="the bootstrap server answers with an error status: not tried again",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{FAILS_OR_RECOMPUTES}; the next batch asks again",
        settings={"status": Setting(default="500", choices=("404", "500"), doc="HTTP status")},
        transform=_fail_query_with_status,
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-bad-json",
        models="the bootstrap answer is no JSON: not tried again",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{FAILS_OR_RECOMPUTES}; the next batch asks again",
        transform=_garble_answer,
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.bootstrap-engine-missing",
        models="the bootstrap answer lacks the engine id: the producer has restarted",
        verb="replace",
        target=BOOTSTRAP_QUERY,
        catches=_UNANSWERED,
        survives=f"{FAILS_OR_RECOMPUTES}; the next batch asks again",
        transform=_hide_engine,
        whole_conversation=True,
        needs=NEEDS,
    ),
)
