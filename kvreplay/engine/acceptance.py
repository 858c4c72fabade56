"""How many drafts of a step turn out to be right (vLLM: v1/sample/rejection_sampler.py, `synthetic`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvreplay.engine.output import Share
from kvreplay.kv.content_index import mix64
from kvreplay.sim.rng import stable_hash


@dataclass(slots=True)
class DraftCounters:
    """What has been verified so far, under vLLM's names (v1/spec_decode/metrics.py, SpecDecodingStats)."""

    num_drafts: int = 0
    """Verifications: one for each request and step that has drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def usage(self) -> dict[str, int]:
        """By the names under which they are sampled."""
        return {
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
        }


class SyntheticAcceptance:
    """A draw for each verification, that depends on nothing but seed, request and position: not on the steps that came
    before, so that two schedules of the same requests agree wherever they verify at the same place.

    `rates`: for each draft, the chance that it and all before it are right.
    """

    def __init__(self, rates: Sequence[float], seed: int, counters: DraftCounters) -> None:
        self._thresholds = [round(rate * 2.0**64) for rate in rates]
        self._seed = seed
        self.counters = counters
        self._names: dict[str, int] = {}

    def verify(self, shares: Iterable[Share]) -> dict[str, int]:
        """Request → drafts of its share that are right, for a step that begins; each share is told how many are not."""
        accepted: dict[str, int] = {}
        counters = self.counters
        for share in shares:
            if not share.num_drafts:
                continue
            request = share.request
            count = 0 if share.admitted else self.num_accepted(request.request_id, request.num_tokens, share.num_drafts)
            share.num_rejected = share.num_drafts - count
            accepted[request.request_id] = count
            counters.num_drafts += 1
            counters.num_draft_tokens += share.num_drafts
            counters.num_accepted_tokens += count
        return accepted

    def num_accepted(self, request_id: str, position: int, num_drafts: int) -> int:
        """Of `num_drafts` drafts, the first of which is for `position`."""
        name = self._names.get(request_id)
        if name is None:
            name = self._names[request_id] = stable_hash(self._seed, "drafts", request_id)
        draw = mix64(name, position)
        return sum(draw < threshold for threshold in self._thresholds[:num_drafts])
