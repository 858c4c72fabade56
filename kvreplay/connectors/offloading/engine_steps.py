"""An engine's step as the connector's scheduler sees it."""

from collections.abc import Iterable

from kvreplay.connectors.offloading.structs import Handoff, OffloadStep, StepRequest
from kvreplay.engine.output import SchedulerOutput, Share


def step_of(out: SchedulerOutput, shares: Iterable[Share] | None = None) -> OffloadStep:
    """An engine's step. Requests in lockstep are not shown: there is nothing to store of them.

    `shares`: those that are shown; None: all.
    """
    return OffloadStep(
        [
            StepRequest(
                share.request.request_id,
                share.start,
                share.num_tokens,
                None if share.admitted else share.new_blocks,
                share.admitted,
                share.request.shared_prefix_boundary,
            )
            for share in (out.shares if shares is None else shares)
        ],
        out.preempted,
        out.finished_req_ids,
        [destination for _, destination in out.block_copies] if out.block_copies else (),
        {request_id: [Handoff(*state) for state in states] for request_id, states in out.boundary_states.items()}
        if out.boundary_states
        else {},
        out.total_num_scheduled_tokens > 0,
    )
