"""Compares the rules with the labels of the hand-labelled conversations.

`python -m tests.support.labelled` prints the figures of docs/evaluation.md,
`python -m tests.support.labelled judge` those of docs/classroom.md.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from classroom_rl.config.base import lesson_plans
from classroom_rl.config.load import ROOT
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.evaluation.metrics.language import flips_role, parrots
from classroom_rl.judges.agreement import rank_correlation
from classroom_rl.judges.feedback import (
    GIVING_KINDS,
    falsely_corrects,
    feedback_kind,
    hands_over,
    repairs,
    shows_uptake,
)
from classroom_rl.judges.findings import TurnFinding, verdict
from classroom_rl.judges.messages import holds, read_message, read_plan
from classroom_rl.judges.rule_judge import analyse
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.engine import ConversationFacts

FILE = Path(__file__).parent / "labelled_conversations.yaml"
Pair = tuple[Any, Any, str]
"""(label, the rule's answer, place)"""


def conversations(half: str) -> list[dict[str, Any]]:
    """The conversations of a half (develop or held_out), each with the text of its problem under `problem`."""
    texts = {}
    for split in ("train", "test"):
        rows = (ROOT / f"data/lesson_plans/{split}.jsonl").read_text(encoding="utf-8").splitlines()
        problems = load_problems([lesson_plans(split)])
        texts |= {json.loads(row)["id"]: problem.text for row, problem in zip(rows, problems, strict=True)}
    loaded = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return [
        {"problem": texts.get(conversation.get("plan"))} | conversation
        for conversation in loaded
        if conversation["half"] == half
    ]


def compare(half: str) -> dict[str, list[Pair]]:
    """What is labelled → (label, the rule's answer, place) of each item."""
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for conversation in conversations(half):
        for name, label, answer, index in _compare(conversation):
            pairs[name].append((label, answer, f"{conversation['id']}:{index}"))
    return pairs


def _compare(conversation: dict[str, Any]) -> Iterator[tuple[str, Any, Any, int]]:
    plan, turns = read_plan(conversation["problem"]), conversation["turns"]
    answers: list[str] = []
    for index, turn in enumerate(turns):
        before = turns[index - 1] if index else None
        if "teacher" in turn:
            yield from _of_teacher(turn, before, plan, answers, index)
            continue
        if plan.lesson:
            yield "error", turn["error"], plan.find_error(turn["student"]), index
        yield "role flip", turn.get("flips", False), flips_role(turn["student"], before["teacher"], plan), index
        yield "parroting", turn.get("parrots", False), parrots(turn["student"], before["teacher"]), index
        if "uptake" in turn:
            error, answer = turns[index - 2]["student"], turn["student"]
            kind = feedback_kind(error, before["teacher"], plan)
            yield "uptake", turn["uptake"], shows_uptake(error, kind, answer, plan), index
            yield "repair", turn["repair"], repairs(error, kind, answer, plan), index
        answers.append(turn["student"])


def _of_teacher(turn, before, plan, said, place) -> Iterator[tuple[str, Any, Any, int]]:
    message = read_message(turn["teacher"])
    yield "number of tasks", turn["tasks"], len(message.tasks), place
    yield "ends with its task", turn.get("ends"), message.ends_with_task, place
    if before is not None and before["error"]:
        kind = feedback_kind(before["student"], turn["teacher"], plan)
        yield "kind of feedback", turn["feedback"], kind, place
        gives = kind in GIVING_KINDS
    else:
        gives = hands_over(turn["teacher"], lambda form: any(holds(text, form) for text in said), plan)
        if before is not None:
            yield "false correction", turn.get("false_correction", False), falsely_corrects(turn["teacher"]), place
    yield "hands over", turn.get("hands_over", False), gives, place


def kappa(pairs: list[Pair]) -> float | None:
    """Cohen's κ: agreement beyond that expected by chance from the frequencies of both sides; None if chance agreement
    is 1."""
    n = len(pairs)
    labels, answers = [str(pair[0]) for pair in pairs], [str(pair[1]) for pair in pairs]
    chance = sum(labels.count(label) * answers.count(label) for label in set(labels)) / n**2
    observed = sum(label == answer for label, answer in zip(labels, answers, strict=True)) / n
    return None if chance == 1 else (observed - chance) / (1 - chance)


def agreement(half: str) -> dict[str, tuple[int, int]]:
    """What is labelled → (number of items that agree, number of items)."""
    return {name: (sum(a == b for a, b, _ in pairs), len(pairs)) for name, pairs in compare(half).items()}


# The `rules` judge ----------------------------------------------------------------------------------------------------

PROMPTS = ("metalinguistic", "repetition", "clarification", "elicitation")
"""Kinds of feedback that make the student find the form: scaffolds, unless the message gives the form as well."""


@dataclass
class JudgeAgreement:
    """The judge's findings beside those that follow from the labels.

    Attributes:
        messages: what is compared → pairs of single messages.
        scores: criterion → for each conversation (score from the labels, judge's score before the cap, judge's score).
    """

    messages: dict[str, list[Pair]] = field(default_factory=lambda: defaultdict(list))
    scores: dict[str, list[tuple[float, float, float]]] = field(default_factory=lambda: defaultdict(list))


def judge_agreement(half: str) -> JudgeAgreement:
    """Run the judge on the conversations on lesson plans; those of the quickstart are for the rubric."""
    result = JudgeAgreement()
    for conversation in conversations(half):
        plan, turns = read_plan(conversation["problem"]), conversation["turns"]
        if plan.lesson:
            continue
        messages = [
            {"role": role, "content": turn[role]} for turn in turns for role in ("teacher", "student") if role in turn
        ]
        findings, covered = analyse(messages, plan, ConversationFacts(tuple(turn.get("persona") for turn in turns)))
        for finding in findings:
            _compare_finding(result, finding, turns, f"{conversation['id']}:{finding.index}")
        free, capped = verdict(findings), verdict(findings, covered)
        for name, labelled in labelled_scores(turns).items():
            result.scores[name].append((labelled, free[name], capped[name]))
    return result


def _compare_finding(found: JudgeAgreement, finding: TurnFinding, turns: list[dict[str, Any]], where: str) -> None:
    turn, before = turns[finding.index], turns[finding.index - 1] if finding.index else None
    found.messages["task set, alone and last"].append((_is_final(turn), finding.task_final, where))
    if before is None:
        return
    found.messages["replies to an error"].append((before["error"], finding.student_error_kind is not None, where))
    if before["error"]:
        found.messages["error scaffolded"].append((_scaffolds(turn), finding.scaffolded, where))
    else:
        found.messages["right answer moved on from"].append((_moves_on(turn), finding.moved_on, where))


def _is_final(turn: dict[str, Any]) -> bool:
    return turn["tasks"] == 1 and turn.get("ends", False)


def _scaffolds(turn: dict[str, Any]) -> bool:
    return turn["feedback"] in PROMPTS and not turn.get("hands_over", False)


def _moves_on(turn: dict[str, Any]) -> bool:
    """Whether a message moves on, as far as the labels say: repeated explanations and drills were not labelled."""
    held_up = turn.get("false_correction", False) or turn.get("hands_over", False)
    return not held_up and (turn["tasks"] == 1 or turn["tasks"] == 0 and END_OF_CONVERSATION in turn["teacher"])


def labelled_scores(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Two of the criteria of the judge's prompt, computed from the labels alone; momentum was not labelled."""
    final = [_is_final(turn) for turn in turns if "teacher" in turn and turn["tasks"]]
    sides: dict[bool, list[bool]] = {True: [], False: []}
    for before, turn in zip(turns, turns[1:], strict=False):
        if "teacher" in turn:
            sides[before["error"]].append(_scaffolds(turn) if before["error"] else _moves_on(turn))
    return {
        "task_final_score": fmean(final) if final else 0.0,
        "forward_progression_score": fmean(fmean(side) for side in sides.values() if side),
    }


def print_judge_agreement(half: str) -> None:
    """Print κ for messages, and for scores the mean absolute error and rank correlation, before and after the cap."""
    result = judge_agreement(half)
    for name, pairs in result.messages.items():
        agreed, value = sum(a == b for a, b, _ in pairs), kappa(pairs)
        print(f"{half:9} {name:28} {agreed:3}/{len(pairs):<3} κ {'–' if value is None else f'{value:.2f}'}")
        if half == "develop":
            for label, said, where in pairs:
                if label != said:
                    print(f"    {where}: labelled {label}, judge says {said}")
    for name, scores in result.scores.items():
        for what, column in (("before the cap", 1), ("as given", 2)):
            error = fmean(abs(row[0] - row[column]) for row in scores)
            rank = rank_correlation([(row[0], row[column]) for row in scores])
            said = "–" if rank is None else f"{rank:.2f}"
            print(f"{half:9} {name:28} {what:14} mean absolute error {error:.2f}, Spearman {said}, n {len(scores)}")


if __name__ == "__main__" and sys.argv[1:2] == ["judge"]:
    for chosen in sys.argv[2:] or ("develop", "held_out"):
        print_judge_agreement(chosen)
elif __name__ == "__main__":
    for half in sys.argv[1:] or ("develop", "held_out"):
        for name, pairs in compare(half).items():
            agreed, found = sum(a == b for a, b, _ in pairs), kappa(pairs)
            print(f"{half:9} {name:20} {agreed:3}/{len(pairs):<3} κ {'–' if found is None else f'{found:.2f}'}")
            if half == "develop":
                for label, said, where in pairs:
                    if label != said:
                        print(f"    {where}: labelled {label}, rule says {said}")
