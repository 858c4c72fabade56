"""The verb `duplicate`."""

from kvreplay.faults.verb import MessageVerb
from kvreplay.ids import NS_PER_MS
from kvreplay.sim.catalogue import DURATION, FaultRow, Setting, Settings
from kvreplay.sim.envelope import Delivery, Envelope


def deliveries(row: FaultRow, envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    first = row.transform(envelope, settings, draw) if row.transform else [Delivery(envelope)]
    return [*first, Delivery(envelope, settings["delay"], settings["until"])]


VERB = MessageVerb(
    name="duplicate",
    doc="the message arrives twice, the second time late",
    deliveries=deliveries,
    settings={"delay": Setting(default=NS_PER_MS, unit=DURATION, doc="how much later the second one arrives")},
    holds=True,
)
