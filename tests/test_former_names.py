"""The import names of version 0.1 lead to the same modules, with a warning."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from classroom_rl.former_names import _NEW_NAMES, forward, new_name
from classroom_rl.system.shipped import ROOT

forward()


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("src.vllm.client", "classroom_rl.server.client"),
        ("src.classroom.rewards", "classroom_rl.environments.classroom.rewards"),
        ("src.inference_providers.open_router_inference", "classroom_rl.judges.model_judge"),
        ("src.rollout", "classroom_rl"),
        ("src.rollout.dialogue", "classroom_rl.rollout.dialogue"),
        ("src.rollout.set_files", "classroom_rl.rollout.store.set_files"),
        ("src.grpo.run", "classroom_rl.trainer.run"),
        ("src.errors", "classroom_rl.errors"),
        ("tutor_rollouts.grading.checker", "classroom_rl.grading.checker"),
    ],
)
def test_a_former_name_is_the_same_module_and_warns(former: str, now: str) -> None:
    for name in [name for name in sys.modules if name.startswith(former)]:
        del sys.modules[name]
    with pytest.warns(FutureWarning, match=f"{former} is called {now} now"):
        module = importlib.import_module(former)
    assert module is importlib.import_module(now) and module.__name__ == now


@pytest.mark.parametrize("room", sorted(set(_NEW_NAMES) - {"rollout.__main__"}))
def test_every_new_name_is_there(room: str) -> None:
    path = ROOT / "src" / Path(*new_name(f"src.{room}").split("."))
    assert path.is_dir() or path.with_suffix(".py").is_file()


def test_what_never_was_a_module_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("src.no_such_room")


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("src.rollout", "usage: classroom-rollouts"),
        ("src.rejudge", "error: There is no folder --help"),
        ("src.evaluation.report", "nothing to report"),
    ],
)
def test_a_program_starts_under_its_former_name(program: str, answer: str) -> None:
    command = [sys.executable, "-m", program, "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert "is called classroom_rl" in result.stderr and answer in result.stdout + result.stderr
