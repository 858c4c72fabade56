"""What a switch is."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switch:
    """One named behaviour: what it models (a public PR or issue) and its value in each profile."""

    name: str
    values: Mapping[str, str]
    """Value → what the engine does then."""
    models: str
    """Where it is documented in public: PR, issue, or vLLM's file and function."""
    v0_33: str
    ideal: str
    v2026_08: str | None = None
    """Value in the dated profile `vllm-2026-08` (before #50388 and #50984); None: as 0.33."""


def switch(
    name: str, models: str, values: Mapping[str, str], v0_33: str, ideal: str, v2026_08: str | None = None
) -> Switch:
    for value in (v0_33, ideal, v2026_08 or v0_33):
        assert value in values, f"{name}: {value}"
    return Switch(name, values, models, v0_33, ideal, v2026_08)
