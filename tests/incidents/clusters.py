"""Clusters in the sizes that incidents tell: blocks of 16 tokens, and pools of a few blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig, Role, RoleConfig
from tests.scenarios.stage import Check, Play, Sizes, pair, role

BLOCK = 16
FULL = KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=1)


def sized(
    config: ReplayConfig,
    blocks: int | Mapping[Role, int],
    *,
    max_model_len: int = 80,
    groups: Sequence[KVCacheGroupSpec] = (FULL,),
    scheduler: Mapping[Role, Mapping[str, Any]] | None = None,
) -> ReplayConfig:
    """The same cluster with so many usable blocks in each engine. `scheduler`: what else a role's settings are."""

    def of_role(name: Role, role: RoleConfig) -> RoleConfig:
        usable = blocks if isinstance(blocks, int) else blocks[name]
        own = replace(role.scheduler, max_model_len=max_model_len, **dict((scheduler or {}).get(name, {})))
        return replace(role, scheduler=own, cache=replace(role.cache, num_gpu_blocks=usable + 1))

    roles: dict[Role, RoleConfig] = {name: of_role(name, role) for name, role in config.roles.items()}
    model = replace(config.model, max_model_len=max_model_len, groups=tuple(groups))
    return replace(config, model=model, roles=roles)


def producer_and_consumer(
    prefill: int = 12,
    decode: int = 12,
    *,
    max_model_len: int = 80,
    groups: Sequence[KVCacheGroupSpec] = (FULL,),
    ranks: tuple[Sizes, Sizes] = ((1, 1), (1, 1)),
    check: Check = "on",
    scheduler: Mapping[Role, Mapping[str, Any]] | None = None,
    **mooncake: float | str,
) -> ReplayConfig:
    """P0 and D0 with so many usable blocks; prompts are computed in one step."""
    roomy = role(max_num_batched_tokens=4 * max_model_len)
    base = pair(prefill=roomy, decode=roomy, ranks=ranks, check=check, **mooncake)
    return sized(
        base, {"prefill": prefill, "decode": decode}, max_model_len=max_model_len, groups=groups, scheduler=scheduler
    )


def laws(played: Play) -> set[str | None]:
    return {event.status for event in played.violations}


def crashes(played: Play) -> list[tuple[str | None, str | None]]:
    return [(event.instance, event.cause) for event in played.of("engine.crashed")]


def how(played: Play) -> dict[str | None, str]:
    """Request → how it ended for its client."""
    return {request_id: end for request_id, (end, _, _) in played.ends().items()}
