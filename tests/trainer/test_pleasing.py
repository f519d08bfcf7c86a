"""The guard of a student under training: a student that learns to please is named, another one is not."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate import PartialState

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.tokens import Turn
from classroom_rl.trainer import judge_monitor
from classroom_rl.trainer.judge_monitor import JudgeMonitor
from classroom_rl.trainer.pleasing import Drift, PleasingWatch
from tests.support.toy_lesson import HINT, PROBLEM, Q1, RIGHT, WRONG


def record(answer: str, reply: str, again: str, student: float = 0.9, tutor: float = 0.5) -> ConversationRecord:
    """A lesson in which an error was drawn first, and none after the tutor's reply."""
    texts = [("teacher", f"Hi! {Q1}"), ("student", answer), ("teacher", reply), ("student", again)]
    personas = iter([ERROR_PERSONA, CORRECT_PERSONA])
    return ConversationRecord(
        **dict.fromkeys(("id", "request_id", "problem_id"), "r"),
        **dict.fromkeys(("step", "index"), 0),
        **dict.fromkeys(("prompt_ids", "completion_ids", "mask", "logprobs"), []),
        problem=PROBLEM,
        answer="",
        meta={},
        rewards={"student": student, "pedagogical": tutor},
        reward=student,
        turns=[Turn(role, text, next(personas) if role == "student" else None) for role, text in texts],
    )


FAITHFUL = record(WRONG, HINT, RIGHT)
RIGHT_ANYWAY = record(RIGHT, "Good!", RIGHT)
REPAIRS_ANYTHING = record(WRONG, f"Good! {Q1}", RIGHT)
STAYS_WRONG = record(WRONG, f"Good! {Q1}", WRONG)


Player = Callable[..., list[tuple[dict[str, float], list[str]]]]
"""Shows batches to a new monitor: what it logs of each, and its warnings of pleasing."""


@pytest.fixture
def played(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Player:
    def play(*batches: list[ConversationRecord]) -> list[tuple[dict[str, float], list[str]]]:
        monitor = JudgeMonitor(TrainRLConfig(generation=GenerationConfig(trained_role="student")), None, tmp_path)
        results = []
        for step, batch in enumerate(batches):
            caplog.clear()
            figures = monitor.check(PartialState(cpu=True), step, batch)
            results.append((figures, [message for message in caplog.messages if "learns to please" in message]))
        return results

    return play


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (FAITHFUL, RIGHT_ANYWAY, "0% of the messages for which an error was drawn hold one, 100% less"),
        (STAYS_WRONG, REPAIRS_ANYTHING, "it repairs 100% of its errors that no hint scaffolds, 100% more"),
        (FAITHFUL, record(WRONG, HINT, RIGHT, 0.7, 0.7), "the tutor's reward is 0.20 higher, and the student's own"),
    ],
)
def test_a_student_that_learns_to_please_is_named_once(before, after, says, played: Player) -> None:
    (_, none), (early, _), (figures, [warning]), (_, again) = played(
        [before] * 256, [before] * 64, [after] * 256, [after] * 64
    )
    assert none == again == [] and says in warning and warning.startswith("step 3: The student learns to please: ")
    assert early["guard/student_pleases"] == 0.0 and figures["guard/student_pleases"] == 1.0


def test_it_is_named_again_after_it_was_gone(played: Player) -> None:
    runs = [[FAITHFUL] * 256, [RIGHT_ANYWAY] * 256, [FAITHFUL] * 256, [RIGHT_ANYWAY] * 256]
    assert [len(warnings) for _, warnings in played(*runs)] == [0, 1, 0, 1]


def test_it_is_not_named_again_after_a_batch_that_was_not_measured(
    played: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, broken = judge_monitor.student_figures, [FAITHFUL] * 2

    def student_figures(records: list[ConversationRecord]) -> dict[str, float]:
        if records == broken:
            raise ValueError("no figure")
        return measure(records)

    monkeypatch.setattr(judge_monitor, "student_figures", student_figures)
    results = played([FAITHFUL] * 256, [RIGHT_ANYWAY] * 256, broken, [RIGHT_ANYWAY] * 256)
    assert [len(warnings) for _, warnings in results] == [0, 1, 0, 0]
    assert "guard/student_pleases" not in results[2][0]


@pytest.mark.parametrize(
    "after",
    [
        FAITHFUL,
        record(WRONG, HINT, RIGHT, 1.0, 0.9),  # both rewards rise
        record(WRONG, HINT, RIGHT, 0.7, 0.5),  # the student's alone falls
    ],
)
def test_another_student_is_not_named(after, played: Player) -> None:
    results = played([FAITHFUL] * 256, [after] * 256, [after] * 256)
    assert [warnings for _, warnings in results] == [[], [], []]
    assert all(figures["guard/student_pleases"] == 0.0 for figures, _ in results)


def test_chance_is_not_named() -> None:
    rng, watch = random.Random(0), PleasingWatch()
    for _ in range(60):
        batch = [rng.choice([FAITHFUL, RIGHT_ANYWAY, REPAIRS_ANYTHING, STAYS_WRONG]) for _ in range(64)]
        watch.update(batch)
        assert watch.signs() == {}


def test_the_figures_are_of_the_latest_messages() -> None:
    watch = PleasingWatch()
    assert watch.update([FAITHFUL]) == {"guard/student_errs_when_drawn": 1.0, "guard/student_pleases": 0.0}
    for _ in range(2):
        figures = watch.update([RIGHT_ANYWAY] * 64 + [FAITHFUL] * 64 + [STAYS_WRONG, REPAIRS_ANYTHING])
    assert figures["guard/student_errs_when_drawn"] == pytest.approx(0.5, abs=0.02)
    assert figures["guard/student_repairs_unhelped"] == 0.5


def test_a_drift_compares_the_latest_with_the_first() -> None:
    drift = Drift(2)
    assert drift.latest is None and drift.move == 0.0
    for value in (1.0, 1.0, 0.0):
        drift.add([value])
    assert drift.move == 0.0  # one value is too few
    for value in (0.0, 0.5):
        drift.add([value])
    assert drift.latest == 0.25 and drift.move == -0.75
