"""The workers' half of the MultiConnector (vLLM: multi_connector.py, MultiConnector.get_finished)."""

from collections.abc import Sequence

from kvreplay.connectors.multi.scheduler import MultiMetadata, MultiOutput
from kvreplay.engine.connector import EngineWorkers, KVConnectorOutput


class MultiWorkers:
    """The children's, in the order of the scheduler's half."""

    def __init__(self, children: Sequence[EngineWorkers]) -> None:
        self.children = list(children)
        self._extra_async_saves: dict[str, int] = {}

    def handle_preemptions(self, metadata: MultiMetadata) -> None:
        for child, part in zip(self.children, metadata.children, strict=True):
            if part is not None:
                child.handle_preemptions(part)

    def start_load_kv(self, metadata: MultiMetadata, compute_until_ns: int) -> int:
        self._extra_async_saves.update(metadata.extra_async_saves)
        held_up = [
            child.start_load_kv(part, compute_until_ns)
            for child, part in zip(self.children, metadata.children, strict=True)
            if part is not None
        ]
        return max(held_up, default=0)

    def has_report(self) -> bool:
        return any(child.has_report() for child in self.children)

    def gives_back(self) -> bool:
        return any(child.gives_back() for child in self.children)

    def get_finished(self, finished_req_ids: Sequence[str]) -> MultiOutput | None:
        parts = [child.get_finished(finished_req_ids) for child in self.children]
        if not any(part is not None for part in parts):
            return None
        return MultiOutput(
            finished_sending=[
                request_id
                for part in parts
                if part is not None
                for request_id in part.finished_sending
                if not self._is_swallowed(request_id)
            ],
            finished_recving=_union(parts, "finished_recving"),
            failed_recving=_union(parts, "failed_recving"),
            invalid_block_ids=[block_id for part in parts if part is not None for block_id in part.invalid_block_ids],
            children=parts,
        )

    def _is_swallowed(self, request_id: str) -> bool:
        """Another child still reads the blocks."""
        left = self._extra_async_saves.get(request_id, 0)
        if not left:
            return False
        if left == 1:
            del self._extra_async_saves[request_id]
        else:
            self._extra_async_saves[request_id] = left - 1
        return True

    def failure_reason(self, request_id: str) -> str | None:
        reasons = [child.failure_reason(request_id) for child in self.children]
        return next((reason for reason in reasons if reason is not None), None)

    def shutdown(self) -> None:
        for child in self.children:
            child.shutdown()


def _union(parts: Sequence[KVConnectorOutput | None], name: str) -> list[str]:
    """Of one step; what a child reports later comes once more."""
    return list(dict.fromkeys(item for part in parts if part is not None for item in getattr(part, name)))
