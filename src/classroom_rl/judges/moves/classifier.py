"""A linear classifier of one label: n-grams of the message and of the student's, figures from the rules, and logistic
regression on them. scikit-learn fits it; what was fitted is kept as plain arrays (judges/moves/stored.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.moves.features import figures, message_letters, message_tokens, student_tokens
from classroom_rl.judges.readings import READ_ALONE, Exchange

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import TfidfVectorizer

WORDS, LETTERS, STUDENT = TEXTS = ("words", "letters", "student")
"""The texts that n-grams are taken of: the message's words, its letters, the words of the student before it."""

FIGURES = "figures"

_OPTIONS = {
    WORDS: {"preprocessor": message_tokens, "tokenizer": str.split, "ngram_range": (1, 3), "min_df": 2},
    LETTERS: {"preprocessor": message_letters, "analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 3},
    STUDENT: {"preprocessor": student_tokens, "tokenizer": str.split, "ngram_range": (1, 3), "min_df": 2},
}
_REGULARISATION = 1.0
"""scikit-learn's `C`. It was fixed before anything was measured with it."""


def require_sklearn() -> None:
    """Raise a `ConfigError` if scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Trained readers need scikit-learn: pip install scikit-learn, or pip install -r requirements-dev.txt."
        ) from error


@dataclass(frozen=True)
class Ngrams:
    """The n-grams of one text: the column of each, and the weight of each column (inverse document frequency)."""

    vocabulary: tuple[str, ...]
    idf: np.ndarray


@dataclass(frozen=True)
class Linear:
    """A fitted classifier: a weight for each n-gram of each text and for each figure, and a constant. A message's score
    is the sum over what it has."""

    weights: Mapping[str, np.ndarray]
    figure_weights: np.ndarray
    intercept: float

    def scores(self, tables: Mapping[str, Any]) -> np.ndarray:
        """The score of each message in `Vectoriser.tables`."""
        found = tables[FIGURES] @ self.figure_weights + self.intercept
        for text, weights in self.weights.items():
            found = found + tables[text] @ weights
        return found


def texts_of(label: str) -> tuple[str, ...]:
    """The texts whose n-grams a label is read by."""
    return (WORDS, LETTERS) if label in READ_ALONE else TEXTS


def seen(label: str, about: Exchange) -> Exchange:
    """What a reader of this label is shown: of those in `READ_ALONE` the message alone."""
    return Exchange(about.message) if label in READ_ALONE else about


class Vectoriser:
    """Turns messages into numbers: tf-idf of the n-grams of each text, and figures."""

    def __init__(self, ngrams: Mapping[str, Ngrams]):
        self.ngrams = dict(ngrams)
        self.fitted = {text: _restored(text, each) for text, each in self.ngrams.items()}

    @classmethod
    def fit(cls, rows: Sequence[Exchange], texts: Sequence[str]) -> "Vectoriser":
        """Collect the n-grams of messages to learn from."""
        found = {}
        for text in texts:
            try:
                fitted = _vectorizer(text).fit(rows)
            except ValueError as error:  # nothing occurs often enough
                raise _too_few(text, len(rows)) from error
            names = fitted.get_feature_names_out()
            found[text] = Ngrams(tuple(map(str, names)), fitted.idf_)
        return cls(found)

    def tables(self, rows: Sequence[Exchange]) -> dict[str, Any]:
        """For each text a sparse matrix, a row for each message and a column for each n-gram; and their figures."""
        return {text: each.transform(rows) for text, each in self.fitted.items()} | {FIGURES: table_of_figures(rows)}


class Counted:
    """The n-grams of all messages of a data set, counted once. A cross-validation fits dozens of classifiers to parts
    of it, and counting takes nearly all of the time; what a part gets is what `Vectoriser.fit` gives it."""

    def __init__(self, rows: Sequence[Exchange], texts: Sequence[str]):
        plain = {"min_df": 1, "use_idf": False, "norm": None, "sublinear_tf": False}
        self._counts = {text: _vectorizer(text, **plain).fit_transform(rows) for text in texts}
        self._figures = table_of_figures(rows)

    def tables(self, train: np.ndarray, test: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tables of `Vectoriser.tables` of the messages at `train`, and of those at `test`, with the n-grams and
        weights of the former."""
        from sklearn.feature_extraction.text import TfidfTransformer

        found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for text, counts in self._counts.items():
            learned = counts[train]
            frequent = np.flatnonzero(learned.getnnz(axis=0) >= _OPTIONS[text]["min_df"])
            if not len(frequent):
                raise _too_few(text, len(train))
            fitted = TfidfTransformer(sublinear_tf=True).fit(learned[:, frequent])
            for side, part in zip(found, (learned, counts[test]), strict=True):
                side[text] = fitted.transform(part[:, frequent])
        for side, places in zip(found, (train, test), strict=True):
            side[FIGURES] = self._figures[places]
        return found


def _too_few(text: str, messages: int) -> DataError:
    return DataError(f"In the {text} of {messages} messages no n-gram is frequent enough: give more data.")


def table_of_figures(rows: Sequence[Exchange]) -> np.ndarray:
    """The figures of messages as a table (messages, figures)."""
    return np.array([list(figures(each).values()) for each in rows], dtype=float)


def figure_names() -> tuple[str, ...]:
    """The names of a table's columns."""
    return tuple(figures(Exchange("")))


def fit_linear(tables: Mapping[str, Any], labels: Sequence[bool]) -> Linear:
    """Fit a classifier to messages and what people said of them. The same input always gives the same weights.

    Args:
        tables: of the messages, as `Vectoriser.tables` has them.
        labels: both values have to occur.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import FeatureUnion
    from sklearn.preprocessing import FunctionTransformer

    texts = [text for text in tables if text != FIGURES]
    model = LogisticRegression(C=_REGULARISATION, solver="liblinear", random_state=0, max_iter=1000)
    beside = FeatureUnion([(name, FunctionTransformer(itemgetter(name))) for name in (*texts, FIGURES)])
    model.fit(beside.transform(tables), np.asarray(labels, bool))
    sizes = [tables[text].shape[1] for text in texts]
    *weights, of_figures = np.split(model.coef_[0], np.cumsum(sizes))
    return Linear(dict(zip(texts, weights, strict=True)), of_figures, float(model.intercept_[0]))


def _vectorizer(text: str, **more) -> "TfidfVectorizer":
    from sklearn.feature_extraction.text import TfidfVectorizer

    options = {"token_pattern": None, "lowercase": False, "sublinear_tf": True} | _OPTIONS[text]
    return TfidfVectorizer(**options | more)


def _restored(text: str, ngrams: Ngrams) -> "TfidfVectorizer":
    """A fitted vectoriser of scikit-learn with these n-grams."""
    found = _vectorizer(text, vocabulary={each: place for place, each in enumerate(ngrams.vocabulary)})
    found.idf_ = np.asarray(ngrams.idf, float)
    return found
