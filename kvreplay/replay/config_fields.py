"""Typed reading of one configuration table into a frozen record: unknown keys refused, types checked."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kvreplay.behaviour import nearest
from kvreplay.errors import ConfigError

T = TypeVar("T")

_MAX_NUMBER: Final = (1 << 53) - 1
_NAMES: Final = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_BOOLEANS: Final = {"true": True, "false": False}


def field_types(record: type, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Key → type, in order; `without`: fields that do not come from this table."""
    hints = get_type_hints(record)
    return {item.name: hints[item.name] for item in fields(record) if item.name not in without}


def build(record: type[T], table: Mapping[str, Any], where: str, *, extra: Mapping[str, Any] | None = None) -> T:
    """`record` from a table of plain values. `extra`: fields with values from elsewhere. Raises ConfigError.

    `where` opens every message about a key, for instance `x.toml: [scheduler]`.
    """
    extra = extra or {}
    hints = field_types(record, without=tuple(extra))
    check_keys(table, hints, where)
    values = {name: convert(table[name], hints[name], f"{where} {name}") for name in hints if name in table}
    for item in fields(record):  # type: ignore[arg-type] # every record is a dataclass
        required = item.default is MISSING and item.default_factory is MISSING
        if required and item.name in hints and item.name not in values:
            raise ConfigError(f"{where} {item.name}: missing")
    return record(**values, **extra)


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    names = list(known)
    for key in table:
        if key not in names:
            hint = nearest(key, names, f"; known are {', '.join(names)}")
            raise ConfigError(f"{where} {key}: unknown key{hint}")


def check_table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a table, got {shown(value)}")
    return value


def convert(value: Any, hint: Any, where: str) -> Any:  # noqa: ANN401 - the point of it is to find out
    """`value` as `hint` wants it, or ConfigError."""
    if get_origin(hint) in (Union, UnionType):
        return _convert_optional(value, hint, where)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value not in choices:
            expected = f"{where}: expected one of {', '.join(choices)}, got {shown(value)}"
            raise ConfigError(expected + (nearest(value, list(choices)) if isinstance(value, str) else ""))
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            what = "an array of tables" if is_dataclass(get_args(hint)[0]) else "an array of numbers"
            raise ConfigError(f"{where}: expected {what}, got {shown(value)}")
        return tuple(convert(item, get_args(hint)[0], f"{where}[{index}]") for index, item in enumerate(value))
    if is_dataclass(hint):
        return build(hint, check_table(value, where), where)  # type: ignore[arg-type] # a class, not an instance
    return _convert_scalar(value, hint, where)


def parse_text(text: str, hint: Any, where: str) -> Any:  # noqa: ANN401
    """A value from the command line, as `hint` wants it: `512`, `0.5`, `true`, `none`, a word, numbers with commas."""
    arguments = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if NoneType in arguments and text == "none":
        return None
    scalar = next(argument for argument in arguments if argument is not NoneType)
    if get_origin(scalar) is tuple:
        return [parse_text(part, get_args(scalar)[0], where) for part in text.split(",")]
    value: Any = text
    try:
        if scalar is int:
            value = int(text)
        elif scalar is float:
            value = float(text)
        elif scalar is bool:
            value = _BOOLEANS.get(text, text)
    except ValueError:
        pass  # `convert` words the error
    return convert(value, hint, where)


def shown(value: object) -> str:
    """A value in an error message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _convert_optional(value: Any, hint: Any, where: str) -> Any:  # noqa: ANN401
    # TOML has no null.
    if value is None or value == "none":
        return None
    (inner,) = (argument for argument in get_args(hint) if argument is not NoneType)
    return convert(value, inner, where)


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:  # noqa: ANN401
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where}: expected {_NAMES[hint]}, got {shown(value)}")
    if isinstance(value, int | float) and not -_MAX_NUMBER <= value <= _MAX_NUMBER:  # NaN is not
        raise ConfigError(f"{where}: {shown(value)} is out of range")
    return value
