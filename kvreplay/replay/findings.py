"""The live checkers of a run: what they find becomes `violation` rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from kvreplay.checkers.conservation import check_conservation, check_drained, snapshot_of
from kvreplay.checkers.finding import AGREE, CONTENT, FENCE, HIT_ATTAINABLE, NULL_BLOCK, STORE_CONTENT, Finding
from kvreplay.checkers.hit_attainable import ShortWindow, WithheldHit
from kvreplay.checkers.store_content import ForeignBlock
from kvreplay.engine.connector_memory import LateWrite
from kvreplay.engine.output import Share
from kvreplay.engine.stepping import SteppingInstance
from kvreplay.engine.suspects import WrongBlock
from kvreplay.events import EventSink
from kvreplay.ids import NS_PER_S, NULL_BLOCK_ID
from kvreplay.kv.memory import Provenance
from kvreplay.sim.envelope import PULL_REQUEST, RANK_REPORT, WRITE_DATA
from kvreplay.sim.event_loop import EventLoop

FaultOf: TypeAlias = Callable[[str, Sequence[str]], int | None]
"""(request id, kinds of message) → the handle of the last `fault.injected` event that named it; one of a fault on such
a message goes before the others."""
_BRING_BYTES: Final = (WRITE_DATA, RANK_REPORT)
"""What may lose or keep bytes, or say too early that they are there."""
_LEAVE_BLOCKS: Final = (RANK_REPORT, WRITE_DATA, PULL_REQUEST)
"""What may keep a transfer from being over."""

_RECOUNT_NS = 1200 * NS_PER_S
"""A pool is recounted when its instance idles, but not more often than this: a recount looks at every block."""


class LiveFindings:
    """Told by the instances of one run (`engine.instance.Findings`).

    `lasting_at`: instances → the event of a fault whose harm at one of them lasts, for requests that none has named.
    """

    def __init__(
        self,
        loop: EventLoop,
        sink: EventSink,
        fault_of: FaultOf = lambda request_id, kinds: None,
        lasting_at: Callable[[Iterable[str]], int | None] = lambda instances: None,
    ) -> None:
        self._loop = loop
        self._sink = sink
        self._fault_of = fault_of
        self._lasting_at = lasting_at
        self._recounted_ns: dict[str, int] = {}

    def wrong_block(self, instance: SteppingInstance, wrong: WrongBlock) -> None:
        if wrong.block_id == NULL_BLOCK_ID:
            self._null_block(instance, wrong)
            return
        provenance = wrong.provenance
        detail = f"read wrong contents from position {wrong.position} on"
        if provenance is not None:
            detail += f", brought by {provenance.transfer_id} for {provenance.request_id}"
        finding = Finding(
            CONTENT,
            self._loop.now_ns,
            detail,
            instance=instance.name,
            request_id=wrong.request_id,
            block_id=wrong.block_id,
            group=wrong.group,
            transfer_id=provenance.transfer_id if provenance is not None else None,
        )
        whose = provenance.request_id if provenance is not None else wrong.request_id
        handle = self._fault_behind(provenance, whose)
        self._emit(finding, handle if handle is not None else self._lasting_at([instance.name]))

    def foreign_store(self, instance: str, request_id: str, transfer_id: str, block: ForeignBlock) -> None:
        """A store reads a block that holds other tokens than those of its key."""
        finding = Finding(
            STORE_CONTENT,
            self._loop.now_ns,
            "what is stored belongs to other tokens by now",
            instance=instance,
            request_id=request_id,
            block_id=block.block_id,
            group=block.group,
            transfer_id=transfer_id,
        )
        self._emit(finding, self._lasting_at([instance]))

    def short_window(self, instance: str, request_id: str, window: ShortWindow) -> None:
        """Told once a request, however often it is looked up."""
        finding = Finding(
            HIT_ATTAINABLE,
            self._loop.now_ns,
            f"no hit at {window.end} tokens: {window.num_chunks} chunks of its window are asked for, "
            f"{window.num_kept} stored",
            instance=instance,
            request_id=request_id,
            group=window.group,
        )
        self._emit(finding, None)

    def withheld_hit(self, instance: str, request_id: str, found: WithheldHit) -> None:
        """The same, where a drafter costs more than it must."""
        finding = Finding(
            HIT_ATTAINABLE,
            self._loop.now_ns,
            f"a hit of {found.hit} tokens, where all groups have {found.attainable} without the chunk that a drafter "
            "gives up",
            instance=instance,
            request_id=request_id,
        )
        self._emit(finding, None)

    def _null_block(self, instance: SteppingInstance, wrong: WrongBlock) -> None:
        act = "computed into" if wrong.is_write else "read from"
        detail = f"position {wrong.position} was {act} the null block"
        now = self._loop.now_ns
        self._emit(
            Finding(NULL_BLOCK, now, detail, instance.name, wrong.request_id, block_id=NULL_BLOCK_ID, group=wrong.group)
        )

    def disagreement(self, instance: SteppingInstance, share: Share) -> None:
        request = share.request
        detail = f"computes up to token {share.end} of {request.num_tokens}"
        self._emit(Finding(AGREE, self._loop.now_ns, detail, instance.name, request.request_id))

    def late_write(self, instance: SteppingInstance, late: LateWrite) -> None:
        """Only into a block that somebody else holds by now; into a free one it does no harm."""
        provenance = late.provenance
        if late.owner is None or (provenance is not None and provenance.request_id == late.owner):
            return
        whose = f"for {provenance.request_id} " if provenance is not None else ""
        finding = Finding(
            FENCE,
            self._loop.now_ns,
            f"a write {whose}landed in a block that belongs to {late.owner} by now",
            instance=instance.name,
            request_id=late.owner,
            block_id=late.block_id,
            group=late.group,
            transfer_id=provenance.transfer_id if provenance is not None else None,
        )
        self._emit(
            finding, self._fault_behind(provenance, provenance.request_id if provenance is not None else late.owner)
        )

    def _fault_behind(self, provenance: Provenance | None, whose: str) -> int | None:
        """The fault that changed the bytes, or their time; else that of the request for which they came, or did not."""
        if provenance is not None and provenance.fault_handle >= 0:
            return provenance.fault_handle
        return self._fault_of(whose, _BRING_BYTES)

    def idle(self, instance: SteppingInstance) -> None:
        now = self._loop.now_ns
        last = self._recounted_ns.get(instance.name)
        if last is None or now - last >= _RECOUNT_NS:
            self.recount(instance, whole_cache=False)

    def recount(self, instance: SteppingInstance, *, whole_cache: bool = True) -> None:
        now = self._loop.now_ns
        self._recounted_ns[instance.name] = now
        snapshot = snapshot_of(instance.scheduler.kv)
        for finding in check_conservation(snapshot, instance.name, now, whole_cache=whole_cache):
            self._emit(finding, self._lasting_at([instance.name]))

    def check_drained(self, instance: SteppingInstance) -> None:
        """At the end: nobody holds a block."""
        for finding in check_drained(snapshot_of(instance.scheduler.kv), instance.name, self._loop.now_ns):
            assert finding.request_id is not None
            handle = self._fault_of(finding.request_id, _LEAVE_BLOCKS)
            self._emit(finding, handle if handle is not None else self._lasting_at([instance.name]))

    def _emit(self, finding: Finding, fault_handle: int | None = None) -> None:
        self._sink.emit(finding.to_event(fault_handle))
