"""A linear classifier for one label: logistic regression on tf-idf n-grams of the tutor's and the student's message and
on numeric features from the rules. scikit-learn fits it; the fitted weights are stored as plain arrays
(judges/moves/stored.py).
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
"""The texts that n-grams are taken from: the words of the tutor's message, its letters, and the words of the student's
message before it."""

FIGURES = "figures"

_OPTIONS = {
    WORDS: {"preprocessor": message_tokens, "tokenizer": str.split, "ngram_range": (1, 3), "min_df": 2},
    LETTERS: {"preprocessor": message_letters, "analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 3},
    STUDENT: {"preprocessor": student_tokens, "tokenizer": str.split, "ngram_range": (1, 3), "min_df": 2},
}
_REGULARISATION = 1.0
"""scikit-learn's `C`. It was fixed before any measurement, so no figure is tuned by it."""


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
    """The n-grams of one text.

    Attributes:
        vocabulary: the n-grams, in the order of their columns.
        idf: the inverse document frequency of each n-gram, of shape (n-grams,).
    """

    vocabulary: tuple[str, ...]
    idf: np.ndarray


@dataclass(frozen=True)
class Linear:
    """A fitted linear classifier. The score of a message is the weighted sum of its features plus the intercept.

    Attributes:
        weights: for each text, the weights of its n-grams, of shape (n-grams,).
        figure_weights: the weights of the numeric features, of shape (features,).
        intercept: the constant.
    """

    weights: Mapping[str, np.ndarray]
    figure_weights: np.ndarray
    intercept: float

    def scores(self, tables: Mapping[str, Any]) -> np.ndarray:
        """The score of each message, of shape (messages,), from the tables of `Vectoriser.tables`."""
        scores = tables[FIGURES] @ self.figure_weights + self.intercept
        for text, weights in self.weights.items():
            scores = scores + tables[text] @ weights
        return scores


def texts_of(label: str) -> tuple[str, ...]:
    """The texts whose n-grams are used to predict a label."""
    return (WORDS, LETTERS) if label in READ_ALONE else TEXTS


def seen(label: str, exchange: Exchange) -> Exchange:
    """The part of an exchange that the classifier of a label sees: for labels in `READ_ALONE`, the message alone."""
    return Exchange(exchange.message) if label in READ_ALONE else exchange


class Vectoriser:
    """Turns messages into features: tf-idf weights of the n-grams of each text, and the numeric features."""

    def __init__(self, ngrams: Mapping[str, Ngrams]):
        self.ngrams = dict(ngrams)
        self.fitted = {text: _restored(text, text_ngrams) for text, text_ngrams in self.ngrams.items()}

    @classmethod
    def fit(cls, exchanges: Sequence[Exchange], texts: Sequence[str]) -> "Vectoriser":
        """Build the vocabulary and its weights from training messages.

        Raises:
            DataError: if no n-gram of a text occurs often enough.
        """
        ngrams = {}
        for text in texts:
            try:
                fitted = _vectorizer(text).fit(exchanges)
            except ValueError as error:  # nothing occurs often enough
                raise _too_few(text, len(exchanges)) from error
            names = fitted.get_feature_names_out()
            ngrams[text] = Ngrams(tuple(map(str, names)), fitted.idf_)
        return cls(ngrams)

    def tables(self, exchanges: Sequence[Exchange]) -> dict[str, Any]:
        """For each text a sparse matrix of shape (messages, n-grams), and under `FIGURES` the numeric features."""
        tables = {text: vectorizer.transform(exchanges) for text, vectorizer in self.fitted.items()}
        return tables | {FIGURES: table_of_figures(exchanges)}


class Counted:
    """The n-gram counts of all messages of a data set, computed once.

    Cross-validation fits dozens of classifiers to parts of a data set, and counting takes nearly all of the time. The
    tables of a part are the same as those of a `Vectoriser` that is fitted to this part.
    """

    def __init__(self, exchanges: Sequence[Exchange], texts: Sequence[str]):
        plain = {"min_df": 1, "use_idf": False, "norm": None, "sublinear_tf": False}
        self._counts = {text: _vectorizer(text, **plain).fit_transform(exchanges) for text in texts}
        self._figures = table_of_figures(exchanges)

    def tables(self, train: np.ndarray, test: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tables of the messages at the indices `train` and `test`, as `Vectoriser.tables` returns them. Vocabulary
        and idf weights come from the training messages alone.

        Raises:
            DataError: if no n-gram of a text occurs often enough.
        """
        from sklearn.feature_extraction.text import TfidfTransformer

        tables: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for text, counts in self._counts.items():
            train_counts = counts[train]
            frequent = np.flatnonzero(train_counts.getnnz(axis=0) >= _OPTIONS[text]["min_df"])
            if not len(frequent):
                raise _too_few(text, len(train))
            fitted = TfidfTransformer(sublinear_tf=True).fit(train_counts[:, frequent])
            for table, part in zip(tables, (train_counts, counts[test]), strict=True):
                table[text] = fitted.transform(part[:, frequent])
        for table, indices in zip(tables, (train, test), strict=True):
            table[FIGURES] = self._figures[indices]
        return tables


def _too_few(text: str, messages: int) -> DataError:
    return DataError(f"In the {text} of {messages} messages no n-gram is frequent enough: give more data.")


def table_of_figures(exchanges: Sequence[Exchange]) -> np.ndarray:
    """The numeric features of messages, of shape (messages, features)."""
    return np.array([list(figures(exchange).values()) for exchange in exchanges], dtype=float)


def figure_names() -> tuple[str, ...]:
    """The names of the columns of `table_of_figures`."""
    return tuple(figures(Exchange("")))


def fit_linear(tables: Mapping[str, Any], labels: Sequence[bool]) -> Linear:
    """Fit a linear classifier. The same input always gives the same weights.

    Args:
        tables: the features of the messages, from `Vectoriser.tables`.
        labels: the annotators' label of each message. Both values must occur.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import FeatureUnion
    from sklearn.preprocessing import FunctionTransformer

    texts = [text for text in tables if text != FIGURES]
    model = LogisticRegression(C=_REGULARISATION, solver="liblinear", random_state=0, max_iter=1000)
    # Joins the tables column by column; `FunctionTransformer` picks one table from the dictionary.
    columns = FeatureUnion([(name, FunctionTransformer(itemgetter(name))) for name in (*texts, FIGURES)])
    model.fit(columns.transform(tables), np.asarray(labels, bool))
    sizes = [tables[text].shape[1] for text in texts]
    *weights, figure_weights = np.split(model.coef_[0], np.cumsum(sizes))
    return Linear(dict(zip(texts, weights, strict=True)), figure_weights, float(model.intercept_[0]))


def _vectorizer(text: str, **overrides) -> "TfidfVectorizer":
    from sklearn.feature_extraction.text import TfidfVectorizer

    options = {"token_pattern": None, "lowercase": False, "sublinear_tf": True} | _OPTIONS[text]
    return TfidfVectorizer(**options | overrides)


def _restored(text: str, ngrams: Ngrams) -> "TfidfVectorizer":
    """A fitted vectorizer of scikit-learn with these n-grams and weights."""
    vectorizer = _vectorizer(text, vocabulary={ngram: column for column, ngram in enumerate(ngrams.vocabulary)})
    vectorizer.idf_ = np.asarray(ngrams.idf, float)
    return vectorizer
