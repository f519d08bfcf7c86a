"""The examples do what they say, as a stranger runs them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from classroom_rl.rollout.dialogue import DialogueEpisode
from classroom_rl.rollout.environment import environment_of
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.tokens import Turn
from classroom_rl.system.shipped import ROOT
from tests.conftest import free_port
from tests.support.configs import training


@pytest.mark.full
def test_the_minimal_loop_learns_the_game(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/minimal_grpo.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=True)
    rewards = [float(reward) for reward in re.findall(r"^step .*reward (\S+)", result.stdout, re.MULTILINE)]
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.2


def write_files(folder: Path, example: str = "minimal_environment", name: str = "counting") -> tuple[str, ...]:
    """Have an example write its files; returns the arguments that name its configuration."""
    subprocess.run([sys.executable, str(ROOT / f"examples/{example}.py")], cwd=folder, check=True, timeout=300)
    return ("--config-dir", str(folder / "runs" / name), "--config-name", name)


def test_the_minimal_environment_loads_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    config = training(*write_files(tmp_path))
    environment_class = environment_of(config)
    assert environment_class.__module__ == "minimal_environment"
    episode = DialogueEpisode("r", Problem.of("8"), turns=[Turn("teacher", "9")])
    environment = environment_class.__new__(environment_class)
    assert environment.reply(episode) == "3", "the message that is to be counted on from"
    for text, digit, following in (("4", 1.0, 1.0), ("5", 1.0, 0.5), ("x", 0.5, 0.5)):
        episode.turns[1:] = [Turn("program", "3"), Turn("teacher", text)]
        assert environment.reward("digit", episode) == digit and environment.reward("next", episode) == following


@pytest.mark.full
@pytest.mark.parametrize(
    ("example", "name", "problems"),
    [("minimal_environment", "counting", "digits"), ("openai_agent", "agent", "numbers")],
)
def test_a_model_learns_in_an_example(example: str, name: str, problems: str, world: Path, tmp_path: Path) -> None:
    files = write_files(tmp_path, example, name)
    paths = os.pathsep.join([str(ROOT / "examples"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    overrides = (
        f"teacher_model.model_name_or_path={world / 'blank'}",
        f"dataset.train_datasets=[{{name_or_path: {tmp_path / 'runs' / name / problems}.jsonl}}]",
        f"logging.save_dir={tmp_path / 'run'}",
        f"generation.server_port={free_port()}",
    )
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [str(ROOT / "start_rl_training.sh"), *files, *overrides]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1800)
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [line["reward"] for line in map(json.loads, lines) if "reward" in line]
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.2
