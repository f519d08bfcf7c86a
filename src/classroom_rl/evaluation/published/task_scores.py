"""What a tutor's answers to MathTutorBench's tasks are worth. An answer that cannot be read is wrong, and counted."""

import re
from collections.abc import Sequence
from typing import Any

from classroom_rl.config.benchmark import MISTAKE_LOCATION, SOLUTION_CORRECTNESS
from classroom_rl.evaluation.published.mathtutorbench import INCORRECT, TutorTask
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.grading.forms import extract_boxed
from classroom_rl.rollout.intervals import mean_with_ci

_VERDICT = re.compile(r"verdict\W*(correct|incorrect)\b", re.IGNORECASE)
_STEP = re.compile(r"first wrong step\W*(\d{1,3})\b", re.IGNORECASE)
_ALONE = {
    SOLUTION_CORRECTNESS: re.compile(r"\W*(correct|incorrect)\W*", re.IGNORECASE),
    MISTAKE_LOCATION: re.compile(r"\W*(?:step\W*)?(\d{1,3})\W*", re.IGNORECASE),
}
"""An answer that is nothing but what was asked for."""


def read_answer(task: str, text: str) -> str | None:
    """The answer in a reply; None if it holds none.

    In `solution_correctness` it is what follows the last "Verdict:", in `mistake_location` the number after the last
    "First wrong step:", and in the others the last \\boxed{…}. A reply of nothing but the answer counts, too.
    """
    if task not in _ALONE:
        return extract_boxed(text)
    if alone := _ALONE[task].fullmatch(text):
        return alone[1].lower()
    found = (_VERDICT if task == SOLUTION_CORRECTNESS else _STEP).findall(text)
    return found[-1].lower() if found else None


async def score_answers(
    task: str, asked: Sequence[TutorTask], texts: Sequence[str | None], checker: AnswerChecker
) -> dict[str, Any]:
    """The figures of a task with one right answer for each question.

    Args:
        texts: the replies; None for a question without a reply, which enters no figure but `failures` elsewhere.

    Returns:
        `accuracy`, with an interval over problems; `unreadable`; where half of the solutions hold a mistake also
        `accuracy_with_mistake` and `accuracy_without`; and, for `solution_correctness`, `f1` of finding the wrong ones.
    """
    replied = [(each, text) for each, text in zip(asked, texts, strict=True) if text is not None]
    answers = [read_answer(task, text) for _, text in replied]
    right = [
        await _is_right(task, each, text, answer, checker)
        for (each, text), answer in zip(replied, answers, strict=True)
    ]
    about: dict[str, Any] = {
        "accuracy": _accuracy(replied, right),
        "unreadable": answers.count(None),
    }
    kinds = {"accuracy_with_mistake": True, "accuracy_without": False}
    for name, kind in kinds.items():
        if any(each.has_mistake is not None for each, _ in replied):
            places = [place for place, (each, _) in enumerate(replied) if each.has_mistake is kind]
            about[name] = _accuracy([replied[place] for place in places], [right[place] for place in places])
    if task == SOLUTION_CORRECTNESS:
        about["f1"] = f1([each.expected == INCORRECT for each, _ in replied], [each == INCORRECT for each in answers])
    return about


async def _is_right(task: str, asked: TutorTask, text: str, answer: str | None, checker: AnswerChecker) -> bool:
    if answer is None:
        return False
    if task == MISTAKE_LOCATION:
        return int(answer) == int(asked.expected)
    if task == SOLUTION_CORRECTNESS:
        return answer == asked.expected
    return await checker.is_correct(text, asked.expected)


def _accuracy(replied: Sequence[tuple[TutorTask, str]], right: Sequence[bool]) -> dict[str, Any]:
    by_problem: dict[str, list[float]] = {}
    for (each, _), value in zip(replied, right, strict=True):
        by_problem.setdefault(each.problem_id, []).append(float(value))
    return mean_with_ci(by_problem)


def f1(expected: Sequence[bool], found: Sequence[bool]) -> float | None:
    """The harmonic mean of precision and recall of what was found; None if there was nothing to find and nothing was
    found."""
    hits = sum(want and has for want, has in zip(expected, found, strict=True))
    total = sum(expected) + sum(found)
    return 2 * hits / total if total else None


def win_rate(asked: Sequence[TutorTask], scores: Sequence[tuple[float, float] | None]) -> dict[str, Any]:
    """How often the tutor's turn has a higher score than the human teacher's, by dialogue.

    Args:
        scores: the tutor's score and the teacher's of each question; None for one without a reply.
    """
    wins: dict[str, list[float]] = {}
    for each, pair in zip(asked, scores, strict=True):
        if pair is not None:
            wins.setdefault(each.problem_id, []).append(float(pair[0] > pair[1]))
    return mean_with_ci(wins)
