"""A run that was trained and measured twice, without a model."""

from pathlib import Path

import pytest

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.lessons import make_lessons
from classroom_rl.environments.toy_language.scripts import Teacher, ideal
from tests.support.scripted_teachers import ignores_errors
from tests.support.synthetic_run import played, step_line, write_evaluation, write_training

LESSONS = make_lessons(1)[1][:12]
CONFIG = {
    "seed": 7,
    "teacher_model": {"model_name_or_path": "tiny <tutor>"},
    "train": {"learning_rate": 0.0007, "number_of_problems_per_batch": 8, "num_samples_per_problem": 4},
    "generation": {"student_error_rate": 0.2},
}


def conversations(tutor: Teacher, judged: bool = True) -> list[ConversationRecord]:
    """Two conversations on each lesson, with an error in the first student turn."""
    personas = ["error_student", "correct_student", "correct_student", "correct_student"]
    return [played(tutor, lesson, personas, number, judged) for number, lesson in enumerate(LESSONS) for _ in range(2)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose tutor learned to scaffold."""
    folder = tmp_path / "runs" / "first <try>"
    before, after = conversations(ignores_errors), conversations(ideal)
    write_evaluation(folder / "eval" / "before", {"sampled": before, "greedy": before}, seconds=20.0)
    write_evaluation(folder / "eval" / "after", {"sampled": after, "greedy": after}, seconds=30.0)
    write_training(folder, [step_line(step, 0.5 + step / 100) for step in range(1, 41)], CONFIG)
    return folder
