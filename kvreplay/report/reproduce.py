"""The command line that gives the same run again."""

import shlex
from collections.abc import Iterator, Sequence

from kvreplay.faults.values import format_float
from kvreplay.verdict.model import DEFAULT_FAIL_ON, InEffect

_DEFAULTS = InEffect(trace="", config="", config_origin="", profile="", profile_origin="", policy="", policy_origin="")


def command_lines(in_effect: InEffect, width: int) -> list[str]:
    """As short as it can be: what came from elsewhere than the command line comes from there again.

    Parted between options where it is longer than `width`, as a shell takes it.
    """
    lines: list[str] = []
    for words in (["kvreplay", "run", in_effect.trace], *_options(in_effect)):
        part = shlex.join(words)
        if lines and len(lines[-1]) + len(part) + len("  \\") <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"  {part}" if lines else part)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _options(in_effect: InEffect) -> Iterator[list[str]]:
    for flag, value, origin in (
        ("--config", in_effect.config, in_effect.config_origin),
        ("--profile", in_effect.profile, in_effect.profile_origin),
        ("--policy", in_effect.policy, in_effect.policy_origin),
    ):
        if basis(origin) == flag:
            yield [flag, value]
    yield from _each("--set", in_effect.settings)
    yield from _each("--behaviour", in_effect.behaviours)
    yield from _each("--plan", [in_effect.plan] if in_effect.plan else [])
    yield from _each("--inject", in_effect.injected)
    if in_effect.limit is not None:
        yield ["--limit", str(in_effect.limit)]
    if in_effect.fail_on != DEFAULT_FAIL_ON:
        yield ["--fail-on", ",".join(in_effect.fail_on) or "none"]
    if in_effect.overdue_after_s != _DEFAULTS.overdue_after_s:
        yield ["--overdue-after", format_float(in_effect.overdue_after_s)]
    if in_effect.time_scale is not None:
        yield ["--transport", in_effect.transport]
        yield ["--time-scale", format_float(in_effect.time_scale)]
    yield ["--seed", str(in_effect.seed)]


def basis(origin: str) -> str:
    """Where a choice came from, without the flags that changed it: they have lines of their own."""
    return origin.split(" --")[0]


def _each(flag: str, values: Sequence[str]) -> Iterator[list[str]]:
    for value in values:
        yield [flag, value]
