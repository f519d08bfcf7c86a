"""Whether verdicts depend on the conversation: hand-worked cases, judges that roll dice, and the monitor's warnings."""

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate import PartialState

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.judge_monitor import JudgeMonitor, VerdictWatch, dependence
from tests.support.offline_trainer import PROBLEMS, conversation
from tests.support.synthetic_run import record_of
from tests.support.toy_lesson import PROBLEM, Q1, RIGHT, WRONG

Judge = Callable[[int, int], list[Verdict]]
"""The verdicts on a conversation, by the number of its problem and its place in the group."""


def scored(*values: float) -> list[Verdict]:
    """Attempts whose reward is each value."""
    all_scores = [Scores(value, value, 10 * value) for value in values]
    return [Verdict("pedagogical_eval", attempt, scores=scores) for attempt, scores in enumerate(all_scores)]


def decided(*values: bool) -> list[Verdict]:
    return [Verdict("does_not_leak_answer", attempt, accepted=value) for attempt, value in enumerate(values)]


def batch(judge: Judge, step: int = 0, problems: int = 16, group: int = 8) -> list[ConversationRecord]:
    record = conversation(0, PROBLEMS[0], seed=1)
    return [
        record.model_copy(
            update={
                "id": f"{step}-{problem}-{index}",
                "step": step,
                "problem_id": str(problem),
                "verdicts": judge(problem, index),
            }
        )
        for problem in range(problems)
        for index in range(group)
    ]


# By hand ------------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """Attempts 0.2 and 0.4, 0.6 and 0.8. Of one conversation: 0.04, 0.04. Of two: 0.16, 0.36, 0.04, 0.16, mean 0.18."""
    two = [scored(0.2, 0.4), scored(0.6, 0.8)]
    measured = dependence(batch(lambda problem, place: two[place], problems=1, group=2))
    assert (measured.conversations, measured.compared, measured.same) == (2, 2, False)
    assert measured.share == pytest.approx(1 - 0.04 / 0.18)
    other_step = batch(lambda problem, place: scored(0.9, 0.9), step=1, problems=1, group=2)
    both = dependence(batch(lambda problem, place: two[place], problems=1, group=2) + other_step)
    assert both.share == pytest.approx(1 - 0.02 / 0.09), "a group of its own: its differences are 0 on both sides"


def test_decisions_count_as_0_and_1() -> None:
    """Attempts OK OK and OK REJECT. Of one conversation: 0, 1. Of two: 0, 1, 0, 1."""
    two = [decided(True, True), decided(True, False)]
    measured = dependence(batch(lambda problem, place: two[place], problems=1, group=2))
    assert measured.share == pytest.approx(0.0) and not measured.same


def test_single_slips_of_a_judge_that_decides_are_no_noise() -> None:
    def judge(problem: int, place: int) -> list[Verdict]:
        return decided(True, (problem, place) not in [(3, 1), (20, 5)])

    measured = dependence(batch(judge, problems=32))
    assert measured.compared == 256 and measured.differing == 2 and measured.share is not None and measured.share < 0.1
    assert measured.warning is None


def test_what_cannot_be_compared_is_not() -> None:
    once = dependence(batch(lambda problem, place: scored(place / 8)))
    assert once.share is None and once.compared == 0 and not once.same and once.warning is None
    failed = [Verdict("pedagogical_eval", 2, error="no JSON")]
    alone = dependence(batch(lambda problem, place: scored(0.1, 0.9) + failed, group=1))
    assert alone.share is None and alone.compared == 0, "nothing else on its problem"


def test_the_same_verdict_on_a_problem_is_the_same_whatever_other_problems_get() -> None:
    of_problem = dependence(batch(lambda problem, place: scored(problem / 16, problem / 16)))
    assert of_problem.same and of_problem.share is None and "the same verdict" in of_problem.warning
    one_differs = dependence(batch(lambda problem, place: scored(0.5, 0.5 + 0.1 * (problem == place == 3))))
    assert not one_differs.same
    equal_sums = [Scores(0.5, 0.25, 5), Scores(0.25, 0.5, 5)]
    measured = dependence(batch(lambda problem, place: [Verdict("pedagogical_eval", 0, scores=equal_sums[place % 2])]))
    assert not measured.same, "criteria count, not the reward that they make"


# Over a run ---------------------------------------------------------------------------------------------------------


def noisy(share: float, seed: int) -> Judge:
    """Two attempts whose scores depend on the conversation with this share of their variance."""
    chance = random.Random(seed)

    def judge(problem: int, place: int) -> list[Verdict]:
        conversation = chance.gauss(0, share**0.5)
        drawn = [0.5 + 0.1 * (conversation + chance.gauss(0, (1 - share) ** 0.5)) for _ in range(2)]
        return scored(*(min(max(value, 0.0), 1.0) for value in drawn))

    return judge


def warnings_of(judge: Judge, steps: int = 3) -> list[str | None]:
    watch = VerdictWatch()
    looks = [watch.update(batch(judge, step)) for step in range(steps)]
    return [look.warning if look is not None else None for look in looks]


@pytest.mark.parametrize("seed", range(5))
def test_a_judge_that_rolls_dice_is_warned_about_and_a_noisy_one_is_not(seed: int) -> None:
    first, *later = warnings_of(noisy(0.0, seed))
    assert first is None, "128 conversations are too few"
    assert all("do not depend on the conversation" in warning for warning in later)
    assert warnings_of(noisy(0.5, seed)) == [None, None, None]


def test_batches_that_are_long_past_do_not_count() -> None:
    watch = VerdictWatch()
    for step in range(3):
        assert watch.update(batch(noisy(0.9, step), step)).warning is None
    looks = [watch.update(batch(lambda problem, place: scored(1.0, 1.0), step)) for step in range(3, 6)]
    assert [look.conversations for look in looks] == [256, 256, 256]
    assert [look.warning is not None for look in looks] == [False, True, True]


def test_small_batches_are_taken_together() -> None:
    watch = VerdictWatch()
    looks = [watch.update(batch(lambda problem, place: decided(True), step, 2, 8)) for step in range(9)]
    assert looks[:7] == [None] * 7 and looks[7].conversations == 128 and looks[8].warning is not None


def monitor_in(folder: Path, judged: bool = True) -> JudgeMonitor:
    rules = {"pedagogical_eval": "rubric"} if judged else {}
    config = TrainRLConfig(generation=GenerationConfig(judges_rules_prompts_paths=rules))
    return JudgeMonitor(config, ClassroomClient("http://127.0.0.1:1"), folder)


def of_the_judge(logged: dict[str, float]) -> dict[str, float]:
    """What is logged, without the student's shares."""
    return {name: value for name, value in logged.items() if not name.startswith("guard/student_")}


def test_a_judge_of_one_verdict_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the default `guards` keys: no judge is asked, and nothing is written."""
    monitor, processes = monitor_in(tmp_path), PartialState(cpu=True)
    with caplog.at_level(logging.WARNING):
        logged = [
            monitor.check(processes, step, batch(lambda problem, place: scored(0.7, 0.7), step)) for step in (0, 2, 4)
        ]
    assert [of_the_judge(line) for line in logged] == [{"guard/blind_judge": 1.0}] * 3 and not list(tmp_path.iterdir())
    [message] = [record.getMessage() for record in caplog.records if "same verdict" in record.getMessage()]
    assert message.startswith("step 1: The judge gave every conversation on a problem the same verdict")
    assert "in the last 128 conversations" in message


def test_a_judge_that_reads_is_logged_and_not_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor, processes = monitor_in(tmp_path), PartialState(cpu=True)
    with caplog.at_level(logging.WARNING):
        logged = [monitor.check(processes, step, batch(noisy(0.8, step), step)) for step in (0, 2)]
    assert [line["guard/blind_judge"] for line in logged] == [0.0, 0.0] and not caplog.records
    assert all(0.6 < line["guard/verdict_dependence"] < 0.95 for line in logged)


def unread(share: float) -> Judge:
    """Verdicts that say of this share of a group's conversations that no rule can read them."""

    def verdicts(problem: int, place: int) -> list[Verdict]:
        scores = Scores(place / 8, place / 8, place)
        return [Verdict("pedagogical_eval", 0, scores=scores, beyond_rules=int(place < 8 * share))]

    return verdicts


def test_a_rise_of_what_no_rule_can_read_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor, processes = monitor_in(tmp_path), PartialState(cpu=True)
    with caplog.at_level(logging.WARNING):
        logged = [
            monitor.check(processes, step, batch(unread(share), step))
            for step, share in enumerate([0.25] * 4 + [0.625] * 4)
        ]
    rises = [line.get("guard/beyond_rules_rise") for line in logged]
    assert rises == [None] * 3 + [0, 0.09375, 0.1875, 0.28125, 0.375], "of 512 conversations each"
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("step 7: The tutor says more and more that the embedded judge cannot read")


def talks(count: int, text: str, persona: str) -> list[ConversationRecord]:
    """Lessons in which the student answers this to the question of its first message."""
    turns = [Turn("teacher", f"Hi! {Q1}"), Turn("student", text, persona)]
    return [record_of(PROBLEM, turns, index=index) for index in range(count)]


def test_a_student_that_strays_is_logged_and_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    monitor, processes = monitor_in(tmp_path), PartialState(cpu=True)
    faithful = talks(128, RIGHT, CORRECT_PERSONA) + talks(128, WRONG, ERROR_PERSONA)
    bounds = {f"guard/student_{name}": 1.0 for name in ("error_persona", "correct_persona")}
    straying = talks(180, RIGHT, CORRECT_PERSONA) + talks(56, RIGHT, ERROR_PERSONA) + talks(20, Q1, "x")
    with caplog.at_level(logging.WARNING):
        few = monitor.check(processes, 0, faithful[:255])
        monitor = monitor_in(tmp_path)
        good, *bad = [
            monitor.check(processes, step, batch) for step, batch in enumerate((faithful, straying, straying))
        ]
    strays = {"guard/student_role_flips": 0.0, "guard/student_parroting": 0.0}
    of_batch = {"guard/student_errors": 0.5, "guard/student_words": 8.0, "guard/student_keeps_to_lesson": 1.0}
    assert few.keys() == of_batch.keys(), "too few messages for the shares"
    assert good == bounds | strays | of_batch
    strays = {"guard/student_role_flips": 0.0, "guard/student_error_persona": 0, "guard/student_parroting": 20 / 256}
    # Every eighth conversation: 30 answers, and 2 repeated questions.
    of_batch |= {"guard/student_errors": 0.0, "guard/student_words": (30 * 8 + 2 * len(Q1.split())) / 32}
    assert bad == 2 * [bounds | strays | of_batch]
    warnings = [record.getMessage() for record in caplog.records]
    assert [warning.split(": ")[0] for warning in warnings] == ["step 2"] * 2, "once each"
    assert "only 0% of the turns asked to err" in warnings[0] and "8% of the student's turns say" in warnings[1]


def test_a_run_without_a_judge_is_left_alone(tmp_path: Path) -> None:
    for judged in (True, False):
        monitor = monitor_in(tmp_path, judged)
        logged = [monitor.check(PartialState(cpu=True), step, batch(lambda *_: [], step)) for step in range(3)]
        assert [of_the_judge(line) for line in logged] == [{}] * 3
