"""What a trained classifier sees of a message, and its n-grams."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from classroom_rl.errors import DataError
from classroom_rl.judges.moves.classifier import (
    TEXTS,
    Counted,
    Vectoriser,
    figure_names,
    figures,
    message_letters,
    message_tokens,
    seen,
    student_tokens,
)
from classroom_rl.judges.moves.labelled import LabelledMessage
from classroom_rl.judges.readings import Exchange
from tests.judges.moves.test_rules import any_exchange, of_language, of_maths


def test_placeholders_say_whether_the_student_has_said_it():
    language = of_language("Door is puerta, not libro. 7!", "está en el libro")
    assert message_tokens(language) == "door is TARGET_NEW not libro . NUMBER_NEW !"
    assert student_tokens(language) == "TARGET_SAID TARGET_SAID el libro"
    maths = of_maths("You had 18, then 30 gives 42 = 5!")
    assert message_tokens(maths) == "you had NUMBER_SAID then NUMBER_HEARD gives NUMBER_ANSWER = NUMBER_NEW !"
    assert message_letters(maths) == "you had 00, then 00 gives 00 = 0!"


def test_a_label_that_is_read_alone_sees_the_message_alone():
    exchange = of_language("Not quite.")
    assert seen("treats_as_wrong", exchange) == Exchange("Not quite.") and seen("correction", exchange) == exchange


@settings(max_examples=150, deadline=None)
@given(any_exchange)
def test_any_text_has_features(exchange: Exchange):
    features = figures(exchange)
    assert tuple(features) == figure_names() and all(map(math.isfinite, features.values()))
    assert isinstance(message_tokens(exchange), str) and isinstance(student_tokens(exchange), str)


def test_n_grams_counted_once_are_those_of_each_part(labelled: Sequence[LabelledMessage]):
    """A cross-validation counts them for all messages, and keeps what a part's own count would have found."""
    exchanges = [message.exchange for message in labelled]
    train, test = np.arange(0, len(exchanges), 2), np.arange(1, len(exchanges), 2)
    vectoriser = Vectoriser.fit([exchanges[index] for index in train], TEXTS)
    for tables, indices in zip(Counted(exchanges, TEXTS).tables(train, test), (train, test), strict=True):
        expected = vectoriser.tables([exchanges[index] for index in indices])
        assert list(tables) == list(expected)
        for name, table in expected.items():
            assert tables[name].shape == table.shape and abs(tables[name] - table).max() < 1e-12, name


def test_messages_without_a_frequent_ngram_are_refused():
    with pytest.raises(DataError, match="no n-gram is frequent enough"):
        Vectoriser.fit([Exchange("one two"), Exchange("three four")], ("words",))
