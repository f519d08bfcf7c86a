"""Whether prices predict outcomes: rank correlations, mean effects by category, and a check with shuffled prices; the
table of these figures, and the file with every comparison.

All differences, in price and in outcome, are those of the alternative minus the message that was sent. A difference in
outcome is the mean over pairs of playouts. Intervals and tests are over lessons.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from classroom_rl.errors import DataError
from classroom_rl.evaluation.counterfactuals.comparing import JUDGE, OUTCOMES, SUPERVISOR, Compared, Comparison
from classroom_rl.evaluation.report.tables import NO_VALUE, estimate_text, format_p
from classroom_rl.judges.agreement import rank_correlation, rank_correlation_by_lesson, rank_correlation_p
from classroom_rl.rollout.intervals import LEVEL as SIGNIFICANT
from classroom_rl.rollout.intervals import Bounds, mean_with_ci, sign_flip_p, within_unit
from classroom_rl.system.storage import write_whole

PREDICTS, NOTHING, OPPOSITE, TOO_FEW = "predicts", "predicts nothing", "predicts the opposite", "too few to say"
LEVEL = 0.01
"""The significance level of the sign-flip test over lessons: a price predicts an outcome if p is below it."""
FEWEST_COMPARISONS = 10
SHUFFLES = 20


def counterfactual_figures(compared: Compared) -> dict[str, Any]:
    """The entry `counterfactuals` of metrics.json: the number of comparisons; for each outcome and price the rank
    correlation; for each outcome and category the mean effect of a faulty message on the outcome; which of these
    predict nothing; and in how many of `SHUFFLES` seeds the supervisor's prices predict nothing after shuffling."""
    comparisons = compared.comparisons
    kinds = [comparison.kind for comparison in comparisons]
    return {
        "comparisons": len(comparisons),
        "lessons": len({comparison.lesson for comparison in comparisons}),
        "conversations": len({comparison.conversation for comparison in comparisons}),
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "playouts": min((len(_pairs(comparison, next(iter(OUTCOMES)))) for comparison in comparisons), default=0),
        "unpriced": compared.unpriced,
        "without_other": compared.without_other,
        "lost_playouts": compared.lost,
        "outcomes": {outcome: _of_outcome(comparisons, outcome) for outcome in OUTCOMES},
    }


def _of_outcome(comparisons: Sequence[Comparison], outcome: str) -> dict[str, Any]:
    sources = list(dict.fromkeys(name for comparison in comparisons for name in comparison.price_said))
    prices = {source: _prediction(comparisons, source, outcome) for source in sources}
    categories = {name: _harm(group, outcome) for name, group in _by_category(comparisons).items()}
    return {
        "prices": prices,
        "categories": categories,
        "predict_nothing": [name for name, figures in (prices | categories).items() if figures["verdict"] == NOTHING],
        "reliability": _reliability(comparisons, outcome),
        "shuffled": shuffled_check(comparisons, outcome),
    }


def price_difference(comparison: Comparison, source: str) -> float | None:
    """How much better the alternative is according to `source`; None without its prices."""
    prices = (comparison.price_other.get(source), comparison.price_said.get(source))
    return None if None in prices else prices[0] - prices[1]


def outcome_difference(comparison: Comparison, outcome: str) -> float:
    """How much better the outcome is after the alternative."""
    return fmean(_pairs(comparison, outcome))


def _pairs(comparison: Comparison, outcome: str) -> list[float]:
    """The difference in each pair of playouts."""
    sides = (comparison.outcome_other[outcome], comparison.outcome_said[outcome])
    return [other - sent for other, sent in zip(*sides, strict=True)]


def outcome_with_ci(comparison: Comparison, outcome: str) -> dict[str, Any]:
    """The difference in outcome with its interval over pairs of playouts."""
    pairs = {str(index): [value] for index, value in enumerate(_pairs(comparison, outcome))}
    return mean_with_ci(pairs, _bounds([comparison], outcome))


# Prices ----------------------------------------------------------------------------------------------------------


def _prediction(comparisons: Sequence[Comparison], source: str, outcome: str) -> dict[str, Any]:
    """How a price agrees with an outcome: {"rank_correlation", "ci95", "p", "n", "verdict"}, and under `size` the same
    for the size of the price difference alone: whether a larger fault does more harm."""
    by_lesson = _priced(comparisons, source, outcome)
    sizes = {lesson: [_faulty(*pair) for pair in pairs if pair[0]] for lesson, pairs in by_lesson.items()}
    return {**_agreement(by_lesson), "size": _agreement(sizes)}


def _agreement(by_lesson: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    all_pairs = [pair for pairs in by_lesson.values() for pair in pairs]
    value, p = rank_correlation(all_pairs), rank_correlation_p(by_lesson)
    interval = rank_correlation_by_lesson(by_lesson)
    enough = value is not None and interval is not None and len(all_pairs) >= FEWEST_COMPARISONS
    verdict = _verdict(value, interval, p) if enough else TOO_FEW
    return {"rank_correlation": value, "ci95": interval, "p": p, "n": len(all_pairs), "verdict": verdict}


def _faulty(price: float, outcome: float) -> tuple[float, float]:
    """The differences of price and outcome, turned to be those of the worse message minus the better one."""
    return (-price, -outcome) if price > 0 else (price, outcome)


def _priced(comparisons: Sequence[Comparison], source: str, outcome: str) -> dict[str, list[tuple[float, float]]]:
    """The differences in price and in outcome, by lesson, of the comparisons that `source` priced."""
    by_lesson: dict[str, list[tuple[float, float]]] = {}
    for comparison in comparisons:
        price = price_difference(comparison, source)
        if price is not None:
            by_lesson.setdefault(comparison.lesson, []).append((price, outcome_difference(comparison, outcome)))
    return by_lesson


def _verdict(value: float, interval: list[float], p: float) -> str:
    if p >= LEVEL or interval[0] <= 0 <= interval[1]:
        return NOTHING
    return PREDICTS if value > 0 else OPPOSITE


def shuffled_check(comparisons: Sequence[Comparison], outcome: str, seeds: int = SHUFFLES) -> dict[str, int]:
    """In how many seeds the supervisor's prices predict nothing after they are shuffled among the comparisons:
    {"flagged", "seeds"}. This validates the test itself on the same outcomes: with fewer than 19 of 20 seeds, the
    verdicts above are too generous."""
    flagged = sum(_is_flagged(shuffled(comparisons, seed), outcome) for seed in range(seeds))
    return {"flagged": flagged, "seeds": seeds}


def _is_flagged(comparisons: Sequence[Comparison], outcome: str) -> bool:
    """Whether the supervisor's prices predict nothing according to the test."""
    p = rank_correlation_p(_priced(comparisons, SUPERVISOR, outcome))
    if p is None or p >= LEVEL:  # no interval is needed
        return True
    return _agreement(_priced(comparisons, SUPERVISOR, outcome))["verdict"] in (NOTHING, TOO_FEW)


def shuffled(comparisons: Sequence[Comparison], seed: int) -> list[Comparison]:
    """The comparisons with their prices shuffled. Comparisons of one lesson resemble each other, so the prices are
    permuted lesson by lesson: those of a lesson stay together."""
    lessons = list(dict.fromkeys(comparison.lesson for comparison in comparisons))
    order = random.Random(f"{seed}|shuffled").sample(lessons, len(lessons))
    originals = sorted(comparisons, key=lambda comparison: lessons.index(comparison.lesson))
    donors = sorted(comparisons, key=lambda comparison: order.index(comparison.lesson))
    return [
        replace(original, price_said=donor.price_said, price_other=donor.price_other)
        for original, donor in zip(originals, donors, strict=True)
    ]


# Categories ------------------------------------------------------------------------------------------------------


def _by_category(comparisons: Sequence[Comparison]) -> Mapping[str, list[Comparison]]:
    """The comparisons by the category of the worse message, the most frequent category first."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.category, []).append(comparison)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def _harm(group: Sequence[Comparison], outcome: str) -> dict[str, Any]:
    """The effect of a faulty message compared with the better one at the same position: the mean difference in price
    and in outcome, below 0 if the faulty message does harm, and the verdict."""
    by_lesson = {
        lesson: [_faulty(*pair) for pair in pairs] for lesson, pairs in _priced(group, SUPERVISOR, outcome).items()
    }
    prices = [price for pairs in by_lesson.values() for price, _ in pairs]
    outcomes = {lesson: [value for _, value in pairs] for lesson, pairs in by_lesson.items()}
    p = sign_flip_p([fmean(values) for values in outcomes.values()])
    harm = mean_with_ci(outcomes, _bounds(group, outcome)) | {"p": p}
    interval = harm["ci95"]
    if interval is None:
        verdict = TOO_FEW
    elif p >= SIGNIFICANT or interval[0] <= 0 <= interval[1]:
        verdict = NOTHING
    else:
        verdict = PREDICTS if harm["mean"] < 0 else OPPOSITE
    return {"price": fmean(prices), **harm, "verdict": verdict}


def _bounds(comparisons: Sequence[Comparison], outcome: str) -> Bounds | None:
    """The bounds of differences in an outcome: −1 and 1 if its values are in [0, 1]; otherwise None."""
    sides = [
        outcomes[outcome]
        for comparison in comparisons
        for outcomes in (comparison.outcome_said, comparison.outcome_other)
    ]
    return (-1.0, 1.0) if within_unit({str(index): side for index, side in enumerate(sides)}) else None


# Outcomes --------------------------------------------------------------------------------------------------------


def _reliability(comparisons: Sequence[Comparison], outcome: str) -> float | None:
    """The split-half reliability of the outcome differences: the rank correlation between even and odd pairs of
    playouts, stepped up to all of them (Spearman and Brown, 1910). A price can hardly correlate with the outcome by
    more than its square root. None if it is not defined, or if the halves do not correlate positively."""
    halves = [[_pairs(comparison, outcome)[start::2] for start in (0, 1)] for comparison in comparisons]
    agreed = rank_correlation([(fmean(even), fmean(odd)) for even, odd in halves if even and odd])
    return None if agreed is None or agreed <= 0 else 2 * agreed / (1 + agreed)


# The file ----------------------------------------------------------------------------------------------------------


COMPARISONS_NAME = "counterfactuals.json"
_COMPARED = TypeAdapter(Compared)


def write_comparisons(folder: Path, compared: Compared) -> Path:
    """Write the comparisons, each with its differences in price and in outcome (other minus said), and return the path.
    Differences in outcome have intervals over pairs of playouts."""
    path = folder / COMPARISONS_NAME
    content: dict[str, Any] = asdict(compared)
    for entry, comparison in zip(content["comparisons"], compared.comparisons, strict=True):
        entry["difference"] = {
            "price": {source: price_difference(comparison, source) for source in comparison.price_said},
            "outcome": {outcome: outcome_with_ci(comparison, outcome) for outcome in OUTCOMES},
        }
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def read_comparisons(folder: Path) -> Compared:
    """Read a file of `write_comparisons`. Raises `DataError` if there is none, or it is damaged."""
    path = folder / COMPARISONS_NAME
    if not path.is_file():
        raise DataError(f"There is no {path}: eval.py writes it with counterfactuals.forks above 0.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for comparison in content["comparisons"]:
            del comparison["difference"]  # follows from the rest
        return _COMPARED.validate_python(content)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): measure again with eval.py.") from error


# The table ---------------------------------------------------------------------------------------------------------


_COLUMNS = (30, 4, 8, 24, 9)


def counterfactual_table(figures: Mapping[str, Any]) -> str:
    """The figures as text: the comparisons, then for each outcome the prices, the categories, and what predicts
    nothing."""
    if not figures["comparisons"]:
        return f"Counterfactuals: no message could be compared with another one. {_left_out(figures)}"
    kinds = ", ".join(f"{count} with a {kind}" for kind, count in figures["kinds"].items())
    header = (
        f"Counterfactuals: {figures['comparisons']} messages of {figures['lessons']} lessons, {kinds}; "
        f"{figures['playouts']} playouts a branch. {_left_out(figures)}"
    )
    outcomes = [_outcome_text(name, outcome_figures) for name, outcome_figures in figures["outcomes"].items()]
    return "\n\n".join([header, *outcomes])


def _left_out(figures: Mapping[str, Any]) -> str:
    labels = {
        "without_other": "without another message of another price",
        "unpriced": "without a verdict of the supervisor",
        "lost_playouts": "pairs of playouts lost to failures",
    }
    return "; ".join(f"{figures[key]} {label}" for key, label in labels.items() if figures[key])


def _outcome_text(name: str, figures: Mapping[str, Any]) -> str:
    lines = [f"Outcome “{name}”: {OUTCOMES[name]}"]
    lines.append(_aligned("price set by", "n", "", "rank correlation", "p", ""))
    for source, price in figures["prices"].items():
        lines.append(_price_row(source, price))
        if source in (SUPERVISOR, JUDGE):
            lines.append(_price_row("  its size alone", price["size"]))
    lines.append(_aligned("a message faulty by", "n", "price", "outcome against a better", "", ""))
    for category, harm in figures["categories"].items():
        value = estimate_text(harm, "mean", "+.2f")
        lines.append(_aligned(category, str(harm["n"]), f"{harm['price']:+.2f}", value, "", harm["verdict"]))
    unpredictive = ", ".join(figures["predict_nothing"]) or "none was found to"
    lines.append(f"Predict nothing: {unpredictive}.")
    reliability = figures["reliability"]
    reliable = NO_VALUE if reliability is None else f"{reliability:.2f}"
    shuffled = figures["shuffled"]
    lines.append(
        f"Reliability of the outcome differences {reliable}. Shuffled prices were found to predict nothing (p ≥ "
        f"{LEVEL:g}) in {shuffled['flagged']} of {shuffled['seeds']} seeds."
    )
    return "\n".join(line.rstrip() for line in lines)


def _price_row(label: str, agreement: Mapping[str, Any]) -> str:
    value = estimate_text(agreement, "rank_correlation", "+.2f")
    p = "" if agreement["p"] is None else f"p{format_p(agreement['p'])}"
    return _aligned(label, str(agreement["n"]), "", value, p, agreement["verdict"])


def _aligned(*cells: str) -> str:
    *first, last = cells
    return " ".join([*(cell.ljust(width) for cell, width in zip(first, _COLUMNS, strict=True)), last])
