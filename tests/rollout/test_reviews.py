"""Reviews: their penalties, and which errors concern one message alone."""

import asyncio

import pytest

from classroom_rl.errors import EngineFailure, JudgeOutputError, ProviderFailure, StorageError
from classroom_rl.rollout.reviews import MessageToReview, Review, priced, reviewed

PENALTIES = {"answer_given": -1.0}
ABOUT = MessageToReview([], "4.", "2 + 2?")


class Scripted:
    """A supervisor that answers with a review, or raises an error."""

    def __init__(self, answer: Review | Exception):
        self.answer = answer

    async def review(self, about: MessageToReview) -> Review:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("review", "penalty"),
    [
        (Review(valid=True), 0.0),
        (Review(valid=False, category="answer_given"), -1.0),
        (Review(valid=None, penalty=-3.0), None),
    ],
)
def test_a_review_has_the_penalty_of_its_category(review: Review, penalty: float | None) -> None:
    assert asyncio.run(reviewed(Scripted(review), ABOUT, PENALTIES)).penalty == penalty


def test_a_category_without_a_penalty_is_an_error() -> None:
    with pytest.raises(KeyError, match="rude"):
        priced(Review(valid=False, category="rude"), PENALTIES)


@pytest.mark.parametrize("error", [JudgeOutputError("no JSON: \ud800"), ValueError("odd"), KeyError("rude")])
def test_an_error_that_concerns_one_message_is_a_review_without_a_verdict(error: Exception, caplog) -> None:
    review = asyncio.run(reviewed(Scripted(error), ABOUT, PENALTIES))
    assert review.valid is None and review.penalty is None
    assert review.error.startswith(f"{type(error).__name__}: ") and review.error in caplog.text
    review.error.encode()


@pytest.mark.parametrize("error", [EngineFailure("dead"), ProviderFailure("wrong key"), StorageError("full")])
def test_an_error_that_concerns_every_message_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        asyncio.run(reviewed(Scripted(error), ABOUT, PENALTIES))
