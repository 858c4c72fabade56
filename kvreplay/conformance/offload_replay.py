"""Replays offloading vectors of the three forms: with a scheduler, of a CPU manager alone, and direct calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from kvreplay.conformance.compare import Difference, Step, first_differences
from kvreplay.conformance.offload_calls import expected_results, replayed_results
from kvreplay.conformance.offload_managers import expected_script, replayed_script
from kvreplay.conformance.offload_vectors import expected_steps, replayed_steps
from kvreplay.conformance.vector import Json
from kvreplay.errors import ConfigError

Document = Mapping[str, Json]

MANAGER_KIND: Final = "cpu_manager"
CALLS_KIND: Final = "offload_calls"


def replay_offload(document: Document) -> Sequence[Difference]:
    """What differs first. Raises ConfigError for a broken vector, UnsupportedVectorError for what is not modelled."""
    kind = document.get("kind")
    if kind == MANAGER_KIND:
        return _replay(document, {"config": dict, "ops": list, "results": list}, expected_script, replayed_script)
    if kind == CALLS_KIND:
        return _replay(document, {"cases": list}, expected_results, replayed_results)
    return _replay(document, {"workload": dict, "resolved": dict, "steps": list}, expected_steps, replayed_steps)


def _replay(
    document: Document,
    parts: Mapping[str, type],
    expected: Callable[[Document], list[dict[str, Json]]],
    replayed: Callable[[Document], Iterator[Step]],
) -> Sequence[Difference]:
    for name, form in parts.items():
        if not isinstance(document.get(name), form):
            raise ConfigError(f"{name}: expected {'an object' if form is dict else 'a list'}")
    try:
        wanted = expected(document)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"not recorded as a vector is: {type(error).__name__}: {error}") from error
    return first_differences(wanted, replayed(document))
