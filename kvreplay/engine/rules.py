"""Which of the scheduler's known mistakes it makes: the behaviour switches that concern it, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvreplay.behaviour import Behaviour


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRules:
    """Defaults: vLLM 0.33.0."""

    refuses_reset: bool = False
    """A reset that cannot empty the pool is refused instead of being fatal."""
    tolerates_reports: bool = False
    """A connector's report that fits nothing is ignored; a load that failed is over, if nothing else will say so."""
    retries_afresh: bool = False
    """A request whose load failed and that has lost all blocks waits as if it were new."""
    rolls_back_dropped: bool = False
    """With overlapping steps: what later steps in flight compute for a request whose sample was dropped is dropped."""
    never_cuts_to_nothing: bool = False
    """A chunk that alignment and drafters leave nothing of is aligned otherwise."""
    pads_whole_only: bool = False
    """A request with one token left is not padded for drafts where the threshold of long prefills would cut that."""
    loads_ignore_drafts: bool = False
    """A load is admitted without regard to what the step after it needs for drafts."""
    exact_estimates: bool = False
    """Blocks that a request will need are not counted short."""
    stops_before_last_token: bool = False
    """A load into windows or states ends before the last token, which is computed to sample from it."""
    frees_aborted_loads: bool = False
    """Who ends while being loaded gives its blocks back at once."""
    zeroes_loads_late: bool = False
    """With overlapping steps: blocks for a load are zeroed when the step in progress is over."""
    adopts_per_group: bool = False
    """With several groups: one takes blocks for a load before the next one has taken its hit."""
    looks_at_whole_chunks: bool = False
    """A hit in chunked local attention has all of the chunk that the next token attends to."""
    releases_rejected: bool = True
    """Of a request that the API server refuses or loses the connector is told, so that a producer keeps nothing."""
    answers_refused: bool = False
    """It is told on a producer, too, so that no consumer waits."""
    keeps_stepping: bool = True
    """As long as a connector keeps blocks of ended requests."""
    sleeps_after_failed_load: bool = False
    """Until the next request comes, if there was nothing else to do."""

    @classmethod
    def of(cls, behaviour: Behaviour) -> SchedulerRules:
        return cls(
            refuses_reset=behaviour["reset_while_loading"] == "refuse",
            tolerates_reports=behaviour["unexpected_reports"] == "ignore",
            retries_afresh=behaviour["failed_load_retry"] == "afresh",
            rolls_back_dropped=behaviour["dropped_samples"] == "roll_back",
            never_cuts_to_nothing=behaviour["aligned_lookahead"] == "progress",
            pads_whole_only=behaviour["padded_decodes"] == "whole",
            loads_ignore_drafts=behaviour["load_lookahead"] == "ignored",
            exact_estimates=behaviour["block_estimates"] == "exact",
            stops_before_last_token=behaviour["whole_prompt_load"] == "stop_before",
            frees_aborted_loads=behaviour["aborted_loads"] == "free",
            zeroes_loads_late=behaviour["zeroed_loads"] == "late",
            adopts_per_group=behaviour["hybrid_adoption"] == "per_group",
            looks_at_whole_chunks=behaviour["chunked_local_hits"] == "whole_chunk",
            releases_rejected=behaviour["rejected_requests"] != "forget",
            answers_refused=behaviour["rejected_requests"] == "answer",
            keeps_stepping=behaviour["idle_engine"] != "sleeps_on_frees",
            sleeps_after_failed_load=behaviour["idle_engine"] == "sleeps_after_failed_load",
        )


VLLM_0_33_RULES: Final = SchedulerRules()
