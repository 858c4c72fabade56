"""Plan files: TOML with one `[[fault]]` table per fault, `name` and the keys that `--inject` takes."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvreplay.behaviour import nearest
from kvreplay.errors import ConfigError
from kvreplay.faults.spec import Fault, build_fault, keys_of, parse_spec
from kvreplay.user_files import read_toml

MAX_PLAN_BYTES: Final = 1 << 20
MAX_FAULTS: Final = 1000

FaultPlan = tuple[Fault, ...]
"""Faults in the order in which they see a message."""


def make_plan(specs: Sequence[str] = (), plan_file: Path | None = None) -> FaultPlan:
    """The faults of a plan file, then those of `--inject`. Raises ConfigError in one line that names the place."""
    from_file = load_plan(plan_file) if plan_file is not None else ()
    plan = (*from_file, *(parse_spec(spec) for spec in specs))
    if len(plan) > MAX_FAULTS:
        raise ConfigError(f"--inject: at most {MAX_FAULTS} faults, got {len(plan)}")
    _check_distinct(plan)
    return plan


def _check_distinct(plan: FaultPlan) -> None:
    """Two that are the same draw the same luck: the second finds nothing left, and would be reported with the first."""
    first_of: dict[Hashable, Fault] = {}
    for fault in plan:
        first = first_of.setdefault(fault.identity, fault)
        if first is not fault:
            where = f"{first.origin} is" if first.origin != fault.origin else "it is"
            hint = ", or an id of its own" if "id" in keys_of(fault.row) else ""
            raise ConfigError(f"{fault.origin}: the same fault twice, {where} there already; expected other keys{hint}")


def load_plan(path: Path) -> FaultPlan:
    tables = _fault_tables(read_toml(path, str(path), MAX_PLAN_BYTES, "plan"), path)
    return tuple(_fault_from(table, f"{path}: fault {number}") for number, table in enumerate(tables, start=1))


def _fault_tables(document: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    for key in document:
        if key != "fault":
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, ['fault'])}; expected [[fault]] tables")
    tables = document.get("fault", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: fault must be [[fault]] tables")
    if not tables:
        raise ConfigError(f"{path}: has no [[fault]] table")
    if len(tables) > MAX_FAULTS:
        raise ConfigError(f"{path}: at most {MAX_FAULTS} faults, got {len(tables)}")
    return tables


def _fault_from(table: Mapping[str, Any], origin: str) -> Fault:
    name = table.get("name")
    if not isinstance(name, str):
        meant = [key for key in table if key != "name" and nearest(key, ["name"])]
        hint = f"; there is {meant[0]!r}, did you mean 'name'?" if meant else ""
        raise ConfigError(f"{origin}: needs name, a text{hint}")
    return build_fault(name, _pairs(table, origin), origin)


def _pairs(table: Mapping[str, Any], origin: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if key != "name":
            yield key, ",".join(_scalar(part, key, origin) for part in _as_list(value))


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _scalar(value: object, key: str, origin: str) -> str:
    """The text that the same value has in `--inject`."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        text = str(value)
        if text.isprintable():
            return text
    raise ConfigError(f"{origin}: {key} must be a number or a text, got {value!r:.60}")
