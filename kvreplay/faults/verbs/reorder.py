"""The verb `reorder`."""

from kvreplay.faults.verb import MessageVerb
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, FaultRow, Setting, Settings
from kvreplay.sim.envelope import Delivery, Envelope
from kvreplay.sim.rng import stable_hash


def deliveries(row: FaultRow, envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    # Each message of the conversation draws its own delay, so that a later one can overtake an earlier one.
    drawn = stable_hash(draw, envelope.kind, envelope.attempt, envelope.reply_index)
    return [Delivery(envelope, drawn % (settings["window"] + 1))]


VERB = MessageVerb(
    name="reorder",
    doc="each message of the conversation is held for a drawn time, so that later ones overtake it",
    deliveries=deliveries,
    settings={"window": Setting(default=NS_PER_S, unit=DURATION, doc="the longest that one is held")},
)
