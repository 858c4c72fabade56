"""The verb `config`."""

from kvreplay.faults.verb import SetupVerb

VERB = SetupVerb(name="config", doc="a key of the configuration has another value than written")
