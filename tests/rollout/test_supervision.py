"""Which episodes are supervised, and what a review leads to."""

from dataclasses import dataclass

import pytest

from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.supervision import ACCEPT, OBSERVE, REPLACE, RETRY, decide, is_supervised


@dataclass
class Options:
    on_invalid: str = OBSERVE
    max_retries: int = 1
    share: float = 1.0
    anneal_steps: int = 0


PROBLEMS = [Problem.of(f"problem {number}") for number in range(400)]


@pytest.mark.parametrize(
    ("share", "anneal_steps", "step", "expected"),
    [(0.0, 0, 5, 0.0), (1.0, 0, 5, 1.0), (0.5, 0, 5, 0.5), (1.0, 10, 5, 0.5), (1.0, 10, 10, 0.0), (1.0, 10, 99, 0.0)],
)
def test_the_share_of_problems_falls_linearly(share: float, anneal_steps: int, step: int, expected: float) -> None:
    options = Options(share=share, anneal_steps=anneal_steps)
    supervised = [is_supervised(options, problem, 1, step) for problem in PROBLEMS]
    assert sum(supervised) / len(PROBLEMS) == pytest.approx(expected, abs=0.1 if 0 < expected < 1 else 0)
    assert supervised == [is_supervised(options, problem, 1, step) for problem in PROBLEMS]


INVALID, CORRECTED = Review(valid=False), Review(valid=False, correction="What is 2 + 2?")


@pytest.mark.parametrize(
    ("review", "on_invalid", "drafts", "decision"),
    [
        (Review(valid=True), RETRY, 1, ACCEPT),
        (Review(valid=None), RETRY, 1, ACCEPT),
        (CORRECTED, OBSERVE, 1, ACCEPT),
        (INVALID, RETRY, 1, RETRY),
        (INVALID, RETRY, 2, ACCEPT),
        (CORRECTED, REPLACE, 1, REPLACE),
        (INVALID, REPLACE, 1, ACCEPT),
    ],
)
def test_a_review_leads_to_a_retry_a_replacement_or_nothing(review, on_invalid, drafts, decision) -> None:
    assert decide(review, Options(on_invalid), drafts) == decision
