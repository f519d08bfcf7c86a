"""The rooms of src/, from the roof to the ground: a room imports only from rooms below it."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from config.load import ROOT

ROOMS = (
    *("launch", "ppo", "grpo", "sft", "training", "evaluation", "server", "memory", "viewer", "results"),
    *("inference_providers", "vllm", "readers", "post_test", "supervision", "message_rules", "toy_language"),
    *("classroom", "marooned"),
    *("config", "rollout"),
    *("grading", "models", "system", "errors"),
)
"""From the roof to the ground. `config` is the folder beside src/, `errors` the one file that stands in no room."""
WITHOUT_CONFIG = ROOMS[ROOMS.index("rollout") :]
DOORS = {"src.rejudge", "src.vllm.client", "src.evaluation.report.__main__"}
"""Modules that keep a name which people know, where the code moved to a higher room."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for folder in ("src", "config") for path in (ROOT / folder).rglob("*.py")}
MODULES = {name: path for name, path in MODULES.items() if name not in DOORS}


def room_of(module: str) -> str | None:
    """The room that claims a module; None for the folder src/ itself."""
    first, *rest = module.split(".")
    return "config" if first == "config" else rest[0] if rest else None


def imports_of(module: str) -> set[str]:
    """The project's modules that one imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
                base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) + 1 - node.level], base]))
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return {name for name in found if name in MODULES and name != module}


IMPORTS = {module: imports_of(module) for module in MODULES}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_claims_every_module(module):
    assert room_of(module) in (None, *ROOMS), f"{module} is in no room: add its folder to ROOMS, or move it"
    assert module == "src" or MODULES[module].parent != ROOT / "src" or module == "src.errors", "src/ holds rooms alone"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_import_goes_up(module):
    room = room_of(module)
    up = {
        name
        for name in IMPORTS[module]
        if room_of(name) not in (None, room) and ROOMS.index(room_of(name)) < ROOMS.index(room)
    }
    assert not up, f"{module} ({room}) imports {', '.join(sorted(up))}, which is above it"


def test_no_module_imports_itself_by_way_of_others():
    done, path = set(), []

    def visit(module: str) -> None:
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in done:
            path.append(module)
            for each in sorted(IMPORTS[module]):
                visit(each)
            path.pop()
            done.add(module)

    for module in sorted(MODULES):
        visit(module)


def test_every_room_is_used():
    used = defaultdict(set)
    for module, names in IMPORTS.items():
        used[room_of(module)] |= {room_of(name) for name in names}
    assert set(ROOMS) <= {room_of(module) for module in MODULES}
    assert all(used[room] - {room} for room in ROOMS if room not in ("system", "errors")), dict(used)


@pytest.mark.parametrize("module", [name for name in sorted(MODULES) if room_of(name) in WITHOUT_CONFIG])
def test_rooms_of_the_library_import_each_other_relatively(module):
    """They are installed under another name than `src` (pyproject.toml)."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    absolute = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert not {name for name in absolute if name.split(".")[0] in ("src", "config")}


def test_the_pure_core_imports_neither_torch_nor_vllm_nor_deepspeed():
    modules = sorted(f"config.{path.stem}" for path in (ROOT / "config").glob("[a-z]*.py"))
    modules += [
        "src.classroom.conversation",
        "src.classroom.verdicts",
        "src.classroom.rewards",
        "src.classroom.setup",
        "src.rollout.tokens",
        "src.server.schemas",
        "src.rollout.datasets",
    ]
    script = (
        f"import sys, {', '.join(modules)}\n"
        "heavy = {'torch', 'vllm', 'deepspeed', 'transformers', 'trl', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
