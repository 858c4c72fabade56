"""What can go wrong around the OffloadingConnector: its rows of the fault catalogue.

Sources: vllm/distributed/kv_transfer/kv_connector/v1/offloading/ and vllm/v1/kv_offload/ (0.33.0). In 0.33.0 a failed
copy has no other end than an assertion in the worker.
"""

from dataclasses import replace
from typing import Any, Final

from kvreplay.connectors.offloading.copy_queues import CopyOrder
from kvreplay.connectors.offloading.manager_bus import FOUND, OFFER, FoundChunk, LookupQuery, Offer
from kvreplay.connectors.offloading.reports import RankReport
from kvreplay.connectors.offloading.tiering import TierJob, TierResult
from kvreplay.connectors.offloading.worker import STORES, CopyResult
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, FaultRow, Setting, Settings
from kvreplay.sim.envelope import COPY_DONE, COPY_JOB, LOOKUP, RANK_REPORT, Delivery, Envelope

_NEEDS: Final = "offloading"
_LOAD_FAILS: Final = "the request fails or is recomputed, and the chunk is forgotten"


def _instead(envelope: Envelope, payload: Any) -> list[Delivery]:  # noqa: ANN401 - any message
    return [Delivery(replace(envelope, payload=payload))]


# -- copies ----------------------------------------------------------------------------------------------


def _is_store(envelope: Envelope, settings: Settings) -> bool:
    """An order to copy out of the GPU, or the end of such a copy."""
    payload = envelope.payload
    return isinstance(payload, CopyOrder | CopyResult) and payload.queue == STORES


def _is_load(envelope: Envelope, settings: Settings) -> bool:
    payload = envelope.payload
    return isinstance(payload, CopyOrder | CopyResult) and payload.queue != STORES


def _is_copy(envelope: Envelope, settings: Settings) -> bool:
    return isinstance(envelope.payload, CopyOrder | CopyResult)


def _fail_copy(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    result: CopyResult = envelope.payload
    return _instead(envelope, result._replace(success=False, cause=settings["message"]))


def _refuse_copy(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    order: CopyOrder = envelope.payload
    return _instead(envelope, order._replace(is_refused=True))


def _read_late(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    order: CopyOrder = envelope.payload
    late = replace(envelope, payload=order._replace(escapes_waits=True))
    return [Delivery(late, settings["delay"])]


_MESSAGE: Final = Setting(default="injected copy failure", doc="what the log says")
_DELAY: Final = Setting(default=NS_PER_S, unit=DURATION, doc="how much longer it takes")

_COPIES: Final = (
    FaultRow(
        name="offload.load-dma-fail",
        models="a copy to the GPU fails (TransferResult.success is false): the worker's assertion, the engine dies",
        verb="replace",
        target=COPY_DONE,
        survives=_LOAD_FAILS,
        settings={"message": _MESSAGE},
        transform=_fail_copy,
        selects=_is_load,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.store-dma-fail",
        models="a copy to the CPU fails: the worker's assertion, the engine dies",
        verb="replace",
        target=COPY_DONE,
        survives="the chunk is forgotten, nobody loads it",
        settings={"message": _MESSAGE},
        transform=_fail_copy,
        selects=_is_store,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.submit-refused",
        models="the copy engine does not take a job (submit_store, submit_load return false): the engine dies",
        verb="replace",
        target=COPY_JOB,
        survives="as a copy that fails",
        transform=_refuse_copy,
        selects=_is_copy,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.load-slow",
        models="a copy to the GPU takes long; those behind it in its queue wait",
        verb="delay",
        target=COPY_JOB,
        survives="its request and those behind it start late",
        settings={"delay": _DELAY},
        selects=_is_load,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.store-slow",
        models="a copy to the CPU takes long; lookups of its chunks are deferred, a flush waits for it",
        verb="delay",
        target=COPY_JOB,
        survives="whoever wants its chunks or its blocks waits",
        settings={"delay": _DELAY},
        selects=_is_store,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.copy-hang",
        models="a copy never ends: its stream and all behind it are stuck, and so is a flush that waits for it",
        verb="drop",
        target=COPY_JOB,
        survives="it is given up after a time and counts as failed",
        selects=_is_copy,
        lasts=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.late-read",
        models="a store reads its blocks after the flush that was to wait for it (vllm#52360 in another connector)",
        verb="replace",
        target=COPY_JOB,
        survives="foreign bytes are never stored under the request's keys",
        settings={"delay": _DELAY},
        transform=_read_late,
        selects=_is_store,
        lasts=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.load-corrupt",
        models="a block arrives on the GPU with other bytes than the chunk has, the status is OK",
        verb="corrupt",
        target=COPY_JOB,
        survives="no token is computed from it; only profile ideal can tell",
        selects=_is_load,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.store-corrupt",
        models="a chunk in CPU memory has other bytes than the block had, the status is OK",
        verb="corrupt",
        target=COPY_JOB,
        survives="no token is computed from it; only profile ideal can tell",
        selects=_is_store,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.done-lost",
        models="a copy's completion event is never seen: it hides those behind it",
        verb="drop",
        target=COPY_DONE,
        survives="after a time it counts as failed",
        selects=_is_copy,
        lasts=True,
        needs=_NEEDS,
    ),
)

# -- reports ---------------------------------------------------------------------------------------------


def _is_report(envelope: Envelope, settings: Settings) -> bool:
    return isinstance(envelope.payload, RankReport)


_REPORTS: Final = (
    FaultRow(
        name="offload.ack-lost",
        models="one worker's report of a job is lost: the job never completes, its chunks stay pinned or pending",
        verb="drop",
        target=RANK_REPORT,
        survives="the worker repeats what nobody has noticed",
        selects=_is_report,
        lasts=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.ack-late",
        models="one worker's report of a job is late: the others wait for it",
        verb="delay",
        target=RANK_REPORT,
        survives="the job completes when the last report is in",
        settings={"delay": _DELAY},
        selects=_is_report,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.ack-duplicate",
        models="a worker reports a job twice: negative count or KeyError, the engine dies",
        verb="duplicate",
        target=RANK_REPORT,
        survives="the second report changes nothing",
        selects=_is_report,
        needs=_NEEDS,
    ),
)

# -- the manager -----------------------------------------------------------------------------------------


def _forget_after(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    found: FoundChunk = envelope.payload
    return _instead(envelope, found._replace(forgets=True))


def _hide_pending(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    found: FoundChunk = envelope.payload
    return _instead(envelope, found._replace(hides_pending=True))


def _refuse_offer(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    offer: Offer = envelope.payload
    return _instead(envelope, offer._replace(is_refused=True))


def _is_lookup(envelope: Envelope, settings: Settings) -> bool:
    return isinstance(envelope.payload, LookupQuery)


def _has_found_ready(envelope: Envelope, settings: Settings) -> bool:
    found: FoundChunk = envelope.payload
    return found.can_be_evicted


def _has_found_pending(envelope: Envelope, settings: Settings) -> bool:
    found: FoundChunk = envelope.payload
    return found.is_pending


_MANAGER: Final = (
    FaultRow(
        name="offload.alloc-fail",
        models="the CPU tier has no room for what is offered (prepare_store returns None)",
        verb="replace",
        target=OFFER,
        survives="the offer is made again in the next step",
        transform=_refuse_offer,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.evict-between",
        models="a chunk is evicted between the lookup that found it and the load: assertion in prepare_load",
        verb="replace",
        target=FOUND,
        survives="as a miss: the request fails over to computing",
        transform=_forget_after,
        selects=_has_found_ready,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.not-ready-hit",
        models="a lookup takes chunks that are still being written for ready: assertion in prepare_load",
        verb="replace",
        target=FOUND,
        survives="as pending: nothing is loaded before it has been written",
        transform=_hide_pending,
        selects=_has_found_pending,
        whole_conversation=True,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.lookup-pending-forever",
        models="a lookup is never decided: the request is passed over in every step",
        verb="drop",
        target=LOOKUP,
        survives="after a time the request computes",
        selects=_is_lookup,
        whole_conversation=True,
        needs=_NEEDS,
    ),
)

# -- secondary tiers -------------------------------------------------------------------------------------


def _is_tier_job(envelope: Envelope, settings: Settings) -> bool:
    return isinstance(envelope.payload, TierJob)


def _is_promotion(envelope: Envelope, settings: Settings) -> bool:
    return isinstance(envelope.payload, TierResult) and envelope.payload.is_promotion


def _is_cascade(envelope: Envelope, settings: Settings) -> bool:
    return isinstance(envelope.payload, TierResult) and not envelope.payload.is_promotion


def _fail_tier(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    result: TierResult = envelope.payload
    return _instead(envelope, result._replace(success=False))


_TIERS: Final = (
    FaultRow(
        name="offload.promotion-fail",
        models="a read from a secondary tier fails: the slots are given back, the next lookup asks again",
        verb="replace",
        target=COPY_DONE,
        survives="the chunks are promoted again, or computed",
        transform=_fail_tier,
        selects=_is_promotion,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.tier-store-fail",
        models="a write to a secondary tier fails: the chunks are only unpinned",
        verb="replace",
        target=COPY_DONE,
        survives="the tier lacks them, nothing else",
        transform=_fail_tier,
        selects=_is_cascade,
        needs=_NEEDS,
    ),
    FaultRow(
        name="offload.tier-slow",
        models="a secondary tier takes long: lookups of what it promotes are deferred",
        verb="delay",
        target=COPY_JOB,
        survives="whoever wants its chunks waits, or computes after a time",
        settings={"delay": _DELAY},
        selects=_is_tier_job,
        needs=_NEEDS,
    ),
)

ROWS: Final[tuple[FaultRow, ...]] = (*_COPIES, *_REPORTS, *_MANAGER, *_TIERS)
