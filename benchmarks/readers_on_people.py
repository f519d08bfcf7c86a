"""What readers that no person's label has trained are worth, on replies that people labelled:

    python -m classroom_rl.judges.moves.train --data data/replies/*.jsonl --out readers/replies
    python -m benchmarks.readers_on_people readers/replies mrbench.jsonl [more of judges/moves/labelled.py]

For each label: Cohen's kappa with people, of the reader and of the rules, with 95 % intervals over dialogues.

On MRBench also Spearman's rank correlation of a single score with the sum of people's labels (mistake identified, its
location, guidance, actionability, coherence, and the answer not revealed; "to some extent" counts half). The score is
chosen among `SCORES` on one half of the dialogues and reported once, on the other half. Beside it, that of the
prices of the rule supervisor.
"""

import argparse
import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from classroom_rl.config.base import default_penalties
from classroom_rl.errors import ClassroomError
from classroom_rl.judges.agreement import rank_correlation, rank_correlation_by_lesson
from classroom_rl.judges.moves.cross_validation import agreement
from classroom_rl.judges.moves.labelled import LABELS_OF, MRBENCH, LabelledMessage, read_labelled, turns_of_mrbench
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.moves.stored import TrainedReaders, load_readers
from classroom_rl.judges.readings import (
    ACTIONABLE,
    FALSE_PRAISE,
    FALSE_STATEMENT,
    GUIDANCE,
    MISTAKE_IDENTIFIED,
    REVEALS_ANSWER,
    Exchange,
    interval_text,
)
from classroom_rl.rollout.reviews import MessageToReview
from classroom_rl.supervision.maths_rules import maths_faults

WANTED = ("Mistake_Identification", "Mistake_Location", "Providing_Guidance", "Actionability", "Coherence")
_POINTS = {"Yes": 1.0, "To some extent": 0.5, "No": 0.0}
Score = Callable[[TrainedReaders, Exchange], float]


def _labels(*signs: tuple[str, int]) -> Score:
    return lambda readers, exchange: sum(sign * readers.reads(label, exchange) for label, sign in signs)


def _probabilities(*signs: tuple[str, int]) -> Score:
    def score(readers: TrainedReaders, exchange: Exchange) -> float:
        return sum(sign / (1 + math.exp(-readers.score(label, exchange))) for label, sign in signs)

    return score


def _by_rules(exchange: Exchange) -> float:
    return sum(sign * RULES[label](exchange) for label, sign in THREE)


THREE = ((MISTAKE_IDENTIFIED, 1), (ACTIONABLE, 1), (REVEALS_ANSWER, -1))
SCORES: dict[str, Score] = {
    "three labels": _labels(*THREE),
    "three probabilities": _probabilities(*(pair for pair in THREE if pair[0] != REVEALS_ANSWER)),
    "with guidance": _probabilities(*THREE[:2], (GUIDANCE, 1)),
    "with guidance and what is false": _probabilities(
        *THREE[:2], (GUIDANCE, 1), (FALSE_STATEMENT, -1), (FALSE_PRAISE, -1)
    ),
    "the rules' three labels": lambda readers, exchange: _by_rules(exchange),
    "the rules' three labels and actionable as read": lambda readers, exchange: (
        _by_rules(exchange) + _probabilities((ACTIONABLE, 1))(readers, exchange)
    ),
}


def price_of(message: LabelledMessage, history: str) -> float:
    """What the rule supervisor takes off for a reply in maths: the price of its worst fault, at most 0."""
    first, *turns = turns_of_mrbench(history)
    dialogue = [{"role": "student" if role == "Student" else "teacher", "content": text} for role, text in turns]
    exchange = message.exchange
    faults = maths_faults(MessageToReview(dialogue, exchange.message, first[1], exchange.target))
    return min((default_penalties()[fault.category] for fault in faults), default=0.0)


def people_s_sum(labels: dict[str, str]) -> float:
    """The sum of people's labels on one reply, from 0 to 6."""
    return sum(_POINTS[labels[name]] for name in WANTED) + (labels["Revealing_of_the_Answer"] == "No")


def in_first_half(lesson: str) -> bool:
    """Which half of the dialogues one is in; the same on every machine."""
    return hashlib.sha256(lesson.encode()).digest()[0] % 2 == 0


def kappas(readers: TrainedReaders, messages: Sequence[LabelledMessage]) -> list[str]:
    """A row of the table for each label that people gave and the readers know."""
    rows = []
    lessons = [message.lesson for message in messages]
    for label in [label for label in LABELS_OF[messages[0].source] if label in readers.trust]:
        people = [message.labels[label] for message in messages]
        cells = []
        for predicted in (RULES[label], lambda exchange, label=label: readers.reads(label, exchange)):
            measured = agreement(people, [predicted(message.exchange) for message in messages], lessons)
            cells.append(f"{measured.kappa:.2f} {interval_text(measured.ci95) if measured.ci95 else ''}".strip())
        base = sum(people) / len(people)
        rows.append(f"| `{label}` | {messages[0].source} | {len(people)} | {base:.2f} | {' | '.join(cells)} |")
    return rows


def correlations(readers: TrainedReaders, messages: Sequence[LabelledMessage], sums: Sequence[float]) -> list[str]:
    """The correlation of each score on the first half of the dialogues, and that of the best one on the second."""
    halves: dict[bool, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for message, value in zip(messages, sums, strict=True):
        half = halves.setdefault(in_first_half(message.lesson), {name: defaultdict(list) for name in SCORES})
        for name, score in SCORES.items():
            half[name][message.lesson].append((score(readers, message.exchange), value))
    first = {name: rank_correlation(sum(pairs.values(), [])) or 0.0 for name, pairs in halves[True].items()}
    lines = [f"first half, {name}: {value:.3f}" for name, value in first.items()]
    for name in (max(first, key=first.__getitem__), "the rules' three labels"):
        pairs = halves[False][name]
        value, interval = rank_correlation(sum(pairs.values(), [])), rank_correlation_by_lesson(pairs)
        replies = sum(map(len, pairs.values()))
        lines.append(f"second half, {name}: {value:.3f} {interval} ({len(pairs)} dialogues, {replies} replies)")
    return lines


def prices(messages: Sequence[LabelledMessage], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The correlation of the supervisor's prices with people's sums, on each half of the dialogues with a solution."""
    lines = []
    for first in (True, False):
        pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for message, row in zip(messages, rows, strict=True):
            if message.exchange.target and in_first_half(message.lesson) == first:
                price = price_of(message, row["history"])
                pairs[message.lesson].append((price, people_s_sum(row["labels"])))
        value, interval = rank_correlation(sum(pairs.values(), [])), rank_correlation_by_lesson(pairs)
        half, replies = "first" if first else "second", sum(map(len, pairs.values()))
        lines.append(f"{half} half, the supervisor's prices: {value:.3f} {interval} ({replies} replies)")
    return lines


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", type=Path)
    parser.add_argument("data", nargs="+")
    options = parser.parse_args(arguments)
    readers = load_readers(options.readers)
    print("| label | set | replies | base | κ of the rules | κ of the reader |\n|---|---|---|---|---|---|")
    lines = []
    for name in options.data:
        messages = read_labelled(name)
        print("\n".join(kappas(readers, messages)), flush=True)
        if messages[0].source == MRBENCH and Path(name).suffix == ".jsonl":
            rows = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines() if line.strip()]
            lines += correlations(readers, messages, [people_s_sum(row["labels"]) for row in rows])
            lines += prices(messages, rows)
    print("\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ClassroomError as error:
        sys.exit(f"error: {error}")
