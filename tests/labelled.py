"""The hand-labelled conversations, and how far the rules agree with their labels.

`python -m tests.labelled` prints the figures of docs/evaluation.md.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from config.base import lesson_plans
from src.data import load_problems
from src.evaluation.feedback import GIVING_KINDS, falsely_corrects, feedback_kind, hands_over, repairs, takes_up
from src.evaluation.fidelity import flips_role, parrots
from src.evaluation.messages import holds, read_message
from src.evaluation.plans import read_plan

FILE = Path(__file__).parent / "labelled_conversations.yaml"
ROOT = FILE.parent.parent
Pair = tuple[Any, Any, str]
"""A label, what the rule says, and where."""


def conversations(half: str) -> list[dict[str, Any]]:
    """The conversations of a half, each with the text of its problem under `problem`."""
    texts = {}
    for split in ("train", "test"):
        rows = (ROOT / f"data/lesson_plans/{split}.jsonl").read_text(encoding="utf-8").splitlines()
        problems = load_problems([lesson_plans(split)])
        texts |= {json.loads(row)["id"]: problem.text for row, problem in zip(rows, problems, strict=True)}
    found = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return [{"problem": texts.get(each.get("plan"))} | each for each in found if each["half"] == half]


def compare(half: str) -> dict[str, list[Pair]]:
    """(label, rule's answer, where) of every labelled thing, by what is labelled."""
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for each in conversations(half):
        for name, label, found, place in _compare(each):
            pairs[name].append((label, found, f"{each['id']}:{place}"))
    return pairs


def _compare(conversation: dict[str, Any]) -> Iterator[tuple[str, Any, Any, int]]:
    plan, turns = read_plan(conversation["problem"]), conversation["turns"]
    said: list[str] = []
    for place, turn in enumerate(turns):
        before = turns[place - 1] if place else None
        if "teacher" in turn:
            yield from _of_teacher(turn, before, plan, said, place)
            continue
        if plan.lesson:
            yield "error", turn["error"], plan.find_error(turn["student"]), place
        yield "role flip", turn.get("flips", False), flips_role(turn["student"], before["teacher"], plan), place
        yield "parroting", turn.get("parrots", False), parrots(turn["student"], before["teacher"]), place
        if "uptake" in turn:
            error, answer = turns[place - 2]["student"], turn["student"]
            kind = feedback_kind(error, before["teacher"], plan)
            yield "uptake", turn["uptake"], takes_up(error, kind, answer, plan), place
            yield "repair", turn["repair"], repairs(error, kind, answer, plan), place
        said.append(turn["student"])


def _of_teacher(turn, before, plan, said, place) -> Iterator[tuple[str, Any, Any, int]]:
    message = read_message(turn["teacher"])
    yield "number of tasks", turn["tasks"], len(message.tasks), place
    yield "ends with its task", turn.get("ends"), message.ends_with_task, place
    if before is not None and before["error"]:
        kind = feedback_kind(before["student"], turn["teacher"], plan)
        yield "kind of feedback", turn["feedback"], kind, place
        gives = kind in GIVING_KINDS
    else:
        gives = hands_over(turn["teacher"], lambda form: any(holds(each, form) for each in said), plan)
        if before is not None:
            yield "false correction", turn.get("false_correction", False), falsely_corrects(turn["teacher"]), place
    yield "hands over", turn.get("hands_over", False), gives, place


def kappa(pairs: list[Pair]) -> float | None:
    """Cohen's: agreement beyond what the two sides' frequencies give by chance; None if that is all."""
    n = len(pairs)
    labels, found = [str(pair[0]) for pair in pairs], [str(pair[1]) for pair in pairs]
    chance = sum(labels.count(each) * found.count(each) for each in set(labels)) / n**2
    observed = sum(one == other for one, other in zip(labels, found, strict=True)) / n
    return None if chance == 1 else (observed - chance) / (1 - chance)


def agreement(half: str) -> dict[str, tuple[int, int]]:
    """(agreed, all) by what is labelled."""
    return {name: (sum(a == b for a, b, _ in pairs), len(pairs)) for name, pairs in compare(half).items()}


if __name__ == "__main__":
    for half in sys.argv[1:] or ("develop", "held_out"):
        for name, pairs in compare(half).items():
            agreed, found = sum(a == b for a, b, _ in pairs), kappa(pairs)
            print(f"{half:9} {name:20} {agreed:3}/{len(pairs):<3} κ {'–' if found is None else f'{found:.2f}'}")
            if half == "develop":
                for label, said, where in pairs:
                    if label != said:
                        print(f"    {where}: labelled {label}, rule says {said}")
