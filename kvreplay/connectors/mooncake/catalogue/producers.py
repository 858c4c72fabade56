"""Rows of the fault catalogue about what goes wrong on the producer before it is asked, about two sides that do not go
together, and about instances that never come up.

Sources as in `catalogue`; start-up: mooncake_connector.py (register_kv_caches, _register_local_worker) and
mooncake_utils.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from kvreplay.connectors.mooncake.catalogue.common import FAILS_OR_RECOMPUTES, NEEDS
from kvreplay.connectors.mooncake.catalogue.legs import is_producers_leg
from kvreplay.connectors.mooncake.config import BOOTSTRAP_ATTEMPTS
from kvreplay.connectors.mooncake.structs import FIRST_TOKEN_STOPS, BootstrapAnswer, MooncakeXferMetadata
from kvreplay.ids import NS_PER_MS, NS_PER_S
from kvreplay.sim.catalogue import DURATION, Death, FaultRow, Setting, Settings
from kvreplay.sim.envelope import (
    BOOTSTRAP_REGISTER,
    BOOTSTRAP_REGISTERED,
    CLIENT_ARRIVAL,
    PULL_REQUEST,
    Delivery,
    Envelope,
)

_UP: Final = "the others serve on; whoever asks it is refused at once, and finds it when it has been started again"

# -- the producer's leg -----------------------------------------------------------------------------------


def _stop_at_once(params: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    if not params.get("do_remote_decode"):
        return dict(params)
    return {**params, FIRST_TOKEN_STOPS: True}


def _share_transfer_id(params: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    return {name: settings["transfer"] if name == "transfer_id" else value for name, value in params.items()}


def _swap_roles(params: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    swapped = {"do_remote_prefill": "do_remote_decode", "do_remote_decode": "do_remote_prefill"}
    return {name: params.get(swapped.get(name, name)) for name in params}


def _chain(params: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    if not params.get("do_remote_prefill"):
        return dict(params)
    return {**params, "do_remote_decode": True}


# -- pulls that do not fit --------------------------------------------------------------------------------


def _is_structured(envelope: Envelope, settings: Settings) -> bool:
    """No other fault has made bytes of it, and something is asked for."""
    pull = envelope.payload
    return isinstance(pull, MooncakeXferMetadata) and any(any(blocks) for _, blocks in pull.req_blocks.values())


def _with(envelope: Envelope, **changes: Any) -> list[Delivery]:  # noqa: ANN401 - fields of the pull
    return [Delivery(replace(envelope, payload=msgspec.structs.replace(envelope.payload, **changes)))]


def _mistake_size(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    pull: MooncakeXferMetadata = envelope.payload
    rank = settings["tp_rank"]
    return _with(
        envelope,
        remote_tp_size=settings["tp_size"],
        remote_tp_rank=pull.remote_tp_rank if rank is None else rank,
    )


def _add_group(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    pull: MooncakeXferMetadata = envelope.payload
    wanted = {name: (transfer_id, [*blocks, []]) for name, (transfer_id, blocks) in pull.req_blocks.items()}
    return _with(envelope, req_blocks=wanted)


def _take_away(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    """A stranger's pull for the same transfers, of no blocks, comes before it: what waits for them finds them gone."""
    pull: MooncakeXferMetadata = envelope.payload
    wanted: dict[str, tuple[str, list[list[int]]]] = {
        name: (transfer_id, []) for name, (transfer_id, _) in pull.req_blocks.items()
    }
    (releasing,) = _with(envelope, req_blocks=wanted)
    stranger = replace(releasing.envelope, source="stranger", conversation=f"stranger-{draw:016x}")
    return [Delivery(stranger), Delivery(envelope)]


def _want_more(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    """The last block of each group so many times more: whatever the producer has is not enough."""
    pull: MooncakeXferMetadata = envelope.payload
    wanted = {
        name: (transfer_id, [_lengthened(list(group), settings["blocks"]) for group in blocks])
        for name, (transfer_id, blocks) in pull.req_blocks.items()
    }
    return _with(envelope, req_blocks=wanted)


def _lengthened(block_ids: list[int], count: int) -> list[int]:
    return block_ids + block_ids[-1:] * count


def _send_strangers(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    """So many pulls of somebody else's come before it, for transfers that nobody knows."""
    pull: MooncakeXferMetadata = envelope.payload
    strangers = []
    for number in range(settings["pulls"]):
        name = f"stranger-{draw:016x}-{number}"
        (wanted,) = _with(envelope, req_blocks={name: (name, [[1]] * _num_groups(pull))})
        strangers.append(
            replace(wanted.envelope, source="stranger", conversation=name, request_ids=(name,), transfer_ids=(name,))
        )
    return [*map(Delivery, strangers), Delivery(envelope)]


def _num_groups(pull: MooncakeXferMetadata) -> int:
    return max(len(blocks) for _, blocks in pull.req_blocks.values())


# -- start-up ---------------------------------------------------------------------------------------------


def _refuse_registration(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    answer = BootstrapAnswer(400, b'{"detail":"injected: another worker is registered in its place"}')
    return [
        Delivery(
            replace(
                envelope,
                kind=BOOTSTRAP_REGISTERED,
                source=envelope.destination,
                destination=envelope.source,
                payload=answer,
            )
        )
    ]


def _is_early_registration(envelope: Envelope, settings: Settings) -> bool:
    return bool(envelope.attempt <= settings["times"])


def _no_engine(settings: Settings, instance: str) -> Death:
    return Death("RuntimeError", "Mooncake Transfer Engine initialization failed.")


def _no_memory(settings: Settings, instance: str) -> Death:
    return Death("RuntimeError", "Mooncake batch memory registration failed.")


PRODUCERS: Final = (
    FaultRow(
        name="mooncake.p-never-ready",
        models="the request never reaches its producer: the pull waits for what nobody computes",
        verb="drop",
        target=CLIENT_ARRIVAL,
        survives=f"after the abort timeout {FAILS_OR_RECOMPUTES}",
        selects=is_producers_leg,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.p-slow-prefill",
        models="the producer has computed the prompt only after its abort timeout",
        verb="delay",
        target=CLIENT_ARRIVAL,
        survives=f"{FAILS_OR_RECOMPUTES}; the producer's blocks expire another abort timeout later",
        settings={"delay": Setting(default=500 * NS_PER_S, unit=DURATION, doc="how much later the prompt is there")},
        selects=is_producers_leg,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.p-expire-before-pull",
        models="the consumer asks when the producer has given the blocks up: the pull waits for them in vain",
        verb="delay",
        target=PULL_REQUEST,
        survives=f"{FAILS_OR_RECOMPUTES}",
        settings={"delay": Setting(default=500 * NS_PER_S, unit=DURATION, doc="how much later it is asked")},
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.p-expire-at-ready",
        models="the producer gives a request's blocks up between their being ready and their being sent: its reply "
        "names the request in neither list (send_kv_to_decode)",
        verb="replace",
        target=PULL_REQUEST,
        survives=f"{FAILS_OR_RECOMPUTES}",
        transform=_take_away,
        selects=_is_structured,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.p-stop-token",
        models="the producer's one token is a stop token: it counts as aborted, and nothing is sent (request_finished)",
        verb="arrival",
        target="arrival",
        survives=f"it is sent like any other; else after the abort timeout {FAILS_OR_RECOMPUTES}",
        rewrite=_stop_at_once,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.p-abort-while-waiting",
        models="the request is aborted on its producer while a pull waits for it: nobody wakes the pull",
        verb="abort",
        target="producer",
        survives=f"the pull is answered at once, or after the abort timeout; {FAILS_OR_RECOMPUTES}",
        settings={"delay": Setting(default=10 * NS_PER_MS, unit=DURATION, doc="how long after that")},
        needs=NEEDS,
    ),
)

MISFITS: Final = (
    FaultRow(
        name="mooncake.dup-transfer-id",
        models="several requests have one transfer id (record_send_reqs: KeyError, or the wrong request's blocks)",
        verb="arrival",
        target="arrival",
        survives="no request gets another's blocks, all blocks come back",
        settings={"transfer": Setting(default="shared", doc="the transfer id that they share")},
        rewrite=_share_transfer_id,
        lasts=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.role-mismatch",
        models="a request's parameters are meant for the other role: an assertion of the engine's",
        verb="arrival",
        target="arrival",
        survives="the request is refused, or served without a transfer; the engine lives",
        rewrite=_swap_roles,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.kv-both-chain",
        models="a request that is pulled is to be handed on, with both flags: it loses its last token before it is "
        "pulled (on_new_request), and without a load it is never announced (update_state_after_alloc)",
        verb="arrival",
        target="arrival",
        survives="its blocks are sent on, or expire; ends of others in its step are heard",
        rewrite=_chain,
        lasts=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.tp-mismatch",
        models="the two sides' tensor parallel sizes do not divide, or their ranks are no pair",
        verb="replace",
        target=PULL_REQUEST,
        survives=f"the pull is refused, and {FAILS_OR_RECOMPUTES}",
        settings={
            "tp_size": Setting(default=3, unit="ranks", minimum=1, doc="what the consumer says of itself"),
            "tp_rank": Setting(default=None, none="own", unit="rank", doc="the rank that it says to be"),
        },
        transform=_mistake_size,
        selects=_is_structured,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.group-mismatch",
        models="the two sides have different numbers of KV cache groups",
        verb="replace",
        target=PULL_REQUEST,
        survives=f"the pull's requests come back in err_reqs; {FAILS_OR_RECOMPUTES}",
        transform=_add_group,
        selects=_is_structured,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.blocks-short",
        models="the producer has fewer blocks of a request than the consumer wants",
        verb="replace",
        target=PULL_REQUEST,
        survives=f"the pull's requests come back in err_reqs; {FAILS_OR_RECOMPUTES}",
        settings={"blocks": Setting(default=1 << 14, unit="blocks", minimum=1, doc="how many more it wants")},
        transform=_want_more,
        selects=_is_structured,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.queue-saturation",
        models="pulls for unknown transfers keep all of a producer's sender tasks busy: later ones queue behind them",
        verb="replace",
        target=PULL_REQUEST,
        survives=f"no wait is longer than its timeout; {FAILS_OR_RECOMPUTES}",
        settings={"pulls": Setting(default=20, unit="pulls", minimum=1, doc="how many come before the chosen one")},
        transform=_send_strangers,
        selects=_is_structured,
        lasts=True,
        needs=NEEDS,
    ),
)

STARTS: Final = (
    FaultRow(
        name="mooncake.register-conflict",
        models="a rank registers where another is registered: the bootstrap server answers 400",
        verb="replace",
        target=BOOTSTRAP_REGISTER,
        survives=_UP,
        transform=_refuse_registration,
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.register-timeout",
        models="the bootstrap server does not answer a registration: three attempts of 30 s, 1 s and 2 s apart",
        verb="drop",
        target=BOOTSTRAP_REGISTER,
        survives=f"it comes up late; after three attempts it does not, and {_UP}",
        settings={"times": Setting(default=BOOTSTRAP_ATTEMPTS, unit="attempts", minimum=1, doc="how many are lost")},
        selects=_is_early_registration,
        whole_conversation=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-init",
        models="the transfer engine cannot be initialised",
        verb="startup",
        target="instance",
        survives=_UP,
        dies_of=_no_engine,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.register-mem",
        models="the transfer engine cannot register the KV memory",
        verb="startup",
        target="instance",
        survives=_UP,
        dies_of=_no_memory,
        needs=NEEDS,
    ),
)
