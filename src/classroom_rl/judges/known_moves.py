"""Finds sentences in a tutor's message that read as none of the moves that the embedded judges know: no task, feedback,
hint, rule, praise, and no talk about the lesson.

Such a sentence may be harmless, or drivel, an insult, an advert or a code: no rule can tell. What the judges know is
teachers' talk (`_TEACHERS_TALK`: words of the good replies in data/replies, of the rules themselves, and of praise),
the words of the lesson, and those of the student. The quickstart's language is closed, so there nearly all words have
to be known.
"""

import re
from collections.abc import Iterable, Set

from classroom_rl.judges.messages import ROLE_PLAY_LINE, own_words, sentences, spoken
from classroom_rl.rollout.text import UNSPACED, normal

MOST_BEYOND_RULES = 0.6
"""The highest score, as a share of its range, of a conversation with a message that no rule can read."""

_FUNCTION_WORDS = frozenset(
    (
        "a about all also am an and another any are aren as at be been but by can could did didn do does doesn "
        "don down each every for from had has have he her here him his how i if in into is isn it its just let m "
        "may me might more most must my no not of off on one only or other our out over re s shall she should so "
        "some t than that the their them then there these they this those three to too two up us ve very was we "
        "were what when where which who whom whose why will with won would yes you your "
    ).split()
)
_TEACHERS_TALK = frozenset(
    (
        "accusative acknowledged adjective after afternoon afterwards again agree agreement ah almost alone "
        "already always amazing answer answered answers anything apart appreciate arabic article articles ask "
        "aspect auxiliary away awesome back beautiful because before begin beginning begins best better between "
        "big both bravo brilliant bye careful case change changes check chinese choose chose clear clearly clever "
        "close come comes compare complete completely congratulations conjugated conjugation continue cool "
        "correct correction count countries course dative day dear delightful describe dialogue difference "
        "different done dutch easy effort either else end ending endings ends english enjoy enjoyed enjoying "
        "enough error errors even evening everything exactly example examples excellent exceptions excited "
        "explain familiar fantastic favorite favourite feminine find fine finish finished first fits fix follow "
        "follows forget form formal forms found french friday friend friends front fun funny future gave gender "
        "genitive german give gives glad go goes going good goodbye got grammar grateful great greek group guess "
        "half happened happens happy hard hear heard hello help helper helpful hi hindi hint hm hmm home hurry "
        "idea ideas imagine impressed impressive improve improving incorrect infinitive informal inside "
        "interesting irregular italian japanese joy keep kind kindness know korean language languages last later "
        "learn left lesson letter letters like likes line listen literally little long look looks lot love lovely "
        "lucky made main make makes many masculine mean meaning means meets message middle mind missing mistake "
        "mistakes moment monday month morning move movement much name natural nature nearly need needs negative "
        "neuter never new next nice note nothing notice noun nouns now often oh ok okay old once ones oops order "
        "own part particle past pattern people perfect person phrase phrases picked place please pleasing "
        "pleasure plural polish polite politeness portuguese possessives practice practise prefix preposition "
        "prepositions present problem progress pronoun pronunciation proud put question questions quickly quite "
        "read ready remember repeat rewrite right role rule rules russian sad said same say saying says second "
        "see sense sentence sentences short side since singular sister situation slip slips small smart softer "
        "somebody something somewhere soon sorry spanish special spell spot stand start starts stay step steps "
        "still story suffix sunday super sure syllable take takes talented talk task teach tell tells tense thank "
        "thanks thing things think thinking third though time times tiny today together tomorrow translate tricky "
        "true try turkish turn understand understanding understood use used usually verb verbs vowel vowels want "
        "watch way week welcome well whether whole without wonderful word words work works worry write wrong yeah "
        "year yesterday yet yours yourself "
    ).split()
)
_ENGLISH = frozenset(
    "could does from how should that the their there these they this those what when where which who why would you "
    "your".split()
)
"""Function words that hardly any other language has: "in", "is", "was", "we" and "so" are Dutch or German, too."""

_ENDINGS = ("s", "es", "d", "ed", "ing", "ly")
_NAMED = re.compile(r"^(\W*(?:\w[\w']*,? ){1,2})[A-Z]\w+(?=\W*$)")
"""A greeting or praise with a name at its end."""

MOST_UNKNOWN, MOST_UNKNOWN_IN_TOY_LANGUAGE = 0.55, 0.34
"""The largest share of unknown words among a sentence's content words."""

_GREETING = 3  # words; so much is said in the language that is taught, too
_DRIVEL_WORDS, _DRIVEL_CONTENT = 12, 0.2
"""A statement of so many words with less than that share of content words says nothing."""


def words_in(texts: Iterable[str]) -> set[str]:
    """All words of the texts, normalised."""
    return {word for text in texts for word in normal(text).split()}


def find_unread(text: str, known: Set[str], closed: bool = False) -> str:
    """The first sentence of a message that reads as no known move; "" if there is none. Lines of a role-play in the
    language that is taught are not read, nor quotations, but for those in the quickstart's closed language.

    Args:
        text: the message, or the part of it that is not a task of the plan.
        known: the words of the lesson and of the student, normalised.
        closed: whether the lesson is in the quickstart's closed language.
    """
    visible = spoken(text)
    if visible and not normal(visible):
        return visible
    narration, *lines = ROLE_PLAY_LINE.split(visible, maxsplit=1)
    if any(_ENGLISH.intersection(normal(line).split()) for line in lines):
        narration = visible  # a line in English
    return next((sentence for sentence in sentences(narration) if _is_unread(sentence, known, closed)), "")


def _is_unread(sentence: str, known: Set[str], closed: bool) -> bool:
    words = normal(_NAMED.sub(r"\1", sentence if closed else own_words(sentence))).split()
    if any(UNSPACED.search(word) for word in words):
        return False
    content = [word for word in words if word not in _FUNCTION_WORDS and word != "q"]
    unknown = [word for word in content if not _is_known(word, known)]
    is_question = sentence.rstrip('"”» ').endswith(("?", "？"))
    if not is_question and len(words) >= _DRIVEL_WORDS and len(content) < _DRIVEL_CONTENT * len(words):
        return True
    if closed:
        return len(unknown) > MOST_UNKNOWN_IN_TOY_LANGUAGE * len(content)
    if len(unknown) == 1:  # a statement whose only word is unknown, such as "You are …"
        return len(content) == 1 and not is_question and len(words) > 2 and "q" not in words
    return len(unknown) > MOST_UNKNOWN * len(content) and len(words) > _GREETING


def _is_known(word: str, known: Set[str]) -> bool:
    """Whether the word, or what is left of it without an ending, is known. Numbers are."""
    stems = [word, *(word.removesuffix(ending) for ending in _ENDINGS if word.endswith(ending))]
    vocabularies = (known, _TEACHERS_TALK, _FUNCTION_WORDS)
    return word.isdecimal() or any(stem in words for stem in stems for words in vocabularies)
