"""The benchmark of a whole step: both programs train with one configuration, and the report compares their rounds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rounds import PROJECT, Round
from benchmarks.whole_step import BOUND, DEEPSPEED, TRL_ALONE, report
from classroom_rl.config.load import ROOT


def test_the_report_compares_rounds_by_step_and_by_message() -> None:
    rounds = {
        PROJECT: [Round(4.0, 0.5, 400), Round(5.0, 0.5, 500)],
        BOUND: [Round(2.0, 0.5, 400), Round(4.0, 0.5, 500)],
        TRL_ALONE: [Round(8.0, 0.5, 200), Round(15.0, 0.5, 500)],
    }
    assert "this project takes 1.62 x the time of its bound" in report(rounds)
    assert "TRL alone takes 2.50 x the time of a step, 3.50 x per message" in report(rounds)
    assert "DeepSpeed" not in report(rounds)
    with_it = rounds | {DEEPSPEED: [Round(5.0, 0.5, 400), Round(7.5, 0.5, 500)]}
    assert "with DeepSpeed it takes 1.38 x the time of a step" in report(with_it)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("opening", "turns"),
    [
        pytest.param((), 3, marks=pytest.mark.full),  # the other one shows as much, and more
        (("generation.teacher_prompt_path=prompt_templates/small_tutor/teacher.txt",), 4),
    ],
)
def test_trl_alone_plays_the_classrooms_conversations(
    opening: tuple[str, ...], turns: int, world: Path, tmp_path: Path
) -> None:
    """Two steps with a blank model; the lines have what the report reads. A template's own messages count as messages:
    with two of them, and the student's answer, the teacher has the fourth."""
    out, blank = tmp_path / "steps.jsonl", world / "blank"
    command = [sys.executable, "-m", "benchmarks.trl_alone", str(out), "--config-name", "quickstart"]
    command += [f"teacher_model.model_name_or_path={blank}", f"student_model.model_name_or_path={blank}"]
    command += [f"dataset.train_datasets=[{{name_or_path: {world / 'lessons_train.jsonl'}}}]", "train.max_steps=2"]
    command += ["train.number_of_problems_per_batch=2", "train.num_samples_per_problem=2"]
    command += [
        "train.per_device_train_batch_size=2",
        f"generation.max_turns={turns}",
        "generation.max_tokens_per_turn=6",
    ]
    command += opening
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and {line["messages"] for line in lines} == {4 * turns}
    assert all(0 <= line["reward"] <= 1 for line in lines)
