"""Synthetic workloads: arrivals, lengths, shared system prompts, sessions that grow, clients that give up."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvreplay.errors import ConfigError
from kvreplay.ids import NS_PER_S, nanoseconds
from kvreplay.kv.content_index import mix64
from kvreplay.sim.rng import generator, stable_hash
from kvreplay.trace import synth_defaults as default
from kvreplay.trace.digest import file_digest
from kvreplay.trace.lengths import Empirical, Fixed, Lengths, pair_drawer, parse_lengths, turns_drawer
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.workload import MAX_REQUEST_TOKENS, Arrival, ClientAbort, Workload

MAX_REQUESTS: Final = 10_000_000
MAX_TIME_NS: Final = 1_000_000_000 * NS_PER_S
"""The last arrival: some thirty years, and far from what 64 bits hold."""
ONE_TURN: Final = Fixed(1)


class ArrivalProcess(StrEnum):
    CONSTANT = "constant"
    POISSON = "poisson"
    BURSTY = "bursty"


DEFAULT_ARRIVALS: Final = ArrivalProcess(default.ARRIVALS)
DEFAULT_PROMPT: Final = parse_lengths("--prompt", default.PROMPT)
DEFAULT_OUTPUT: Final = parse_lengths("--output", default.OUTPUT)
DEFAULT_TURNS: Final = parse_lengths("--turns", default.TURNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """What to make. The same options give the same workload."""

    requests: int = default.REQUESTS
    """Requests in all, later turns included."""
    seed: int = 0
    arrivals: ArrivalProcess = DEFAULT_ARRIVALS
    rate: float = default.RATE
    """New sessions per second; without turns a session is one request."""
    burstiness: float = default.BURSTINESS
    """Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts."""
    prompt: Lengths = DEFAULT_PROMPT
    """New text of each turn."""
    output: Lengths = DEFAULT_OUTPUT
    system_prompts: int = default.SYSTEM_PROMPTS
    system_tokens: int = default.SYSTEM_TOKENS
    """Each session starts with one of so many system prompts of so many tokens."""
    turns: Lengths = DEFAULT_TURNS
    """Turns of a session; each contains the turns before it, outputs included."""
    think_s: float = default.THINK_S
    """Mean time from one turn's arrival to the next one's."""
    max_tokens: int = default.MAX_TOKENS
    """Prompt and output of one request; a session that would outgrow it ends, a first turn is cut."""
    abort: float = default.ABORT
    """Share of requests that their client gives up."""
    abort_after_s: float = default.ABORT_AFTER_S
    """Mean time until it does."""
    hash_tokens: int = default.HASH_TOKENS
    """Prompt tokens per prefix hash: what is shared below that is lost."""

    def __post_init__(self) -> None:
        for name, at_least, at_most in (
            ("requests", 1, MAX_REQUESTS),
            ("system_prompts", 0, MAX_REQUESTS),
            ("system_tokens", 0, MAX_REQUEST_TOKENS),
            ("think_s", 0, 1e6),
            ("max_tokens", 2, MAX_REQUEST_TOKENS),
            ("abort", 0, 1),
            ("abort_after_s", 0, 1e6),
            ("hash_tokens", 1, MAX_REQUEST_TOKENS),
            ("rate", 1e-6, 1e6),
            ("burstiness", 1e-3, 1e3),
        ):
            value = getattr(self, name)
            # Not `<`: a NaN lies nowhere.
            if not at_least <= value <= at_most:
                flag = name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"--{flag} {value:.10g}: expected {at_least:.10g} to {at_most:.10g}")
        self._check_effect()
        if bool(self.system_prompts) != bool(self.system_tokens):
            raise ConfigError("--system-prompts and --system-tokens: one needs the other")
        if self.system_tokens + 2 > self.max_tokens:
            raise ConfigError(
                f"--system-tokens {self.system_tokens}: no room left below --max-tokens {self.max_tokens}"
            )

    def _check_effect(self) -> None:
        """What has no effect without another option, is not given without it."""
        needs = {
            "burstiness": ("--arrivals bursty", self.arrivals is ArrivalProcess.BURSTY),
            "think_s": ("--turns", self.turns != ONE_TURN),
            "abort_after_s": ("--abort", self.abort > 0),
        }
        defaults = {item.name: item.default for item in fields(self)}
        for name, (needed, is_there) in needs.items():
            value = getattr(self, name)
            if value != defaults[name] and not is_there:
                flag = name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"--{flag} {value:.10g}: has no effect without {needed}")

    @property
    def input_files(self) -> list[Path]:
        """Traces that lengths are drawn from."""
        lengths = (self.prompt, self.output, self.turns)
        return sorted({value.file for value in lengths if isinstance(value, Empirical)})

    def metadata(self, config: Mapping[str, Any] | None = None) -> TraceMetadata:
        """How the trace says where it comes from: files by their hash. `config`: what to replay it with."""
        values = {name: getattr(self, name) for name in self.__slots__}
        options = {name: _described(value) if isinstance(value, Lengths) else value for name, value in values.items()}
        inputs = sorted(file_digest(file) for file in self.input_files)
        return TraceMetadata(source={"tool": "kvreplay synth", "options": options, "inputs": inputs}, config=config)


def _described(lengths: Lengths) -> dict[str, Any]:
    if isinstance(lengths, Empirical):
        return {"trace": file_digest(lengths.file)}
    settings = {name: value for name, value in asdict(lengths).items() if value is not None}
    return {type(lengths).__name__.lower(): settings}


def synthesise(options: SynthOptions) -> Workload:
    """The workload that the options describe. Raises KvReplayError for a trace that cannot be drawn from."""
    arrivals = _in_order_of_time(options)
    return Workload(tuple(arrivals), tuple(_aborts(options, arrivals)))


@dataclass(slots=True)
class _Turn:
    session: int
    turn: int
    prompt_tokens: int
    output_tokens: int
    turns_left: int


def _in_order_of_time(options: SynthOptions) -> list[Arrival]:
    """Sessions begin as the arrival process says; each turn is drawn when its time comes."""
    rng = {part: generator(options.seed, f"synth.{part}") for part in ("gaps", "system", "turns", "think")}
    gap_s = _gap_drawer(options, rng["gaps"])
    draw_turns = turns_drawer(options.turns, rng["turns"])
    draw_pair = pair_drawer(
        options.prompt,
        options.output,
        generator(options.seed, "synth.prompt"),
        generator(options.seed, "synth.output"),
    )
    arrivals: list[Arrival] = []
    chains: dict[int, _HashChain] = {}
    waiting: list[tuple[int, int, _Turn]] = []
    next_session_ns, num_sessions = 0, 0
    while len(arrivals) < options.requests:
        if not waiting or next_session_ns <= waiting[0][0]:
            time_ns, session = next_session_ns, num_sessions
            chains[session] = _HashChain(options, session, rng["system"])
            turn = _first_turn(options, session, *draw_pair(), draw_turns())
            next_session_ns += nanoseconds(gap_s())
            num_sessions += 1
        else:
            time_ns, session, turn = heappop(waiting)
        if time_ns > MAX_TIME_NS:
            raise ConfigError(
                f"--rate {options.rate:.10g}: request {len(arrivals)} would arrive after {time_ns // NS_PER_S:,} s, "
                f"expected at most {MAX_TIME_NS // NS_PER_S:,} s"
            )
        arrivals.append(_arrival(options, len(arrivals), time_ns, turn, chains[session]))
        later = _next_turn(options, turn, *draw_pair()) if turn.turns_left else None
        if later is None:
            del chains[session]
        else:
            think_s = rng["think"].expovariate(1 / options.think_s) if options.think_s else 0
            heappush(waiting, (time_ns + nanoseconds(think_s), session, later))
    return arrivals


def _gap_drawer(options: SynthOptions, rng: Random) -> Callable[[], float]:
    mean_s = 1 / options.rate
    match options.arrivals:
        case ArrivalProcess.CONSTANT:
            return lambda: mean_s
        case ArrivalProcess.POISSON:
            return lambda: rng.expovariate(options.rate)
        case ArrivalProcess.BURSTY:
            return lambda: rng.gammavariate(options.burstiness, mean_s / options.burstiness)


def _first_turn(options: SynthOptions, session: int, new_tokens: int, output_tokens: int, num_turns: int) -> _Turn:
    prompt_tokens = min(options.system_tokens + new_tokens, options.max_tokens - 1)
    return _Turn(session, 0, prompt_tokens, min(output_tokens, options.max_tokens - prompt_tokens), num_turns - 1)


def _next_turn(options: SynthOptions, turn: _Turn, new_tokens: int, output_tokens: int) -> _Turn | None:
    prompt_tokens = turn.prompt_tokens + turn.output_tokens + new_tokens
    if prompt_tokens + output_tokens > options.max_tokens:
        return None
    return _Turn(turn.session, turn.turn + 1, prompt_tokens, output_tokens, turn.turns_left - 1)


def _arrival(options: SynthOptions, number: int, time_ns: int, turn: _Turn, chain: "_HashChain") -> Arrival:
    params: dict[str, Any] = {}
    if options.turns != ONE_TURN:
        params = {"session": f"s{turn.session:05}", "turn": turn.turn}
    return Arrival(
        f"r{number:05}",
        time_ns,
        turn.prompt_tokens,
        turn.output_tokens,
        chain.hashes(turn.prompt_tokens),
        options.hash_tokens,
        params=params,
    )


class _HashChain:
    """The prefix hashes of one session, as far as it has grown.

    Chunks that lie wholly in the system prompt are the same in every session that has it; all others belong to the
    session. A chunk that a later turn fills up keeps its hash: what it covered before has not changed.
    """

    def __init__(self, options: SynthOptions, session: int, rng: Random) -> None:
        self._chunk = options.hash_tokens
        self._num_shared = options.system_tokens // options.hash_tokens
        self._session = stable_hash(options.seed, "session", session)
        self._system = 0
        if options.system_prompts:
            self._system = stable_hash(options.seed, "system", rng.randrange(options.system_prompts))
        self._hashes: list[int] = []

    def hashes(self, prompt_tokens: int) -> NDArray[np.uint64]:
        count = -(-prompt_tokens // self._chunk)
        for place in range(len(self._hashes), count):
            text = self._system if place < self._num_shared else self._session
            self._hashes.append(mix64(self._hashes[-1] if self._hashes else 0, text, place))
        return np.array(self._hashes[:count], np.uint64)


def _aborts(options: SynthOptions, arrivals: list[Arrival]) -> list[ClientAbort]:
    """Drawn for every request, so that another share leaves the others' instants as they were."""
    rng = generator(options.seed, "synth.aborts")
    aborts: list[ClientAbort] = []
    for arrival in arrivals:
        is_aborted = rng.random() < options.abort
        patience_s = rng.expovariate(1 / options.abort_after_s) if options.abort_after_s else 0
        if is_aborted:
            aborts.append(ClientAbort(arrival.request_id, arrival.time_ns + nanoseconds(patience_s)))
    return sorted(aborts, key=lambda abort: abort.time_ns)
