"""The layout's rules: no import cycles, a control plane without torch, files of one noun, kernels that stand alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
MIN_FILES = 100  # of specpaged/: a test that looks at fewer has looked in the wrong place
MAX_ROOT_FILES = 12
MAX_LINES = 300
MAX_MEDIAN_LINES = 100
CONTROL_PLANE = [
    "specpaged.checks",
    "specpaged.config",
    "specpaged.engine.detokenizer",
    "specpaged.engine.request",
    "specpaged.engine.scheduler",
    "specpaged.engine.sequence",
    "specpaged.engine.stop_checker",
    "specpaged.metrics",
    "specpaged.outputs",
    "specpaged.paging.block_allocator",
    "specpaged.paging.leased_page_table",
    "specpaged.paging.page_table",
    "specpaged.paging.prefix_cache",
    "specpaged.planning.commands",
    "specpaged.planning.request",
    "specpaged.prompts",
    "specpaged.research.alignment",
    "specpaged.research.build",
    "specpaged.research.dense_table",
    "specpaged.research.eqspec",
    "specpaged.research.exspec",
    "specpaged.sampling_params",
    "specpaged.scheduling.continuous",
    "specpaged.scheduling.halves",
    "specpaged.paging.split_page_table",
    "specpaged.speculation.acceptance",
    "specpaged.speculation.adaptive",
    "specpaged.speculation.combined",
    "specpaged.speculation.controller",
    "specpaged.speculation.cost_model",
    "specpaged.speculation.pass_errors",
    "specpaged.speculation.pass_seconds",
    "specpaged.speculation.lookup_choice",
    "specpaged.speculation.looks",
    "specpaged.speculation.overlap_choice",
    "specpaged.speculation.trials",
    "specpaged.speculation.selection",
    "specpaged.speculation.step_times",
    "specpaged.speculation.stop_rule",
    "specpaged.speculation.tetris",
    "specpaged.speculative_config",
    "specpaged.studies.scaling.fits",
    "specpaged.studies.scaling.laws",
    "specpaged.studies.scaling.optimum",
    "specpaged.studies.scaling.options",
]


def files_of(folder: str, at_least: int) -> list[Path]:
    """The Python files under a folder of the checkout: at least so many, or what follows would prove nothing."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) >= at_least, f"{folder} holds {len(files)} files"
    return files


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, in_functions: bool) -> set[str]:
    """Full names that are imported anywhere but under TYPE_CHECKING; those in functions only if asked for."""
    names: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            nodes += node.orelse
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return names


def imports_of(path: Path, in_functions: bool = True) -> set[str]:
    return imports(ast.parse(path.read_text()), in_functions)


def package_of(name: str) -> str:
    """The directory or module directly under specpaged that a full name belongs to; "specpaged" for its own names."""
    first = name.split(".")[1:2]
    return first[0] if first and _is_package(first[0]) else "specpaged"


def _is_package(name: str) -> bool:
    return any((ROOT / "specpaged" / place).exists() for place in (name, f"{name}.py"))


def package_graph(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    """From what each module imports to what each package does."""
    graph: dict[str, set[str]] = {}
    for module, imported in modules.items():
        package = package_of(module)
        targets = {package_of(name) for name in imported if name.startswith("specpaged.")}
        graph.setdefault(package, set()).update(targets - {package})
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for target in sorted(graph[node]):
            cycle = visit(target, [*path, node])
            if cycle:
                return cycle
        done.add(node)
        return None

    for node in sorted(graph):
        cycle = visit(node, [])
        if cycle:
            return cycle
    return None


def test_modules_import_without_cycles():
    files = {module_of(path): path for path in files_of("specpaged", MIN_FILES)}
    graph = {name: (imports_of(path, in_functions=False) & files.keys()) - {name} for name, path in files.items()}
    assert find_cycle(graph) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_packages_import_without_cycles_even_in_functions():
    modules = {module_of(path): imports_of(path) for path in files_of("specpaged", MIN_FILES)}
    graph = package_graph(modules)
    assert len(graph) > 12
    assert {"engine", "modeling", "config"} <= graph["llm"]
    # The names of the root load what they stand for: importing one would be an edge to all of that.
    assert [package for package, targets in graph.items() if "specpaged" in targets] == []
    assert find_cycle(graph) is None
    planted = imports(ast.parse("def f():\n    from specpaged.engine.sequence import Sequence"), in_functions=True)
    modules["specpaged.paging.page_table"] |= planted
    cycle = find_cycle(package_graph(modules))
    assert cycle is not None
    assert "paging engine" in " ".join(cycle)


@pytest.mark.parametrize(
    ("source", "everywhere", "at_load"),
    [
        ("import specpaged.llm", True, True),
        ("try:\n    from specpaged import llm\nexcept ImportError:\n    pass", True, True),
        ("class C:\n    from specpaged.llm import LLM", True, True),
        ("def f():\n    from specpaged.llm import LLM", True, False),
        ("if TYPE_CHECKING:\n    from specpaged.llm import LLM", False, False),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import specpaged.llm", True, True),
    ],
)
def test_imports_are_found_wherever_they_can_run(source, everywhere, at_load):
    tree = ast.parse(source)
    assert ("specpaged.llm" in imports(tree, in_functions=True)) == everywhere
    assert ("specpaged.llm" in imports(tree, in_functions=False)) == at_load


def test_the_engine_knows_neither_who_serves_it_nor_what_is_studied():
    for path in files_of("specpaged/engine", 8):
        for name in imports_of(path):
            assert name.split(".")[0] != "vllm", path
            if name.startswith("specpaged."):
                assert package_of(name) not in {"research", "studies", "vllm_plugin", "cli", "llm"}, (path, name)


NO_TORCH = """
import sys
for name in sys.argv[1:]:
    __import__(name)
    if {"torch", "transformers"} & sys.modules.keys():
        sys.exit(name)
"""


def test_the_control_plane_imports_no_torch(tmp_path):
    """One after the other in one process: the first that does is named."""
    command = [sys.executable, "-c", NO_TORCH, "specpaged", *CONTROL_PLANE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "torch.py").touch()
    planted = subprocess.run([*command[:3], "json", "torch"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (planted.returncode, planted.stderr) == (1, "torch\n")


def test_files_are_of_a_size_to_be_read():
    lines = {module_of(path): len(path.read_text().splitlines()) for path in files_of("specpaged", MIN_FILES)}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}
    assert median(lines.values()) <= MAX_MEDIAN_LINES
    assert 1 < len(list((ROOT / "specpaged").glob("*.py"))) <= MAX_ROOT_FILES


def test_kernels_import_nothing_of_specpaged():
    for path in files_of("kernels", 10):
        assert "specpaged" not in {name.split(".")[0] for name in imports_of(path)}, path


def test_kernels_is_a_source_root_and_no_package():
    assert (ROOT / "kernels" / "specpaged_kernels" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_vllm_is_imported_by_its_plugin_only():
    importers = {path for path in files_of("specpaged", MIN_FILES) if _imports_vllm(path)}
    assert importers
    assert {path for path in importers if "vllm_plugin" not in path.parts} == set()


def _imports_vllm(path: Path) -> bool:
    """Whether a file names vLLM in an import, be it one for type checkers alone."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name for node in nodes for name in imports(node, in_functions=True)}
    return "vllm" in {name.split(".")[0] for name in names}


def test_nothing_is_pickled():
    for path in [*files_of("specpaged", MIN_FILES), *files_of("kernels", 10)]:
        tree = ast.parse(path.read_text())
        assert "pickle" not in imports(tree, in_functions=True), path
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}, path


def test_public_names_load_lazily_and_unknown_ones_are_named():
    import specpaged

    for name in specpaged.__all__:
        assert getattr(specpaged, name).__module__ == specpaged._HOMES[name]
    with pytest.raises(AttributeError, match=r"'Nonsense'.*LLM"):
        specpaged.Nonsense  # noqa: B018
