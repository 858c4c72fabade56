"""What `kvreplay synth` makes unless it is told otherwise. Light at import: the command's help shows it.

Lengths as `parse_lengths` reads them; the rest under the names, and in the units, of `SynthOptions`.
"""

from typing import Final

REQUESTS: Final = 200
ARRIVALS: Final = "poisson"
RATE: Final = 1.0
BURSTINESS: Final = 0.25
PROMPT: Final = "lognormal:median=1000,sigma=0.8"
OUTPUT: Final = "lognormal:median=200,sigma=0.7"
MAX_TOKENS: Final = 32_768
SYSTEM_PROMPTS: Final = 0
SYSTEM_TOKENS: Final = 0
TURNS: Final = "1"
HASH_TOKENS: Final = 64
THINK_S: Final = 20.0
ABORT: Final = 0.0
ABORT_AFTER_S: Final = 5.0
