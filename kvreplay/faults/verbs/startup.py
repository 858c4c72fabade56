"""The verb `startup`."""

from kvreplay.faults.verb import SetupVerb

VERB = SetupVerb(name="startup", doc="the instance dies while it starts")
