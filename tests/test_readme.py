"""The README against what it describes: parts that are written from the code, and tables that are held against it.

Run as a program it writes those parts again: python -m tests.test_readme
"""

import re
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from kvreplay.behaviour import DEFAULT_PROFILE, PROFILES, SWITCHES
from kvreplay.checkers import finding
from kvreplay.cli.app import COMMANDS, app
from kvreplay.cli.common import ProcessStatus
from kvreplay.events import DETAIL_LEVELS, KINDS
from kvreplay.faults.catalogue import catalogue
from kvreplay.faults.registry import VERBS, settings_of
from kvreplay.faults.spec import COMMON_KEYS, default_of, write_setting
from kvreplay.faults.verb import MessageVerb
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.replay import config_load
from kvreplay.replay.cluster import topology_of
from kvreplay.replay.config_load import config_from_document, load_config, preset_names, read_document
from kvreplay.replay.network import NETWORK_PRESETS
from kvreplay.replay.presets import MODEL_PRESETS, packaged_names
from kvreplay.replay.timing import TIMING_PRESETS
from kvreplay.report.faults import kind_of, sections_of
from kvreplay.report.profiles import told_apart, where
from kvreplay.trace.schema import DICTIONARY, METADATA_KEYS, SCHEMA
from kvreplay.verdict.exit_status import ExitStatus
from kvreplay.verdict.model import Summary
from tests.test_layers import LAYERS

PATH = Path(__file__).parents[1] / "README.md"
README = PATH.read_text()

_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)((?!<!-- generated).)*?(<!-- end -->)", re.DOTALL)


def table(*rows: tuple[str, ...]) -> str:
    """Markdown; the first row is the head."""
    head, *body = rows
    lines = [head, tuple("---" for _ in head), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`"


# -- parts that are written from the code -------------------------------------------------------------------------


def options() -> str:
    """Each command with its arguments and options."""
    parts = []
    for name, command in commands():
        rows = [(_usage(option), _help(option)) for option in command.params]
        parts.append(f"**`kvreplay {name}`**: {_sentence(command.help)}\n\n{table(('', ''), *rows)}")
    return "\n\n".join(parts)


def commands() -> Iterator[tuple[str, Any]]:
    group: Any = typer.main.get_command(app)
    for name, _ in COMMANDS:
        command = group.commands[name]
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {sub}", command.commands[sub]) for sub in inner)


def _usage(option: Any) -> str:  # noqa: ANN401 - typer's classes differ between its versions
    if option.param_type_name == "argument":
        return code(option.metavar)
    value = "" if getattr(option, "is_flag", False) else f" {option.metavar}"
    return ", ".join(code(name + value) for name in sorted(option.opts, key=len))


def _help(option: Any) -> str:  # noqa: ANN401
    text = option.help.replace("\\[", "[")
    is_plain = option.required or option.default is None or option.default is False
    return text if is_plain else f"{text} Default: {code(str(option.default))}."


def _sentence(text: str) -> str:
    first = text.split("\n")[0]
    return first[:1].lower() + first[1:]


def faults() -> str:
    parts = []
    for name, rows in sections_of(catalogue().values()):
        head = ("fault", "models", "how it acts", "settings", "what must survive it")
        lines = [(code(row.name), row.models, _act(row.verb, row.target), _settings(row), row.survives) for row in rows]
        parts.append(f"**{name}**\n\n{table(head, *lines)}")
    return "\n\n".join(parts)


def _act(verb: str, target: str) -> str:
    return code(verb) if target == verb else f"{code(verb)} on {code(target)}"


def _settings(row: Any) -> str:  # noqa: ANN401
    lines = []
    for name, setting in settings_of(row).items():
        kind = kind_of(setting)
        default = write_setting(setting, default_of(setting))
        lines.append(f"{code(f'{name}={default}')} {setting.doc}" + (f" ({kind})" if kind else ""))
    return "; ".join(lines)


def fault_keys() -> str:
    return table(("key", "means"), *((code(key), meaning.doc) for key, meaning in COMMON_KEYS.items()))


def verbs() -> str:
    return table(("verb", "does"), *((code(verb.name), verb.doc) for verb in VERBS.values()))


def profiles() -> str:
    return table(("profile", "differs from the default in"), *((code(name), _differs(name)) for name in PROFILES))


def _differs(name: str) -> str:
    return "nothing: it is the default" if name == DEFAULT_PROFILE else code(told_apart(name)).replace(", ", "`, `")


def behaviours() -> str:
    rows = [
        (code(name), code(value), meaning + _where(name, value), switch.models if first else "")
        for name, switch in SWITCHES.items()
        for first, (value, meaning) in zip([True, *[False] * len(switch.values)], switch.values.items(), strict=False)
    ]
    named = [(name if models else "", value, meaning, models) for name, value, meaning, models in rows]
    return table(("behaviour", "value", "the engine then", "models"), *named)


def _where(name: str, value: str) -> str:
    place = where(name, value)
    return f" (**{place}**)" if place else ""


def kinds() -> str:
    level_of = {number: level for level, number in DETAIL_LEVELS.items()}
    return table(
        ("kind", "detail", "means"),
        *((code(kind), level_of[spec.detail], spec.meaning) for kind, spec in KINDS.items()),
    )


def models() -> str:
    rows = [
        (code(name), ", ".join(_group(group) for group in preset.groups), f"{preset.max_model_len:,}", preset.source)
        for name, preset in MODEL_PRESETS.items()
    ]
    return table(("model", "KV cache groups (block size)", "max_model_len", "from"), *rows)


def _group(group: KVCacheGroupSpec) -> str:
    return f"{group.kind} ({group.block_size:,})"


def timings() -> str:
    numbers = ("fixed_ns", "per_prefill_token_ps", "per_request_ns", "per_kv_token_ps")
    rows = [
        (code(name), *(f"{getattr(preset.timing, key):,}" for key in numbers), preset.source)
        for name, preset in TIMING_PRESETS.items()
    ]
    return table(("timing", *numbers, "from"), *rows)


def networks() -> str:
    numbers = ("latency_ns", "bandwidth_bytes_per_s")
    rows = [
        (code(name), *(f"{getattr(preset.link, key):,}" for key in numbers), preset.source)
        for name, preset in NETWORK_PRESETS.items()
    ]
    return table(("network", *numbers, "from"), *rows)


PARTS: dict[str, Callable[[], str]] = {
    "options": options,
    "models": models,
    "timings": timings,
    "networks": networks,
    "faults": faults,
    "fault-keys": fault_keys,
    "verbs": verbs,
    "profiles": profiles,
    "behaviours": behaviours,
    "kinds": kinds,
}


def rewritten(text: str) -> str:
    return _PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[4]}", text)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_as_the_code_says(name: str) -> None:
    (found,) = [match[0] for match in _PART.finditer(README) if match[2] == name]
    assert found == rewritten(found), "write it again: python -m tests.test_readme"


# -- tables that are held against the code ------------------------------------------------------------------------


def chapter(title: str) -> str:
    """The text under a heading, up to the next one of the same or a higher level."""
    (level, rest) = re.findall(rf"^(#+) {re.escape(title)}\n(.*)", README, re.DOTALL | re.MULTILINE)[0]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """What stands in backticks at the start of each row of its tables."""
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_every_command_has_a_row(name: str) -> None:
    assert re.search(rf"^\| `{name}\b", chapter("Commands"), re.MULTILINE)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_row(name: str) -> None:
    assert f"\n| `{name}` |" in README


@pytest.mark.parametrize("name", packaged_names("traces", ".parquet"))
def test_every_canned_trace_is_named(name: str) -> None:
    assert f"`{name}`" in README


def test_the_example_of_a_configuration_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(\[model\].*?)```", README, re.DOTALL)
    path = tmp_path / "example.toml"
    path.write_text(example)
    config = config_from_document(read_document(str(path)), "README")
    assert config.role("prefill").scheduler.max_num_batched_tokens == 16_384


def test_every_key_of_a_configuration_has_a_row() -> None:
    of_groups = [f"model.groups[].{field.name}" for field in fields(KVCacheGroupSpec)]
    assert sorted(first_cells(chapter("Keys"))) == sorted([*config_load._settable(), *of_groups])


def test_every_fault_that_is_listed_can_be_carried_out() -> None:
    commands = topology_of(load_config("mooncake-1p1d").config, None).commands
    acts = {name: VERBS[row.verb] for name, row in catalogue().items()}
    assert [
        name for name, verb in acts.items() if not isinstance(verb, MessageVerb) and verb.name not in commands
    ] == []


def test_every_exit_status_has_a_row() -> None:
    found = {int(status) for status in re.findall(r"^\| (\d+) \|", chapter("Exit status"), re.MULTILINE)}
    assert found == {*ExitStatus, *ProcessStatus}


def test_every_law_has_a_row() -> None:
    laws = {value for name, value in vars(finding).items() if name.isupper() and isinstance(value, str)}
    assert set(first_cells(chapter("Laws"))) == laws


def json_keys(kind: Any = Summary, prefix: str = "") -> Iterator[str]:  # noqa: ANN401
    """Every key of the summary: `requests.total`, `stalled[].request_id`; maps of counts are one key."""
    hints = typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        arguments = typing.get_args(hint)
        inner = [each for each in (hint, *arguments) if isinstance(each, type) and issubclass(each, msgspec.Struct)]
        if not inner:
            yield name
        else:
            yield from json_keys(inner[0], f"{name}[]." if typing.get_origin(hint) is list else f"{name}.")


def test_every_json_key_has_a_row() -> None:
    keys = [key for key in json_keys() if not key.startswith("baseline.")]
    rows = first_cells(chapter("A run"))
    assert [key for key in keys if key not in rows] == []
    assert [row for row in rows if row not in keys] == ["baseline"]


_TYPES = {DICTIONARY: "string"}


def test_every_column_has_a_row_with_its_type() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w<>]+) \|", chapter("Columns"), re.MULTILINE)
    columns = [(column.name, _TYPES.get(column.type, re.sub(r"\w+: ", "", str(column.type)))) for column in SCHEMA]
    assert rows == columns


def test_every_key_of_the_file_metadata_is_named() -> None:
    assert all(f"`{key}`" in chapter("Trace schema") for key in (*METADATA_KEYS, "schema_version", "kvreplay_version"))


def test_the_layers_are_those_that_a_test_enforces() -> None:
    (block,) = re.findall(r"```\n(errors  ids.*?)```", chapter("Architecture"), re.DOTALL)
    lines = [line.split("   ")[0].split() for line in block.splitlines()]
    assert [set(line) for line in lines] == [layer for layer in LAYERS if layer != {"__main__"}]


if __name__ == "__main__":
    PATH.write_text(rewritten(README))
    sys.exit(0)
