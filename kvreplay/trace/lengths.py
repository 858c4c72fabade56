"""How long prompts and outputs are: fixed, lognormal, or as in a trace."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

from kvreplay.behaviour import nearest
from kvreplay.errors import ConfigError
from kvreplay.trace.reader import read_trace
from kvreplay.trace.workload import MAX_REQUEST_TOKENS, read_workload

FORMS: Final = "N, fixed:N, lognormal:median=N,sigma=X[,max=N] or trace:TRACE"


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int


@dataclass(frozen=True, slots=True)
class Lognormal:
    median: float
    sigma: float
    max: int | None = None


@dataclass(frozen=True, slots=True)
class Empirical:
    """Drawn from the requests of a trace. Prompts and outputs from one file are drawn together."""

    file: Path


Lengths: TypeAlias = Fixed | Lognormal | Empirical


def parse_lengths(flag: str, text: str, find_file: Callable[[str], Path] = Path) -> Lengths:
    """`text` as given for `flag`; `find_file`: a trace by its name. Raises ConfigError naming both."""
    form, separator, rest = text.partition(":")
    if not separator and text[:1].isascii() and text[:1] in "+-.0123456789":
        form, rest = "fixed", text
    elif not separator:
        raise ConfigError(f"{flag} {text}: expected {FORMS}{nearest(text, ['fixed', 'lognormal', 'trace'])}")
    if form == "fixed":
        return Fixed(int(_number(flag, text, "fixed", rest, at_least=1, is_whole=True)))
    if form == "lognormal":
        return _parse_lognormal(flag, text, rest)
    if form == "trace" and rest:
        return Empirical(find_file(rest))
    known = ["fixed", "lognormal", "trace"]
    raise ConfigError(f"{flag} {text}: expected {FORMS}{nearest(form, known) if form not in known else ''}")


def written(described: Mapping[str, Any]) -> str:
    """As `parse_lengths` reads it, from what a synthesised trace says of its lengths (`SynthOptions.metadata`)."""
    [(form, settings)] = described.items()
    if form == "fixed":
        return f"fixed:{settings['tokens']}"
    if isinstance(settings, Mapping):
        # Metadata is kept sorted by name.
        ordered = sorted(settings.items(), key=lambda item: ("median", "sigma", "max").index(item[0]))
        return f"{form}:{','.join(f'{name}={value:.12g}' for name, value in ordered)}"
    return f"{form}:{settings}"


def is_lengths(described: object) -> bool:
    return isinstance(described, Mapping) and list(described) in (["fixed"], ["lognormal"], ["trace"])


def _parse_lognormal(flag: str, text: str, rest: str) -> Lognormal:
    bounds: dict[str, tuple[float, bool]] = {"median": (1, False), "sigma": (0, False), "max": (1, True)}
    values: dict[str, float] = {}
    for setting in filter(None, rest.split(",")):
        name, separator, value = setting.partition("=")
        if name not in bounds or not separator:
            raise ConfigError(f"{flag} {text}: {setting!r} is no setting of lognormal{nearest(name, list(bounds))}")
        at_least, is_whole = bounds[name]
        values[name] = _number(flag, text, name, value, at_least=at_least, is_whole=is_whole)
    for name in ("median", "sigma"):
        if name not in values:
            raise ConfigError(f"{flag} {text}: {name} is missing, expected {FORMS}")
    maximum = int(values["max"]) if "max" in values else None
    return Lognormal(values["median"], values["sigma"], maximum)


def _number(flag: str, text: str, name: str, value: str, *, at_least: float, is_whole: bool) -> float:
    try:
        number = int(value) if is_whole else float(value)
    except ValueError:
        number = None
    if number is None or not at_least <= number <= MAX_REQUEST_TOKENS:
        kind = "a whole number" if is_whole else "a number"
        raise ConfigError(
            f"{flag} {text}: {name} is {value!r}, expected {kind} from {at_least:g} to {MAX_REQUEST_TOKENS}"
        )
    return number


def pair_drawer(
    prompts: Lengths, outputs: Lengths, prompt_rng: Random, output_rng: Random
) -> Callable[[], tuple[int, int]]:
    """Draws (prompt tokens, output tokens), each from its own generator."""
    if isinstance(prompts, Empirical) and prompts == outputs:
        pairs = _measured(prompts.file)
        return lambda: pairs[prompt_rng.randrange(len(pairs))]
    draw_prompt = drawer(prompts, prompt_rng, place=0)
    draw_output = drawer(outputs, output_rng, place=1)
    return lambda: (draw_prompt(), draw_output())


def drawer(lengths: Lengths, rng: Random, *, place: int = 0) -> Callable[[], int]:
    """Draws one length; of a trace's (prompt, output) pairs the one at `place`."""
    match lengths:
        case Fixed(tokens):
            return lambda: tokens
        case Lognormal(median, sigma, maximum):
            limit = MAX_REQUEST_TOKENS if maximum is None else maximum
            return lambda: _whole(rng.normalvariate(log(median), sigma), limit)
        case Empirical(file):
            pairs = _measured(file)
            return lambda: pairs[rng.randrange(len(pairs))][place]


def turns_drawer(turns: Lengths, rng: Random) -> Callable[[], int]:
    """Draws how many turns a session has; of a trace, as many as one of its sessions has."""
    if not isinstance(turns, Empirical):
        return drawer(turns, rng)
    counts = _turns_of_sessions(turns.file)
    return lambda: counts[rng.randrange(len(counts))]


def _turns_of_sessions(file: Path) -> list[int]:
    """In the order in which they begin. A request that names no session is one of its own."""
    counts: Counter[str | int] = Counter()
    for place, arrival in enumerate(read_workload(read_trace(file)).arrivals):
        session = arrival.params.get("session") if arrival.params else None
        counts[place if session is None else str(session)] += 1
    return list(counts.values())


def _whole(logarithm: float, limit: int) -> int:
    """As many tokens, from 1 to the limit. What is far beyond it is more than a float can be."""
    return limit if logarithm > log(limit) + 1 else min(max(round(exp(logarithm)), 1), limit)


def _measured(file: Path) -> list[tuple[int, int]]:
    arrivals = read_workload(read_trace(file)).arrivals
    return [(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals]
