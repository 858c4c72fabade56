"""Virtual time beside sockets whose both ends are in this process: it jumps, but never past a message on its way."""

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

from kvreplay.sim.event_loop import FOREVER_NS
from kvreplay.transport.paced import PacedLoop
from kvreplay.transport.traffic import Ledger, Traffic

_LOST_S: Final = 2.0
"""What has been on its way for so long while nothing came will not come any more."""
_MAX_WAIT_S: Final = 0.05


class HeldClock:
    """Drives a loop and all sockets of a process. `traffics`: what each of their owners counts."""

    def __init__(self, paced: PacedLoop, traffics: Callable[[], Iterable[Traffic]]) -> None:
        self._paced = paced
        self._loop = paced.loop
        self._traffics = traffics
        self._ledger = Ledger()

    def run_until(self, time_ns: int, after: Callable[[], None] | None = None) -> None:
        """Let happen what happens up to that instant; `after` is called at every instant at which something did."""
        paced, loop = self._paced, self._loop
        self.settle()
        while (next_ns := loop.peek_ns()) <= time_ns:
            paced.grant(next_ns)
            self.settle()
            if after is not None:
                after()
        if time_ns < FOREVER_NS:
            paced.grant(time_ns)
            loop.now_ns = max(loop.now_ns, time_ns)

    def run_until_quiescent(self) -> None:
        """Until nothing but daemons is left."""
        self.settle()
        while self._loop.num_live:
            self._paced.grant(self._loop.peek_ns())
            self.settle()

    def settle(self) -> None:
        """Let what is due happen, and arrive what is on its way."""
        paced, ledger = self._paced, self._ledger
        heard_s = monotonic()
        while True:
            paced.run_due()
            for traffic in self._traffics():
                told = traffic.tell()
                if told is not None:
                    heard_s = monotonic()
                    ledger.hear(told)
            if paced.is_due:
                paced.listen(0.0)
            elif ledger.is_even:
                return
            else:
                paced.listen(_MAX_WAIT_S)
                if monotonic() - heard_s > _LOST_S:
                    ledger.give_up()
