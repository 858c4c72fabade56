"""What `config` faults make of the configuration: for the whole cluster, or for single instances of it."""

from kvreplay.errors import ConfigError
from kvreplay.faults.plan import FaultPlan
from kvreplay.faults.setup import overrides
from kvreplay.replay.config import ReplayConfig
from kvreplay.replay.config_load import Given, apply_text, config_from_document

_OF_AN_INSTANCE = ("scheduler", "cache", "timing", "connector")
"""Tables in which instances of one cluster may differ; they share a model, and the network."""


def overridden(config: ReplayConfig, plan: FaultPlan, instance: str | None = None) -> ReplayConfig:
    """The configuration with the plan's overrides for `instance` alone or, without one, for all. The same object where
    there are none. Raises ConfigError naming the fault."""
    found = overrides(plan, instance)
    if not found:
        return config
    document = config.to_document()
    for key, value, origin in found:
        table = key.partition(".")[0]
        if instance is not None and table not in _OF_AN_INSTANCE:
            allowed = ", ".join(_OF_AN_INSTANCE)
            raise ConfigError(f"{origin}: {key} is not for a single instance, whose tables are {allowed}")
        apply_text(document, key, value, origin)
    given = [Given(key, origin) for key, _, origin in found]
    return config_from_document(document, given[0].origin, given)
