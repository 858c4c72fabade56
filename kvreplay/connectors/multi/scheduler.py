"""The scheduler's half of the MultiConnector (vLLM: multi_connector.py, MultiConnector)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvreplay.engine.connector import KVConnectorOutput, RequestBlocks, SchedulerConnector
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request


@dataclass(slots=True)
class MultiMetadata:
    """One step's orders, child by child."""

    children: list[Any]
    extra_async_saves: dict[str, int] = field(default_factory=dict)
    """Request → how many `finished_sending` reports are to be swallowed before the one that counts."""


@dataclass(slots=True)
class MultiOutput(KVConnectorOutput):
    """What all children report, and what each does."""

    children: list[KVConnectorOutput | None] = field(default_factory=list)


class MultiScheduler:
    """Children are asked in order. The first with tokens loads them; all hear of everything."""

    def __init__(self, children: Sequence[SchedulerConnector], *, losers_load: bool = False) -> None:
        """`losers_load`: the switch multi_losers."""
        assert children
        self._losers_load = losers_load
        self._offers: dict[str, list[int]] = {}
        """Request → what each child has offered at its last lookup, where losers load."""
        self.children = list(children)
        self.requires_kv_delivery = any(child.requires_kv_delivery for child in children)
        self.completes_failed_loads = all(child.completes_failed_loads for child in children)
        self.follows_windows = any(child.follows_windows for child in children)
        self._chosen: dict[str, int] = {}
        """Request → the child whose hit it loads. Kept until the request ends, over all of its lookups."""
        self._extra_async_saves: dict[str, int] = {}

    # -- how the engine steps ---------------------------------------------------------------------------------

    @property
    def lookup_is_pure(self) -> bool:
        return all(child.lookup_is_pure for child in self.children)

    @property
    def lookup_version(self) -> int:
        return sum(child.lookup_version for child in self.children)

    @property
    def needs_every_step(self) -> bool:
        return any(child.needs_every_step for child in self.children)

    def needs_share(self, request_id: str) -> bool:
        return any(child.needs_share(request_id) for child in self.children)

    def note_allocated(self, block_ids: Sequence[int]) -> None:
        for child in self.children:
            child.note_allocated(block_ids)

    def note_uneventful(self) -> None:
        for child in self.children:
            child.note_uneventful()

    def is_asked_in_vain(self, request_id: str, *, is_idle: bool) -> bool:
        return all(
            child.lookup_is_pure or child.is_asked_in_vain(request_id, is_idle=is_idle) for child in self.children
        )

    def is_going_in_circles(self, request_id: str) -> bool:
        return any(child.is_going_in_circles(request_id) for child in self.children)

    def has_pending_push_work(self) -> bool:
        return any(child.has_pending_push_work() for child in self.children)

    def has_pending_block_frees(self) -> bool:
        return any(child.has_pending_block_frees() for child in self.children)

    # -- requests ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        for child in self.children:
            child.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Children behind the one that is chosen are asked all the same; one that does not know yet stops it all."""
        answer: tuple[int, bool] = (0, False)
        offers: list[int] = []
        for place, child in enumerate(self.children):
            num_tokens, is_async = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                return None, False
            offers.append(num_tokens)
            if not answer[0] and num_tokens > 0:
                self._chosen[request.request_id] = place
                answer = (num_tokens, is_async)
        if self._losers_load:
            self._offers[request.request_id] = offers
        return answer

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        chosen = self._chosen.get(request.request_id)
        offers = self._offers.pop(request.request_id, None)
        for place, child in enumerate(self.children):
            lost = offers[place] if offers and num_external_tokens else 0
            child.update_state_after_alloc(request, blocks, num_external_tokens if place == chosen else lost)

    def peer_of(self, request: Request) -> str | None:
        return next((peer for child in self.children if (peer := child.peer_of(request)) is not None), None)

    def get_load_source(self, request_id: str) -> str | None:
        chosen = self._chosen.get(request_id)
        return None if chosen is None else self.children[chosen].get_load_source(request_id)

    def loads_every_group(self, request_id: str) -> bool:
        chosen = self._chosen.get(request_id)
        return chosen is not None and self.children[chosen].loads_every_group(request_id)

    def leaves_drafter_out(self, request_id: str) -> bool:
        chosen = self._chosen.get(request_id)
        return chosen is not None and self.children[chosen].leaves_drafter_out(request_id)

    def note_invalid(self, request: Request, num_tokens: int) -> None:
        for child in self.children:
            child.note_invalid(request, num_tokens)

    def request_finished(self, request: Request, blocks: RequestBlocks) -> bool:
        """If several children keep the blocks, they come back with the last one's report."""
        self._chosen.pop(request.request_id, None)
        num_saves = sum([child.request_finished(request, blocks) for child in self.children])
        if num_saves > 1:
            self._extra_async_saves[request.request_id] = num_saves - 1
        return num_saves > 0

    # -- steps ------------------------------------------------------------------------------------------------

    def build_connector_meta(self, out: SchedulerOutput) -> MultiMetadata | None:
        parts = [child.build_connector_meta(out) for child in self.children]
        saves, self._extra_async_saves = self._extra_async_saves, {}
        if not saves and all(part is None for part in parts):
            return None
        return MultiMetadata(parts, saves)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if isinstance(output, MultiOutput):
            for child, part in zip(self.children, output.children, strict=True):
                if part is not None:
                    child.update_connector_output(part)

    def reset_cache(self) -> bool:
        done = [child.reset_cache() for child in self.children]
        return all(done)
