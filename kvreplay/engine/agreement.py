"""What a step computes must be tokens that there are."""

from collections.abc import Iterator

from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.scheduler import Scheduler


def beyond_known(out: SchedulerOutput, scheduler: Scheduler) -> Iterator[Share]:
    """Shares of a step that reach beyond the tokens that their requests have, now that all steps before it have been
    taken in. (What drafts stand for is not known before they are verified.)"""
    if scheduler.speculation is not None:
        return
    for share in out.shares:
        request = share.request
        is_live = scheduler.requests.get(request.request_id) is request and not request.status.is_finished
        if is_live and not request.num_stale_output_tokens and share.end > request.num_tokens:
            yield share
