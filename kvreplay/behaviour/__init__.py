"""Known misbehaviour as data: named switches, and the profiles that set them.

`SWITCHES` is the only vocabulary. A switch is read in one place, mostly where a strategy is chosen at
construction; no code compares versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from kvreplay.behaviour.cluster import CLUSTER
from kvreplay.behaviour.engine import ENGINE
from kvreplay.behaviour.mooncake import MOONCAKE
from kvreplay.behaviour.multi import MULTI
from kvreplay.behaviour.offload import OFFLOAD
from kvreplay.behaviour.switch import Switch
from kvreplay.errors import ConfigError

SWITCHES: Final[dict[str, Switch]] = {
    switch.name: switch for switch in (*CLUSTER, *ENGINE, *MOONCAKE, *OFFLOAD, *MULTI)
}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The value of every switch, and the profile it started from."""

    profile: str
    switches: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.switches[name]

    def with_switch(self, assignment: str) -> "Behaviour":
        """One `NAME=VALUE` from the command line, on top. Raises ConfigError naming the nearest known one."""
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--behaviour {assignment}: expected NAME=VALUE")
        switch = SWITCHES.get(name)
        if switch is None:
            hint = nearest(name, SWITCHES, "; kvreplay profiles lists them")
            raise ConfigError(f"--behaviour {assignment}: no switch {name!r}{hint}")
        if value not in switch.values:
            raise ConfigError(f"--behaviour {assignment}: {name} is one of {', '.join(switch.values)}, not {value!r}")
        return Behaviour(self.profile, {**self.switches, name: value})


def nearest(word: str, known: Mapping[str, object] | list[str], otherwise: str = "") -> str:
    """`; did you mean 'x'?` for the closest known word; if none is close, what else to say."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else otherwise


def _profiles() -> dict[str, Behaviour]:
    base = {name: switch.v0_33 for name, switch in SWITCHES.items()}

    def derived(profile: str, **changes: str) -> Behaviour:
        return Behaviour(profile, {**base, **changes})

    return {
        "vllm-0.33": derived("vllm-0.33"),
        "pre-50388": derived("pre-50388", hybrid_failure="unpack_crash"),
        "post-50388": derived("post-50388", hybrid_failure="whole_request"),
        "pre-50984": derived("pre-50984", mooncake_failure="silent"),
        "post-50984": derived("post-50984", mooncake_failure="report"),
        "pre-offload-boundary": derived(
            "pre-offload-boundary", offload_boundary="from-zero", offload_state_below_mark="unhashed"
        ),
        "post-offload-boundary": derived(
            "post-offload-boundary", offload_boundary="from-computed", offload_state_below_mark="unhashed"
        ),
        "vllm-2026-08": Behaviour(
            "vllm-2026-08", {name: switch.v2026_08 or switch.v0_33 for name, switch in SWITCHES.items()}
        ),
        "ideal": Behaviour("ideal", {name: switch.ideal for name, switch in SWITCHES.items()}),
    }


PROFILES: Final[dict[str, Behaviour]] = _profiles()
DEFAULT_PROFILE: Final = "vllm-0.33"


def profile(name: str, flag: str = "--profile") -> Behaviour:
    """The profile of this name. Raises ConfigError naming the flag that gave it, and the nearest known one."""
    behaviour = PROFILES.get(name)
    if behaviour is None:
        hint = nearest(name, PROFILES, f", expected one of {', '.join(PROFILES)}")
        raise ConfigError(f"{flag} {name}: unknown profile{hint}")
    return behaviour
