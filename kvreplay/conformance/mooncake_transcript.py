"""What happens while a scenario is played: the lanes of a transcript, and counts that a scenario can wait for."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvreplay.conformance.vector import Json
from kvreplay.connectors.mooncake import log
from kvreplay.ids import NS_PER_S
from kvreplay.sim.event_loop import EventLoop

CONNECTOR: Final = "mooncake_connector"
_REGISTERED: Final = re.compile(r"addr='tcp://P[\d.]*-real'")
_WANTED: Final = re.compile(r"(want to register at tcp://)P[\d.]*-real")


@dataclass(slots=True)
class Transcript:
    """Events in the order of recording. `counts`: what a scenario waits for, by name."""

    loop: EventLoop
    events: list[dict[str, Json]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    entry_states: dict[str, list[Json]] = field(default_factory=dict)
    """Worker → every state that its transfers have been in, also those that no poll has seen."""

    def add(self, lane: str, keys: Iterable[str] = (), **fields: Json) -> dict[str, Json]:
        event = {"i": len(self.events), "t": round(self.loop.now_ns / NS_PER_S, 1), "lane": lane, **fields}
        self.events.append(event)
        self.note(keys)
        return event

    def note(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.counts[key] = self.counts.get(key, 0) + 1

    def mark(self, keys: Iterable[str]) -> None:
        """Conditions that hold or do not, rather than count."""
        for key in keys:
            self.counts[key] = 1

    def unmark(self, prefix: str) -> None:
        for key in [key for key in self.counts if key.startswith(prefix)]:
            del self.counts[key]

    def holds(self, condition: str) -> bool:
        """`name`, `name*3` for as many times, `!` before it for the contrary; `log:` and a part of a line."""
        if condition.startswith("!"):
            return not self.holds(condition[1:])
        name, star, times = condition.rpartition("*")
        key, wanted = (name, int(times)) if star and times.isdecimal() else (condition, 1)
        if key.startswith("log:"):
            part = key.removeprefix("log:")
            lines = (count for line, count in self.counts.items() if line.startswith("log:") and part in line)
            return sum(lines) >= wanted
        return self.counts.get(key, 0) >= wanted

    def log_line(self, thread: str, level: str, source: str, template: str, arguments: tuple[object, ...]) -> None:
        # The logging module takes a single mapping for the arguments themselves.
        only = arguments[0] if len(arguments) == 1 else None
        args = plain(only if isinstance(only, Mapping) else arguments)
        self.add("log", lvl=level, src=source, msg=plain(template), args=args, th=thread)
        try:
            line = template % arguments if arguments else template
        except (TypeError, ValueError):
            line = template
        self.note([f"log:{plain(line)}"])


@dataclass(slots=True)
class WorkerLog:
    """A worker's lines, with the names of the threads that say them."""

    transcript: Transcript
    debug: bool
    threads: Mapping[str, str]

    def __call__(self, thread: str, level: str, template: str, *arguments: object) -> None:
        if level == log.DEBUG and not self.debug:
            return
        self.transcript.log_line(self.threads[thread], level, CONNECTOR, template, arguments)


def worker_log(transcript: Transcript, name: str, *, both_roles: bool, debug: bool) -> WorkerLog:
    threads = {
        log.MAIN: "main",
        log.POOL: "vllm",
        log.RECEIVER: f"{name}loop",
        log.SENDER: f"{name}loopP" if both_roles else f"{name}loop",
    }
    return WorkerLog(transcript, debug, threads)


def plain(value: Any) -> Json:  # noqa: ANN401 - whatever a line's argument is
    """As the recorder writes it: JSON, sets sorted, floats that are times left out, addresses by name."""
    if isinstance(value, str):
        value = _REGISTERED.sub("addr='tcp://P-real'", value)
        return _WANTED.sub(r"\g<1>127.0.0.1:PORT", value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value == int(value) or value == 0.1 else "<float>"
    return str(value)
