"""A checker of answers in one process."""

from collections.abc import Iterator

import pytest

from classroom_rl.grading.checker import AnswerChecker


@pytest.fixture
def checker() -> Iterator[AnswerChecker]:
    answer_checker = AnswerChecker(workers=1)
    yield answer_checker
    answer_checker.shutdown()
