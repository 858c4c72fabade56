"""What every kind of CPU tier needs of the engine that has it."""

from collections.abc import Callable
from dataclasses import dataclass

from kvreplay.behaviour import Behaviour
from kvreplay.engine.log import EngineLog
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.content import KeyArray
from kvreplay.sim.bus import Bus


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOwner:
    """`num_keys`: of the contents of the whole workload. `names`: what a tier knows each of them by; None: by itself.
    `on_report` wakes the engine."""

    instance: str
    kv: KVCacheManager
    num_keys: int
    names: KeyArray | None
    behaviour: Behaviour
    bus: Bus
    log: EngineLog
    on_report: Callable[[], None]
