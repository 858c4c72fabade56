"""CPU manager vectors: a script of calls, and what the real manager answered and held after each."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from kvreplay.conformance.vector import Json
from kvreplay.connectors.offloading.arc import ARCPolicy
from kvreplay.connectors.offloading.arrays import NO_KEYS, ChunkIds, Keys
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.lru import LRUPolicy
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.errors import ConfigError, EngineFatal

LETTERS = {
    LookupResult.HIT: "H",
    LookupResult.HIT_PENDING: "P",
    LookupResult.RETRY: "R",
    LookupResult.MISS: "M",
}
_MAX_GROUPS = 16
_NO_POSITIONS = "nopos"
_ANSWERED = ("lookup", "store", "load", "events")
"""Operations that return something."""


class KeyNames(Protocol):
    def names(self, keys: Keys) -> list[str]:
        """Each key as `OWNER@END/GROUP`."""
        ...


class Labels:
    """Names, and the keys made up for them."""

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._prefixes: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def keys(self, names: list[str], *, positioned: bool = True) -> Keys:
        keys = np.array([self._key(name) for name in names], np.int64)
        if positioned and names:
            self._space.note(keys, np.array([_end_of(name) for name in names], np.int64))
        return keys

    def names(self, keys: Keys) -> list[str]:
        return [self._names[key] for key in keys.tolist()]

    def _key(self, name: str) -> int:
        prefix, _, group = name.rpartition("/")
        index = self._prefixes.setdefault(prefix, len(self._prefixes))
        key = index * self._space.num_groups + int(group)
        self._names[key] = name
        return key


def _end_of(name: str) -> int:
    """The number after `@`, or 0 for a name without."""
    _, found, place = name.partition("@")
    return int(place.partition("/")[0]) if found else 0


def manager_state(manager: CPUOffloadingManager, labels: KeyNames) -> dict[str, Any]:
    """Chunks as `[key, chunk, references]`: LRU from the next victim on, ARC its four lists and target."""
    chunks = manager.chunks

    def rows(chunk_ids: ChunkIds | list[int]) -> list[list[Any]]:
        ids = np.asarray(chunk_ids, np.int64)
        columns = labels.names(chunks.keys[ids]), ids.tolist(), chunks.ref_counts[ids].tolist()
        return [list(row) for row in zip(*columns, strict=True)]

    state: dict[str, Any] = {}
    policy = manager.policy
    if isinstance(policy, ARCPolicy):
        state["t1"], state["t2"] = rows(list(policy.t1.values())), rows(list(policy.t2.values()))
        for name, ghosts in (("b1", policy.b1), ("b2", policy.b2)):
            state[name] = labels.names(np.array(list(ghosts), np.int64))
        state["p"] = round(policy.target_t1_size, 6)
    else:
        assert isinstance(policy, LRUPolicy)
        state["lru"] = rows(policy.ranking())
    return state


def counts_of(manager: CPUOffloadingManager, labels: KeyNames) -> list[list[Any]] | None:
    """The threshold tracker, oldest first."""
    if manager.counts is None:
        return None
    counts = manager.counts.counts
    return [[name, count] for name, count in zip(labels.names(np.array(list(counts))), counts.values(), strict=True)]


def expected_script(document: Mapping[str, Json]) -> list[dict[str, Json]]:
    """The recorded answers and states, one step for each operation."""
    return [
        {"k": record["i"], **{name: value for name, value in record.items() if name != "i"}}
        for record in document["results"]
    ]


def replayed_script(document: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    """The same of our manager. A state is left out where it is the last one still."""
    run = _Run(document["config"])
    last: dict[str, Json] | None = None
    for index, op in enumerate(document["ops"]):
        record: dict[str, Json] = {"k": index}
        try:
            answer = run.perform(op)
        except EngineFatal as death:
            yield {**record, "error": death.exception}
            return
        if op[0] in _ANSWERED:
            record["res"] = answer
        state = run.state()
        if state != last:
            record["st"] = last = state
        yield record


class _Run:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.space = KeySpace(_MAX_GROUPS)
        self.labels = Labels(self.space)
        self.manager = CPUOffloadingManager(
            config["num_chunks"],
            self.space,
            eviction_policy=config.get("policy", "lru"),
            store_threshold=config.get("store_threshold", 0),
            max_tracker_size=config.get("max_tracker_size", 64_000),
            enable_events=True,
        )
        self.contexts: dict[str, RequestContext] = {}

    def state(self) -> dict[str, Any]:
        chunks = self.manager.chunks
        state = manager_state(self.manager, self.labels)
        state["free"], state["fl"] = chunks.num_free, chunks.free_list.tolist()
        state["evictable"], state["write_pending"] = chunks.num_evictable, chunks.num_write_pending
        counts = counts_of(self.manager, self.labels)
        if counts is not None:
            state["counts"] = counts
        return state

    def perform(self, op: list[Any]) -> Any:  # noqa: ANN401 - JSON
        name, *arguments = op
        manager = self.manager
        context = self._context(arguments[0]) if arguments else None
        keys = self._keys(op) if len(arguments) > 1 else NO_KEYS
        if context is None:
            return self._events() if name == "events" else manager.reset_cache()
        match name:
            case "new":
                manager.on_new_request(context)
            case "lookup":
                return [LETTERS[manager.lookup(key, context)] for key in keys.tolist()]
            case "store":
                return self._store(keys, context)
            case "stored":
                manager.complete_store(keys, context, success=arguments[2] is True if len(arguments) > 2 else True)
            case "load":
                return manager.prepare_load(keys, context).tolist()
            case "loaded":
                manager.complete_load(keys, context)
            case "touch":
                manager.touch(keys, context)
            case "finish":
                manager.on_request_finished(context)
            case _:
                raise ConfigError(f"ops: unknown operation {name!r}")
        return None

    def _context(self, req_id: str) -> RequestContext:
        return self.contexts.setdefault(req_id, RequestContext(req_id))

    def _keys(self, op: list[Any]) -> Keys:
        return self.labels.keys(op[2], positioned=op[-1] != _NO_POSITIONS)

    def _store(self, keys: Keys, context: RequestContext) -> dict[str, Any] | None:
        plan = self.manager.prepare_store(keys, context)
        if plan is None:
            return None
        names = self.labels.names
        return {"keys": names(plan.keys), "chunks": plan.chunk_ids.tolist(), "evicted": names(plan.evicted)}

    def _events(self) -> list[list[Any]]:
        return [
            ["removed" if event.is_removal else "stored", self.labels.names(event.keys), event.metadata_only]
            for event in self.manager.take_events()
        ]
