"""How MathTutorBench reads answers and scores them. The formulas are those of its `tasks/`, written here anew; where
its program takes an unreadable answer for a default one, so it is here, and such answers are counted."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from classroom_rl.config.benchmark import (
    MISTAKE_CORRECTION,
    MISTAKE_LOCATION,
    PROBLEM_SOLVING,
    SOCRATIC_QUESTIONING,
    SOLUTION_CORRECTNESS,
)
from classroom_rl.evaluation.published.mathtutorbench.clone import TEACHING

Figures = dict[str, float]

_MOST_DIGITS = 4300
"""Python converts no longer integers."""
_TOLERANCE = 1e-6
_ASKING = frozenset("what how why when where which who whose whom can could would".split())


@dataclass(frozen=True)
class Measure:
    """How a task is scored.

    Attributes:
        figure: the figure that the leaderboard shows.
        parse: reads an answer; None if it cannot be read.
        target: converts the ground truth; a ValueError if it cannot be.
        each: the score of each question, if the figure is their mean: of (answer, target); None leaves it out.
        total: all figures, of (answers, targets) of the same length, at least 1.
        default: what an unreadable answer counts as; None is always wrong.
    """

    figure: str
    parse: Callable[[str], Any]
    target: Callable[[str], Any]
    total: Callable[[Sequence[Any], Sequence[Any]], Figures]
    each: Callable[[Any, Any], float | None] | None = None
    default: Any = None


def last_number(text: str) -> float | None:
    """The last number in a solution, without a thousands separator: "1,234" ends with 234."""
    numbers = re.findall(r"-?\d*\.?\d+", text)
    return float(numbers[-1]) if numbers else None


def final_answer(text: str) -> float | None:
    """The number after the first "Final Answer:", else the last one; commas in it are dropped."""
    number = r"\$?([-,\d]*\.?\d+)"
    marked = re.search(rf"Final Answer:\s*{number}", text)
    digits = marked[1] if marked else (re.findall(number, text) or [""])[-1]
    try:
        return float(digits.replace(",", ""))
    except ValueError:
        return None


def first_step(text: str) -> int | None:
    """The first number in an answer."""
    match = re.search(r"\d+", text)
    return int(match[0][:_MOST_DIGITS]) if match else None


def says_incorrect(text: str) -> bool | None:
    """Whether an answer says that the student's solution is incorrect: it holds "yes", or else "no", also in words."""
    lowered = text.lower()
    return True if "yes" in lowered else False if "no" in lowered else None


def answer_lines(text: str) -> list[str]:
    """The lines of an answer."""
    return [line.strip() for line in text.split("\n")]


def guiding_questions(answer: str) -> list[str]:
    """The questions in an answer of GSM8K's `socratic`, whose lines are "question ** step"."""
    parts = [line.split(" ** ") for line in answer.split("\n")]
    return [line[0] for line in parts if len(line) == 2]


def asks(text: str) -> bool:
    """Whether a turn holds a question mark or a word that begins questions."""
    return "?" in text or not _ASKING.isdisjoint(text.lower().split())


def is_number(answer: float | None, target: float) -> float:
    """1.0 if the numbers are equal, else 0.0."""
    return float(answer is not None and abs(answer - target) < _TOLERANCE)


def accuracy(answers: Sequence[float | None], targets: Sequence[float]) -> Figures:
    """The share of right numbers."""
    return {"accuracy": fmean(map(is_number, answers, targets))}


def f1_of_each(answers: Sequence[Any], targets: Sequence[Any]) -> dict[Any, float]:
    """Each label's F1 score 2·hits / (answers + targets), for all labels that are answered or right."""
    hits = Counter(target for answer, target in zip(answers, targets, strict=True) if answer == target)
    counts = Counter(answers) + Counter(targets)
    return {label: 2 * hits[label] / count for label, count in counts.items()}


def f1_by_step(answers: Sequence[int], targets: Sequence[int]) -> Figures:
    """The F1 score over steps: micro, which is the share of right steps, and the mean of all steps' scores, plain and
    weighted by how often a step is right."""
    scores = f1_of_each(answers, targets)
    return {
        "f1_micro": fmean(answer == target for answer, target in zip(answers, targets, strict=True)),
        "f1_macro": fmean(scores.values()),
        "f1_weighted": fmean(scores[target] for target in targets),
    }


def verdicts(answers: Sequence[bool], targets: Sequence[bool]) -> Figures:
    """Accuracy, and precision, recall and F1 of finding incorrect solutions, each 0 where it divides by 0."""
    hits = sum(answer and target for answer, target in zip(answers, targets, strict=True))
    return {
        "accuracy": fmean(answer == target for answer, target in zip(answers, targets, strict=True)),
        "precision": hits / max(1, sum(answers)),
        "recall": hits / max(1, sum(targets)),
        "f1": f1_of_each(answers, targets).get(True, 0.0),
    }


def best_bleu(lines: Sequence[str], questions: Sequence[str]) -> float | None:
    """The best BLEU score of a line, with all questions as references, from 0 to 1; None without a question."""
    return max(sentence_bleu(line, questions) for line in lines) if questions else None


def questioning(answers: Sequence[Sequence[str]], targets: Sequence[Sequence[str]]) -> Figures:
    """The mean of `best_bleu`, and the mean number of lines, at most that of the questions."""
    pairs = [pair for pair in zip(answers, targets, strict=True) if pair[1]]
    return {
        "bleu": fmean(best_bleu(*pair) for pair in pairs) if pairs else 0.0,
        "avg_questions": fmean(min(map(len, pair)) for pair in pairs) if pairs else 0.0,
    }


def asking(answers: Sequence[str], targets: Sequence[str]) -> Figures:
    """`match`, the share of turns that ask something."""
    return {"match": fmean(map(asks, answers))}


MEASURES: Mapping[str, Measure] = {
    PROBLEM_SOLVING: Measure("accuracy", last_number, float, accuracy, is_number),
    SOCRATIC_QUESTIONING: Measure("bleu", answer_lines, guiding_questions, questioning, best_bleu),
    SOLUTION_CORRECTNESS: Measure(
        "f1", says_incorrect, lambda text: says_incorrect(text) is not False, verdicts, default=True
    ),
    MISTAKE_LOCATION: Measure("f1_micro", first_step, int, f1_by_step, lambda *pair: float(pair[0] == pair[1]), 0),
    MISTAKE_CORRECTION: Measure("accuracy", final_answer, float, accuracy, is_number),
    **dict.fromkeys(TEACHING, Measure("win_rate", str, str, asking)),
}
"""Task → its measure. `win_rate` comes from the reward model (rewards.py)."""


# BLEU ----------------------------------------------------------------------------------------------------------------


_LONGEST = 4
_SEPARATED = str.maketrans({sign: f" {sign} " for sign in string.punctuation if sign not in "',-."})
_ESCAPED = {"<skipped>": "", "-\n": "", "\n": " ", "&quot;": '"', "&amp;": "&", "&lt;": "<", "&gt;": ">"}


def words_of(text: str) -> list[str]:
    """The words and signs of a sentence, as NIST's mteval-v13a separates them."""
    text = text.rstrip()
    for spelled, meant in _ESCAPED.items():
        text = text.replace(spelled, meant)
    text = f" {text} ".translate(_SEPARATED)
    text = re.sub(r"([^0-9])([.,])", r"\1 \2 ", text)
    text = re.sub(r"([.,])([^0-9])", r" \1 \2", text)
    return re.sub(r"([0-9])(-)", r"\1 \2 ", text).split()


def sentence_bleu(sentence: str, references: Sequence[str]) -> float:
    """The BLEU score of a sentence, from 0 to 1, as sacrebleu's `sentence_bleu` computes it by default.

    Papineni et al., 2002, with n-grams up to the sentence's own length, and method 3 of Chen and Cherry (2014): the
    k-th precision that would be 0 is 1 / (2^k · n-grams).
    """
    words, reference_words = words_of(sentence), [words_of(reference) for reference in references]
    precisions: list[float] = []
    halvings = 0
    for order in range(1, min(_LONGEST, len(words)) + 1):
        allowed: Counter[tuple[str, ...]] = Counter()
        for tokens in reference_words:
            allowed |= _ngrams(tokens, order)
        hits = (_ngrams(words, order) & allowed).total()
        if order == 1 and not hits:
            return 0.0  # then no longer n-gram is shared either
        halvings += not hits
        precisions.append((hits or 0.5**halvings) / (len(words) - order + 1))
    if not precisions:
        return 0.0
    length = min(map(len, reference_words), key=lambda length: (abs(length - len(words)), length))
    brevity = math.exp(min(0.0, 1 - length / len(words)))
    return brevity * math.exp(fmean(map(math.log, precisions)))


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))
