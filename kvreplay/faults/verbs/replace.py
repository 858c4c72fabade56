"""The verb `replace`."""

from kvreplay.faults.verb import MessageVerb
from kvreplay.sim.catalogue import FaultRow, Settings
from kvreplay.sim.envelope import Delivery, Envelope


def deliveries(row: FaultRow, envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    assert row.transform is not None, row.name
    return row.transform(envelope, settings, draw)


VERB = MessageVerb(name="replace", doc="another message arrives instead", deliveries=deliveries, needs_transform=True)
