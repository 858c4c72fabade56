"""The verb `corrupt`."""

from dataclasses import replace

from kvreplay.faults.verb import MessageVerb
from kvreplay.sim.catalogue import FaultRow, Settings
from kvreplay.sim.envelope import Corruption, Delivery, Envelope


def deliveries(row: FaultRow, envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    if row.transform is not None:
        return row.transform(envelope, settings, draw)
    # Which fault it was is written in by the injector, which knows the event.
    corruption = Corruption(draw=draw, fault_spec="")
    return [Delivery(replace(envelope, corruptions=(*envelope.corruptions, corruption)))]


VERB = MessageVerb(
    name="corrupt",
    doc="bytes of the delivered copy change; the source keeps the truth, the status stays OK",
    deliveries=deliveries,
)
