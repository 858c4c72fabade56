"""What a trace holds, for people: `trace.describe.describe` as text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from kvreplay.report.layout import Column, Line, Section, print_sections, table, title
from kvreplay.report.words import number, percent
from kvreplay.trace.lengths import is_lengths, written

_LEFT, _RIGHT = Column(""), Column("", "right")


def print_description(document: Mapping[str, Any], console: Console) -> None:
    sections = (
        _facts(document),
        _tokens(document["workload"]),
        _instances(document["instances"]),
        _events(document["events"]),
        _notes(document),
    )
    print_sections(console, sections)


def _facts(document: Mapping[str, Any]) -> Section:
    yield title(document["file"])
    workload = document["workload"]
    facts = {
        "source": _source(document),
        "fingerprint": document["fingerprint"],
        "span": _span(document),
        "requests": _requests(workload),
        "prefix sharing": _sharing(workload),
        "config": _config(document["config"]),
        "profile": document["profile"],
        "seed": document["seed"],
        "faults": _faults(document["faults"]),
        "verdict": document["verdict"],
    }
    rows = [
        (name if place == 0 else "", line)
        for name, value in facts.items()
        if value is not None
        for place, line in enumerate([value] if isinstance(value, str | int) else value)
    ]
    yield table([_LEFT, Column("", fold=True)], [(name, str(line)) for name, line in rows])


def _source(document: Mapping[str, Any]) -> str:
    source = document["source"]
    options = source.get("options") or {}
    shown = [f"{name}={_option(value)}" for name, value in options.items() if value not in (None, [], {})]
    parts = [str(source.get("tool", "unknown")), *shown]
    inputs = source.get("inputs") or []
    parts += [f"input {inputs[key]}" if isinstance(inputs, Mapping) else f"input {key}" for key in inputs]
    return f"{', '.join(parts)} (kvreplay {document['kvreplay_version']}, schema {document['schema_version']})"


def _option(value: Any) -> str:  # noqa: ANN401 - JSON is whatever it is
    """Lengths as `kvreplay synth` takes them."""
    try:
        return written(value) if is_lengths(value) else _short(value)
    except (KeyError, TypeError, ValueError):  # another tool's, or a later version's
        return _short(value)


def _short(value: object) -> str:
    """A setting in one line; what is not set is left out."""
    if isinstance(value, Mapping):
        parts = [
            f"{name}:{_short(inner)}" if isinstance(inner, Mapping) else f"{name}={_short(inner)}"
            for name, inner in value.items()
            if inner not in (None, "", {}, [])
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
    parts = [f"{number(workload['requests'])} in {workload['arrival_span_s']:,.1f} s"]
    if workload["requests_per_s"] is not None:
        parts[0] += f" ({workload['requests_per_s']:.2f}/s)"
    if workload["sessions"]:
        parts.append(f"{number(workload['sessions'])} sessions")
    if workload["client_aborts"]:
        parts.append(f"{number(workload['client_aborts'])} given up by their client")
    return ", ".join(parts)


def _sharing(workload: Mapping[str, Any]) -> str | None:
    if workload["prefix_sharing"] is None:
        return None
    share = percent(workload["prefix_sharing"])
    return f"{share} of prompt tokens would hit an endless cache ({number(workload['shared_prompt_tokens'])})"


def _config(config: Mapping[str, Any] | None) -> list[str] | None:
    """A line for each table that is not empty."""
    if config is None:
        return None
    return [
        f"[{name}] {_short(value)}" if isinstance(value, Mapping) else f"{name} = {value}"
        for name, value in config.items()
        if value != {}
    ]


def _faults(faults: Sequence[Any] | None) -> list[str] | None:
    if faults is None:
        return None
    return [_short(fault) for fault in faults] or ["none"]


def _tokens(workload: Mapping[str, Any]) -> Section:
    if not workload["requests"]:
        return
    yield title("Tokens")
    columns = ("total", "p50", "p90", "p99", "max")
    rows = [
        (name.removesuffix("_tokens"), *(number(workload[name][column]) for column in columns))
        for name in ("prompt_tokens", "output_tokens")
    ]
    yield table([_LEFT, *(Column(name, "right") for name in columns)], rows)


def _instances(instances: Sequence[Mapping[str, Any]]) -> Section:
    if not instances:
        return
    yield title("Instances")
    columns = ("events", "finished", "crashes")
    rows = [(instance["id"], *(number(instance[column]) for column in columns)) for instance in instances]
    yield table([Column("instance", fold=True), *(Column(name, "right") for name in columns)], rows)


def _events(counts: Mapping[str, int]) -> Section:
    yield title("Events", number(sum(counts.values())))
    yield table([_LEFT, _RIGHT], [(kind, number(count)) for kind, count in sorted(counts.items())])


def _notes(document: Mapping[str, Any]) -> Iterator[Line]:
    notes = list(document["notes"])
    sizes = document["workload"]["prefix_hash_tokens"]
    if sizes:
        chunk = " or ".join(map(str, sizes))
        notes.append(f"a prefix hash stands for {chunk} tokens: what prompts share below that is lost")
    for note in notes:
        yield Line(f"note: {note}", style="yellow")
