"""Runs written by hand, summed up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kvreplay.checkers.finding import Finding
from kvreplay.events import Event
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.writer import MemoryTrace
from kvreplay.verdict.model import InEffect, Summary
from kvreplay.verdict.summary import RunFacts, summarise

_IN_EFFECT = InEffect(
    trace="decode-stall",
    config="mooncake-1p1d",
    config_origin="the trace",
    profile="vllm-0.33",
    profile_origin="the default",
    policy="fail",
    policy_origin="the config",
    seed=7,
)
_ROLES: Mapping[str, str] = {"P0": "prefill", "D0": "decode"}


@pytest.fixture
def sum_up() -> Callable[..., Summary]:
    """`sum_up(*events, findings=(), **facts)`."""

    def build(*events: Event, findings: Sequence[Finding] = (), **facts: Any) -> Summary:  # noqa: ANN401
        trace = MemoryTrace(TraceMetadata(source={}))
        for event in events:
            trace.emit(event)
        given = {"fingerprint": trace.fingerprint(), "in_effect": _IN_EFFECT, "roles": _ROLES, **facts}
        return summarise(trace.frame(), RunFacts(**given), findings)

    return build
