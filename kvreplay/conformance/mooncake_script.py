"""What a scenario's script may say: its actions, and its rules for messages, engine writes and bootstrap answers.

The objects themselves are played, and recorded, as they are written; what is here says whether they can be.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from kvreplay.conformance.vector import Json
from kvreplay.conformance.workload import Count
from kvreplay.errors import ConfigError

Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=100_000)]
Timeout: TypeAlias = Annotated[float, Meta(ge=-100_000, le=100_000)]
"""In seconds; below 0 it is over before it begins."""
Flag: TypeAlias = bool | int
Side: TypeAlias = Literal["P", "D"]
Tables: TypeAlias = list[list[Count]]

# -- actions ----------------------------------------------------------------------------------------------


class Allocation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request: str
    blocks: Tables = []
    num_local: Count = 0


class Finish(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request: str
    status: Literal["length", "stopped", "abort", "error"]
    blocks: Tables = []


class Addition(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request: str


class Steps(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    side: Side
    times: Annotated[int, Meta(ge=0, le=10_000)] = 1


class RunOptions(Struct, frozen=True, forbid_unknown_fields=True):
    until: str | list[str] = []
    sides: Literal["", "P", "D", "PD", "DP"] | list[Side] = "PD"


class Run(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    duration: Seconds
    options: RunOptions | None = None


class Duration(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    duration: Seconds


class EnvChanges(Struct, frozen=True, forbid_unknown_fields=True):
    p_abort: Timeout = 0
    d_recv: Timeout | Literal["real"] = 0
    http: Timeout = 0


class Change(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    env: EnvChanges


class Poke(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    frames: list[str]


class Death(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    side: Side
    rank: Count


class Nothing(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


_ACTIONS: Final[Mapping[str, Any]] = {
    "p_alloc": Allocation,
    "d_alloc": Allocation,
    "p_finish": Finish,
    "d_finish": Finish,
    "add": Addition,
    "abort": Annotated[list[str], Meta(min_length=1)],
    "step": Steps,
    "run": Run,
    "sleep": Duration,
    "env": Change,
    "poke": Poke,
    "forget_layout": Nothing,
    "block_loop": Duration,
    "expire_now": list[str],
    "dead": Death,
    "mem": Nothing,
}


def read_action(action: Sequence[Json], where: str) -> Any:  # noqa: ANN401 - one of the above
    """Its arguments. Raises ConfigError."""
    operation = action[0] if action else None
    form = _ACTIONS.get(operation) if isinstance(operation, str) else None
    if form is None:
        raise ConfigError(f"{where}: unknown action {operation!r}")
    arguments = _read(list(action[1:]), form, f"{where}: action {operation!r}")
    if isinstance(arguments, Poke):
        for frame in arguments.frames:
            _check_hex(frame, where)
    return arguments


# -- rules ------------------------------------------------------------------------------------------------


class WireRule(Struct, frozen=True):
    """What a proxy does to one message of a connection."""

    act: Literal["drop", "dup", "edit", "replace", "answer", "delay", "inject_before", "inject_after"]
    dir: Literal["req", "rep"] = "rep"
    conn: str = "*"
    n: int | None = None
    type: str | None = None
    always: Flag = False
    s: Seconds | None = None
    set: dict[str, Json] = {}
    remove: list[str] = field(name="del", default=[])
    omit: list[str] = []
    hex: str | None = None
    frame: Json = None
    frames: list[Json] = []

    @property
    def complaint(self) -> str | None:
        if self.act == "delay" and self.s is None:
            return "delay needs s"
        if self.act == "replace" and self.hex is None and (self.frame is None or self.dir == "req"):
            return "replace needs hex" if self.dir == "req" else "replace needs hex or frame"
        return None


class EngineRule(Struct, frozen=True):
    """What a write of the transfer engine comes to, or a call of its start-up."""

    call: int | str = "*"
    on: str = "*"
    ret: int = 0
    delay: Seconds = 0
    late: Seconds = 0
    copy: Count | Literal["all", "none"] = "all"
    corrupt: list[tuple[Count, Annotated[int, Meta(ge=0, le=255)]]] = []
    error: str | None = field(name="raise", default=None)


class BootstrapRule(Struct, frozen=True):
    act: Literal["pass", "close", "hang", "status", "body", "edit"]
    sticky: Flag = False
    delay: Seconds = 0
    s: Seconds | None = None
    code: Annotated[int, Meta(ge=100, le=999)] | None = None
    body: Json = None
    rename: str | None = None
    drop_tp: list[int] = []
    drop_pp: list[tuple[int, int]] = []
    drop_dp: int | None = None
    addr: str | None = None
    add: dict[str, Json] = {}

    @property
    def complaint(self) -> str | None:
        if self.act == "hang" and self.s is None:
            return "hang needs s"
        if self.act == "status" and self.code is None:
            return "status needs code"
        if self.act == "status" and not isinstance(self.body, str | None):
            return "status needs a text for its body"
        return None


class PreRegistration(Struct, frozen=True, forbid_unknown_fields=True):
    engine_id: str
    dp_rank: Count
    tp_rank: Count
    pp_rank: Count
    addr: str


_RULES: Final[Mapping[str, type[Struct]]] = {
    "wire": WireRule,
    "engine": EngineRule,
    "bootstrap": BootstrapRule,
    "pre_register": PreRegistration,
}


def check_rules(rules: Mapping[str, Sequence[Json]]) -> None:
    """Raises ConfigError for the first that nobody could follow. `rules`: each kind's, by its key in a scenario."""
    for place, rule, form in _each(rules):
        read = _read(rule, form, place)
        complaint = getattr(read, "complaint", None)
        if complaint is not None:
            raise ConfigError(f"{place}: {complaint}")
        if getattr(read, "hex", None) is not None:
            _check_hex(read.hex, place)


def _each(rules: Mapping[str, Sequence[Json]]) -> Iterator[tuple[str, Json, type[Struct]]]:
    for name, form in _RULES.items():
        for index, rule in enumerate(rules[name]):
            yield f"scenario.{name}[{index}]", rule, form


def _read(value: Json, form: Any, where: str) -> Any:  # noqa: ANN401 - of that form
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_hex(text: str, where: str) -> None:
    try:
        bytes.fromhex(text)
    except ValueError as error:
        raise ConfigError(f"{where}: hex: {error}") from error
