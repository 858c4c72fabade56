"""The report for machines: one JSON object, and nothing else."""

from typing import TextIO

import msgspec

from kvreplay.verdict.model import Summary


def write_json(summary: Summary, stream: TextIO) -> None:
    stream.write(msgspec.json.format(summary.to_json(), indent=2) + "\n")
