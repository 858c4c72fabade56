"""The verb `arrival`."""

from kvreplay.faults.verb import ARRIVAL_KEYS, SetupVerb

VERB = SetupVerb(name="arrival", doc="a request arrives with other transfer parameters", keys=ARRIVAL_KEYS)
