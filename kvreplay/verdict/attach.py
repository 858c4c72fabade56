"""Which findings stand for themselves, and which only follow from something that is reported anyway."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvreplay.checkers.finding import (
    CONSERVATION,
    CONTENT,
    NO_FATAL,
    NULL_BLOCK,
    OUTPUT_EQUAL,
    PROGRESS,
    Finding,
)


class StallKey(NamedTuple):
    request_id: str
    instance: str | None


class Attached(NamedTuple):
    """`independent` findings in order of time, and how many others follow from what, by checker.

    The keys are places: in the list of stalls, of crashes, and of `independent`.
    """

    independent: list[Finding]
    by_stall: dict[int, Counter[str]]
    by_crash: dict[int, Counter[str]]
    by_finding: dict[int, Counter[str]]


def attach(
    findings: Sequence[Finding], stalls: Sequence[StallKey], crashed_instances: Sequence[str | None]
) -> Attached:
    """Sort out what is implied.

    By a stall: its instance's PROGRESS, and the CONSERVATION of the blocks that it still holds. By a crash: its
    NO-FATAL. By wrong contents, or a request's use of the null block, which has none: wrong outputs (OUTPUT-EQUAL) of
    the same request, or later of the same instance.
    """
    attached = Attached([], {}, {}, {})
    stall_of = _Stalls(stalls)
    content_of: dict[tuple[str | None, str | None], int] = {}
    for finding in sorted(findings, key=lambda finding: (finding.time_ns, finding.checker == OUTPUT_EQUAL)):
        owners, owner = _owner(finding, attached, stall_of, crashed_instances, content_of)
        if owner is not None:
            owners.setdefault(owner, Counter())[finding.checker] += 1
            continue
        if finding.checker == CONTENT or (finding.checker == NULL_BLOCK and finding.request_id is not None):
            place = len(attached.independent)
            content_of[finding.instance, finding.request_id] = content_of[finding.instance, None] = place
        attached.independent.append(finding)
    return attached


class _Stalls:
    """Finds the stall of a request, or the first one of an instance."""

    def __init__(self, stalls: Sequence[StallKey]) -> None:
        backwards = list(reversed(list(enumerate(stalls))))
        self.by_request = {stall: place for place, stall in backwards}
        self.by_instance = {stall.instance: place for place, stall in backwards}

    def find(self, finding: Finding) -> int | None:
        if finding.request_id is None:
            return self.by_instance.get(finding.instance)
        return self.by_request.get(StallKey(finding.request_id, finding.instance))


def _owner(
    finding: Finding,
    attached: Attached,
    stall_of: _Stalls,
    crashed_instances: Sequence[str | None],
    content_of: Mapping[tuple[str | None, str | None], int],
) -> tuple[dict[int, Counter[str]], int | None]:
    """What implies the finding: the account it goes to, and the place there (None: nothing implies it)."""
    if finding.checker == PROGRESS or (finding.checker == CONSERVATION and finding.request_id is not None):
        return attached.by_stall, stall_of.find(finding)
    if finding.checker == NO_FATAL and finding.request_id is None:
        places = [place for place, instance in enumerate(crashed_instances) if instance == finding.instance]
        # One for each death, in order.
        return attached.by_crash, next(
            (place for place in places if place not in attached.by_crash), places[-1] if places else None
        )
    if finding.checker == OUTPUT_EQUAL:
        of_request = content_of.get((finding.instance, finding.request_id))
        return attached.by_finding, content_of.get((finding.instance, None)) if of_request is None else of_request
    return attached.by_stall, None
