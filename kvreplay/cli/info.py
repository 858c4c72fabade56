"""`kvreplay info`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreplay.cli.common import JsonOption, make_console, one_line, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def info(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace to describe.")], *, as_json: JsonOption = False
) -> None:
    """Say what is in TRACE: where it comes from, its requests and what they share, instances, events."""
    from kvreplay.trace.describe import describe
    from kvreplay.trace.reader import read_trace

    document = describe(read_trace(trace))
    if as_json:
        print_json(document)
        return
    console = make_console()
    for part in _parts(document):
        console.print(part)


def _parts(document: Mapping[str, Any]) -> "Sequence[RenderableType]":
    from rich.text import Text

    parts: list[RenderableType] = [_facts(document), Text()]
    workload = document["workload"]
    if workload["requests"]:
        parts += [_lengths(workload), Text()]
    if document["instances"]:
        parts += [_instances(document["instances"]), Text()]
    parts.append(_events(document["events"]))
    parts += [Text("note: ", style="yellow") + _plain(note) for note in _notes(document)]
    return parts


def _facts(document: Mapping[str, Any]) -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("trace", document["file"]),
        ("source", _source(document)),
        ("fingerprint", document["fingerprint"]),
        ("span", _span(document)),
        ("requests", _requests(document["workload"])),
        ("prefix sharing", _sharing(document["workload"])),
        ("config", _config(document["config"])),
        ("profile", document["profile"]),
        ("seed", document["seed"]),
        ("faults", _faults(document["faults"])),
        ("verdict", document["verdict"]),
    ):
        if value is not None:
            table.add_row(name, _plain(str(value)))
    return table


def _source(document: Mapping[str, Any]) -> str:
    source = document["source"]
    options = source.get("options") or {}
    shown = [f"{name}={_short(value)}" for name, value in options.items() if value not in (None, [], {})]
    parts = [str(source.get("tool", "unknown")), *shown]
    inputs = source.get("inputs") or []
    parts += [f"input {inputs[key]}" if isinstance(inputs, Mapping) else f"input {key}" for key in inputs]
    return f"{', '.join(parts)} (kvreplay {document['kvreplay_version']}, schema {document['schema_version']})"


def _short(value: object) -> str:
    """A setting in one line; what is not set is left out."""
    if isinstance(value, Mapping):
        parts = [
            f"{name}:{_short(inner)}" if isinstance(inner, Mapping) else f"{name}={_short(inner)}"
            for name, inner in value.items()
            if inner not in (None, {}, [])
        ]
        return ", ".join(parts)
    if isinstance(value, list | tuple):
        return " ".join(f"({_short(inner)})" if isinstance(inner, Mapping) else str(inner) for inner in value)
    return str(value)


def _span(document: Mapping[str, Any]) -> str:
    span = f"{document['span_s']:,.1f} s"
    started_ns = document["t0_unix_ns"]
    return span if started_ns is None else f"{span} from {started_ns / 1e9:.3f} (Unix time)"


def _requests(workload: Mapping[str, Any]) -> str:
    parts = [f"{workload['requests']:,} in {workload['arrival_span_s']:,.1f} s"]
    if workload["requests_per_s"] is not None:
        parts[0] += f" ({workload['requests_per_s']:.2f}/s)"
    if workload["sessions"]:
        parts.append(f"{workload['sessions']:,} sessions")
    if workload["client_aborts"]:
        parts.append(f"{workload['client_aborts']:,} given up by their client")
    return ", ".join(parts)


def _sharing(workload: Mapping[str, Any]) -> str | None:
    if workload["prefix_sharing"] is None:
        return None
    return (
        f"{workload['prefix_sharing']:.1%} of prompt tokens would hit an endless cache "
        f"({workload['shared_prompt_tokens']:,})"
    )


def _config(config: Mapping[str, Any] | None) -> str | None:
    if config is None:
        return None
    sections = [
        f"[{name}] {_short(value)}" if isinstance(value, Mapping) else f"{name} = {value}"
        for name, value in config.items()
    ]
    return "\n".join(sections)


def _faults(faults: Sequence[Any] | None) -> str | None:
    if faults is None:
        return None
    return "\n".join(_short(fault) for fault in faults) or "none"


def _lengths(workload: Mapping[str, Any]) -> "Table":
    columns = ("total", "p50", "p90", "p99", "max")
    table = _table("tokens", *columns)
    for name in ("prompt_tokens", "output_tokens"):
        table.add_row(name.removesuffix("_tokens"), *(f"{workload[name][column]:,}" for column in columns))
    return table


def _instances(instances: Sequence[Mapping[str, Any]]) -> "Table":
    columns = ("events", "finished", "crashes")
    table = _table("instance", *columns)
    for instance in instances:
        table.add_row(_plain(instance["id"]), *(f"{instance[column]:,}" for column in columns))
    return table


def _events(counts: Mapping[str, int]) -> "Table":
    table = _table("event", "rows")
    for kind, count in sorted(counts.items()):
        table.add_row(_plain(kind), f"{count:,}")
    return table


def _notes(document: Mapping[str, Any]) -> list[str]:
    notes = list(document["notes"])
    sizes = document["workload"]["prefix_hash_tokens"]
    if sizes:
        notes.append(
            f"a prefix hash stands for {' or '.join(map(str, sizes))} tokens: what prompts share below that is lost"
        )
    return notes


def _table(first: str, *numbers: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _plain(text: str) -> "Text":
    """What a file says, shown as it is: neither markup nor orders to the terminal."""
    from rich.text import Text

    return Text("\n".join(map(one_line, text.split("\n"))))
