"""Finds the post-test on a problem: of the quickstart's lessons, of lesson plans, of maths problems with siblings."""

from collections.abc import Iterable

from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.errors import DataError
from classroom_rl.judges.plans import read_plan
from classroom_rl.judges.post_test.maths_exam import MathsExam
from classroom_rl.judges.post_test.phrase_exam import PhraseExam
from classroom_rl.judges.post_test.toy_exam import ToyExam
from classroom_rl.rollout.post_test import Exam
from classroom_rl.rollout.problem import Problem


class EmbeddedExaminer:
    """An examiner without a model.

    Args:
        siblings: the most sibling problems that are asked after a maths problem.
    """

    def __init__(self, siblings: int = 3):
        self._siblings = siblings

    def exam(self, problem: Problem) -> Exam:
        """The post-test on a problem.

        Raises:
            DataError: if it is no lesson of the quickstart, holds no phrases of a lesson plan, and is no maths problem
                with an answer and siblings.
        """
        plan = read_plan(problem.text)
        if plan.lesson is not None:
            return ToyExam(plan.lesson)
        if plan.phrases:
            return PhraseExam(plan, problem.text)
        if not problem.material.siblings or not problem.answer:
            lacks = "no answer" if problem.material.siblings else "no sibling problems"
            raise DataError(
                f"generation.post_test.enable is true, but the problem {problem.text[:80]!r} is no lesson plan and has "
                f"{lacks}: name the dataset's column with sibling_problems_column (python -m "
                "classroom_rl.judges.post_test.sibling_templates makes such data), or set "
                "generation.post_test.enable=false."
            )
        return MathsExam(problem, self._siblings)


def examiner_of(generation: EnvironmentConfig) -> EmbeddedExaminer | None:
    """The examiner of a configuration; None without a post-test."""
    post_test = getattr(generation, "post_test", None)  # of the classroom alone
    return EmbeddedExaminer(post_test.siblings) if post_test is not None and post_test.enable else None


def check_exams(generation: EnvironmentConfig, problems: Iterable[Problem]) -> None:
    """Raise a `DataError` for the first problem on which the configured post-test cannot be held."""
    examiner = examiner_of(generation)
    for problem in problems if examiner is not None else ():
        examiner.exam(problem)
