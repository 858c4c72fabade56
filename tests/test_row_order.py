"""polars puts rows in any order, another one each time, unless it is told to keep theirs: so it always is told."""

import ast
from pathlib import Path
from typing import Final

import kvreplay

_REORDERING: Final = ("group_by", "join", "sort", "unique")


def _forgetful(path: Path) -> list[str]:
    """Calls that may reorder rows, and don't say in what order they are to be."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        keys = {keyword.arg for keyword in node.keywords}
        if node.func.attr not in _REORDERING or "maintain_order" in keys:
            continue
        if node.func.attr == "join" and not keys:  # of strings, or paths
            continue
        found.append(f"{path.name}:{node.lineno}: {node.func.attr}")
    return found


def test_rows_keep_an_order() -> None:
    sources = [path for path in Path(kvreplay.__file__).parent.rglob("*.py") if "polars" in path.read_text()]
    assert len(sources) > 10
    assert [call for path in sources for call in _forgetful(path)] == []


def test_whoever_forgets_is_found(tmp_path: Path) -> None:
    source = tmp_path / "frames.py"
    source.write_text(
        "import polars as pl\n"
        "a = frame.join(other, on='key', maintain_order='left').unique()\n"
        "b = ', '.join(names)\n"
        "c = frame.join(other, how='cross').sort('key', maintain_order=True)\n"
    )
    assert _forgetful(source) == ["frames.py:2: unique", "frames.py:4: join"]
