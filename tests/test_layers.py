"""The import direction between packages. `LAYERS` is its documentation."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "kvreplay"

# A package imports only from the lines above it, never from its own.
LAYERS = [
    {"errors", "ids"},
    {"behaviour", "user_files"},
    {"events"},
    {"sim"},
    {"kv", "transport"},
    {"engine"},
    {"connectors"},
    {"faults"},
    {"trace", "checkers"},
    {"verdict"},
    {"replay", "conformance"},
    {"explore", "record"},
    {"report"},
    {"cli"},
    {"__main__"},
]
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}
MODULES = sorted(ROOT.rglob("*.py"))
TERMINAL_LIBRARIES = {"rich", "typer"}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_names(path: Path) -> set[str]:
    """Every imported dotted name, imports inside functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def imported_packages(path: Path) -> set[str]:
    names = imported_names(path)
    return {name.split(".")[1] for name in names if name.startswith("kvreplay.")} - {"__version__"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    package = package_of(path)
    for imported in imported_packages(path) - {package}:
        assert LEVEL[imported] < LEVEL[package], f"{name_of(path)}: {package} imports {imported}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_report_and_cli_know_the_terminal(path: Path) -> None:
    libraries = {name.split(".")[0] for name in imported_names(path)} & TERMINAL_LIBRARIES
    assert not libraries or package_of(path) in {"report", "cli"}


def test_every_package_has_its_layer() -> None:
    assert {package_of(path) for path in MODULES} - {"__init__"} <= set(LEVEL)
