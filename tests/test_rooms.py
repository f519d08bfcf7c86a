"""The rooms of src/classroom_rl/, from the roof to the ground: a room imports only from rooms below it."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from classroom_rl.system.shipped import ROOT

ROOMS = (
    *("launch", "trainer", "evaluation", "server", "memory", "viewer", "results"),
    *("environments", "supervision", "judges", "engines", "environments.toy_language"),
    *("config", "rollout", "grading", "models", "system", "errors"),
)
"""From the roof to the ground. The toy language is what judges know; the other environments use judges. `errors` is the
one file that stands in no room, with the package's own door and the names that it had before."""
DOORS = {"classroom_rl", "classroom_rl.former_names", "classroom_rl.export", "classroom_rl.evaluation.report.__main__"}
"""Modules that import from any room: the public names, the export out of the house, and forwards."""
SOURCE = ROOT / "src"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in (SOURCE / "classroom_rl").rglob("*.py")}
MODULES = {name: path for name, path in MODULES.items() if name not in DOORS}


def room_of(module: str) -> str | None:
    """The room that claims a module: the longest that its name begins with."""
    name = module.removeprefix("classroom_rl.")
    rooms = [room for room in ROOMS if name == room or name.startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def imports_of(module: str) -> set[str]:
    """The project's modules that one imports, anywhere in it."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
                base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) + 1 - node.level], base]))
            imported |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return {name for name in imported if name in MODULES and name != module}


IMPORTS = {module: imports_of(module) for module in MODULES}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_claims_every_module(module):
    assert room_of(module), f"{module} is in no room: add its folder to ROOMS, or move it"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_import_goes_up(module):
    room = room_of(module)
    up = {name for name in IMPORTS[module] if room_of(name) != room and ROOMS.index(room_of(name)) < ROOMS.index(room)}
    assert not up, f"{module} ({room}) imports {', '.join(sorted(up))}, which is above it"


def test_no_module_imports_itself_by_way_of_others():
    visited, path = set(), []

    def visit(module: str) -> None:
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in visited:
            path.append(module)
            for imported in sorted(IMPORTS[module]):
                visit(imported)
            path.pop()
            visited.add(module)

    for module in sorted(MODULES):
        visit(module)


def test_every_room_is_used():
    used = defaultdict(set)
    for module, names in IMPORTS.items():
        used[room_of(module)] |= {room_of(name) for name in names}
    assert set(ROOMS) <= {room_of(module) for module in MODULES}
    assert all(used[room] - {room} for room in ROOMS if room not in ("system", "errors")), dict(used)


def test_the_pure_core_imports_neither_torch_nor_vllm_nor_deepspeed():
    modules = sorted(name for name in MODULES if room_of(name) == "config")
    modules += [
        "classroom_rl.environments.classroom.conversation",
        "classroom_rl.judges.verdicts",
        "classroom_rl.environments.classroom.rewards",
        "classroom_rl.environments.classroom.setup",
        "classroom_rl.rollout.tokens",
        "classroom_rl.server.schemas",
        "classroom_rl.rollout.datasets",
    ]
    script = (
        f"import sys, {', '.join(modules)}\n"
        "heavy = {'torch', 'vllm', 'deepspeed', 'transformers', 'trl', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
