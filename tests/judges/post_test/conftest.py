"""A checker of answers in one process."""

from collections.abc import Iterator

import pytest

from classroom_rl.grading.checker import AnswerChecker


@pytest.fixture
def checker() -> Iterator[AnswerChecker]:
    made = AnswerChecker(workers=1)
    yield made
    made.shutdown()
