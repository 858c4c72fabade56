"""Rows about pulls on their way to the producer, and what they ask for."""

from collections.abc import Mapping
from typing import Any, Final

from kvreplay.connectors.mooncake.catalogue.common import (
    FAILS_OR_RECOMPUTES,
    MESSAGE,
    NEEDS,
    answered,
    error_response,
    is_early_attempt,
)
from kvreplay.connectors.mooncake.structs import (
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
)
from kvreplay.sim.catalogue import FaultRow, Setting, Settings
from kvreplay.sim.envelope import (
    PULL_REPLY,
    PULL_REQUEST,
    Delivery,
    Envelope,
)


def _refuse_pull(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return [answered(envelope, PULL_REPLY, error_response(settings))]


def _is_release_only(envelope: Envelope, settings: Settings) -> bool:
    pull = envelope.payload
    return isinstance(pull, MooncakeXferMetadata) and not any(any(blocks) for _, blocks in pull.req_blocks.values())


def _release(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    pull: MooncakeXferMetadata = envelope.payload
    response = MooncakeXferResponse(MooncakeXferResponseStatus.FINISH, ok_reqs=list(pull.req_blocks))
    return [answered(envelope, PULL_REPLY, response)]


def _relies_on_layout(envelope: Envelope, settings: Settings) -> bool:
    """A first attempt without the layout, or the one after it, which has it."""
    if isinstance(envelope.payload, bytes):
        return False
    pull: MooncakeXferMetadata = envelope.payload
    return is_early_attempt(envelope, settings) and (envelope.attempt > 0 or not pull.kv_caches_base_addr)


def _miss_layout(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    status = MooncakeXferResponseStatus.LAYOUT_MISS
    return [answered(envelope, PULL_REPLY, MooncakeXferResponse(status, err_msg="unknown layout_id"))]


def _forget_param(params: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != settings["key"]}


PULLS: Final = (
    FaultRow(
        name="error-response",
        models="the producer answers ERROR to the pull, and never serves it (send_kv_to_decode)",
        verb="replace",
        target=PULL_REQUEST,
        survives=f"at once {FAILS_OR_RECOMPUTES}; the producer's blocks expire",
        settings={"message": MESSAGE},
        transform=_refuse_pull,
        short_name=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.conn-refused",
        models="the pull never reaches the producer: its socket is gone, ZeroMQ keeps reconnecting",
        verb="drop",
        target=PULL_REQUEST,
        survives=f"after the receive timeout {FAILS_OR_RECOMPUTES}; the producer's blocks expire",
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.release-only-fail",
        models="a pull without blocks, which only lets the producer free its own, is answered ERROR",
        verb="replace",
        target=PULL_REQUEST,
        survives="nothing is reported of it; the producer's blocks expire",
        settings={"message": MESSAGE},
        transform=_refuse_pull,
        selects=_is_release_only,
        needs=NEEDS,
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
        needs=NEEDS,
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
        needs=NEEDS,
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
        needs=NEEDS,
    ),
)
