"""Whether prices predict outcomes: rank correlations, categories, and what shuffled prices would give.

A comparison's difference is that of the other message minus that of the message that was sent, in price and in outcome;
the outcome's is the mean over pairs of playouts. Intervals and tests are over lessons.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from classroom_rl.evaluation.counterfactuals.comparing import Compared, Comparison
from classroom_rl.evaluation.counterfactuals.prices import OUTCOMES, SUPERVISOR
from classroom_rl.results.agreement import rank_correlation, rank_correlation_by_lesson, rank_correlation_p
from classroom_rl.rollout.intervals import LEVEL as SIGNIFICANT
from classroom_rl.rollout.intervals import Bounds, mean_with_ci, sign_flip_p, within_unit

PREDICTS, NOTHING, OPPOSITE, TOO_FEW = "predicts", "predicts nothing", "predicts the opposite", "too few to say"
LEVEL = 0.01
"""A price predicts if fewer than this share of all signs of the lessons correlate as strongly with the outcome."""
FEWEST_COMPARISONS = 10
SHUFFLES = 20


def counterfactual_figures(compared: Compared) -> dict[str, Any]:
    """The entry `counterfactuals` of metrics.json: the number of comparisons; for each outcome and price the rank
    correlation; for each outcome and category the mean difference of the faulty message's outcome; what of these
    predicts nothing; and in how many of `SHUFFLES` seeds the supervisor's prices are found to predict nothing once they
    are shuffled."""
    found = compared.comparisons
    kinds = [comparison.kind for comparison in found]
    return {
        "comparisons": len(found),
        "lessons": len({comparison.lesson for comparison in found}),
        "conversations": len({comparison.conversation for comparison in found}),
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "playouts": min((len(_pairs(each, next(iter(OUTCOMES)))) for each in found), default=0),
        "unpriced": compared.unpriced,
        "without_other": compared.without_other,
        "lost_playouts": compared.lost,
        "outcomes": {outcome: _of_outcome(found, outcome) for outcome in OUTCOMES},
    }


def _of_outcome(found: Sequence[Comparison], outcome: str) -> dict[str, Any]:
    sources = list(dict.fromkeys(name for comparison in found for name in comparison.price_said))
    prices = {source: _prediction(found, source, outcome) for source in sources}
    categories = {name: _harm(group, outcome) for name, group in _by_category(found).items()}
    return {
        "prices": prices,
        "categories": categories,
        "predict_nothing": [n for n, each in (prices | categories).items() if each["verdict"] == NOTHING],
        "reliability": _reliability(found, outcome),
        "shuffled": shuffled_check(found, outcome),
    }


def price_difference(comparison: Comparison, source: str) -> float | None:
    """How much better the other message is, if `source` is asked; None if it gave no price."""
    prices = (comparison.price_other.get(source), comparison.price_said.get(source))
    return None if None in prices else prices[0] - prices[1]


def outcome_difference(comparison: Comparison, outcome: str) -> float:
    """How much better the lesson goes on after the other message."""
    return fmean(_pairs(comparison, outcome))


def _pairs(comparison: Comparison, outcome: str) -> list[float]:
    """The difference in each pair of playouts."""
    sides = (comparison.outcome_other[outcome], comparison.outcome_said[outcome])
    return [other - said for other, said in zip(*sides, strict=True)]


def outcome_with_ci(comparison: Comparison, outcome: str) -> dict[str, Any]:
    """The difference in outcome with its interval over pairs of playouts."""
    pairs = {str(place): [value] for place, value in enumerate(_pairs(comparison, outcome))}
    return mean_with_ci(pairs, _bounds([comparison], outcome))


# Prices ----------------------------------------------------------------------------------------------------------


def _prediction(found: Sequence[Comparison], source: str, outcome: str) -> dict[str, Any]:
    """How a price agrees with an outcome: {"rank_correlation", "ci95", "p", "n", "verdict"}, and under `size` the same
    for its size alone: whether of two faulty messages, each against a better one, the dearer does more harm."""
    by_lesson = _priced(found, source, outcome)
    sizes = {lesson: [_faulty(*pair) for pair in pairs if pair[0]] for lesson, pairs in by_lesson.items()}
    return {**_agreement(by_lesson), "size": _agreement(sizes)}


def _agreement(by_lesson: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    everything = [pair for pairs in by_lesson.values() for pair in pairs]
    value, p = rank_correlation(everything), rank_correlation_p(by_lesson)
    interval = rank_correlation_by_lesson(by_lesson)
    enough = value is not None and interval is not None and len(everything) >= FEWEST_COMPARISONS
    verdict = _verdict(value, interval, p) if enough else TOO_FEW
    return {"rank_correlation": value, "ci95": interval, "p": p, "n": len(everything), "verdict": verdict}


def _faulty(price: float, outcome: float) -> tuple[float, float]:
    """Differences of price and outcome as those of the worse message minus the better one."""
    return (-price, -outcome) if price > 0 else (price, outcome)


def _priced(found: Sequence[Comparison], source: str, outcome: str) -> dict[str, list[tuple[float, float]]]:
    """The differences in price and in outcome, by lesson, of the comparisons that `source` priced."""
    by_lesson: dict[str, list[tuple[float, float]]] = {}
    for comparison in found:
        price = price_difference(comparison, source)
        if price is not None:
            by_lesson.setdefault(comparison.lesson, []).append((price, outcome_difference(comparison, outcome)))
    return by_lesson


def _verdict(value: float, interval: list[float], p: float) -> str:
    if p >= LEVEL or interval[0] <= 0 <= interval[1]:
        return NOTHING
    return PREDICTS if value > 0 else OPPOSITE


def shuffled_check(found: Sequence[Comparison], outcome: str, seeds: int = SHUFFLES) -> dict[str, int]:
    """In how many seeds the supervisor's prices predict nothing once they are shuffled among the comparisons:
    {"flagged", "seeds"}. It checks the check itself, on these very outcomes; fewer than 19 of 20 mean that the
    verdicts above are too generous."""
    flagged = sum(_is_flagged(shuffled(found, seed), outcome) for seed in range(seeds))
    return {"flagged": flagged, "seeds": seeds}


def _is_flagged(found: Sequence[Comparison], outcome: str) -> bool:
    """Whether the supervisor's prices are not found to predict anything."""
    p = rank_correlation_p(_priced(found, SUPERVISOR, outcome))
    if p is None or p >= LEVEL:  # no interval is needed
        return True
    return _agreement(_priced(found, SUPERVISOR, outcome))["verdict"] in (NOTHING, TOO_FEW)


def shuffled(found: Sequence[Comparison], seed: int) -> list[Comparison]:
    """The comparisons, each with the prices of another one. Those of a lesson stay together, as they resemble each
    other: lessons are dealt out in a drawn order, and their prices follow them."""
    lessons = list(dict.fromkeys(each.lesson for each in found))
    order = random.Random(f"{seed}|shuffled").sample(lessons, len(lessons))
    together = sorted(found, key=lambda each: lessons.index(each.lesson))
    drawn = sorted(found, key=lambda each: order.index(each.lesson))
    return [
        replace(mine, price_said=other.price_said, price_other=other.price_other)
        for mine, other in zip(together, drawn, strict=True)
    ]


# Categories ------------------------------------------------------------------------------------------------------


def _by_category(found: Sequence[Comparison]) -> Mapping[str, list[Comparison]]:
    """The comparisons by what is wrong with the dearer message, the most frequent category first."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in found:
        groups.setdefault(comparison.category, []).append(comparison)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def _harm(group: Sequence[Comparison], outcome: str) -> dict[str, Any]:
    """What follows a faulty message, compared with what follows the better one in its place: the mean difference in
    price and in outcome, below 0 if the faulty message does harm, and the verdict."""
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


def _bounds(found: Sequence[Comparison], outcome: str) -> Bounds | None:
    """Of differences in an outcome: −1 and 1, if it goes from 0 to 1."""
    sides = [each[outcome] for comparison in found for each in (comparison.outcome_said, comparison.outcome_other)]
    return (-1.0, 1.0) if within_unit({str(place): side for place, side in enumerate(sides)}) else None


# Outcomes --------------------------------------------------------------------------------------------------------


def _reliability(found: Sequence[Comparison], outcome: str) -> float | None:
    """How well the outcomes of these playouts repeat: the rank correlation of the differences in even and in odd pairs
    of playouts, stepped up to all of them (Spearman and Brown, 1910). A price can hardly correlate with the outcome by
    more than its square root. None if it cannot be told, or if the halves do not agree at all."""
    halves = [[_pairs(comparison, outcome)[first::2] for first in (0, 1)] for comparison in found]
    agreed = rank_correlation([(fmean(even), fmean(odd)) for even, odd in halves if even and odd])
    return None if agreed is None or agreed <= 0 else 2 * agreed / (1 + agreed)
