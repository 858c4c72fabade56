"""The stage on which the incidents of pulls and kept blocks are played: their numbers, in their units.

Blocks of 16 tokens, and a tick is a second. A step takes 10 ms and a message 1 ms, so that what happens in one tick is
over before the next, unless a fault or a slow instance holds it up.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.ids import NS_PER_S
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.replay.config import ConnectorConfig, ReplayConfig, Role, RoleConfig
from kvreplay.trace.workload import Arrival, Workload
from tests.incidents.clusters import BLOCK, FULL
from tests.scenarios.offload_stage import SLOT
from tests.scenarios.stage import TIMING, Play, Sizes, pair, request, role, single, workload

TICK_MS: Final = 1000

Ends = dict[str | None, tuple[str, float]]
"""Request → how it ended for its client, and at which tick."""


def usable(num_blocks: int, *, max_model_len: int | None = None, step_ms: int = 10, budget: int = 1024) -> RoleConfig:
    """An instance with so many blocks beside the null block."""
    limit = max_model_len or min(128, num_blocks * BLOCK)
    own = role(
        num_gpu_blocks=num_blocks + 1,
        timing=replace(TIMING, fixed_ns=step_ms * NS_PER_S // 1000),
        max_num_batched_tokens=budget,
    )
    return replace(own, scheduler=replace(own.scheduler, max_model_len=limit))


def engines(
    prefill: int | RoleConfig = 64,
    decode: int | RoleConfig = 64,
    *groups: KVCacheGroupSpec,
    ranks: tuple[Sizes, Sizes] = ((1, 1), (1, 1)),
    **mooncake: float | str,
) -> ReplayConfig:
    """P0 and D0 with so many blocks, and Mooncake between them; timeouts in ticks, `ranks` as `stage.pair` has them."""
    roles: dict[Role, RoleConfig] = {
        "prefill": usable(prefill) if isinstance(prefill, int) else prefill,
        "decode": usable(decode) if isinstance(decode, int) else decode,
    }
    connector = ConnectorConfig(kind="mooncake", options=MooncakeConfig(**mooncake))  # type: ignore[arg-type]
    limit = max(own.scheduler.max_model_len for own in roles.values())
    base = pair(ranks=ranks)
    whole = groups or (FULL,)
    model = replace(base.model, groups=whole, max_model_len=limit)
    return replace(base, model=model, roles=roles, connector=connector)


def at(tick: float, name: str, prompt_tokens: int, output_tokens: int = 3, **more: Any) -> Arrival:  # noqa: ANN401
    """A request that its client sends at this tick."""
    return request(name, tick * TICK_MS, prompt_tokens=prompt_tokens, output_tokens=output_tokens, **more)


def clients(*arrivals: Arrival, leave: Sequence[tuple[str, float]] = ()) -> Workload:
    """`leave`: whose client goes away, at which tick."""
    return workload(*arrivals, aborts=[(name, tick * TICK_MS) for name, tick in leave])


def ends(played: Play) -> Ends:
    return {name: (kind, ms / TICK_MS) for name, (kind, _, ms) in played.ends().items()}


def about(kind: str, tick: float, within: float = 0.1) -> Any:  # noqa: ANN401 - equal to what is so near
    """An end of this kind, a few steps and messages after this tick."""
    return (kind, pytest.approx(tick + within / 2, abs=within / 2))


def ticks_of(played: Play, kind: str, instance: str | None = None) -> dict[str | None, float]:
    """Request → the tick of its last event of this kind."""
    return {event.request_id: event.time_ns / NS_PER_S for event in played.of(kind, instance=instance)}


def laws(played: Play) -> set[str | None]:
    """Those that are broken; `stall`: a request never ends, `crash`: an engine dies."""
    told = {event.status for event in played.violations}
    told |= {"stall"} if played.of("request.stalled") else set()
    return told | ({"crash"} if played.of("engine.crashed") else set())


def offloaded(engine: int | RoleConfig, *, cpu_chunks: int, **options: Any) -> ReplayConfig:  # noqa: ANN401
    """E0 with so many blocks, and a CPU tier with room for so many; `options` are fields of OffloadingConfig."""
    own = usable(engine) if isinstance(engine, int) else engine
    limit = own.scheduler.max_model_len
    base = single()
    model = replace(base.model, groups=(FULL,), max_model_len=limit)
    tier = OffloadingConfig(cpu_bytes_to_use=cpu_chunks * SLOT, copy_latency=1e-6, **options)
    connector = ConnectorConfig(kind="offloading", options=tier)
    return replace(base, model=model, roles={"engine": own}, connector=connector)
