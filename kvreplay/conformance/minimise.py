"""The smallest workload that still does something: what a difference between two engines is reported with.

Smaller is, in this order: fewer requests, fewer events, fewer settings, simpler prompts, smaller numbers.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvreplay.errors import KvReplayError

Fields: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]

MAX_TRIES: Final = 3000

_REQUIRED: Final = frozenset({"id", "prompt", "step", "num_gpu_blocks", "block_size", "type", "tokens", "method"})
_SHAPE: Final = frozenset({"groups", "mamba_cache_mode"})
"""Settings without which the others mean something else."""

_FLOORS: Final[Mapping[str, int]] = {
    "num_gpu_blocks": 2,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "max_model_len": 1,
    "max_tokens": 1,
    "arrive": 0,
    "step": 0,
    "recv_after": 0,
    "send_after": 0,
    "invalid_after": 0,
    "failed_after": 0,
    "defer": 1,
    "times": 1,
    "tokens": 1,
    "priority": 0,
    "external": 1,
}
"""Numbers that may shrink, and how far."""


def minimised(workload: Fields, still: Callable[[Fields], bool], *, max_tries: int = MAX_TRIES) -> Fields:
    """The least of what was tried for which `still` holds; it holds for `workload`, and is asked `max_tries` times."""
    return _Minimiser(workload, still, max_tries).run()


class _Minimiser:
    def __init__(self, workload: Fields, still: Callable[[Fields], bool], max_tries: int) -> None:
        self.best = copy.deepcopy(workload)
        self._still = still
        self._tries_left = max_tries

    def run(self) -> Fields:
        passes = (self._drop_requests, self._drop_events, self._drop_fields, self._plain_prompts, self._lower_numbers)
        while any(reduce() for reduce in passes) and self._tries_left:
            pass
        return self.best

    def _consider(self, candidate: Fields) -> bool:
        """The only place where the question is asked."""
        if not self._tries_left or candidate == self.best:
            return False
        self._tries_left -= 1
        try:
            holds = self._still(candidate)
        except KvReplayError:
            return False  # it is no workload any more
        if holds:
            self.best = candidate
        return holds

    # -- passes: each says whether it made progress ------------------------------------------------------------

    def _drop_requests(self) -> bool:
        return self._drop_items("requests", at_least=1)

    def _drop_events(self) -> bool:
        return self._drop_items("events", at_least=0)

    def _drop_items(self, name: str, *, at_least: int) -> bool:
        progress = False
        for index in reversed(range(len(self.best.get(name, ())))):
            if len(self.best[name]) > at_least:
                candidate = copy.deepcopy(self.best)
                del candidate[name][index]
                progress |= self._consider(candidate)
        return progress

    def _drop_fields(self) -> bool:
        progress = False
        for path in list(_optional_fields(self.best)):
            candidate = copy.deepcopy(self.best)
            owner = _at(candidate, path[:-1])
            if owner is not None and path[-1] in owner:
                del owner[path[-1]]
                progress |= self._consider(candidate)
        return progress

    def _plain_prompts(self) -> bool:
        """A prompt of one part, then the first half of it, then a token less."""
        progress = False
        for index, request in enumerate(self.best["requests"]):
            for prompt in _simpler_prompts(request["prompt"], 1000 * (index + 1)):
                candidate = copy.deepcopy(self.best)
                candidate["requests"][index]["prompt"] = prompt
                if self._consider(candidate):
                    progress = True
                    break
        return progress

    def _lower_numbers(self) -> bool:
        progress = False
        for path in list(_numbers(self.best)):
            value, floor = _at(self.best, path), _FLOORS[str(path[-1])]
            for lower in dict.fromkeys((floor, (value + floor) // 2, value - 1)):
                if floor <= lower < value:
                    candidate = copy.deepcopy(self.best)
                    _at(candidate, path[:-1])[path[-1]] = lower
                    if self._consider(candidate):
                        progress = True
                        break
        return progress


def _optional_fields(workload: Fields) -> Iterator[Path]:
    """Of the engine, the requests, and of what is inside these; what contains others first."""
    for path, owner in _owners(workload):
        for name in list(owner):
            if name not in _REQUIRED | _SHAPE:
                yield (*path, name)


def _numbers(workload: Fields) -> Iterator[Path]:
    for path, owner in _owners(workload):
        for name, value in owner.items():
            if name in _FLOORS and isinstance(value, int) and not isinstance(value, bool):
                yield (*path, name)


def _owners(workload: Fields) -> Iterator[tuple[Path, Fields]]:
    yield ("engine",), workload["engine"]
    for section in ("requests", "events"):
        for index, item in enumerate(workload.get(section, ())):
            yield (section, index), item
            for name in ("external", "load"):
                if isinstance(item.get(name), dict):
                    yield (section, index, name), item[name]
    for name in ("spec",):
        if isinstance(workload["engine"].get(name), dict):
            yield ("engine", name), workload["engine"][name]
    for index, group in enumerate(workload["engine"].get("groups", ())):
        yield ("engine", "groups", index), group


def _simpler_prompts(prompt: Any, first: int) -> Iterator[Any]:  # noqa: ANN401 - JSON
    """From the simplest on. `first`: of a ramp that no other request has."""
    parts: Sequence[Any] = prompt["cat"] if isinstance(prompt, dict) and "cat" in prompt else [prompt]
    length = sum(_length(part) for part in parts)
    if len(parts) > 1:
        yield {"ramp": [first, length]}
        yield from (part for part in parts if _length(part))
    for index, part in enumerate(parts):
        for shorter in dict.fromkeys((_length(part) // 2, _length(part) - 1)):
            rest = [_cut(part, shorter)] if shorter > 0 else []
            kept = [*parts[:index], *rest, *parts[index + 1 :]]
            if kept:
                yield kept[0] if len(kept) == 1 else {"cat": kept}


def _length(prompt: Any) -> int:  # noqa: ANN401 - JSON
    if isinstance(prompt, list):
        return len(prompt)
    if "cat" in prompt:
        return sum(_length(part) for part in prompt["cat"])
    return int((prompt.get("ramp") or prompt["const"])[1])


def _cut(prompt: Any, length: int) -> Any:  # noqa: ANN401 - JSON
    if isinstance(prompt, list):
        return prompt[:length]
    if "cat" in prompt:
        kept: list[Any] = []
        for part in prompt["cat"]:
            if length > 0:
                kept.append(_cut(part, min(length, _length(part))))
                length -= _length(part)
        return {"cat": kept}
    kind = "ramp" if "ramp" in prompt else "const"
    return {kind: [prompt[kind][0], length]}


def _at(document: Any, path: Path) -> Any:  # noqa: ANN401 - JSON
    """None where the way to it is gone."""
    for step in path:
        try:
            document = document[step]
        except (KeyError, IndexError, TypeError):
            return None
    return document
