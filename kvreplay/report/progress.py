"""A progress bar on a terminal; nothing at all elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvreplay.ids import NS_PER_S

Advance: TypeAlias = Callable[[int, int], None]
"""(requests done so far, virtual time in ns)."""

_STEPS: Final = 500
"""A bar has no more positions than that, so that a call that changes nothing costs next to nothing."""


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed else "-/s", style="progress.data.speed")


@contextmanager
def progress(total_requests: int, console: Console) -> Iterator[Advance]:
    """`with progress(n, console) as advance: advance(done_requests, virtual_ns)`, as often as you like.

    Give it the console of stderr: stdout is for results. The bar goes when the block ends, however it ends.
    """
    if not console.is_terminal:
        yield lambda done_requests, virtual_ns: None
        return
    bar = Progress(
        TextColumn("replaying"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} requests"),
        _RateColumn(),
        TextColumn("at {task.fields[virtual_s]:,.0f} s"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        refresh_per_second=5,
    )
    with bar:
        task = bar.add_task("", total=total_requests, virtual_s=0.0)
        step = max(1, total_requests // _STEPS)
        shown = 0

        def advance(done_requests: int, virtual_ns: int) -> None:
            nonlocal shown
            if done_requests - shown >= step or done_requests == total_requests:
                shown = done_requests
                bar.update(task, completed=done_requests, virtual_s=virtual_ns / NS_PER_S)

        yield advance
