"""How the engine says what happens: one method per event, so that its code reads as decisions."""

from collections.abc import Sequence
from typing import Final

from kvreplay.engine.output import Share
from kvreplay.engine.request import Request
from kvreplay.events import DETAIL_BLOCKS, DETAIL_STEPS, Event, EventSink
from kvreplay.kv.prefix_cache import BlockIds

_new_event: Final = tuple.__new__


class EngineLog:
    """Emits one instance's events at `now_ns` and `step`, which the instance keeps up to date."""

    def __init__(self, sink: EventSink, instance: str | None) -> None:
        self.sink = sink
        self.instance = instance
        self.now_ns = 0
        self.step = 0
        self.wants_blocks = sink.detail >= DETAIL_BLOCKS
        self.wants_steps = sink.detail >= DETAIL_STEPS

    # -- requests ---------------------------------------------------------------------------------------------

    def lookup(self, request: Request, num_tokens: int | None, *, is_async: bool) -> None:
        """The connector's answer; an event only where it differs from the last one."""
        answer = (num_tokens, is_async)
        if request.lookup_answer == answer:
            request.lookup_count += 1
            return
        status = "none" if not num_tokens else "async" if is_async else "sync"
        self._request("lookup", request, num_tokens=num_tokens, num_blocks=request.lookup_count, status=status)
        request.lookup_answer = answer
        request.lookup_count = 1

    def parked(self, request: Request, num_external_tokens: int, num_blocks: int) -> None:
        request.parked_since_ns = self.now_ns
        self._request("request.parked", request, num_tokens=num_external_tokens, num_blocks=num_blocks)

    def load_started(self, request: Request, num_tokens: int, num_blocks: int, source: str | None) -> None:
        """`source`: the tier that it comes from, where there are tiers."""
        self._request("load.started", request, num_tokens=num_tokens, num_blocks=num_blocks, status=source)

    def load_finished(self, request: Request, num_tokens: int) -> None:
        self._request("load.finished", request, num_tokens=num_tokens)

    def load_failed(self, request: Request, num_tokens: int, level: str, block_ids: list[int] | None = None) -> int:
        return self._request(
            "load.failed",
            request,
            num_tokens=num_tokens,
            status=level,
            block_ids=block_ids,
            cause=request.load_error,
        )

    def promoted(self, request: Request, *, failed: bool) -> None:
        self._request(
            "request.promoted",
            request,
            num_tokens=request.num_computed_tokens,
            status="failed" if failed else "ok",
        )

    def preempted(self, request: Request, num_tokens: int, num_blocks: int) -> int:
        return self._request("request.preempted", request, num_tokens=num_tokens, num_blocks=num_blocks)

    def scheduled(self, share: Share) -> None:
        drafts = f"{share.num_drafts - share.num_rejected}/{share.num_drafts}" if share.num_drafts else None
        self._request(
            "request.scheduled", share.request, num_tokens=share.num_tokens, num_blocks=share.computed[0], status=drafts
        )

    def recomputed(self, request: Request, num_tokens: int, cause: str, handle: int | None) -> None:
        self.sink.emit(
            Event(
                "tokens.recomputed",
                self.now_ns,
                self.instance,
                self.step,
                request.request_id,
                request.transfer_id,
                num_tokens=num_tokens,
                cause=cause,
                cause_handle=handle,
            )
        )

    def drafter_recomputes(self, request: Request, num_tokens: int) -> None:
        self._request("draft.recomputed", request, num_tokens=num_tokens)

    def first_token(self, request: Request) -> None:
        self._request("request.first_token", request)

    def finished(self, request: Request, status: str, output_hash: int) -> None:
        self._request(
            "request.finished",
            request,
            num_tokens=request.num_output_tokens,
            status=status,
            output_hash=output_hash,
        )

    def failed(self, request: Request, cause: str) -> None:
        self._request("request.failed", request, num_tokens=request.num_output_tokens, cause=cause)

    def aborted(self, request: Request) -> None:
        self._request("request.aborted", request, num_tokens=request.num_output_tokens)

    def rejected(self, request: Request, cause: str) -> None:
        self._request("request.rejected", request, cause=cause)

    def _request(
        self,
        kind: str,
        request: Request,
        *,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        status: str | None = None,
        cause: str | None = None,
        block_ids: list[int] | None = None,
        output_hash: int | None = None,
    ) -> int:
        # Most events come this way: field by field, since filling in what is left takes longer than all the rest.
        fields = (
            kind, self.now_ns, self.instance, self.step, request.request_id, request.transfer_id,
            None, None, None, block_ids, num_tokens, num_blocks, status, cause,
            None, None, None, None, None, None, output_hash, None,
        )  # fmt: skip
        return self.sink.emit(_new_event(Event, fields))

    def store(self, kind: str, request_id: str | None, transfer_id: str, num_blocks: int, cause: str | None) -> None:
        """A copy out of the GPU's pool begins or ends."""
        # As above: there are several to a request.
        fields = (
            kind, self.now_ns, self.instance, self.step, request_id, transfer_id,
            None, None, None, None, None, num_blocks, None, cause,
            None, None, None, None, None, None, None, None,
        )  # fmt: skip
        self.sink.emit(_new_event(Event, fields))

    # -- the instance -----------------------------------------------------------------------------------------

    def crashed(self, exception: str, message: str) -> int:
        return self.sink.emit(
            Event("engine.crashed", self.now_ns, self.instance, self.step, status=exception, cause=message)
        )

    def usage(self, name: str, value: int) -> None:
        self.sink.emit(Event("usage", self.now_ns, self.instance, self.step, status=name, num_tokens=value))

    def evicted(self, num_blocks: int, group: int, cause: str, *, tier: str | None = None) -> None:
        """`tier`: where, if not in the GPU's pool."""
        if num_blocks:
            self.sink.emit(
                Event(
                    "block.evicted",
                    self.now_ns,
                    self.instance,
                    self.step,
                    group=group,
                    num_blocks=num_blocks,
                    status=tier,
                    cause=cause,
                )
            )

    def evicted_by_group(self, num_blocks: Sequence[int], cause: str) -> None:
        """`num_blocks`: of each group."""
        for group, count in enumerate(num_blocks):
            self.evicted(count, group, cause)

    def blocks(
        self, kind: str, request_id: str | None, group: int, block_ids: BlockIds | list[int], cause: str | None = None
    ) -> None:
        """block.allocated, .cached, .freed, .invalidated; call only where `wants_blocks`."""
        if len(block_ids):
            ids = block_ids if isinstance(block_ids, list) else block_ids.tolist()
            self.sink.emit(
                Event(
                    kind,
                    self.now_ns,
                    self.instance,
                    self.step,
                    request_id,
                    group=group,
                    block_ids=ids,
                    num_blocks=len(ids),
                    cause=cause,
                )
            )
