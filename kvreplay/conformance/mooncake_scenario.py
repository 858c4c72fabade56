"""A Mooncake scenario: two sides, their requests, scripted faults, and what to do in order.

The form is that of the transcripts recorded from vLLM's own MooncakeConnector (`tests/conformance/mooncake/README.md`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvreplay.conformance.mooncake_script import Allocation, Finish, Seconds, Timeout, check_rules, read_action
from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.conformance.workload import Positive, Token
from kvreplay.errors import ConfigError

SIDES: Final = ("P", "D")
ROLES: Final = {"P": "kv_producer", "D": "kv_consumer"}
NUM_KV_HEADS: Final = 2
"""Of the recorded model."""
_MAX_BYTES: Final = 1 << 28
"""Of one engine's KV memory: far more than any recorded one had."""

Few: TypeAlias = Annotated[int, Meta(ge=1, le=64)]
Many: TypeAlias = Annotated[int, Meta(ge=1, le=65_536)]


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """One KV cache group. `heads`: on one rank; None: the model's, spread over the ranks."""

    type: str = "full"
    layers: list[Annotated[int, Meta(ge=0, le=1000)]] | None = None
    sliding_window: Many | None = None
    head_size: Many = 4
    heads: Few | None = None
    block_size: Many | None = None
    name: str = "attn"
    mode: str = "align"

    def page_bytes(self, block_size: int, heads: int) -> int:
        """Bytes of a block of one layer: half precision, keys and values; a state's own size for `mamba`."""
        tokens = self.block_size or block_size
        if self.type == "mamba":
            return 2 * 64 * 2
        if self.type == "mla":
            return tokens * self.head_size * 2
        return tokens * (self.heads or heads) * self.head_size * 2 * 2


class SideSpec(msgspec.Struct, forbid_unknown_fields=True):
    """One engine."""

    tp: Few = 1
    pp: Few = 1
    role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    num_workers: Many = 10
    num_blocks: Annotated[int, Meta(ge=2, le=65_536)] = 16
    block_size: Many = 16
    kernel_block_size: Many | None = None
    policy: Literal["fail", "recompute"] = "fail"
    max_num_batched_tokens: Many = 256
    engine_id: str | None = None
    bootstrap_server_address: str | None = None
    groups: list[Group] = msgspec.field(default_factory=list)
    aggregate: bool = True
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        if not self.groups:
            self.groups = [Group(layers=[0, 1])]
        if self.block_size % (self.kernel_block_size or self.block_size):
            raise ValueError(f"kernel_block_size ({self.kernel_block_size}) must divide block_size ({self.block_size})")
        pages = sum(len(group.layers or ()) * group.page_bytes(self.block_size, NUM_KV_HEADS) for group in self.groups)
        if pages * self.num_blocks * self.tp * self.pp > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES:,} bytes of KV memory")

    @property
    def kernel_ratio(self) -> int:
        return self.block_size // (self.kernel_block_size or self.block_size)


class RequestSpec(msgspec.Struct, forbid_unknown_fields=True):
    """One request on one side. `params`: `auto` for what the proxy sends."""

    xfer: str | None = None
    prompt: Annotated[int, Meta(ge=1, le=1_000_000)] | Annotated[list[Token], Meta(min_length=1)] = 48
    params: dict[str, Any] | str | None = "auto"
    set: dict[str, Any] = msgspec.field(default_factory=dict)
    remove: list[str] = msgspec.field(default_factory=list, name="del")
    max_tokens: Positive | None = None
    stop: list[Token] | None = None
    seed: int = 0
    prompt_logprobs: int | None = None
    side: Literal["P", "D"] | None = None

    @property
    def tokens(self) -> list[int]:
        if isinstance(self.prompt, list):
            return self.prompt
        return [(7 + 3 * index + 1000 * self.seed) % 30000 for index in range(self.prompt)]


class Env(msgspec.Struct):
    """Timeouts in seconds. `d_recv`: the consumer's for each reply, `real` for the producer's + 60."""

    p_abort: Timeout = 1
    d_recv: Timeout | Literal["real"] = 20.0
    http: Timeout = 5.0


class _Document(msgspec.Struct):
    do: list[list[Any]]
    name: str = ""
    note: str = ""
    mode: str = "conn"
    debug: bool = False
    common: dict[str, Any] = msgspec.field(default_factory=dict)
    producer: dict[str, Any] = msgspec.field(default_factory=dict, name="P")
    consumer: dict[str, Any] = msgspec.field(default_factory=dict, name="D")
    env: Env = msgspec.field(default_factory=Env)
    requests: dict[str, RequestSpec] = msgspec.field(default_factory=dict)
    engine: list[dict[str, Any]] = msgspec.field(default_factory=list)
    bootstrap: list[dict[str, Any]] = msgspec.field(default_factory=list)
    wire: list[dict[str, Any]] = msgspec.field(default_factory=list)
    late_bind: Seconds = 0
    pre_register: list[dict[str, Any]] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Rules are plain objects: they are recorded as they are."""

    is_scheduled: bool
    """A whole scheduler on both sides; otherwise the scenario plays the schedulers' part."""
    debug: bool
    sides: Mapping[str, SideSpec]
    requests: Mapping[str, RequestSpec]
    env: Env
    engine: Sequence[Mapping[str, Any]]
    bootstrap: Sequence[Mapping[str, Any]]
    wire: Sequence[Mapping[str, Any]]
    late_bind_s: float
    pre_register: Sequence[Mapping[str, Any]]
    actions: Sequence[Sequence[Any]]
    variables: Mapping[str, str] = field(
        default_factory=lambda: {
            "$BOOT": "http://BOOT",
            "$REAL/": "http://BOOTREAL/",
            "$REFUSED": "http://REFUSED",
            "$REFUSED_HP": "REFUSED",
        }
    )

    def side_of(self, request_id: str) -> str:
        spec = self.request(request_id)
        return spec.side or ("P" if request_id.startswith("p") else "D")

    def request(self, request_id: str) -> RequestSpec:
        spec = self.requests.get(request_id)
        if spec is None:
            raise ConfigError(f"scenario: no request {request_id!r} in requests")
        return spec

    def params_of(self, request_id: str) -> dict[str, Any] | None:
        """The request's `kv_transfer_params`, a fresh copy."""
        spec, side = self.request(request_id), self.side_of(request_id)
        if isinstance(spec.params, str):
            params: dict[str, Any] = {
                "do_remote_decode": side == "P",
                "do_remote_prefill": side == "D",
                "transfer_id": spec.xfer or f"xfer-{request_id}",
            }
            if side == "D":
                params |= {"remote_bootstrap_addr": "$BOOT", "remote_engine_id": "P-engine"}
        elif spec.params:
            params = dict(spec.params)
        else:
            return None
        params |= spec.set
        for name in spec.remove:
            params.pop(name, None)
        return {
            name: self.variables.get(value, value) if isinstance(value, str) else value
            for name, value in params.items()
        }


def read_scenario(document: Json) -> Scenario:
    """Raises ConfigError for a scenario that nobody can run, UnsupportedVectorError for what is not modelled."""
    try:
        raw = msgspec.convert(document, _Document)
        sides = {
            side: msgspec.convert({**raw.common, **own}, SideSpec)
            for side, own in (("P", raw.producer), ("D", raw.consumer))
        }
    except msgspec.ValidationError as error:
        raise ConfigError(f"scenario: {error}") from error
    for spec in sides.values():
        if spec.async_scheduling:
            raise UnsupportedVectorError("async_scheduling")
        for group in spec.groups:
            if group.type not in ("full", "swa", "mla", "mamba"):
                raise UnsupportedVectorError(f"group type {group.type}")
    scenario = Scenario(
        is_scheduled=raw.mode == "sched",
        debug=raw.debug,
        sides=sides,
        requests=raw.requests,
        env=raw.env,
        engine=raw.engine,
        bootstrap=raw.bootstrap,
        wire=raw.wire,
        late_bind_s=raw.late_bind,
        pre_register=raw.pre_register,
        actions=raw.do,
    )
    _check_script(scenario)
    return scenario


def _check_script(scenario: Scenario) -> None:
    """Raises ConfigError for what is no action or no rule, and for one that names what is not there."""
    check_rules({name: getattr(scenario, name) for name in ("wire", "engine", "bootstrap", "pre_register")})
    for index, action in enumerate(scenario.actions):
        where = f"scenario.do[{index}]"
        read = read_action(action, where)
        if isinstance(read, Allocation | Finish):
            num_blocks = scenario.sides[scenario.side_of(read.request)].num_blocks
            if any(block_id >= num_blocks for table in read.blocks for block_id in table):
                raise ConfigError(f"{where}: there are {num_blocks} blocks, counted from 0")


def matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern)
