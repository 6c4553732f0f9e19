"""The floors of the package: imports run downward, algorithms know types and ops only, nothing reaches into jax."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS: Mapping[str, int] = {
    "types": 0,
    "errors": 0,
    "typed": 0,
    "ops": 1,
    "report": 1,
    "parallel": 1,
    "algos": 2,
    "models": 2,
    "data": 3,
    "rollout": 3,
    "rewards": 3,
    "io": 3,
    "controller": 4,
    "synth": 5,
    "serve": 5,
    "command": 5,
    "main": 6,
}
PARTS = {"config": "controller"}  # modules beside the packages, and the package whose floor they share
ALGORITHMS_MAY_IMPORT = {"types", "errors", "ops"}
# The one module that may use private jax API.
PRIVATE_API = "yatt_jax/controller/hosts.py"
TEST_ONLY = {"torch", "trl", "datasets"}


def imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, as (line, dotted name); of ``from a import b`` the name is ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def private_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Uses of ``jax._something``, as (line, dotted name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            name = ast.unparse(node)
            if name.startswith("jax."):
                yield node.lineno, name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def unit_of(dotted: str) -> str:
    """The package, or the module beside the packages, that a name in yatt_jax belongs to."""
    name = dotted.split(".")[1] if "." in dotted else ""
    return PARTS.get(name, name)


def faults(sources: Mapping[str, str]) -> list[str]:
    """What is wrong with a set of files.

    Args:
      sources: path below the root, as "yatt_jax/ops/kl.py", to the file's text.
    """
    found: list[str] = []
    edges: dict[tuple[str, str], str] = {}
    for path, text in sources.items():
        dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package = dotted if path.endswith("/__init__.py") else dotted.rpartition(".")[0]
        unit = unit_of(dotted)
        if unit and unit not in FLOORS:
            found.append(f"{path}: {unit!r} has no floor; give it one in FLOORS")
            continue
        tree = ast.parse(text)
        public_only = path != PRIVATE_API
        for line, name in private_attributes(tree) if public_only else ():
            found.append(f"{path}:{line}: {name} is private to jax")
        for line, name in imports(tree, package):
            where, parts = f"{path}:{line}", name.split(".")
            if parts[0] in TEST_ONLY:
                found.append(f"{where}: {parts[0]} is for tests, never for the running trainer")
            if parts[0] in ("jax", "jaxlib") and public_only and any(_is_private(part) for part in parts):
                found.append(f"{where}: {name} is private to jax")
            other = unit_of(name) if parts[0] == "yatt_jax" else ""
            if other not in FLOORS or not unit:
                continue
            if FLOORS[other] > FLOORS[unit]:
                found.append(f"{where}: {unit} imports {other}, which is a floor above it")
            if unit == "algos" and other not in ALGORITHMS_MAY_IMPORT and name != dotted:
                found.append(f"{where}: an algorithm imports types and ops only, and this is {name}")
            if other != unit:
                edges.setdefault((unit, other), where)
    for (unit, other), where in edges.items():
        if (other, unit) in edges and unit < other:
            found.append(f"{where}: {unit} imports {other}, and {edges[other, unit]} the other way round")
    return found


def test_package_keeps_its_floors() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "yatt_jax").rglob("*.py"))}
    assert len(files) > 10
    assert faults(files) == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("yatt_jax/ops/a.py", "from yatt_jax.models.config import DecoderConfig", "a floor above"),
        ("yatt_jax/types.py", "def f():\n    import yatt_jax.ops.kl", "yatt_jax/types.py:2: types imports ops"),
        ("yatt_jax/models/a.py", "from yatt_jax import rollout", "a floor above"),
        ("yatt_jax/models/a.py", "from ..io import hf", "a floor above"),
        ("yatt_jax/models/a.py", "from .. import config", "a floor above"),
        ("yatt_jax/report/a.py", "import importlib\nimportlib.import_module('yatt_jax.main')", "a floor above"),
        ("yatt_jax/algos/grpo.py", "from yatt_jax.algos.ppo import Hyper", "types and ops only"),
        ("yatt_jax/algos/grpo.py", "from .ppo import Hyper", "types and ops only"),
        ("yatt_jax/algos/grpo.py", "from yatt_jax.parallel import partition", "types and ops only"),
        ("yatt_jax/data/a.py", "import torch.utils", "torch is for tests"),
        ("yatt_jax/io/a.py", "def f():\n    from datasets import load_from_disk", "datasets is for tests"),
        ("yatt_jax/ops/a.py", "from jax._src import core", "private to jax"),
        ("yatt_jax/ops/a.py", "from jax import _src", "private to jax"),
        ("yatt_jax/ops/a.py", "import jax\nx = jax._src.core.Tracer", "private to jax"),
        ("yatt_jax/helpers/a.py", "", "has no floor"),
    ],
)
def test_a_planted_fault_is_found(path: str, text: str, expected: str) -> None:
    found = faults({path: text})
    assert found
    assert expected in found[0]


@pytest.mark.parametrize("path", sorted((ROOT / "yatt_jax" / "algos").glob("*.py")), ids=lambda path: path.stem)
def test_an_algorithm_is_one_short_file(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 120


def test_packages_of_one_floor_do_not_import_each_other_in_a_circle() -> None:
    one_way = {"yatt_jax/data/a.py": "from yatt_jax.io import gguf"}
    assert faults(one_way) == []
    circle = {**one_way, "yatt_jax/io/b.py": "from yatt_jax.data import prompts"}
    assert faults(circle) == [
        "yatt_jax/data/a.py:1: data imports io, and yatt_jax/io/b.py:1 the other way round",
    ]


def test_what_is_allowed_is_not_a_fault() -> None:
    allowed = {
        "yatt_jax/__init__.py": "__version__ = '0'",
        "yatt_jax/algos/ppo.py": "from yatt_jax.ops import kl\nfrom yatt_jax.types import Ratio\nimport jax",
        "yatt_jax/config.py": "from yatt_jax.controller.optimizer import OptimizerConfig",
        "yatt_jax/controller/job.py": "from yatt_jax.config import Config\nfrom yatt_jax import __version__",
        "yatt_jax/main.py": "from yatt_jax import config\nimport jax.numpy as jnp",
    }
    assert faults(allowed) == []
