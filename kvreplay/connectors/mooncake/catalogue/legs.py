"""Rows of the fault catalogue about legs of a request that end before an engine has them.

Sources: vllm/entrypoints/generate/base/serving.py; vllm#50425, llm-d#1138, aibrix#2289, sglang#9726.
"""

from dataclasses import replace
from typing import Final

from kvreplay.connectors.mooncake.catalogue.common import FAILS_OR_RECOMPUTES, NEEDS
from kvreplay.sim.catalogue import DURATION, FaultRow, Setting, Settings
from kvreplay.sim.envelope import CLIENT_ARRIVAL, Delivery, Envelope


def is_producers_leg(envelope: Envelope, settings: Settings) -> bool:
    return bool(getattr(envelope.payload, "is_producers", False))


def _is_consumers_leg(envelope: Envelope, settings: Settings) -> bool:
    params = getattr(envelope.payload, "params", None) or {}
    return bool(params.get("do_remote_prefill"))


def _turn_away(envelope: Envelope, where: str, delay_ns: int = 0) -> list[Delivery]:
    return [Delivery(replace(envelope, payload=replace(envelope.payload, turned_away=where)), delay_ns)]


def _leave(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return _turn_away(envelope, settings["where"])


def _refuse(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return _turn_away(envelope, "error", settings["delay"])


LEGS: Final = (
    FaultRow(
        name="mooncake.p-refused",
        models="the producer answers its leg with an error before its engine has it (aibrix#2289, sglang#9726)",
        verb="replace",
        target=CLIENT_ARRIVAL,
        survives=f"after the abort timeout {FAILS_OR_RECOMPUTES}, or the proxy cancels them at once",
        settings={"delay": Setting(default=0, unit=DURATION, doc="how long that takes it")},
        transform=_refuse,
        selects=is_producers_leg,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.d-left-early",
        models="the client goes away before the consumer's engine has the request (vllm#50425, llm-d#1138)",
        verb="replace",
        target=CLIENT_ARRIVAL,
        survives="the producer's blocks are asked for by nobody, and free at once, or when their time is up",
        settings={
            "where": Setting(
                default="gateway",
                choices=("gateway", "api"),
                doc="how far it has come: not to the instance, or into its API server",
            )
        },
        transform=_leave,
        selects=_is_consumers_leg,
        needs=NEEDS,
    ),
)
