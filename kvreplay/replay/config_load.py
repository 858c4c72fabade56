"""From TOML, a trace's metadata and the command line to a `ReplayConfig`, and where each choice came from.

A *document* is the nested tables of a TOML file. Roles may have tables of their own (`[prefill.cache]`), which are
laid over the ones at the top. `--set` and `--policy` change the document, later ones winning; a key without a role
then holds for every role.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvreplay.behaviour import DEFAULT_PROFILE, Behaviour, nearest
from kvreplay.behaviour import profile as profile_named
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.multi.config import MultiConfig
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.engine.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from kvreplay.errors import ConfigError
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.replay.config import (
    DEFAULT_POLICY,
    ConnectorConfig,
    ConnectorKind,
    KvConfig,
    ModelConfig,
    Policy,
    ReplayConfig,
    Role,
    RoleConfig,
    TopologyConfig,
)
from kvreplay.replay.config_fields import build, check_keys, check_table, convert, field_types, parse_text
from kvreplay.replay.network import NETWORK_PRESETS, LinkTiming
from kvreplay.replay.presets import MODEL_PRESETS, packaged_folder, packaged_names
from kvreplay.replay.timing import TIMING_PRESETS, StepTiming
from kvreplay.user_files import read_toml

DEFAULT_CONFIG: Final = "mooncake-1p1d"
"""Used when neither --config nor the trace says anything."""

DEFAULT_NETWORK: Final = "8x400g-roce"

MAX_CONFIG_BYTES: Final = 1 << 20

Document = dict[str, Any]


class Given(NamedTuple):
    """A key that was set on top of a document, and by whom, for messages."""

    key: str
    origin: str


_ROLE_SECTIONS: Final[dict[str, type]] = {
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "timing": StepTiming,
    "speculative": SpeculativeConfig,
}
_SECTIONS: Final[dict[str, type]] = {
    "model": ModelConfig,
    "connector": ConnectorConfig,
    "topology": TopologyConfig,
    "network": LinkTiming,
    "kv": KvConfig,
    **_ROLE_SECTIONS,
}
_ROLES: Final = ("prefill", "decode")
_OPTIONS: Final[dict[str, type]] = {
    "mooncake": MooncakeConfig,
    "offloading": OffloadingConfig,
    "simple_cpu": SimpleCpuConfig,
}
"""Kind of connector → its own keys in `[connector]`."""
_TOGETHER: Final = ("mooncake", "offloading")
"""What `multi` has."""
_FROM_ELSEWHERE: Final = {"scheduler": ("max_model_len",), "connector": ("options",)}
"""Fields that are not keys of their own table."""
_KIND: Final = "connector.kind"
_EXTRA_KEYS: Final[dict[str, dict[str, Any]]] = {
    "model": {"preset": str, "block_size": int},
    "timing": {"preset": str},
    "network": {"preset": str},
}
"""Keys that are no fields."""


def _model_table(name: str) -> Document:
    preset = MODEL_PRESETS[name]
    groups = [asdict(group) for group in preset.groups]
    return {
        "name": name,
        "groups": groups,
        "max_model_len": preset.max_model_len,
        "num_kv_heads": preset.num_kv_heads,
        "use_mla": preset.use_mla,
    }


_PRESETS: Final[dict[str, tuple[Mapping[str, object], Callable[[str], Document]]]] = {
    "model": (MODEL_PRESETS, _model_table),
    "timing": (TIMING_PRESETS, lambda name: asdict(TIMING_PRESETS[name].timing)),
    "network": (NETWORK_PRESETS, lambda name: asdict(NETWORK_PRESETS[name].link)),
}
"""Section → what its `preset` key may name, and the table that stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Where each choice came from, in words for the report."""

    config: str
    profile: str
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """What is in effect. `config_name`: a preset, a path, or `trace`.

    `policy` is `kv_load_failure_policy` with the profile and vLLM's default applied.
    """

    config: ReplayConfig
    config_name: str
    behaviour: Behaviour
    policy: Policy
    origins: Origins


def load_config(
    name_or_path: str | None = None,
    *,
    sets: Sequence[str] = (),
    policy: str | None = None,
    profile: str | None = None,
    switches: Sequence[str] = (),
    trace_config: str | None = None,
    trace_name: str = "the trace",
) -> LoadedConfig:
    """Resolve what a run is configured with. Raises ConfigError, one line that names the file, key or flag.

    `name_or_path` is --config: a preset's name or a file. Without it `trace_config` (the JSON in the metadata of the
    trace that messages call `trace_name`) is used, else `DEFAULT_CONFIG`. `sets` are --set arguments, `policy`,
    `profile` and `switches` those of --policy, --profile and --behaviour.
    """
    trace_source = f"{trace_name}'s config"
    document, name, origin = _base_document(name_or_path, trace_config, trace_source)
    document.setdefault("network", {"preset": DEFAULT_NETWORK})
    source = {"the trace": trace_source}.get(origin, name)
    # First what decides on which keys there are: with another kind of connector, the file's own keys for it are gone.
    for assignment in sorted(sets, key=lambda assignment: not assignment.startswith(f"{_KIND}=")):
        apply_set(document, assignment)
    if policy is not None:
        apply_text(document, "connector.kv_load_failure_policy", policy, f"--policy {policy}")
    config = config_from_document(document, source, [_given_by(assignment) for assignment in sets])
    behaviour = profile_named(profile or DEFAULT_PROFILE)
    for switch in switches:
        behaviour = behaviour.with_switch(switch)
    in_effect, policy_origin = _resolve_policy(config, behaviour, sets, policy)
    origins = Origins(
        config=" ".join([origin, *(f"--set {assignment}" for assignment in sets)]),
        profile=" ".join(["--profile" if profile else "default", *(f"--behaviour {switch}" for switch in switches)]),
        policy=source if policy_origin == "config" else policy_origin,
    )
    return LoadedConfig(config=config, config_name=name, behaviour=behaviour, policy=in_effect, origins=origins)


def config_from_json(text: str, source: str = "the trace's config") -> ReplayConfig:
    """Read back what `ReplayConfig.to_json` wrote."""
    return config_from_document(_parse_json(text, source), source)


def preset_names() -> list[str]:
    return packaged_names("configs", ".toml")


def _given_by(assignment: str) -> Given:
    return Given(assignment.partition("=")[0], f"--set {assignment}")


def config_from_document(document: Document, source: str, given: Sequence[Given] = ()) -> ReplayConfig:
    """Check keys and types of a document, and build it. Messages begin with what is to be mended: who gave the key
    that is wrong, else `source`, of whom the rest is."""
    check_keys(document, [*_SECTIONS, *_ROLES], f"{source}:")
    document.setdefault("network", {"preset": DEFAULT_NETWORK})
    for section in _SECTIONS:
        check_table(document.setdefault(section, {}), f"{source}: [{section}]")
    try:
        return _build(document, source)
    except ConfigError as error:
        message = str(error).removeprefix(f"{source}: ")
        raise ConfigError(f"{_blamed(message, source, given)}: {message}") from error


def _blamed(message: str, source: str, given: Sequence[Given]) -> str:
    """What to mend: who gave the key that the message names first, for the role that it names; else all."""
    found = [(place, not names_role, origin) for origin, place, names_role in _mentions(message, given)]
    if found:
        return min(found)[2]
    return " ".join(dict.fromkeys([source, *(one.origin for one in given)]))


def _mentions(message: str, given: Sequence[Given]) -> Iterator[tuple[str, int, bool]]:
    """(who gave it, where the message names it, whether it was given for one role)."""
    for key, origin in given:
        role, path = _split_role(key.split("."))
        # As a record's own check, and as the reading of its table names it.
        for name in (".".join(path), f"[{'.'.join(path[:-1])}] {path[-1]}"):
            found = re.search(rf"((?:{'|'.join(_ROLES)})\.)?{re.escape(name)}(?!\w)", message)
            if found and (role is None or found[1] in (None, f"{role}.")):
                yield origin, found.start(), role is not None


def apply_set(document: Document, assignment: str) -> None:
    """Change the document as `--set KEY=VALUE` says."""
    key, separator, text = assignment.partition("=")
    if not separator:
        raise ConfigError(f"--set {assignment}: expected KEY=VALUE")
    apply_text(document, key, text, f"--set {assignment}")


# -- where a document comes from ----------------------------------------------------------------------------------


def _base_document(name_or_path: str | None, trace_config: str | None, trace_source: str) -> tuple[Document, str, str]:
    """(document, its name, its origin)."""
    if name_or_path is not None:
        return read_document(name_or_path), name_or_path, "--config"
    if trace_config is not None:
        return _parse_json(trace_config, trace_source), "trace", "the trace"
    return read_document(DEFAULT_CONFIG), DEFAULT_CONFIG, "default"


def read_document(name_or_path: str) -> Document:
    """The tables of a preset or file."""
    return read_toml(_find(name_or_path), name_or_path, MAX_CONFIG_BYTES, "configuration")


def _find(name_or_path: str) -> Path:
    names = preset_names()
    if name_or_path in names:
        return packaged_folder("configs") / f"{name_or_path}.toml"
    path = Path(name_or_path)
    if not path.exists():
        hint = nearest(name_or_path, names, f"; presets are {', '.join(names)}")
        raise ConfigError(f"--config {name_or_path}: no such preset or file{hint}")
    return path


def _parse_json(text: str, source: str) -> Document:
    try:
        return check_table(json.loads(text), source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON: {error}") from error


# -- the command line ---------------------------------------------------------------------------------------------


def apply_text(document: Document, dotted: str, text: str, where: str) -> None:
    """Put a typed value at `[role.]section.key`."""
    role, path = _split_role(dotted.split("."))
    known = _settable()
    key = ".".join(path)
    if path[:2] == ["model", "groups"]:
        raise ConfigError(f"{where}: groups are tables, which a file has; here model.preset or model.block_size")
    if key not in known or (role and path[0] not in _ROLE_SECTIONS):
        sections = list(dict.fromkeys(name.split(".")[0] for name in known))
        hint = nearest(key, known, f"; sections are {', '.join(sections)}")
        raise ConfigError(f"{where}: unknown key{hint}")
    value = parse_text(text, known[key], where)
    if role:
        _put(document.setdefault(role, {}), path, value, where)
        return
    _put(document, path, value, where)
    for table in (document.get(name) for name in _ROLES):
        if isinstance(table, dict) and isinstance(table.get(path[0]), dict):
            _drop(table[path[0]], path)


def _split_role(path: list[str]) -> tuple[str | None, list[str]]:
    return (path[0], path[1:]) if path[0] in _ROLES and len(path) > 1 else (None, path)


def _put(document: Document, path: list[str], value: object, where: str) -> None:
    table = document
    for name in path[:-1]:
        table = check_table(table.setdefault(name, {}), where)
    if path[-1] == "preset":
        _drop(table, path)
    table[path[-1]] = value
    if ".".join(path) == _KIND:
        for name in [name for name in table if name not in _connector_keys(str(value))]:
            del table[name]


def _drop(table: Document, path: list[str]) -> None:
    """Remove a section's key; with `preset`, every key that a preset stands for."""
    if path[-1] == "preset":
        for name in [*field_types(_SECTIONS[path[0]]), "preset", "block_size"]:
            if name != "max_model_len":
                table.pop(name, None)
    else:
        table.pop(path[-1], None)


@cache
def _settable() -> dict[str, Any]:
    """Every key that --set knows, `section.key`, with its type."""
    known: dict[str, Any] = {}
    for section, record in _SECTIONS.items():
        keys = {**field_types(record, without=_FROM_ELSEWHERE.get(section, ())), **_EXTRA_KEYS.get(section, {})}
        for key, hint in keys.items():
            known[f"{section}.{key}"] = hint
    known["connector.connectors"] = field_types(MultiConfig)["connectors"]
    for options in _OPTIONS.values():
        known.update({f"connector.{key}": hint for key, hint in field_types(options).items()})
    del known["model.groups"]  # tables, not one value
    return known


# -- building -----------------------------------------------------------------------------------------------------


def _build(document: Document, source: str) -> ReplayConfig:
    model = _build_model(document["model"], f"{source}: [model]")
    topology: TopologyConfig = build(TopologyConfig, document["topology"], f"{source}: [topology]")
    for role in _ROLES:
        if role in document and role not in topology.roles:
            raise ConfigError(f"{source}: [{role}]: the topology has no {role} instances")
    return ReplayConfig(
        model=model,
        connector=_build_connector(document["connector"], f"{source}: [connector]"),
        topology=topology,
        network=build(LinkTiming, _expanded("network", document["network"], source), f"{source}: [network]"),
        kv=build(KvConfig, document["kv"], f"{source}: [kv]"),
        roles={role: _build_role(document, role, model, source) for role in topology.roles},
    )


def _build_role(document: Document, role: Role, model: ModelConfig, source: str) -> RoleConfig:
    own = check_table(document.get(role, {}), f"{source}: [{role}]")
    check_keys(own, _ROLE_SECTIONS, f"{source}: [{role}]")

    def section(name: str) -> tuple[Document, str]:
        label = f"[{role}.{name}]" if own.get(name) else f"[{name}]"
        table = check_table(own.get(name, {}), f"{source}: {label}")
        return _expanded(name, _laid_over(document[name], table), source), f"{source}: {label}"

    return RoleConfig(
        scheduler=build(SchedulerConfig, *section("scheduler"), extra={"max_model_len": model.max_model_len}),
        cache=build(CacheConfig, *section("cache")),
        timing=build(StepTiming, *section("timing")),
        speculative=_build_speculative(*section("speculative")),
    )


def _build_speculative(table: Document, where: str) -> SpeculativeConfig | None:
    """None without the table, or with no speculative tokens in it."""
    check_keys(table, field_types(SpeculativeConfig), where)
    if not table or table.get("num_speculative_tokens") == 0:
        return None
    return build(SpeculativeConfig, table, where)


def _laid_over(base: Document, own: Document) -> Document:
    # A preset of its own replaces the base; single keys are laid over it.
    return own if "preset" in own else {**base, **own}


def _expanded(section: str, table: Document, source: str) -> Document:
    """The table with its preset, if it names one, spelled out under its other keys."""
    if section not in _PRESETS or "preset" not in table:
        return table
    presets, table_of = _PRESETS[section]
    name = convert(table["preset"], str, f"{source}: [{section}] preset")
    if name not in presets:
        raise ConfigError(f"{section}.preset: no preset {name!r}; known are {', '.join(presets)}")
    own = {key: value for key, value in table.items() if key != "preset"}
    changed = {"name": f"{name}, changed"} if own and section != "model" else {}
    return {**table_of(name), **changed, **own}


def _build_model(table: Document, where: str) -> ModelConfig:
    table = deepcopy(_expanded("model", table, where.removesuffix(": [model]")))
    block_size = table.pop("block_size", None)
    table.setdefault("name", "custom")
    if "groups" not in table:
        raise ConfigError(f"{where}: expected a preset ({', '.join(MODEL_PRESETS)}), or [[model.groups]]")
    if block_size is not None:
        convert(block_size, int, f"{where} block_size")
        convert(table.get("groups", []), tuple[KVCacheGroupSpec, ...], f"{where} groups")
        table["groups"] = [{**group, "block_size": block_size} for group in table.get("groups", [])]
    return build(ModelConfig, table, where)


def _build_connector(table: Document, where: str) -> ConnectorConfig:
    kind = convert(table.get("kind", "none"), ConnectorKind, f"{where} kind")
    if kind == "none":
        return build(ConnectorConfig, table, where, extra={"options": None})
    if kind == "multi":
        return _build_multi(table, where)
    own = field_types(_OPTIONS[kind])
    common = field_types(ConnectorConfig, without=("options",))
    check_keys(table, _connector_keys(kind), where)
    options: object = build(_OPTIONS[kind], {key: value for key, value in table.items() if key in own}, where)
    shared = {key: value for key, value in table.items() if key in common}
    return build(ConnectorConfig, shared, where, extra={"options": options})


def _connector_keys(kind: str) -> list[str]:
    """What `[connector]` may hold for this kind."""
    kinds = _TOGETHER if kind == "multi" else (kind,)
    keys = list(field_types(ConnectorConfig, without=("options",)))
    if kind == "multi":
        keys += field_types(MultiConfig, without=_TOGETHER)
    for name in kinds:
        keys += field_types(_OPTIONS[name]) if name in _OPTIONS else ()
    return keys


def _build_multi(table: Document, where: str) -> ConnectorConfig:
    """The options of all its connectors stand in one table."""
    common = field_types(ConnectorConfig, without=("options",))
    records = {name: _OPTIONS[name] for name in _TOGETHER}
    own = {name: field_types(record) for name, record in records.items()}
    order = field_types(MultiConfig, without=tuple(own))
    check_keys(table, _connector_keys("multi"), where)
    children: Document = {
        name: build(record, {key: value for key, value in table.items() if key in own[name]}, where)
        for name, record in records.items()
    }
    options = build(MultiConfig, {key: value for key, value in table.items() if key in order}, where, extra=children)
    shared = {key: value for key, value in table.items() if key in common}
    return build(ConnectorConfig, shared, where, extra={"options": options})


def _resolve_policy(
    config: ReplayConfig, behaviour: Behaviour, sets: Sequence[str], policy: str | None
) -> tuple[Policy, str]:
    """The policy in effect and where it came from (`config`: the config itself)."""
    configured = config.connector.kv_load_failure_policy
    if configured is None:
        # What a read that failed should cost is its tokens, not its request.
        return ("recompute", "profile ideal") if behaviour.profile == "ideal" else (DEFAULT_POLICY, "vLLM's default")
    if policy is not None:
        return configured, "--policy"
    is_set = any(item.startswith("connector.kv_load_failure_policy=") for item in sets)
    return configured, "--set" if is_set else "config"
