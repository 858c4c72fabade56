"""What several of the rows need."""

from dataclasses import replace
from typing import Final

from kvreplay.connectors.mooncake.structs import (
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
)
from kvreplay.sim.catalogue import Setting, Settings
from kvreplay.sim.envelope import (
    Delivery,
    Envelope,
)

NEEDS: Final = "mooncake"
FAILS_OR_RECOMPUTES: Final = "the requests fail, or their prompts are computed on the consumer, by policy"
MESSAGE: Final = Setting(default="injected error", doc="err_msg of the reply")


def answered(envelope: Envelope, kind: str, payload: object) -> Delivery:
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


def error_response(settings: Settings) -> MooncakeXferResponse:
    return MooncakeXferResponse(MooncakeXferResponseStatus.ERROR, err_msg=settings["message"])


def is_early_attempt(envelope: Envelope, settings: Settings) -> bool:
    return bool(envelope.attempt < settings["times"])
