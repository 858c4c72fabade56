"""Decoding requests that advance by one token a step, without being touched in between.

A request in lockstep was at `num_computed_tokens` at the start of step `lockstep_since`; its counters at any later
step follow from the step number. Per step only those are looked at that fill a block, need a new one, or finish.
Not with speculative decoding: how many tokens a step brings is drawn for each request anew.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

from kvreplay.engine.request import Request
from kvreplay.sim.event_loop import FOREVER_NS

NEVER = FOREVER_NS
"""A step that does not come."""


class Lockstep:
    """The set of such requests, over blocks of `block_size` tokens. Iteration is in running order."""

    def __init__(self, block_size: int, max_model_len: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.members: dict[str, Request] = {}
        """In order of joining. To be read only: whoever counts them often asks it instead of this object."""
        self._buckets: list[dict[str, Request]] = [{} for _ in range(block_size)]
        """Members by the step, modulo block size, in which they start with a multiple of it and need a new block."""
        self._finishing: list[tuple[int, int, Request]] = []
        self._context = 0
        """Sum over members of (num_computed_tokens - lockstep_since): context at step s is this + s * members."""

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.members

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self.members.values(), key=_order))

    def num_kv_tokens(self, step: int) -> int:
        """Context that all members read in `step`: their computed tokens and the new one."""
        return self._context + (step + 1) * len(self.members)

    def join(self, request: Request, step: int) -> None:
        """From the start of `step` on `request` decodes one token a step. It has just sampled one."""
        assert request.num_computed_tokens == request.num_tokens - 1, request
        assert request.lockstep_since is None, request
        request.lockstep_since = step
        self.members[request.request_id] = request
        self._buckets[(step - request.num_computed_tokens) % self.block_size][request.request_id] = request
        self._context += request.num_computed_tokens - step
        remaining = min(request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens)
        assert remaining > 0, request
        heappush(self._finishing, (step + remaining - 1, request.lockstep_order, request))

    def leave(self, request: Request, step: int, *, in_flight: bool = False) -> None:
        """Bring the counters up to the start of `step`, and let the request go.

        `in_flight`: `step` has been scheduled and its output not yet processed.
        """
        since = request.lockstep_since
        assert since is not None, request
        del self.members[request.request_id]
        del self._buckets[(since - request.num_computed_tokens) % self.block_size][request.request_id]
        self._context -= request.num_computed_tokens - since
        request.lockstep_since = None
        advanced = step - since
        request.num_computed_tokens += advanced + (1 if in_flight else 0)
        request.num_tokens += advanced
        request.num_output_tokens += advanced
        if in_flight:
            request.num_in_flight_tokens = 1
        if len(self._finishing) > 2 * len(self.members) + 64:
            self._finishing = [entry for entry in self._finishing if self._is_current(entry)]
            heapify(self._finishing)

    def needing_blocks(self, step: int) -> list[Request]:
        """Members that start `step` with full blocks only, in running order."""
        bucket = self._buckets[step % self.block_size]
        if len(bucket) < 2:
            return list(bucket.values())
        return sorted(bucket.values(), key=_order)

    def growth(self, first_step: int, num_steps: int) -> Iterator[tuple[int, list[Request]]]:
        """(step, members that need a block in it) for those of the next steps in which anybody does."""
        block_size = self.block_size
        end_step = first_step + num_steps
        # Nobody joins or leaves in between: the same members need one in every round.
        rounds = [
            (step, self.needing_blocks(step))
            for step in range(first_step, min(end_step, first_step + block_size))
            if self._buckets[step % block_size]
        ]
        for start in range(0, num_steps, block_size):
            for step, members in rounds:
                if step + start >= end_step:
                    return
                yield step + start, members

    def filling_blocks(self, step: int) -> list[Request]:
        """Members whose token of `step` is the last of its block, in running order."""
        return self.needing_blocks(step + 1)

    def num_needing_blocks(self, step: int) -> int:
        return len(self._buckets[step % self.block_size])

    def next_finish(self) -> int:
        """The first step in which a member samples its last token; NEVER if there is none."""
        finishing = self._finishing
        while finishing and not self._is_current(finishing[0]):
            heappop(finishing)
        return finishing[0][0] if finishing else NEVER

    def finishing_in(self, step: int) -> list[Request]:
        """Members that sample their last token in `step`, in running order."""
        found: dict[str, Request] = {}
        while self.next_finish() == step:
            # One that left and came back has an entry for each time, with the same step.
            request = heappop(self._finishing)[2]
            found[request.request_id] = request
        return list(found.values())

    def _is_current(self, entry: tuple[int, int, Request]) -> bool:
        step, _, request = entry
        since = request.lockstep_since
        if since is None or self.members.get(request.request_id) is not request:
            return False
        remaining = min(request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens)
        return since + remaining - 1 == step


class EventLockstep(Lockstep):
    """Members change their blocks in more than one place of a period: whenever their computed tokens are one of
    `residues`, modulo `period`."""

    def __init__(self, period: int, residues: Sequence[int], max_model_len: int) -> None:
        super().__init__(period, max_model_len)
        assert residues
        self._residues = tuple(residues)

    def settle(self, request: Request, step: int) -> None:
        """Bring a member's counters up to the start of `step`; it stays."""
        assert request.lockstep_since is not None, request
        advanced = step - request.lockstep_since
        request.lockstep_since = step
        request.num_computed_tokens += advanced
        request.num_tokens += advanced
        request.num_output_tokens += advanced

    def needing_blocks(self, step: int) -> list[Request]:
        """Members whose blocks change in `step`, in running order."""
        buckets, period = self._buckets, self.block_size
        members: list[Request] = []
        for residue in self._residues:
            bucket = buckets[(step - residue) % period]
            if bucket:
                members += bucket.values()
        if len(members) > 1:
            members.sort(key=_order)
        return members

    def num_needing_blocks(self, step: int) -> int:
        buckets, period = self._buckets, self.block_size
        return sum([len(buckets[(step - residue) % period]) for residue in self._residues])

    def growth(self, first_step: int, num_steps: int) -> Iterator[tuple[int, list[Request]]]:
        if num_steps <= len(self.members):
            for step in range(first_step, first_step + num_steps):
                members = self.needing_blocks(step)
                if members:
                    yield step, members
            return
        # Nobody joins or leaves in between.
        due = sorted(self._due(first_step, num_steps))
        place = 0
        while place < len(due):
            step = due[place][0]
            end = place + 1
            while end < len(due) and due[end][0] == step:
                end += 1
            yield step, [entry[-1] for entry in due[place:end]]
            place = end

    def _due(self, first_step: int, num_steps: int) -> Iterator[tuple[int, int, int, Request]]:
        """(step, place in running order, place of the residue, member) for those steps in which a member's blocks
        change: from member to member, where the steps are more than those."""
        period, residues, end_step = self.block_size, self._residues, first_step + num_steps
        for request in self.members.values():
            since = request.lockstep_since
            assert since is not None, request
            ahead = since - request.num_computed_tokens - first_step
            for index, residue in enumerate(residues):
                for step in range(first_step + (ahead + residue) % period, end_step, period):
                    yield step, request.lockstep_order, index, request

    def changes(self, first_step: int, num_steps: int) -> Iterator[tuple[int, list[int]]]:
        """(step, by residue the number of members whose computed tokens are that) for those of the next steps in
        which there are any."""
        buckets, period, residues = self._buckets, self.block_size, self._residues
        if num_steps <= len(self.members):
            for step in range(first_step, first_step + num_steps):
                counts = [len(buckets[(step - residue) % period]) for residue in residues]
                if any(counts):
                    yield step, counts
            return
        by_step: dict[int, list[int]] = {}
        for step, _, index, _ in self._due(first_step, num_steps):
            by_step.setdefault(step, [0] * len(residues))[index] += 1
        yield from sorted(by_step.items())

    def most_changes(self, num_steps: int) -> int:
        """No more often do members' blocks change in so many steps."""
        return len(self.members) * len(self._residues) * (num_steps // self.block_size + 1)

    def filling_blocks(self, step: int) -> list[Request]:
        """None: what a step fills is hashed where the member's blocks change in it."""
        return []


_order = attrgetter("lockstep_order")
