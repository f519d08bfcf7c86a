"""Which interval of a mean covers, on few lessons and many: the choice in rollout/intervals.py, simulated.

    python -m benchmarks.intervals [--simulations 2000] [--lessons 6 8 12 20 30 60 116] [--exact]

Families of lessons' values, all from 0 to 1:

    ceiling     like a trained tutor near the ceiling, stated: .98 in 80 % of the lessons, else uniform from .2 to .9
    trained     the quickstart's trained tutor as its recorded interval has it (docs/measured.md: 0.972, [0.957, 0.985]
                over 116 lessons): 1 in 82 % of the lessons, uniform from .8 to .98 in 14 %, from .5 to .8 in 4 %. It is
                made after those figures: the values of single lessons are not in the repository
    recorded    with --values FILE: resampled from the lessons of a run (eval/after/conversations.parquet)
    rare        an event in 5 % of the lessons: 0 or 1
    rare turns  an event in 5 % of four turns of a lesson, which resemble each other
    untrained   a tutor in the middle: Beta(2.2, 2.4)

and of paired differences, from −1 to 1: `learned` (trained − untrained), `equal` (ceiling − ceiling), `equal trained`,
`from a constant` (ceiling − 0.5), `rarer` (an event in 10 % before and 2 % after).

Methods: percentile bootstrap (what was used before), BCa, Student's t, studentised bootstrap, the Bayesian bootstrap
with an unseen lesson at the bound, of weight 1 (Gaffke; for shares Clopper and Pearson) and 0.5, and the chosen one,
with and without known bounds. Of each: the coverage of the intervals that there are, how often there is one, and the
mean width. Wilson's interval, for shares alone, covers 0.90 of events of 5 % at 11 lessons, and 0.85 of 2 % at 8.

The first table is of verdicts: how often a run "learned" if before and after are equal, and if the reward rose.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from classroom_rl.results.learning import LEARNED, LearningEvidence, conclude
from classroom_rl.results.rollout_files import read_records
from classroom_rl.results.statistics import paired_change, rewards_by_lesson
from classroom_rl.rollout import intervals
from classroom_rl.rollout.intervals import LEAST_LESSONS, Bounds, mean_with_ci, share_interval, student_t

Draw = Callable[[np.random.Generator, int], np.ndarray]
Ends = tuple[float, float] | None
Method = Callable[[np.ndarray, Bounds], Ends]


def _ceiling(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.8, 0.98, rng.uniform(0.2, 0.9, n))


def _trained(rng: np.random.Generator, n: int) -> np.ndarray:
    kind = rng.random(n)
    return np.where(kind < 0.82, 1.0, np.where(kind < 0.96, rng.uniform(0.8, 0.98, n), rng.uniform(0.5, 0.8, n)))


def _untrained(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.beta(2.2, 2.4, n)


def _rare(share: float) -> Draw:
    return lambda rng, n: (rng.random(n) < share).astype(float)


def _rare_turns(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.binomial(4, rng.beta(0.5, 9.5, n)) / 4


def _minus(first: Draw, second: Draw) -> Draw:
    return lambda rng, n: first(rng, n) - second(rng, n)


VALUES: dict[str, tuple[Draw, float]] = {
    "ceiling": (_ceiling, 0.8 * 0.98 + 0.2 * 0.55),
    "trained": (_trained, 0.82 + 0.14 * 0.89 + 0.04 * 0.65),
    "rare": (_rare(0.05), 0.05),
    "rare turns": (_rare_turns, 0.05),
    "untrained": (_untrained, 2.2 / 4.6),
}
"""Family → how a lesson's value is drawn, and the mean of all of them."""

DIFFERENCES: dict[str, tuple[Draw, float]] = {
    "learned": (_minus(_trained, _untrained), VALUES["trained"][1] - 2.2 / 4.6),
    "equal": (_minus(_ceiling, _ceiling), 0.0),
    "equal trained": (_minus(_trained, _trained), 0.0),
    "from a constant": (lambda rng, n: _ceiling(rng, n) - 0.5, VALUES["ceiling"][1] - 0.5),
    "rarer": (_minus(_rare(0.02), _rare(0.10)), -0.08),
}


# Methods -----------------------------------------------------------------------------------------------------------


def _means(values: np.ndarray) -> np.ndarray:
    return intervals.draws(len(values), 2_000) @ values / len(values)


def _percentile(values: np.ndarray, bounds: Bounds) -> Ends:
    low, high = np.percentile(_means(values), [2.5, 97.5])
    return low, high


def _bca(values: np.ndarray, bounds: Bounds) -> Ends:
    """Bias-corrected and accelerated (Efron, 1987)."""
    means, mean, normal = np.sort(_means(values)), values.mean(), NormalDist()
    below = np.clip(np.mean(means < mean) + np.mean(means == mean) / 2, 1 / len(means), 1 - 1 / len(means))
    off, spread = values - mean, np.sum((values - mean) ** 2)
    if spread == 0:
        return float(mean), float(mean)
    skew, bias = np.sum(off**3) / (6 * spread**1.5), normal.inv_cdf(float(below))
    ends = []
    for z in (normal.inv_cdf(0.025), normal.inv_cdf(0.975)):
        share = normal.cdf(bias + (bias + z) / (1 - skew * (bias + z)))
        ends.append(float(means[min(len(means) - 1, int(share * len(means)))]))
    return ends[0], ends[1]


def _student(values: np.ndarray, bounds: Bounds) -> Ends:
    reach = student_t(len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return values.mean() - reach, values.mean() + reach


def _parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    distinct, times = np.unique(values, return_counts=True)
    return distinct, np.ones(len(distinct)), times


def _studentised(values: np.ndarray, bounds: Bounds) -> Ends:
    low, high = intervals._studentised(*_parts(values))
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _unseen(weight: float) -> Method:
    def ends(values: np.ndarray, bounds: Bounds) -> Ends:
        sums, counts, times = _parts(values)
        rng = np.random.default_rng(0)
        weights, unseen = rng.standard_gamma(times, size=(2_000, len(times))), rng.standard_gamma(weight, size=2_000)
        limits = [
            np.quantile((weights @ sums + unseen * bound) / (weights @ counts + unseen), end)
            for bound, end in zip(bounds, (0.025, 0.975), strict=True)
        ]
        return limits[0], limits[1]

    return ends


def _chosen(values: np.ndarray, bounds: Bounds | None) -> Ends:
    return mean_with_ci({str(index): [value] for index, value in enumerate(values.tolist())}, bounds)["ci95"]


def _without_bounds(values: np.ndarray, bounds: Bounds) -> Ends:
    return _chosen(values + 10, None)


METHODS: dict[str, Method] = {
    "percentile": _percentile,
    "BCa": _bca,
    "Student's t": _student,
    "wider of t and studentised": _studentised,
    "unseen of 1": _unseen(1.0),
    "unseen of .5": _unseen(0.5),
    "chosen": _chosen,
    "chosen, no bounds": _without_bounds,
}


def coverage(
    draw: Draw, mean: float, bounds: Bounds, method: Method, lessons: int, simulations: int, seed: int = 0
) -> tuple[float, float, float]:
    """(share of the intervals that hold the mean, share of simulations with an interval, mean width). Of a method for
    values without bounds, 10 is added to them, so that none of them looks like a share."""
    rng, covered, widths = np.random.default_rng(seed), 0, []
    shift = 10 if method is _without_bounds else 0
    for _ in range(simulations):
        ends = method(draw(rng, lessons), bounds)
        if ends is not None:
            covered += ends[0] - 1e-9 <= mean + shift <= ends[1] + 1e-9
            widths.append(ends[1] - ends[0])
    printed = len(widths) / simulations
    return (covered / len(widths), printed, float(np.mean(widths))) if widths else (math.nan, 0.0, math.nan)


def table(families: Mapping[str, tuple[Draw, float]], bounds: Bounds, lessons: Sequence[int], simulations: int) -> str:
    """Coverage and width of each method; in brackets the share of simulations with an interval, if it is not 1."""
    out = []
    for name, (draw, mean) in families.items():
        out += [f"\n{name}", f"{'lessons':28}" + "".join(f"{n:>18}" for n in lessons)]
        for label, method in METHODS.items():
            cells = []
            for n in lessons:
                covered, printed, width = coverage(draw, mean, bounds, method, n, simulations)
                some = "" if printed == 1 else f" ({printed:.2f})"
                cells.append("none" if printed == 0 else f"{covered:.3f} w {width:.3f}{some}")
            out.append(f"{label:28}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(out)


def exact(shares: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.5), most: int = 116) -> str:
    """The least coverage of shares over all numbers of lessons, computed from the binomial distribution."""
    out = [f"{'share':8}{'Wilson':>22}{'chosen':>22}"]
    for share in shares:
        cells = []
        for interval in (_wilson, share_interval):
            coverages = [
                (sum(chance for hits, chance in enumerate(_binomial(n, share)) if _holds(interval(hits, n), share)), n)
                for n in range(LEAST_LESSONS, most + 1)
            ]
            cells.append("{:.3f} at {}".format(*min(coverages)))
        out.append(f"{share:<8}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(out)


def _holds(ends: Sequence[float], share: float) -> bool:
    return ends[0] <= share <= ends[1]


def _wilson(hits: int, total: int) -> Sequence[float]:
    z = NormalDist().inv_cdf(0.975)
    share, doubt = hits / total, z**2 / total
    reach = z * math.sqrt(share * (1 - share) / total + doubt / (4 * total))
    return (share + doubt / 2 - reach) / (1 + doubt), (share + doubt / 2 + reach) / (1 + doubt)


def _binomial(total: int, share: float) -> list[float]:
    return [math.comb(total, hits) * share**hits * (1 - share) ** (total - hits) for hits in range(total + 1)]


# Verdicts ----------------------------------------------------------------------------------------------------------


def learned(draw: Draw, rise: float, lessons: int, simulations: int, seed: int = 0) -> tuple[float, float]:
    """How often `conclude` says that a tutor learned whose reward rose by `rise` in each lesson, at most to 1, on top
    of what two conversations of one policy differ by; and how often the rule before said so, by percentiles alone."""
    rng, now, before = np.random.default_rng(seed), 0, 0
    for _ in range(simulations):
        first, second = draw(rng, lessons), np.minimum(1, draw(rng, lessons) + rise)
        sides = [{str(index): [value] for index, value in enumerate(side.tolist())} for side in (first, second)]
        change = paired_change(*sides)
        now += conclude(LearningEvidence(steps=1, held_out={"sampled": change})).verdict == LEARNED
        before += change["mean"] >= 0.02 and _percentile(second - first, (-1, 1))[0] > 0
    return now / simulations, before / simulations


def verdicts(lessons: Sequence[int], simulations: int) -> str:
    """How often a run learned, by the rule and by the one before."""
    out = [f"{'':34}" + "".join(f"{n:>16}" for n in lessons)]
    for name in ("ceiling", "trained", "rare", "untrained"):
        for rise in (0.0,) if name != "untrained" else (0.0, 0.03, 0.06, 0.1, 0.2):
            cells = ["{:.3f} ({:.3f})".format(*learned(VALUES[name][0], rise, n, simulations)) for n in lessons]
            out.append(f"{name + (f', rose by {rise}' if rise else ', equal'):34}" + "".join(f"{c:>16}" for c in cells))
    return "\n".join(out)


def recorded(path: Path) -> tuple[Draw, float]:
    """The family of a run's lessons: their mean rewards, drawn with replacement."""
    lessons = rewards_by_lesson(read_records(path))
    means = np.array([np.mean(group) for group in lessons.values() if group])
    return (lambda rng, n: rng.choice(means, n)), float(means.mean())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=2_000)
    parser.add_argument("--lessons", type=int, nargs="+", default=[6, 8, 12, 20, 30, 60, 116])
    parser.add_argument("--values", type=Path, help="conversations.parquet of an evaluation of a trained tutor")
    parser.add_argument("--exact", action="store_true", help="only the exact coverage of shares")
    options = parser.parse_args()
    print(f"Least exact coverage of shares at {LEAST_LESSONS} to 116 lessons\n\n{exact()}", flush=True)
    if options.exact:
        return
    intervals.RESAMPLES = 2_000  # a fifth, so that the simulations end within an hour
    families = VALUES | ({"recorded": recorded(options.values)} if options.values else {})
    print('\nVerdict "learned", now (and by the percentile bootstrap alone)\n', flush=True)
    print(verdicts([2, 4, *options.lessons], options.simulations), flush=True)
    print("\nCoverage and mean width (w)", flush=True)
    for name, family in families.items():
        print(table({name: family}, (0.0, 1.0), options.lessons, options.simulations), flush=True)
    for name, family in DIFFERENCES.items():
        print(table({name: family}, (-1.0, 1.0), options.lessons, options.simulations), flush=True)


if __name__ == "__main__":
    main()
