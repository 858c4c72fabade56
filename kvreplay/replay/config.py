"""What a run is configured with: frozen records, composed, checked when built.

`config_load` makes them from TOML, from a trace and from the command line; `config_fields` checks keys and types.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.plan import HeadLayout
from kvreplay.connectors.mooncake.sharding import Sharding
from kvreplay.connectors.multi.config import MultiConfig
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.offloading.groups import engine_layout, num_chunks, rank_layout
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.engine.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from kvreplay.errors import ConfigError
from kvreplay.kv.attention_managers import make_cache_manager
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.cache_manager import NO_DRAFTS, DraftRules
from kvreplay.kv.specs import (
    CHUNKED_LOCAL,
    MAMBA,
    KVCacheGroupSpec,
    cdiv,
    check_pages,
    rank_block_bytes,
    resolve_block_sizes,
)
from kvreplay.replay.config_fields import field_types
from kvreplay.replay.network import LinkTiming
from kvreplay.replay.timing import StepTiming

MAX_BLOCKS: Final = 1 << 24
"""Per instance. Their contents take 2 GiB with 16-token blocks; no real pool comes near."""
MAX_INSTANCES: Final = 1024
MAX_RANKS: Final = 64
"""Per instance. A real one has 8 or 16."""
_OF_EVERY_GROUP: Final = ("kind", "block_size", "sliding_window", "bytes_per_token")

ConnectorKind: TypeAlias = Literal["none", "mooncake", "offloading", "simple_cpu", "multi"]
Role: TypeAlias = Literal["engine", "prefill", "decode"]
Policy: TypeAlias = Literal["fail", "recompute"]
Routing: TypeAlias = Literal["round_robin", "least_loaded"]

DEFAULT_POLICY: Final = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    name: str
    groups: tuple[KVCacheGroupSpec, ...]
    max_model_len: int
    num_kv_heads: int | None = None
    """What tensor parallel ranks share out; None: as many parts as there are ranks."""
    use_mla: bool = False
    """Latents instead of heads: every tensor parallel rank keeps all of them."""

    def __post_init__(self) -> None:
        if self.num_kv_heads is not None and self.num_kv_heads <= 0:
            raise ConfigError(f"model.num_kv_heads must be > 0, got {self.num_kv_heads}")
        if not self.groups:
            raise ConfigError("model.groups: at least one KV cache group is needed")
        if self.max_model_len <= 0:
            raise ConfigError(f"model.max_model_len must be > 0, got {self.max_model_len}")
        for group in self.groups:
            needed = "state_bytes" if group.kind == MAMBA else "bytes_per_token"
            if getattr(group, needed) <= 0:
                raise ConfigError(f"model.groups: {needed} must be > 0, got {getattr(group, needed)}")
            if group.sliding_window is not None and group.sliding_window < group.block_size:
                raise ConfigError(
                    f"model.groups: sliding_window ({group.sliding_window}) must be >= block_size ({group.block_size})"
                )
        if [group.drafter_only for group in self.groups] != sorted(group.drafter_only for group in self.groups):
            raise ConfigError("model.groups: what is drafter_only comes after all others")
        if all(group.drafter_only for group in self.groups):
            raise ConfigError("model.groups: at least one group that is not drafter_only is needed")
        check_pages(self.groups)
        sizes = resolve_block_sizes(self.groups)
        if any(group.kind == CHUNKED_LOCAL and group.block_size != sizes.scheduler for group in self.groups):
            raise ConfigError("model.groups: beside chunked_local, every group must have its block_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """`kv_load_failure_policy` None: what the profile says, else vLLM's default (`LoadedConfig.policy` is the outcome).

    `options` are the kind's own, None for `none`; in a file they stand beside `kind`.
    """

    kind: ConnectorKind = "none"
    kv_load_failure_policy: Policy | None = None
    options: MooncakeConfig | OffloadingConfig | SimpleCpuConfig | MultiConfig | None = None

    def __post_init__(self) -> None:
        assert (self.kind == "mooncake") == isinstance(self.options, MooncakeConfig)
        assert (self.kind == "offloading") == isinstance(self.options, OffloadingConfig)
        assert (self.kind == "simple_cpu") == isinstance(self.options, SimpleCpuConfig)
        assert (self.kind == "multi") == isinstance(self.options, MultiConfig)

    @property
    def parts(self) -> list[str]:
        """The connectors of an engine, in their order."""
        if isinstance(self.options, MultiConfig):
            return self.options.order
        return [] if self.kind == "none" else [self.kind]

    @property
    def mooncake(self) -> MooncakeConfig:
        """The options, where it is one of `parts`."""
        options = self.options.mooncake if isinstance(self.options, MultiConfig) else self.options
        assert isinstance(options, MooncakeConfig)
        return options

    @property
    def simple_cpu(self) -> SimpleCpuConfig:
        """The options, where `kind` is `simple_cpu`."""
        assert isinstance(self.options, SimpleCpuConfig)
        return self.options

    @property
    def offloading(self) -> OffloadingConfig:
        """The options, where it is one of `parts`."""
        options = self.options.offloading if isinstance(self.options, MultiConfig) else self.options
        assert isinstance(options, OffloadingConfig)
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyConfig:
    """`instances` engines that serve whole requests, or `prefill` and `decode` ones. tp, pp, dp: per instance.

    `prefill_tp` and so on: that role's own number of ranks.
    """

    instances: int = 0
    prefill: int = 0
    decode: int = 0
    tp: int = 1
    pp: int = 1
    dp: int = 1
    prefill_tp: int | None = None
    prefill_pp: int | None = None
    decode_tp: int | None = None
    decode_pp: int | None = None
    proxy_prefill: Routing = "round_robin"
    """How the proxy picks a prefill instance."""
    proxy_decode: Routing = "round_robin"
    """How it picks the instance that serves the client: a decode instance, or one of `instances`."""

    def __post_init__(self) -> None:
        self._check_counts()
        if self.dp != 1:
            raise ConfigError(f"topology.dp: only 1 is modelled so far, got {self.dp}")
        for name in ("tp", "pp", "prefill_tp", "prefill_pp", "decode_tp", "decode_pp"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_RANKS:
                raise ConfigError(f"topology.{name} must be in [1, {MAX_RANKS}], got {value}")
        for role in self.roles:
            if self.num_ranks(role) > MAX_RANKS:
                raise ConfigError(
                    f"topology: a {role} instance has at most {MAX_RANKS} ranks, got {self.num_ranks(role)}"
                )

    def _check_counts(self) -> None:
        for name in ("instances", "prefill", "decode"):
            if not 0 <= getattr(self, name) <= MAX_INSTANCES:
                raise ConfigError(f"topology.{name} must be in [0, {MAX_INSTANCES}], got {getattr(self, name)}")
        if self.instances and (self.prefill or self.decode):
            raise ConfigError("topology: give either instances, or prefill and decode")
        if not self.instances and not (self.prefill and self.decode):
            raise ConfigError("topology: give instances, or both prefill and decode")

    @property
    def is_disaggregated(self) -> bool:
        return self.prefill > 0

    @property
    def roles(self) -> tuple[Role, ...]:
        return ("prefill", "decode") if self.is_disaggregated else ("engine",)

    def num_instances(self, role: Role) -> int:
        return {"engine": self.instances, "prefill": self.prefill, "decode": self.decode}[role]

    def parallel_sizes(self, role: Role) -> tuple[int, int]:
        """Tensor and pipeline parallel size of an instance of this role."""
        own_tp, own_pp = {
            "engine": (None, None),
            "prefill": (self.prefill_tp, self.prefill_pp),
            "decode": (self.decode_tp, self.decode_pp),
        }[role]
        return self.tp if own_tp is None else own_tp, self.pp if own_pp is None else own_pp

    def num_ranks(self, role: Role) -> int:
        tp_size, pp_size = self.parallel_sizes(role)
        return tp_size * pp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    """KV contents: where the tensors live, and how often they are compared with what they should hold."""

    device: str = "cpu"
    check: Literal["on", "off", "every-read"] = "on"

    def __post_init__(self) -> None:
        if self.device != "cpu":
            raise ConfigError(f"kv.device must be cpu, the only one so far, got {self.device!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """What the instances of one role have of their own."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    timing: StepTiming
    speculative: SpeculativeConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """A whole cluster. `roles` has an entry for each role of the topology: `engine`, or `prefill` and `decode`."""

    model: ModelConfig
    connector: ConnectorConfig
    topology: TopologyConfig
    network: LinkTiming
    kv: KvConfig
    roles: Mapping[Role, RoleConfig]

    def __post_init__(self) -> None:
        assert set(self.roles) == set(self.topology.roles)
        has_mooncake = "mooncake" in self.connector.parts
        if self.topology.is_disaggregated and not has_mooncake:
            raise ConfigError(
                f"connector.kind: prefill and decode instances need mooncake, got {self.connector.kind!r}"
            )
        if has_mooncake and not self.topology.is_disaggregated:
            raise ConfigError(f"connector.kind: {self.connector.kind} needs topology.prefill and topology.decode")
        assert self.hash_block_size > 0  # or it raises
        for role, config in self.roles.items():
            self._check_ranks(role)
            check_role(self.groups_of(role), role, config)
            if config.speculative is not None:
                check_speculation(self.groups_of(role), config)
            self._check_engine(role)

    def _check_ranks(self, role: Role) -> None:
        """Whether the model can be cut so."""
        tp_size, _ = self.topology.parallel_sizes(role)
        if self.topology.num_ranks(role) > 1 and self.connector.kind == "none":
            raise ConfigError("topology.tp, topology.pp: ranks of an instance are modelled with a connector only")
        of_ranks = self.roles[role].cache.rank_gpu_blocks
        if of_ranks is not None and len(of_ranks) != self.topology.num_ranks(role):
            raise ConfigError(
                f"cache.rank_gpu_blocks: {role} has {self.topology.num_ranks(role)} ranks, got {len(of_ranks)} numbers"
            )
        heads = self.model.num_kv_heads
        if heads is not None and heads % tp_size and tp_size % heads:
            raise ConfigError(f"topology.tp: {role} has {tp_size}, which does not go with {heads} model.num_kv_heads")

    def _check_engine(self, role: Role) -> None:
        """Whether its cache manager and its CPU tier can be made: they have checks of their own."""
        cache, scheduler = self.roles[role].cache, self.roles[role].scheduler
        kv = make_cache_manager(
            self.groups_of(role),
            BlockPool(2, enable_caching=cache.enable_prefix_caching),
            max_model_len=scheduler.max_model_len,
            max_in_flight_tokens=scheduler.max_in_flight_tokens,
            retention_interval=cache.prefix_cache_retention_interval,
            hash_block_size=cache.prefix_match_unit,
            drafts=self.draft_rules(role),
            has_connector=self.connector.kind != "none",
        )
        kv.check_lookahead()  # of a model that is served, some group is the drafter's, said or not
        if self.connector.kind == "simple_cpu":
            if not any(group.is_full_attention for group in self.model.groups):
                raise ConfigError("connector.kind: simple_cpu needs a group of full attention")
            if not cache.enable_prefix_caching:
                raise ConfigError("cache.enable_prefix_caching: simple_cpu needs it (vLLM leaves it out then)")
            bytes_of_rank = rank_block_bytes(self.model.groups, self.num_parts(role))
            self.connector.simple_cpu.num_blocks(bytes_of_rank, self.topology.num_ranks(role))
        if "offloading" in self.connector.parts:
            options, num_ranks = self.connector.offloading, self.topology.num_ranks(role)
            layout = rank_layout(engine_layout(kv, options, num_workers=num_ranks), self.num_parts(role))
            num_chunks(layout, options, is_replicated=self.is_replicated(role))

    def num_parts(self, role: Role) -> int:
        """Into how many different parts the ranks of an instance cut a block."""
        cut = Sharding.of(self._heads, [self.topology.parallel_sizes(role)])
        return cut.num_units * cut.num_stages

    def is_replicated(self, role: Role) -> bool:
        """Whether an instance keeps one copy in its CPU tier for all ranks, which hold the same (vLLM:
        offloading/config.py, replicated_layout: neither stages nor states)."""
        tp_size, pp_size = self.topology.parallel_sizes(role)
        return self._heads.is_mla and tp_size > 1 and pp_size == 1 and not self._heads.has_states

    @property
    def sharding(self) -> Sharding:
        """How every engine's KV memory is cut."""
        return Sharding.of(self._heads, [self.topology.parallel_sizes(role) for role in self.topology.roles])

    @property
    def _heads(self) -> HeadLayout:
        model = self.model
        return HeadLayout(
            num_kv_heads=model.num_kv_heads,
            is_mla=model.use_mla,
            has_states=any(group.kind == MAMBA for group in model.groups),
        )

    @property
    def hash_block_size(self) -> int:
        """Tokens of one prefix hash; the same everywhere, since contents are known by it."""
        units = {config.cache.prefix_match_unit for config in self.roles.values()}
        if len(units) > 1:
            raise ConfigError("cache.prefix_match_unit: all roles must have the same")
        return resolve_block_sizes(self.model.groups, hash_block_size=units.pop()).hashing

    def role(self, role: Role) -> RoleConfig:
        return self.roles[role]

    def groups_of(self, role: Role) -> tuple[KVCacheGroupSpec, ...]:
        """The model's groups as an instance of this role has them: with states for drafts, or without the drafter's
        own."""
        speculative = self.roles[role].speculative
        if speculative is None:
            return tuple(group for group in self.model.groups if not group.drafter_only)
        count = speculative.num_speculative_tokens
        return tuple(
            replace(group, num_speculative_blocks=count) if group.kind == MAMBA else group
            for group in self.model.groups
        )

    def draft_rules(self, role: Role) -> DraftRules:
        """What speculative decoding asks of the cache of such an instance."""
        config = self.roles[role]
        if config.speculative is None:
            return NO_DRAFTS
        return config.speculative.cache_rules(
            enable_caching=config.cache.enable_prefix_caching, has_connector=self.connector.kind != "none"
        )

    @property
    def num_hash_lookahead(self) -> int:
        """Tokens behind a block that its hash covers; the same everywhere, since only engines on their own have any."""
        return max(self.draft_rules(role).num_hash_lookahead for role in self.roles)

    def to_document(self) -> dict[str, Any]:
        """Nested tables with every value spelled out: what roles share at the top, the rest per role."""
        connector = _table(self.connector)
        options = connector.pop("options") or {}
        for name in self.connector.parts if self.connector.kind == "multi" else ():
            options.update(options.pop(name))
        document: dict[str, Any] = {
            "model": _table(self.model),
            "connector": {**connector, **options},
            "topology": _table(self.topology),
            "network": _table(self.network),
            "kv": _table(self.kv),
        }
        tables = {role: _table(config) for role, config in self.roles.items()}
        for config in tables.values():
            del config["scheduler"]["max_model_len"]  # the model's
            config["speculative"] = config["speculative"] or {}
        return {**document, **_split_common(tables)}

    def to_json(self) -> str:
        """Canonical: equal configs, equal text. `config_load.config_from_json` reads it back."""
        return json.dumps(self.to_document(), sort_keys=True, separators=(",", ":"), allow_nan=False)


def check_role(groups: Sequence[KVCacheGroupSpec], role: Role, config: RoleConfig) -> None:
    """Whether this role's pool and budget can serve any request that the model allows."""
    where = "" if role == "engine" else f"{role}."
    if config.cache.num_gpu_blocks > MAX_BLOCKS:
        raise ConfigError(f"{where}cache.num_gpu_blocks must be <= {MAX_BLOCKS}, got {config.cache.num_gpu_blocks}")
    num_blocks = config.cache.pool_blocks()
    scheduler = config.scheduler
    needed = sum(group.max_blocks(scheduler.max_in_flight_tokens, scheduler.max_model_len) for group in groups)
    if config.speculative is not None:
        # Beside a whole load there must be room for a step with drafts.
        needed += sum(cdiv(config.speculative.num_step_slots, group.block_size) for group in groups)
    if needed > num_blocks - 1:
        raise ConfigError(
            f"{where}cache.num_gpu_blocks: {num_blocks} blocks, one of them the null block, cannot hold one request of "
            f"model.max_model_len ({scheduler.max_model_len} tokens): {needed + 1} are needed"
        )
    budget = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and budget < scheduler.max_model_len:
        raise ConfigError(
            f"{where}scheduler.max_num_batched_tokens ({budget}) must be >= model.max_model_len "
            f"({scheduler.max_model_len}) without chunked prefill"
        )


def check_speculation(groups: Sequence[KVCacheGroupSpec], config: RoleConfig) -> None:
    """Whether drafts go with the model's groups, and with what a step may compute."""
    speculative, scheduler = config.speculative, config.scheduler
    assert speculative is not None
    count = speculative.num_speculative_tokens
    if speculative.uses_hidden_states and any(group.kind == CHUNKED_LOCAL for group in groups):
        raise ConfigError(f"speculative.method: {speculative.method} does not go with groups of kind {CHUNKED_LOCAL}")
    smallest = min((group.block_size for group in groups if group.kind == MAMBA), default=count + 1)
    if count >= smallest:
        raise ConfigError(
            f"speculative.num_speculative_tokens must be < the block_size of mamba groups ({smallest}), got {count}"
        )
    least = 1 + count + speculative.num_draft_slots
    if scheduler.token_budget < least:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens: a step with {count} "
            f"speculative tokens needs {least}, got {scheduler.token_budget}"
        )


def _table(record: Any) -> Any:  # noqa: ANN401 - any dataclass, recursively; 480 for a float becomes 480.0
    if is_dataclass(record):
        hints = field_types(type(record))
        return {
            item.name: _table(float(value) if hints[item.name] is float else value)
            for item in fields(record)
            for value in (getattr(record, item.name),)
            if not _is_left_out(record, item.name, value, item.default)
        }
    if isinstance(record, tuple):
        return [_table(item) for item in record]
    return record


def _is_left_out(record: object, name: str, value: object, default: object) -> bool:
    """What is particular to some kinds of groups is spelled out for those only."""
    return isinstance(record, KVCacheGroupSpec) and name not in _OF_EVERY_GROUP and value == default


def _split_common(tables: dict[Role, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """{role: {section: {key: value}}} → sections with what all roles share, and role tables with the rest."""
    first, *others = tables.values()
    common = {
        section: {
            key: value
            for key, value in table.items()
            if all(key in other[section] and other[section][key] == value for other in others)
        }
        for section, table in first.items()
    }
    own: dict[str, Any] = {
        role: {
            section: {key: value for key, value in table.items() if key not in common[section]}
            for section, table in sections.items()
        }
        for role, sections in tables.items()
        if others
    }
    for sections in (common, *own.values()):
        if not sections["speculative"]:
            del sections["speculative"]
    return {**common, **own}
