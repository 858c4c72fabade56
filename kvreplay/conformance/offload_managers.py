"""CPU manager vectors: a script of calls, and what the real manager answered and held after each."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvreplay.conformance.vector import Json
from kvreplay.conformance.workload import Count
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
_Form = TypeVar("_Form")
_MAX_GROUPS = 16
_NO_POSITIONS = "nopos"
_OF_NO_REQUEST = ("events", "reset")
_OF_KEYS = ("lookup", "store", "stored", "load", "loaded", "touch")
_ANSWERED = ("lookup", "store", "load", "events")
"""Operations that return something."""


_KEY = r"^[^@/]*(@[0-9]{1,15})?/([0-9]|1[0-5])\Z"


class ManagerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    num_chunks: Annotated[int, Meta(ge=0, le=10_000_000)]
    policy: Literal["lru", "arc"] = "lru"
    store_threshold: Count = 0
    max_tracker_size: Count = 64_000


Name = Annotated[str, Meta(pattern=_KEY)]


class Operation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One call. `option`: what a store's end came to, or that the keys' positions are not known."""

    name: Literal["new", "lookup", "store", "stored", "load", "loaded", "touch", "finish", "events", "reset"]
    req_id: str | None = None
    keys: list[Name] | None = None
    option: bool | Literal["nopos"] | None = None
    last: Literal["nopos"] | None = None


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
    run = _Run(_read(document["config"], ManagerConfig, "config"))
    operations = _read(document["ops"], list[Operation], "ops")
    for index, operation in enumerate(operations):
        if operation.name not in _OF_NO_REQUEST and operation.req_id is None:
            raise ConfigError(f"ops[{index}]: {operation.name} needs a request")
        if operation.name in _OF_KEYS and operation.keys is None:
            raise ConfigError(f"ops[{index}]: {operation.name} needs keys")
    last: dict[str, Json] | None = None
    for index, operation in enumerate(operations):
        record: dict[str, Json] = {"k": index}
        try:
            answer = run.perform(operation)
        except EngineFatal as death:
            yield {**record, "error": death.exception}
            return
        if operation.name in _ANSWERED:
            record["res"] = answer
        state = run.state()
        if state != last:
            record["st"] = last = state
        yield record


def _read(value: Json, form: type[_Form], where: str) -> _Form:
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


class _Run:
    def __init__(self, config: ManagerConfig) -> None:
        self.space = KeySpace(_MAX_GROUPS)
        self.labels = Labels(self.space)
        self.manager = CPUOffloadingManager(
            config.num_chunks,
            self.space,
            eviction_policy=config.policy,
            store_threshold=config.store_threshold,
            max_tracker_size=config.max_tracker_size,
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

    def perform(self, operation: Operation) -> Any:  # noqa: ANN401 - JSON
        manager = self.manager
        if operation.req_id is None:
            return self._events() if operation.name == "events" else manager.reset_cache()
        context = self.contexts.setdefault(operation.req_id, RequestContext(operation.req_id))
        positioned = _NO_POSITIONS not in (operation.option, operation.last)
        keys = NO_KEYS if operation.keys is None else self.labels.keys(operation.keys, positioned=positioned)
        match operation.name:
            case "new":
                manager.on_new_request(context)
            case "lookup":
                return [LETTERS[manager.lookup(key, context)] for key in keys.tolist()]
            case "store":
                return self._store(keys, context)
            case "stored":
                manager.complete_store(keys, context, success=operation.option is not False)
            case "load":
                return manager.prepare_load(keys, context).tolist()
            case "loaded":
                manager.complete_load(keys, context)
            case "touch":
                manager.touch(keys, context)
            case "finish":
                manager.on_request_finished(context)
        return None

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
