"""Architecture rules: imports only point down, no cycles, packages are used through their exports, names are unique.

A *component* is a direct child of a layer or of a wing of ``tasks/``: a file, or a package with everything in it. The
page ``dev/architecture.md`` draws the components; these tests read the imports.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from tools import sizes

PROJECT = Path(__file__).resolve().parent.parent
NAMESPACE = "mergegate."
LAYERS = ("merge_core", "tasks", "flows")  # from the lowest up
MAX_COMPONENTS = 47
MAX_TASK_PACKAGES = 22
WINGS = {f"tasks.{name}" for name in sizes.WINGS}  # folders of components
MAX_GROUPS = MAX_FLOORS = 8  # of tasks/: its wings, and the packages beside them
# Its front would import every operation, but a command needs one and must start fast. So each of its files is public.
WITHOUT_FRONT = "flows.operations"

# Public names with two definitions, and the reason why both mean the same thing.
TWINS = {
    "combine": "merge_core.methods: a fused kernel is the twin of the torch expression of that name",
    "gram": "merge_core.methods: a fused kernel is the twin of the torch expression of that name",
    "mask_words": "merge_core.methods: a fused kernel is the twin of the torch expression of that name",
    "merge": "the stage of that name merges like the function of merge_core, with a cache and progress",
    "main": "the entry point of a program: of the command line, and of a script that a child process runs",
}


class Import(NamedTuple):
    """One import of `name` from `module`.

    Both modules are dotted, without the leading ``mergegate.``.
    """

    importer: str
    module: str
    name: str


def files() -> list[Path]:
    return [file for layer in LAYERS for file in sorted((PROJECT / layer).rglob("*.py"))]


def dotted(file: Path) -> str:
    parts = file.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(file): file for file in files()}
PACKAGES = {name for name, file in MODULES.items() if file.name == "__init__.py"}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports_in(module: str, nodes: Iterable[ast.AST]) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith(NAMESPACE):
                    yield Import(module, name.name.removeprefix(NAMESPACE), "")
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith(NAMESPACE):
            for name in node.names:
                yield Import(module, str(node.module).removeprefix(NAMESPACE), name.name)


@cache
def imports() -> tuple[Import, ...]:
    """Return every import between the project's own modules: at the top of a file, in a function, or for types only."""
    return tuple(one for module in MODULES for one in imports_in(module, ast.walk(tree(module))))


def target(one: Import) -> str:
    """Return the imported module, which is `name` itself if that is a module that its package does not export."""
    inner = f"{one.module}.{one.name}"
    exported = one.module in PACKAGES and one.name in exports(one.module)
    return one.module if exported or inner not in MODULES else inner


@cache
def exports(package: str) -> set[str]:
    """Return the names that the package's ``__init__.py`` imports from the package, and those that it defines."""
    body = tree(package).body
    # Lazy exports are imported in a block for type checkers.
    body = [*body, *(inner for node in body if isinstance(node, ast.If) for inner in node.body)]
    imported = {one.name for one in imports_in(package, body)}
    return imported | {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def component(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[: 3 if ".".join(parts[:2]) in WINGS else 2])


def third_party(module: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found.update(name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def layer(module: str) -> int:
    return LAYERS.index(module.partition(".")[0])


def test_imports_only_point_down() -> None:
    assert [one for one in imports() if layer(one.module) > layer(one.importer)] == []


def test_packages_are_imported_through_their_exports() -> None:
    """Other components may not import a file inside a package, or a name that the package does not export."""
    past = []
    for one in imports():
        if component(one.module) in (component(one.importer), WITHOUT_FRONT) or one.module in (*LAYERS, *WINGS):
            continue
        if one.module not in PACKAGES and component(one.module) != one.module:
            past.append(f"{one.importer}: {one.module} is a file of a package")
        if one.module in PACKAGES and one.name not in exports(one.module):
            inner = f"{one.module}.{one.name}"
            if inner not in PACKAGES:
                past.append(f"{one.importer}: {one.module} does not export {one.name}")
    assert past == []


def component_graph() -> dict[str, set[str]]:
    """Return the components that each component imports, including imports for types only."""
    found: dict[str, set[str]] = {component(module): set() for module in MODULES if module not in (*LAYERS, *WINGS)}
    for one in imports():
        inside, there = component(one.importer), component(target(one))
        if {inside, there} & {*LAYERS, *WINGS} or inside == there:
            continue
        found[inside].add(there)
    return found


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle, sorted, or nothing if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []


def defining_file(module: str, name: str) -> str:
    """Return the file that defines a name, which a package may import from one of its files."""
    if module not in PACKAGES:
        return module
    for one in imports_in(module, tree(module).body):
        if one.name == name and one.module != module:
            return defining_file(one.module, name)
    return f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def file_graph() -> dict[str, set[str]]:
    """Return the files that each file imports from: at the top, in a function, or for types only."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES if module not in PACKAGES}
    for one in imports():
        imported = defining_file(one.module, one.name)
        if one.importer in graph and imported in graph and imported != one.importer:
            graph[one.importer].add(imported)
    return graph


def test_components_and_files_have_no_import_cycle() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_in(component_graph()) == cycle_in(file_graph()) == []


def floor(name: str, graph: Mapping[str, set[str]]) -> int:
    """Return the length of the longest way down, counted from 1."""
    return 1 + max((floor(below, graph) for below in graph[name]), default=0)


def test_tasks_has_few_groups_on_few_floors() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for one in imports():
        inside, there = (".".join(module.split(".")[:2]) for module in (one.importer, target(one)))
        if inside.startswith("tasks.") and there.startswith("tasks."):
            graph[inside] |= {there} - {inside}
            graph[there] |= set()
    assert cycle_in(graph) == []
    assert set(graph) > WINGS
    assert len(graph) <= MAX_GROUPS
    assert max(floor(name, graph) for name in list(graph)) <= MAX_FLOORS


def test_the_number_of_components_is_limited() -> None:
    components = {component(module) for module in MODULES if module not in (*LAYERS, *WINGS)}
    assert len(components) <= MAX_COMPONENTS, sorted(components)
    assert len([one for one in components if one.startswith("tasks.")]) <= MAX_TASK_PACKAGES


def test_the_architecture_page_draws_every_component() -> None:
    drawn = (PROJECT / "dev" / "architecture.md").read_text()
    components = {component(module).rpartition(".")[2] for module in MODULES if module not in (*LAYERS, *WINGS)}
    assert sorted(one for one in components if one not in drawn) == []


def test_every_package_has_a_docstring_and_exports_only_what_others_use() -> None:
    used = {(one.module, one.name) for one in imports() if one.importer != one.module}
    folders = ("tests", "benchmarks", "tools")
    texts = (file.read_text() for folder in folders for file in (PROJECT / folder).rglob("*.py"))
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    for package in sorted(PACKAGES - set(LAYERS) - WINGS):
        assert ast.get_docstring(tree(package)), package
        if package not in ("flows.cli", "merge_core.methods.kernels"):  # A program, and a namespace.
            assert [name for name in exports(package) - words if (package, name) not in used] == [], package


@cache
def definitions() -> dict[str, set[str]]:
    """Return the modules that define each public class, type alias or top-level function."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found[node.name].add(module)
            elif isinstance(node, ast.Assign):
                for name in (target.id for target in node.targets if isinstance(target, ast.Name)):
                    # Type aliases such as 'OnProgress = Callable[...]'. Constants may repeat.
                    if name[:1].isupper() and not name.isupper() and "_" not in name and len(name) > 1:
                        found[name].add(module)
    return {name: modules for name, modules in found.items() if not name.startswith("_")}


def test_a_public_name_is_defined_once() -> None:
    twice = {name: sorted(modules) for name, modules in definitions().items() if len(modules) > 1 and name not in TWINS}
    assert twice == {}
    assert [name for name in TWINS if len(definitions().get(name, ())) < 2] == [], "every exception is needed"


def test_merge_core_does_not_import_prefect_transformers_and_lm_eval() -> None:
    forbidden = {"prefect", "transformers", "lm_eval"}
    assert [module for module in MODULES if module.startswith("merge_core") and forbidden & third_party(module)] == []


LIBRARIES = ("torch", "numba", "prefect", "transformers", "lm_eval", "matplotlib", "scipy", "pyarrow", "datasets")
EVERY_PACKAGE = tuple(sorted(PACKAGES - {"flows", "merge_core.methods.kernels"}))


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (("flows.cli",), (*LIBRARIES, "pydantic")),
        pytest.param(
            ("flows.operations.merge",),
            (*LIBRARIES, f"{NAMESPACE}tasks.quality.evaluation.stage"),
            marks=pytest.mark.story,
        ),
        pytest.param(("flows.preflight", *EVERY_PACKAGE), LIBRARIES, marks=pytest.mark.story),
    ],
    ids=["command line", "merge", "packages"],
)
def test_packages_import_without_heavy_libraries(modules: tuple[str, ...], heavy: tuple[str, ...]) -> None:
    """The output names the first module in one process that imports a heavy library."""
    script = f"""
import importlib, sys
seen = set()
for module in {modules!r}:
    importlib.import_module({NAMESPACE!r} + module)
    for name in {heavy!r}:
        if name in sys.modules and name not in seen:
            seen.add(name)
            print(module, "imports", name)
"""
    # Variables that another test has set must not change what is imported.
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [sys.executable, "-c", script]
    seen = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT, env=environment)
    assert (seen.returncode, seen.stdout) == (0, ""), seen.stderr[-2000:]


def test_every_exported_name_exists() -> None:
    """A package with lazy exports imports a module only when one of its names is used."""
    missing = [
        f"{package}.{name}"
        for package in EVERY_PACKAGE
        for name in exports(package)
        if not hasattr(import_module(NAMESPACE + package), name)
    ]
    assert missing == []


# Modules that read files without the bounded opener of merge_core.parsing, by the reason why no user names the files.
_READERS = {
    "files that mergegate wrote": (
        "flows.cli.init flows.outcome.run_outcome merge_core.checkpoint.measurements "
        "tasks.quality.judge.answers tasks.quality.judge.stage "
        "tasks.quality.serve.process tasks.base.store.shared tasks.release.telemetry.exports "
        "tasks.quality.variants.quantize_child"
    ),
    "files that are installed with mergegate or a library": (
        "merge_core.architecture.conversions merge_core.architecture.families merge_core.methods.kernel_cache "
        "tasks.quality.evaluation.definitions.tree tasks.preflight.licenses.table tasks.release.report.page"
    ),
    "/proc, /sys and devices": "merge_core.system tasks.base.sandbox.gpu_lock tasks.base.sandbox.supervision",
    "weights or release files, which were opened or hashed as plain files before": (
        "tasks.release.publish.content tasks.release.publish.public_names tasks.release.publish.targets.s3_access "
        "tasks.quality.serve.static_checks"
    ),
    "the standard streams of this process": "flows.cli.streams",
    "the mark of a partial directory, whose size is checked first": "merge_core.files.new_directory",
    "a descriptor of the bounded opener": "merge_core.parsing.json_text",
    "it checks first that the path names a plain file": "merge_core.files.hashing",
    "files of the Hub's cache, which are compared with the Hub's hashes": "tasks.models.checkpoints.parent_weights",
    "a file of the target with the size of ours": "tasks.release.publish.stage",
    "a file that was downloaded into a directory of its own": "tasks.release.publish.targets.hub",
    "the converter's code, and files that this stage wrote": "tasks.quality.variants.gguf_conversion",
}
UNBOUNDED_READERS = {module: reason for reason, modules in _READERS.items() for module in modules.split()}


def unbounded_reads(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the calls that read a path without a bound or would wait for a pipe.

    These are `path.read_text()`, `open(path)`, `path.open("rb")` and `with path.open()`.
    """
    reads = []
    for node in nodes:
        contexts = [item.context_expr for item in node.items] if isinstance(node, ast.With) else [node]
        for call in contexts:
            if not isinstance(call, ast.Call):
                continue
            function = call.func
            named = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            position = 1 if isinstance(function, ast.Name) else 0
            modes = [*call.args[position : position + 1], *(word.value for word in call.keywords if word.arg == "mode")]
            mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else ""
            by_default = not modes and (isinstance(function, ast.Name) or isinstance(node, ast.With))
            is_mode = isinstance(mode, str) and re.fullmatch("[rwaxbt+]+", mode) and ("r" in mode or "+" in mode)
            is_whole = isinstance(function, ast.Attribute) and named in ("read_text", "read_bytes")
            if is_whole or (named == "open" and (by_default or is_mode)):
                reads.append(ast.unparse(call))
    return reads


@pytest.mark.story
def test_paths_that_a_user_names_are_opened_by_the_bounded_opener() -> None:
    """A pipe as a key or a text would make the run wait forever, and ``/dev/zero`` would fill the memory."""
    readers = {module: unbounded_reads(ast.walk(tree(module))) for module in MODULES}
    assert {module: calls for module, calls in readers.items() if calls and module not in UNBOUNDED_READERS} == {}
    assert sorted(module for module in UNBOUNDED_READERS if not readers.get(module)) == []


@pytest.mark.parametrize("call", ["p.read_text()", "p.read_bytes()", "open(p)", "open(p, 'rb')", "p.open(mode='r')"])
def test_an_unbounded_read_is_detected(call: str) -> None:
    assert unbounded_reads(ast.walk(ast.parse(call))) == [call]


def test_a_write_or_another_opener_is_not_a_read() -> None:
    code = "p.open('wb'); open(p, 'x'); checkpoint.open(); read_plain(p, 1); webbrowser.open(url)"
    assert unbounded_reads(ast.walk(ast.parse(code))) == []
