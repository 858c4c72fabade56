"""The verb `delay`."""

from kvreplay.faults.verb import MessageVerb
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, FaultRow, Setting, Settings
from kvreplay.sim.envelope import Delivery, Envelope


def deliveries(row: FaultRow, envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return [Delivery(envelope, settings["delay"], settings["until"])]


VERB = MessageVerb(
    name="delay",
    doc="the message arrives late, or with until=EVENT after that event",
    deliveries=deliveries,
    settings={"delay": Setting(default=NS_PER_S, unit=DURATION, doc="how much later it arrives")},
    holds=True,
)
