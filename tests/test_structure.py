"""The layout's rules: no import cycles, a control plane without torch, kernels that know nothing of the engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTROL_PLANE = [
    "specpaged.config",
    "specpaged.engine.sequence",
    "specpaged.engine.request",
    "specpaged.outputs",
    "specpaged.metrics",
    "specpaged.engine.stopping",
    "specpaged.sampling_params",
    "specpaged.scheduling.continuous",
    "specpaged.research.eqspec",
    "specpaged.research.exspec",
    "specpaged.research.alignment",
    "specpaged.research.dense_table",
    "specpaged.paging.block_allocator",
    "specpaged.paging.page_table",
    "specpaged.paging.prefix_cache",
]


def module_imports(tree: ast.Module):
    """Names imported when a module is loaded (imports in functions and under TYPE_CHECKING are not)."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(package: str) -> dict[str, set[str]]:
    files = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        name: {i for i in module_imports(ast.parse(path.read_text())) if i in files and i != name}
        for name, path in files.items()
    }


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
    graph = import_graph("specpaged")
    assert len(graph) > 20
    assert find_cycle(graph) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize("module", ["specpaged", *CONTROL_PLANE])
def test_the_control_plane_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_kernels_import_nothing_of_specpaged():
    for path in (ROOT / "kernels").rglob("*.py"):
        imported = {name.split(".")[0] for node in ast.walk(ast.parse(path.read_text())) for name in _names(node)}
        assert "specpaged" not in imported, path


def test_kernels_is_a_source_root_and_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_vllm_is_imported_by_its_plugin_only():
    for path in (ROOT / "specpaged").rglob("*.py"):
        if "vllm_plugin" not in path.parts:
            imported = {name.split(".")[0] for node in ast.walk(ast.parse(path.read_text())) for name in _names(node)}
            assert "vllm" not in imported, path


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def test_nothing_is_pickled():
    for path in [*(ROOT / "specpaged").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            assert "pickle" not in _names(node), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}, path


def test_public_names_load_lazily_and_unknown_ones_are_named():
    import specpaged

    assert specpaged.SamplingParams.__module__ == "specpaged.sampling_params"
    with pytest.raises(AttributeError, match=r"'Nonsense'.*LLM"):
        specpaged.Nonsense  # noqa: B018
