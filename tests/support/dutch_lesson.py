"""A lesson plan at a Dutch bakery with messages on it, and shipped lesson plans by language."""

import json

from classroom_rl.config.base import lesson_plans
from classroom_rl.config.load import ROOT
from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.rollout.datasets import load_problems

ERR, RIGHT = ERROR_PERSONA, CORRECT_PERSONA
DRAWS = (
    (RIGHT, ERR, RIGHT, RIGHT, ERR, RIGHT, RIGHT),
    (ERR, RIGHT, RIGHT, ERR, RIGHT, RIGHT, RIGHT),
    (RIGHT, RIGHT, RIGHT, ERR, ERR, RIGHT, RIGHT),
)
"""The personas of the student's messages in three conversations."""

PLAN = """Language: Dutch
Level: A1
Topic: bakery
Aim of this lesson: The learner can buy bread.

Chunks of this lesson:
1. Ik ben aan de beurt | meaning: It is my turn | use: When somebody asks who is next.
2. Anders nog iets? | meaning: Anything else? | use: The baker says it.
3. Een half bruin, alstublieft | meaning: Half a brown loaf, please | use: Bread is sold in halves.
4. Mag ik pinnen? | meaning: May I pay by card? | use: Before the bill.

Lessons that follow, not part of this one: The market"""
ASK = "You are next. What do you say?"
OTHER = "You want half a loaf. What do you tell the baker?"
SAID, WRONG = "Ik ben aan de beurt", "Ik bent aan de beurt"


def plans_by_language(count: int) -> dict[str, list[str]]:
    """The texts of the first problems in each language."""
    rows = (ROOT / "data/lesson_plans/train.jsonl").read_text(encoding="utf-8").splitlines()
    plans: dict[str, list[str]] = {}
    for row, problem in zip(rows, load_problems([lesson_plans("train")]), strict=True):
        texts = plans.setdefault(json.loads(row)["language_code"], [])
        texts += [problem.text] if len(texts) < count else []
    return plans


PLANS = plans_by_language(2)


def dialogue(*texts: str) -> list[dict[str, str]]:
    """Messages in turn, of which the teacher writes the first."""
    return [{"role": ("teacher", "student")[index % 2], "content": text} for index, text in enumerate(texts)]
