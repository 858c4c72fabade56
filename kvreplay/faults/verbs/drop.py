"""The verb `drop`."""

from kvreplay.faults.verb import MessageVerb
from kvreplay.sim.catalogue import FaultRow, Settings
from kvreplay.sim.envelope import Delivery, Envelope


def deliveries(row: FaultRow, envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return []


VERB = MessageVerb(name="drop", doc="the message is lost", deliveries=deliveries)
