"""A library that imports neither the laboratory nor its packages, and no cycles of imports; pages that are whole."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msvit
import msvit_lab
from msvit_lab.__main__ import PACKAGES as LAB_PACKAGES

PACKAGES = [Path(package.__file__ or "").parent for package in (msvit, msvit_lab)]
# Left out of the graph: a model's `save_pretrained` and `from_pretrained` call msvit.save and msvit.load.
HUB = ("msvit.integrations.hub", "msvit.saving.model")
TOP = {"msvit", "msvit_lab"}


def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name."""
    found = {}
    for path in [path for package in PACKAGES for path in package.rglob("*.py")]:
        parts = path.relative_to(PACKAGES[0].parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules that this one imports, in functions too; those for type checkers alone do not count.

    Both import_module("msvit.NAME") and the use of a public name count: msvit.NAME imports the module that has it.
    """
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.If(test, _, otherwise) if "TYPE_CHECKING" in ast.unparse(test):
                nodes += otherwise
                continue
            case ast.Import(names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(str(module), names):
                found |= {name if (name := f"{module}.{alias.name}") in known else module for alias in names}
            case ast.Call(ast.Name("import_module"), [ast.Constant(str(module))]):
                found.add(module)
            case ast.Attribute(ast.Name("msvit"), name) if name in msvit._HOME:
                found.add(f"msvit.{msvit._HOME[name] or name}")
        nodes += ast.iter_child_nodes(node)
    return found


@cache
def import_graph() -> dict[str, set[str]]:
    """What each module imports, without `HUB`."""
    known = modules()
    graph = {name: imports(path, known) & known.keys() - {name} for name, path in known.items()}
    graph[HUB[0]].remove(HUB[1])
    return graph


def assert_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_the_library_imports_neither_the_laboratory_nor_what_only_the_command_needs() -> None:
    known = modules()
    library = [name for name in known if not name.startswith("msvit_lab") and name != "msvit.__main__"]  # the command
    assert len(library) > 50
    found = {(name, other) for name in library for other in imports(known[name], known)}
    wrong = {(name, other) for name, other in found if other.split(".")[0] in {"msvit_lab", *LAB_PACKAGES}}
    assert wrong == {("msvit.shapes", "jaxtyping")}  # which does without


def test_there_are_no_cycles_of_imports_neither_of_modules_nor_of_packages() -> None:
    """A room of the laboratory, or of the library, is read without its readers."""

    def room(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[: 3 if parts[1] in ("integrations", "fast", "backbones") else 2])

    graph: dict[str, set[str]] = {}
    for name, others in import_graph().items():
        if name not in TOP:
            graph.setdefault(room(name), set()).update({room(other) for other in others - TOP} - {room(name)})
    assert sum(map(len, import_graph().values())) > 300
    assert len(graph) > 40
    assert_no_cycle(import_graph())
    assert_no_cycle(graph)


def test_the_method_imports_of_its_fast_forms_what_kernels_need_and_nothing_of_budgets_and_files() -> None:
    used = ("msvit.fast.find_kernels", "msvit.fast.kernels", "msvit.fast.regions", "msvit.fast.gates")
    method = {"types", "output", "model", "segmenter", "gates", "losses", "tokens", "execution", "backbones"}
    method |= {"reduction", "heads"}
    wrong = {
        f"{name} imports {other}"
        for name, others in import_graph().items() if ".".join(name.split(".")[1:2]) in method
        for other in others
        if other.startswith(("msvit.fast", "msvit.budget", "msvit.saving")) and not other.startswith(used)
    }  # fmt: skip
    assert not wrong


def test_no_page_holds_both_sides_of_a_merge() -> None:
    root = Path(__file__).parents[1]
    pages = [page for where in (".", "docs", "benchmarks/**", "examples") for page in root.glob(f"{where}/*.md")]
    assert len(pages) > 10
    wrong = [page.name for page in pages if re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE)]
    assert not wrong
