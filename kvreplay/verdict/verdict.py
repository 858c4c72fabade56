"""What a run came to: one verdict, its exit status, and one sentence that says why."""

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvreplay.behaviour import nearest
from kvreplay.errors import ConfigError
from kvreplay.ids import plural
from kvreplay.verdict.exit_status import ExitStatus
from kvreplay.verdict.model import DEFAULT_FAIL_ON, Crash, Requests, Stall, Violation, Word

FAIL_ON: Final = ("crashed", "stalled", "violated", "failed", "rejected", "aborted", "overdue", "unfired")
DEFAULT: Final = "default"
"""Of `--fail-on`: what counts without it."""

WORDS: Final[dict[ExitStatus, Word]] = {
    ExitStatus.PASSED: "passed",
    ExitStatus.VIOLATED: "violated",
    ExitStatus.STALLED: "stalled",
    ExitStatus.CRASHED: "crashed",
}


class Verdict(NamedTuple):
    status: ExitStatus
    reason: str

    @property
    def word(self) -> Word:
        return WORDS[self.status]


def parse_fail_on(text: str) -> tuple[str, ...]:
    """`--fail-on a,b`: what counts against a run, in order of weight; `default` stands for what counts without the
    option, `none` for nothing.

    Raises ConfigError naming the nearest known word.
    """
    words = [word.strip() for word in text.split(",")]
    if words == ["none"]:
        return ()
    known = [*FAIL_ON, DEFAULT]
    for word in words:
        if word not in known:
            raise ConfigError(f"--fail-on {text}: {word!r} is none of {', '.join(known)}{nearest(word, known)}")
    return tuple(word for word in FAIL_ON if word in words or (DEFAULT in words and word in DEFAULT_FAIL_ON))


def judge(
    requests: Requests,
    stalls: Sequence[Stall],
    crashes: Sequence[Crash],
    violations: Sequence[Violation],
    fail_on: Sequence[str] = DEFAULT_FAIL_ON,
    unfired: Sequence[str] = (),
    too_late: Sequence[str] = (),
) -> Verdict:
    """Crashed before stalled before violated before passed; what `fail_on` leaves out is only mentioned.

    `violations` are the independent ones: what a stall or a crash implies is attached to it, not among them.
    `unfired`: faults that never fired; `too_late`: those that did when every request had ended.
    """
    sentences = {
        "crashed": (ExitStatus.CRASHED, _say_crashes(crashes)),
        "stalled": (ExitStatus.STALLED, _say_stalls(requests, stalls)),
        "violated": (ExitStatus.VIOLATED, _say_violations(violations)),
        "failed": (ExitStatus.VIOLATED, _say(requests.failed, "failed")),
        "rejected": (ExitStatus.VIOLATED, _say(requests.rejected, "rejected")),
        "aborted": (ExitStatus.VIOLATED, _say(requests.aborted, "aborted")),
        "overdue": (ExitStatus.VIOLATED, _say(requests.overdue, "ended overdue")),
        "unfired": (ExitStatus.VIOLATED, _say_unfired(unfired, too_late)),
    }
    for word in FAIL_ON:
        status, sentence = sentences[word]
        if word in fail_on and sentence:
            return Verdict(status, sentence)
    ignored = [sentences[word][1] for word in DEFAULT_FAIL_ON if word not in fail_on and sentences[word][1]]
    left_out = f"; left out by --fail-on: {'; '.join(ignored)}" if ignored else ""
    return Verdict(ExitStatus.PASSED, _say_outcomes(requests) + left_out)


def _say_crashes(crashes: Sequence[Crash]) -> str:
    if not crashes:
        return ""
    first = crashes[0]
    more = f"; {len(crashes) - 1:,} more after it" if crashes[1:] else ""
    message = f"{first.exception}: {first.message}" if first.message else first.exception
    return f"{first.instance} died at {first.time_s:,.3f} s of {message}{more}"


def _say_stalls(requests: Requests, stalls: Sequence[Stall]) -> str:
    if not stalls:
        return ""
    [(common, count)] = Counter(stall.waiting_on or stall.status for stall in stalls).most_common(1)
    share = "" if len(stalls) == 1 else "all " if count == len(stalls) else f"{count:,} of them "
    waiting = f", {share}waiting on {common}"
    if not requests.stalled:
        return f"{plural(len(stalls), 'leg')} of answered requests never ended{waiting}"
    if requests.held_up == requests.stalled:
        return f"{plural(requests.stalled, 'request')} ended only after the faults were taken away{waiting}"
    return f"{plural(requests.stalled, 'request')} will never end{waiting}"


def _say_violations(violations: Sequence[Violation]) -> str:
    if not violations:
        return ""
    checkers = Counter(violation.checker for violation in violations)
    counts = ", ".join(f"{name} {count:,}" for name, count in checkers.most_common())
    return f"{plural(len(violations), 'violation')}: {counts}"


def _say(count: int, what: str) -> str:
    return f"{plural(count, 'request')} {what}" if count else ""


def _say_unfired(unfired: Sequence[str], too_late: Sequence[str]) -> str:
    parts = {"never fired": unfired, "fired only after every request had ended": too_late}
    return "; ".join(f"{what}: {', '.join(specs)}" for what, specs in parts.items() if specs)


def _say_outcomes(requests: Requests) -> str:
    if not requests.total:
        return "no requests"
    if requests.finished == requests.total:
        return f"all {plural(requests.total, 'request')} finished" if requests.total > 1 else "the request finished"
    counts = {
        "stalled": requests.stalled,
        "failed": requests.failed,
        "aborted": requests.aborted,
        "rejected": requests.rejected,
        "unfinished": requests.unfinished,
    }
    others = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    faulted = ""
    if requests.failed and not requests.failed_unfaulted:
        faulted = "; every failure follows from a fault"
    return f"{requests.finished:,} of {plural(requests.total, 'request')} finished, {others}{faulted}"
