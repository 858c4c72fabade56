"""What the offloading vectors record of a manager, and how they name keys."""

from collections.abc import Sequence

import numpy as np

from kvreplay.conformance.offload_managers import KeyNames
from kvreplay.conformance.offload_simulation import StepClock
from kvreplay.conformance.offload_workload import OffloadRequestSpec
from kvreplay.conformance.workload import sampled_token
from kvreplay.connectors.offloading.arrays import ChunkIds, Keys
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.manager import StorePlan
from kvreplay.connectors.offloading.tiering import TieringOffloadingManager
from kvreplay.connectors.offloading.worker import LOADS, STORES
from kvreplay.kv.content_index import TokenIndex


class ContentLabels:
    """Names a key after the first request whose tokens agree with its prefix."""

    def __init__(
        self, specs: Sequence[OffloadRequestSpec], index: TokenIndex, space: KeySpace, group_ids: Sequence[int]
    ) -> None:
        self._space = space
        self._group_ids = list(group_ids)
        self._prefixes: dict[int, str] = {}
        self.contents = {spec.id: index.content(_all_tokens(spec), spec.salt) for spec in specs}
        for spec in specs:
            for place, key in enumerate(self.contents[spec.id].block_keys.tolist()):
                self._prefixes.setdefault(key, f"{spec.id}@{(place + 1) * index.hash_block_size}")

    def name(self, key: int) -> str:
        prefix, index = divmod(key, self._space.num_groups)
        return f"{self._prefixes[prefix]}/{self._group_ids[index]}"

    def names(self, keys: Keys) -> list[str]:
        return [self.name(key) for key in keys.tolist()]


def _all_tokens(spec: OffloadRequestSpec) -> list[int]:
    """The prompt, and the output that the scripted model gives."""
    prompt = spec.prompt_token_ids
    return prompt + [sampled_token(len(prompt) + place) for place in range(spec.max_tokens)]


class RecordingManager:
    """Passes everything on, and notes what the vectors record."""

    def __init__(
        self, inner: CPUOffloadingManager | TieringOffloadingManager, clock: StepClock, names: KeyNames
    ) -> None:
        self.inner = inner
        self.lookup_is_pure = inner.lookup_is_pure
        self.lookup_is_pure_for = inner.lookup_is_pure_for
        self.never_answers = inner.never_answers
        self.may_interfere = inner.may_interfere
        self.may_end_circles = inner.may_end_circles
        self.last_loaded: Keys = np.empty(0, np.int64)
        self._clock = clock
        self._names = names.names
        self.on_new_request = inner.on_new_request
        self.lookup = inner.lookup
        self.lookup_many = inner.lookup_many
        self.can_load = inner.can_load
        self.can_discard = inner.can_discard
        self.discard = inner.discard
        self.touch = inner.touch
        self.on_schedule_end = inner.on_schedule_end
        self.has_pending_work = inner.has_pending_work
        self.take_events = inner.take_events
        self.get_load_source = inner.get_load_source
        self.on_reset_flushed = inner.on_reset_flushed

    def prepare_load(self, keys: Keys, context: RequestContext) -> ChunkIds:
        self.last_loaded = keys
        return self.inner.prepare_load(keys, context)

    def prepare_store(self, keys: Keys, context: RequestContext) -> StorePlan | None:
        plan = self.inner.prepare_store(keys, context)
        accepted = None if plan is None else self._names(plan.keys)
        chunk_ids = [] if plan is None else plan.chunk_ids.tolist()
        self._clock.note("offer", [context.req_id, self._names(keys), accepted, chunk_ids])
        self.note_evicted(plan)
        return plan

    def prepare_each(self, keys: Keys, context: RequestContext) -> ChunkIds | None:
        return None  # each is an offer of its own in the record

    def note_evicted(self, plan: StorePlan | None) -> None:
        if plan is not None and len(plan.evicted):
            self._clock.record.setdefault("cpu_evict", []).extend(self._names(plan.evicted))

    def complete_store(self, keys: Keys, context: RequestContext, *, success: bool = True) -> None:
        self._note_done(STORES, keys, context)
        self.inner.complete_store(keys, context, success=success)

    def complete_load(self, keys: Keys, context: RequestContext) -> None:
        self._note_done(LOADS, keys, context)
        self.inner.complete_load(keys, context)

    def _note_done(self, kind: str, keys: Keys, context: RequestContext) -> None:
        self._clock.note("done", [kind, context.req_id, sorted(self._names(keys))])

    def on_request_finished(self, context: RequestContext) -> None:
        self._clock.note("req_done", context.req_id)
        self.inner.on_request_finished(context)

    def reset_cache(self) -> None:
        self._clock.record["cpu_reset"] = True
        self.inner.reset_cache()
