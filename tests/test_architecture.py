"""The two floors: a library that never imports the laboratory, and no cycles of imports; pages that are whole."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msvit

PACKAGE = Path(msvit.__file__).parent


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path], inside_functions: bool) -> set[str]:
    """Modules of the package that this one imports; those for type checkers alone do not count."""
    found: set[str] = set()
    nodes = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef) and not inside_functions:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
        nodes += ast.iter_child_nodes(node)
    return found & known.keys()


def assert_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_the_library_does_not_import_the_laboratory() -> None:
    known = modules()
    library = {name: path for name, path in known.items() if not name.startswith("msvit.lab")}
    del library["msvit.__main__"]  # the command
    assert len(library) > 50
    wrong = {
        f"{name} imports {other}"
        for name, path in library.items()
        for other in imports(path, known, inside_functions=True)
        if other.startswith("msvit.lab")
    }
    assert not wrong


def test_there_are_no_cycles_of_imports() -> None:
    known = modules()
    graph = {name: imports(path, known, inside_functions=False) - {name} for name, path in known.items()}
    assert sum(map(len, graph.values())) > 300
    assert_no_cycle(graph)


def test_there_are_no_cycles_of_packages() -> None:
    """Neither by imports inside functions: a room of the laboratory, or of the library, is read without its readers."""
    known = modules()

    def room(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[: 3 if parts[1:2] == ["lab"] else 2])

    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        if name != "msvit":
            others = {room(other) for other in imports(path, known, inside_functions=True) - {"msvit"}}
            graph.setdefault(room(name), set()).update(others - {room(name)})
    assert len(graph) > 40
    assert_no_cycle(graph)


def test_no_page_holds_both_sides_of_a_merge() -> None:
    root = Path(__file__).parents[1]
    pages = [page for where in (".", "docs", "benchmarks/**", "examples") for page in root.glob(f"{where}/*.md")]
    assert len(pages) > 10
    wrong = [page.name for page in pages if re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE)]
    assert not wrong
