"""The connector's switches, as values of one frozen record (`kvreplay.behaviour` names what each models)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBehaviour:
    """Defaults: vLLM 0.33.0."""

    boundary: str = "position"
    """Where a load starts in a group's block table: `from-zero`, `from-computed` or `position`."""
    eagle_lookup: str = "widened"
    """Whether a drafter's query is `widened` by the chunk that it gives up, or `narrow`."""
    hit_groups: str = "all"
    """Who must have what is hit: `all` groups, or `attention` alone and not the recurrent ones."""
    abort_clamp: str = "blocks"
    """Stores of an aborted request: `blocks` that it has, or (`none`) as many as it has keys."""
    readmission: str = "defer"
    """A lookup while jobs of the request are in flight: `defer`, or `ask` all the same."""
    no_forward: str = "submit"
    """Stores of a step without tokens: `submit`, or `drop`."""
    partial_tail_cap: str = "assert"
    """A partial tail beyond what the request may store: `assert`, or `skip` it."""
    stale_ids: str = "pending"
    """Mirrored ids that now belong to others are forgotten where they are `pending`, or in `all` positions."""
    window_mask: str = "short"
    """Store a `short` window, or as much as the `lookup` asks for."""
    promotions: str = "own-key"
    """What a promotion must not evict: its `own-key`, or what the `request` has found."""
    failed_copy: str = "assert"
    """A copy that fails: `assert`, or the `request` fails (a load) and the chunk is forgotten."""
    acknowledgements: str = "trusted"
    """Each worker reports each job once: `trusted`, or `checked` and waited for only so long."""
    missing_chunk: str = "assert"
    """A hit that is gone when it is to be loaded: `assert`, or a `miss`."""
    pending_lookup: str = "wait"
    """A lookup that stays undecided: `wait` for ever, or `bound` it."""
    integrity: str = "none"
    """Whether what a load brings is verified: `none` or `checksum`."""


VLLM_0_33 = OffloadBehaviour()


def offload_behaviour(switches: Mapping[str, str]) -> OffloadBehaviour:
    """From a run's switches: `offload_boundary` is `boundary`, and so on; integrity is that of all transfers."""
    named = {
        field.name: switches[f"offload_{field.name}"] for field in fields(OffloadBehaviour) if field.name != "integrity"
    }
    return OffloadBehaviour(**named, integrity=switches["transfer_integrity"])
