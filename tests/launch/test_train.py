"""The program that trains: what a dry run of it shows and refuses."""

import json
from pathlib import Path

import pytest

from tests.launch.test_before_start import JUDGE
from tests.support.programs import run_program


def test_a_dry_run_says_what_a_start_would_miss_and_how_much_an_api_is_asked() -> None:
    result = run_program("train_rl.py", *JUDGE, "judge_model.api_key_env=NO_SUCH_KEY", "dry_run=true")
    assert result.returncode == 0, result.stderr
    assert "# a start would be refused: judge_model is judge" in result.stdout
    assert "# requests to judge_model (judge), for 50 batches: 3,200, and 12,800 at most" in result.stdout


def test_problems_that_are_too_long_end_it_before_anything_is_loaded(world: Path, long_problems: str) -> None:
    model = f"teacher_model.model_name_or_path={world / 'blank'}"
    result = run_program("train_rl.py", model, long_problems, "dry_run=true")
    assert result.returncode == 2 and "makes a teacher prompt of" in result.stderr


@pytest.mark.parametrize(
    ("judge", "words"),
    [("rubric", "not a lesson of the quickstart: 'Eli has 25 euros"), ("rules", "reads lesson plans")],
)
def test_problems_that_the_embedded_judge_cannot_read_end_it_before_anything_is_loaded(
    world: Path, tmp_path: Path, judge: str, words: str
) -> None:
    row = {"problem": "Eli has 25 euros and spends 5. How many are left?", "answer": "20"}
    (tmp_path / "mine.jsonl").write_text(f"{json.dumps(row)}\n" * 64, encoding="utf-8")
    result = run_program(
        "train_rl.py",
        f"teacher_model.model_name_or_path={world / 'blank'}",
        f"dataset.train_datasets=[{{name_or_path: {tmp_path / 'mine.jsonl'}}}]",
        f"judge_model.model_name_or_path={judge}",
        "dry_run=true",
    )
    assert result.returncode == 2 and words in result.stderr


def test_accelerate_with_another_precision_is_refused() -> None:
    result = run_program("train_rl.py", "train.dtype=float32", "dry_run=true", ACCELERATE_MIXED_PRECISION="bf16")
    assert result.returncode == 2 and "mixed_precision bf16, but train.dtype is float32" in result.stderr
