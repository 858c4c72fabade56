"""Speculative decoding in small clusters, by chance: every kind of drafter, every share of drafts that are right."""

from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st

from kvreplay.engine.config import SpeculativeConfig
from kvreplay.kv.specs import CHUNKED_LOCAL, MAMBA, KVCacheGroupSpec, cdiv
from kvreplay.replay.config import ReplayConfig, RoleConfig
from tests.scenarios.random_worlds import World

NS_PER_PASS: Final = 1_000_003
"""Of a drafter's forward pass: nothing that a step's own duration could hide."""


def with_drafts(config: ReplayConfig, speculative: SpeculativeConfig | None) -> ReplayConfig:
    """All roles speculate so, with that much more room."""
    if speculative is None:
        return config
    roles = {name: _with_room(role, config.model.groups, speculative) for name, role in config.roles.items()}
    return replace(config, roles=roles)


def _with_room(role: RoleConfig, groups: tuple[KVCacheGroupSpec, ...], speculative: SpeculativeConfig) -> RoleConfig:
    states = sum(group.kind == MAMBA for group in groups) * speculative.num_speculative_tokens
    more = states + sum(cdiv(speculative.num_step_slots, group.block_size) for group in groups)
    cache = replace(role.cache, num_gpu_blocks=role.cache.num_gpu_blocks + more)
    return replace(role, cache=cache, speculative=speculative)


def without_drafts(config: ReplayConfig) -> ReplayConfig:
    return replace(config, roles={name: replace(role, speculative=None) for name, role in config.roles.items()})


@st.composite
def drafters(draw: st.DrawFn, groups: tuple[KVCacheGroupSpec, ...]) -> SpeculativeConfig:
    count = draw(st.integers(1, 3))
    has_chunks = any(group.kind == CHUNKED_LOCAL for group in groups)
    method = draw(st.sampled_from(["draft_model", "ngram", *([] if has_chunks else ["eagle", "eagle", "mtp"])]))
    settings: dict[str, Any] = {"num_speculative_tokens": count, "method": method, "draft_pass_ns": NS_PER_PASS}
    if draw(st.booleans()):
        settings["synthetic_acceptance_length"] = draw(st.sampled_from([1, 1.5, 2, count + 1]))
    if method == "mtp" and min(count, *(group.block_size for group in groups)) == count:
        settings["num_mtp_layers"] = draw(st.sampled_from([1, count]))
    if draw(st.integers(0, 3)) == 3:
        settings["disable_eagle_block_drop"] = True
    if draw(st.integers(0, 2)) == 2:
        settings["disable_lookahead_block_hashes"] = True
    if method in ("eagle", "draft_model") and draw(st.integers(0, 3)) == 3:
        settings["parallel_drafting"] = True
    return SpeculativeConfig(**settings)


@st.composite
def speculating(draw: st.DrawFn, of: st.SearchStrategy[World], *, may_overlap: bool = True) -> World:
    """These worlds, with drafts. `may_overlap`: in some of them steps do (async scheduling)."""
    world = draw(of)
    config = with_drafts(world.config, draw(drafters(world.config.model.groups)))
    if may_overlap and draw(st.integers(0, 2)) == 2:
        roles = {}
        for name, role in config.roles.items():
            scheduler = replace(role.scheduler, async_scheduling=True)
            more = sum(
                group.max_blocks(scheduler.max_in_flight_tokens, scheduler.max_model_len)
                - group.max_blocks(role.scheduler.max_in_flight_tokens, scheduler.max_model_len)
                for group in config.model.groups
            )
            cache = replace(role.cache, num_gpu_blocks=role.cache.num_gpu_blocks + more)
            roles[name] = replace(role, scheduler=scheduler, cache=cache)
        config = replace(config, roles=roles)
    return replace(world, config=config)
