"""How long prompts and outputs are: fixed, lognormal, or as in a trace."""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

from kvreplay.behaviour import nearest
from kvreplay.errors import ConfigError
from kvreplay.trace.reader import read_trace
from kvreplay.trace.workload import MAX_REQUEST_TOKENS, read_workload

FORMS: Final = "N, fixed:N, lognormal:median=N,sigma=X[,max=N] or trace:FILE"


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


def parse_lengths(flag: str, text: str) -> Lengths:
    """`text` as given for `flag`. Raises ConfigError naming both."""
    form, separator, rest = text.partition(":")
    if not separator:
        form, rest = "fixed", text
    if form == "fixed":
        return Fixed(int(_number(flag, text, "fixed", rest, at_least=1, is_whole=True)))
    if form == "lognormal":
        return _parse_lognormal(flag, text, rest)
    if form == "trace" and rest:
        return Empirical(Path(rest))
    raise ConfigError(
        f"{flag} {text}: expected {FORMS}{nearest(form, ['fixed', 'lognormal', 'trace']) if separator else ''}"
    )


def _parse_lognormal(flag: str, text: str, rest: str) -> Lognormal:
    bounds: dict[str, tuple[float, bool]] = {"median": (1, False), "sigma": (0, False), "max": (1, True)}
    values: dict[str, float] = {}
    for setting in rest.split(","):
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
            return lambda: min(max(round(rng.lognormvariate(log(median), sigma)), 1), limit)
        case Empirical(file):
            pairs = _measured(file)
            return lambda: pairs[rng.randrange(len(pairs))][place]


def _measured(file: Path) -> list[tuple[int, int]]:
    arrivals = read_workload(read_trace(file)).arrivals
    return [(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals]
