"""The public incidents that tests replay, and which tests those are.

python -m tests.incidents           every incident, with what its tests came to
python -m tests.incidents B C       only those of the kinds B and C
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

TESTS: Final = Path(__file__).parents[1]


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    refs: tuple[str, ...]
    """Public issues and pull requests, as repository#number."""
    kind: str
    title: str
    where: str
    right: str
    """What should have happened."""
    missing: str = ""
    """Why no test replays it."""


def read_catalogue() -> list[Incident]:
    document = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text("utf-8"))
    return msgspec.convert(document["incident"], list[Incident])


def marked_ids() -> Iterator[tuple[str, Path]]:
    """Each id in a `pytest.mark.incident(...)` of the tests, with its file: from their source, nothing is imported."""
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text("utf-8")
        if "mark.incident(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "incident":
                yield from ((ast.literal_eval(argument), path) for argument in node.args)
