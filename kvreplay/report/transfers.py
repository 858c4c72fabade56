"""What was moved from producers to consumers, where there is room to say so."""

from kvreplay.ids import plural
from kvreplay.report.layout import INDENT, WIDE, Line, Section, title
from kvreplay.report.words import causes, duration, size
from kvreplay.verdict.model import Summary


def transfers_section(summary: Summary, width: int) -> Section:
    moved = summary.transfers
    if moved is None or width < WIDE:
        return
    yield title("Transfers", f"{size(moved.bytes)} in {plural(moved.finished, 'write')}")
    if moved.bytes_per_s is not None and moved.bytes_per_s_each is not None:
        together = f"{size(moved.bytes_per_s)}/s in the {duration(moved.seconds)} in which there were any"
        yield Line(f"{together}, {size(moved.bytes_per_s_each)}/s each", indent=INDENT)
    if moved.failed:
        yield Line(f"{plural(moved.failed, 'write')} failed: {causes(moved.failed_by_cause)}", indent=INDENT)
    if moved.expired:
        yield Line(f"{plural(moved.expired, 'request')} expired: nobody asked for the blocks in time", indent=INDENT)
