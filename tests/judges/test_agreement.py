"""Agreement of judges: Cohen's kappa and Krippendorff's alpha worked out by hand, and scikit-learn's kappa."""

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score, f1_score

from classroom_rl.judges.agreement import (
    confusion_by_group,
    disagreement_weights,
    krippendorff_alpha,
    macro_f1,
    resampled,
    weighted_kappa,
)


def test_cohens_kappa_of_a_table_worked_by_hand():
    # 20 both yes, 15 both no, 5 + 10 apart: observed 0.7; chance 0.5 × 0.6 + 0.5 × 0.4 = 0.5; κ = 0.2 / 0.5.
    table = np.array([[15, 10], [5, 20]])
    assert weighted_kappa(table, disagreement_weights(2, ordinal=False)) == pytest.approx(0.4)
    assert weighted_kappa(table, disagreement_weights(2, ordinal=True)) == pytest.approx(0.4), "two have no middle"


@pytest.mark.parametrize(("ordinal", "weights"), [(False, None), (True, "quadratic")])
def test_kappa_is_that_of_scikit_learn(ordinal: bool, weights: str | None):
    generator = np.random.default_rng(3)
    truth = generator.integers(0, 3, 200)
    predicted = np.where(generator.random(200) < 0.6, truth, generator.integers(0, 3, 200))
    groups = [str(index // 9) for index in range(200)]
    tables = confusion_by_group(truth, predicted, groups, 3)
    assert tables.shape == (23, 3, 3) and tables.sum() == 200
    kappa = weighted_kappa(tables.sum(axis=0), disagreement_weights(3, ordinal))
    assert kappa == pytest.approx(cohen_kappa_score(truth, predicted, weights=weights))


@pytest.mark.parametrize("answers", [(0, 1, 2), (0, 2), (1,)], ids=str)
def test_macro_f1_is_that_of_scikit_learn(answers: tuple[int, ...]):
    generator = np.random.default_rng(4)
    truth, predicted = generator.choice(answers, (2, 90))
    tables = confusion_by_group(truth, predicted, ["a", "b", "c"] * 30, 3)
    assert macro_f1(tables.sum(axis=0)) == pytest.approx(f1_score(truth, predicted, average="macro"))
    assert macro_f1(tables).shape == (3,) and macro_f1(np.zeros((3, 3))) == 0


def test_who_always_says_the_same_agrees_by_chance():
    assert weighted_kappa(np.array([[0, 5], [0, 5]]), disagreement_weights(2, False)) == 0
    assert weighted_kappa(np.array([[0, 0], [0, 5]]), disagreement_weights(2, False)) == 0, "nor is it undefined"


def test_dialogues_are_resampled_whole():
    # Two dialogues, of one reply that agrees and of nine that do not: a resample has 2, 10 or 18 replies,
    # both have 10, and one without the other 9 or 1.
    tables = np.zeros((2, 2, 2))
    tables[0, 1, 1], tables[1, 0, 1] = 1, 9
    total, *samples, first, second = resampled(tables).sum(axis=(1, 2)).tolist()
    assert set(samples) == {2, 10, 18} and (total, first, second) == (10, 9, 1)


def test_krippendorffs_alpha():
    # (1, 2) and (3, 3): observed Σ of squares 2 + 0 over 4 values, 0.5. Expected: ordered pairs of 1, 2, 3, 3 differ by
    # 1, 2, 2, 1, 1, 0, squared and both ways 2 × (1 + 4 + 4 + 1 + 1) = 22, over 4 × 3: 1.8333. α = 1 − 0.5 / 1.8333.
    assert krippendorff_alpha([(1, 2), (3, 3), (9, None)]) == pytest.approx(1 - 0.5 / (22 / 12))
    assert krippendorff_alpha([(0.1, 0.1), (0.9, 0.9)]) == 1.0
    assert krippendorff_alpha([(0, 1), (1, 0)]) == pytest.approx(1 - 1 / (8 / 12))
    assert krippendorff_alpha([(1, None)]) is None and krippendorff_alpha([(1, 1), (1, 1)]) is None
