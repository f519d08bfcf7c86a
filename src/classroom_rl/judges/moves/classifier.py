"""A linear classifier for one label: logistic regression on tf-idf n-grams of the tutor's and the student's message and
on numeric features from the rules. scikit-learn fits it; the fitted weights are stored as plain arrays
(judges/moves/stored.py).

In the texts of the n-grams, words of the target and numbers are replaced by placeholders that tell whether the student
has already used them: "bed is letto" becomes "bed is TARGET_NEW". So a classifier learns how a message uses the answer,
not which answers occur in the training data.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.feedback import SAYS_WRONG, TERMS, falsely_corrects
from classroom_rl.judges.messages import own_words, quotes, read_message, sentences
from classroom_rl.judges.moves.rules import (
    ASKS_FOR_HELP,
    CONTRASTS,
    LOOKS_AGAIN,
    PRAISES,
    RULES,
    answers,
    is_question,
    numbers,
    values,
    words,
)
from classroom_rl.judges.readings import READ_ALONE, Exchange

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import TfidfVectorizer

FEATURES_VERSION = 1
"""Increased whenever a change in this file, or in a rule that it uses, changes the features. Stored classifiers of
another version are refused."""

_TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+|[^\W\d_][\w']*|[?？!.…_=]")
_LONGEST_COMPARED = 300
"""In characters. Longer texts are not compared: `SequenceMatcher` takes time quadratic in the length."""
STOPWORDS = frozenset(
    "a an the is are of to in on it that this you your we i he she and so for with be as at have has was were".split()
)
"""Words without content."""


@lru_cache(maxsize=8192)
def message_tokens(exchange: Exchange) -> str:
    """The words and punctuation of the tutor's message, separated by spaces, with placeholders for words of the target
    and for numbers."""
    return _with_placeholders(exchange.message, exchange)


@lru_cache(maxsize=8192)
def student_tokens(exchange: Exchange) -> str:
    """The same as `message_tokens` for the student's message before it."""
    return _with_placeholders(exchange.student, exchange)


def message_letters(exchange: Exchange) -> str:
    """The tutor's message in lower case, with every digit replaced by 0."""
    return re.sub(r"\d", "0", exchange.message.lower())


def _with_placeholders(text: str, exchange: Exchange) -> str:
    correct, said, heard = answers(exchange), values([exchange.student]), values(exchange.before)
    target, student = set(words(exchange.target)), set(words(exchange.student))
    tokens = []
    for token in _TOKEN.findall(text.lower()):
        if any(character.isdigit() for character in token):
            value = next(iter(values([token])), None)
            kind = "ANSWER" if value in correct else "SAID" if value in said else "HEARD" if value in heard else "NEW"
            tokens.append(f"NUMBER_{kind}")
        elif token in target:
            tokens.append("TARGET_SAID" if token in student else "TARGET_NEW")
        else:
            tokens.append(token)
    return " ".join(tokens)


@lru_cache(maxsize=8192)
def figures(exchange: Exchange) -> dict[str, float]:
    """The numeric features by name, nearly all between 0 and 1. Names and order are the same for every message: weights
    are stored by position."""
    features = _form_features(exchange) | _target_features(exchange)
    features |= _context_features(exchange) | _number_features(exchange)
    return {name: float(value) for name, value in features.items()}


def _form_features(exchange: Exchange) -> dict[str, float]:
    """Features of the message alone, and the predictions of all rules."""
    text, plain = exchange.message, own_words(exchange.message)
    parts, message, word_list = sentences(text), read_message(text), words(text)
    questions = [is_question(sentence) for sentence in parts]
    return {
        "question": any(questions),
        "ends_with_question": bool(questions) and questions[-1],
        "question_then_more": any(questions) and not questions[-1],
        "questions": min(sum(questions), 3) / 3,
        "has_task": bool(message.tasks),
        "ends_with_task": bool(message.ends_with_task),
        "falsely_corrects": falsely_corrects(text),
        "says_wrong": bool(SAYS_WRONG.search(plain)),
        "terms": bool(TERMS.search(plain)),
        "praises": bool(PRAISES.match(plain)),
        "contrasts": bool(CONTRASTS.search(plain)),
        "looks_again": bool(LOOKS_AGAIN.search(plain)),
        "quotations": min(len(quotes(text)), 4) / 4,
        "one_or_two_words": len(word_list) <= 2,
        "three_or_four_words": 2 < len(word_list) <= 4,
        "words": min(len(word_list), 80) / 40,
        "sentences": min(len(parts), 6) / 3,
        "equals_sign": "=" in text,
    } | {f"rule_{label}": rule(exchange) for label, rule in RULES.items()}


def _target_features(exchange: Exchange) -> dict[str, float]:
    """How far the messages of tutor and student match the target; all 0 without a target."""
    message, student, target = (set(words(text)) for text in (exchange.message, exchange.student, exchange.target))
    similarity = _similarity(" ".join(words(exchange.student)), " ".join(words(exchange.target)))
    missing = target - student
    return {
        "student_like_target": similarity,
        "student_near_target": similarity > 0.85,
        "student_is_target": similarity == 1,
        "target_said": _share(target, student),
        "target_all_said": bool(target) and not missing,
        "target_given": _share(target, message),
        "missing_given": _share(missing, message),
        "any_missing_given": bool(missing & message),
        "message_of_target": _share(message, target),
        "target_repeated": _share(message, student & target),
    }


def _context_features(exchange: Exchange) -> dict[str, float]:
    """How far the tutor's message takes up the words of the student and of the earlier messages."""
    message, student = (set(words(text)) - STOPWORDS for text in (exchange.message, exchange.student))
    shares_target_word = bool(set(words(exchange.student)) & set(words(exchange.target)))
    earlier_words = {word for text in exchange.before for word in words(text)} - STOPWORDS
    asks_for_help = bool(ASKS_FOR_HELP.search(exchange.student))
    return {
        "student_asks": asks_for_help,
        "student_question_mark": "?" in exchange.student,
        "student_asks_and_tries_nothing": asks_for_help and not shares_target_word,
        "student_words": min(len(words(exchange.student)), 80) / 40,
        "message_from_student": _share(message, student),
        "message_from_before": _share(message, earlier_words),
        "message_new": _share(message, message - student - earlier_words),
    }


def _number_features(exchange: Exchange) -> dict[str, float]:
    """Whether the message contains the answer, and in which sentences; and other numbers in it."""
    correct, said, heard = answers(exchange), values([exchange.student]), values(exchange.before)
    message_values = [number.value for number in numbers(exchange.message)]
    answer_starts = [number.start for number in numbers(exchange.message) if number.value in correct]
    with_answer = [sentence for sentence in sentences(exchange.message) if values([sentence]) & correct]
    return {
        "answer_unknown": not correct,
        "answer_there": bool(with_answer),
        "answer_last": bool(message_values) and message_values[-1] in correct,
        "answer_in_question": any(is_question(sentence) for sentence in with_answer),
        "answer_only_in_questions": bool(with_answer) and all(is_question(sentence) for sentence in with_answer),
        "answer_said": bool(with_answer) and bool(correct & said),
        "answer_heard": bool(with_answer) and bool(correct & heard),
        "answer_new": bool(with_answer) and not correct & (said | heard),
        "answer_after_equals_sign": any(exchange.message[:start].rstrip(" $").endswith("=") for start in answer_starts),
        "target_unknown": not exchange.target,
        "no_number": not message_values,
        "numbers": min(len(message_values), 10) / 5,
        "numbers_new": min(len(set(message_values) - said - heard), 4) / 2,
        "last_number_new": bool(message_values) and message_values[-1] not in said | heard,
        "numbers_of_student": _share(said, set(message_values)),
    }


def _share(part: set, whole: set) -> float:
    """The share of the elements of `part` that are in `whole`; 0 if `part` is empty."""
    return len(part & whole) / len(part) if part else 0.0


def _similarity(one: str, other: str) -> float:
    if not one or not other or max(len(one), len(other)) > _LONGEST_COMPARED:
        return 0.0
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


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
                vectorizer = _vectorizer(text).fit(exchanges)
            except ValueError as error:  # nothing occurs often enough
                raise _too_few(text, len(exchanges)) from error
            names = vectorizer.get_feature_names_out()
            ngrams[text] = Ngrams(tuple(map(str, names)), vectorizer.idf_)
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
        options = {"min_df": 1, "use_idf": False, "norm": None, "sublinear_tf": False}
        self._counts = {text: _vectorizer(text, **options).fit_transform(exchanges) for text in texts}
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
            transformer = TfidfTransformer(sublinear_tf=True).fit(train_counts[:, frequent])
            for table, part in zip(tables, (train_counts, counts[test]), strict=True):
                table[text] = transformer.transform(part[:, frequent])
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
    """Fit a linear classifier to the tables of `Vectoriser.tables` and the annotators' labels. Both labels must occur.
    The same input always gives the same weights."""
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
