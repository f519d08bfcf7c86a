"""Classifies, by rules on the text, how a teacher replies to a student's error, and how the student responds.

The kinds of feedback, uptake and repair are those of Lyster and Ranta (1997), "Corrective feedback and learner uptake",
Studies in Second Language Acquisition 19. If a message gives several kinds of feedback, the first in `KINDS` counts.
"""

import re
from collections.abc import Callable
from difflib import SequenceMatcher

from classroom_rl.environments.toy_language.grammar import (
    Slip,
    corrected,
    find_slips,
    holds_statement,
    parse_sentence,
)
from classroom_rl.judges.messages import (
    RETRY,
    ParsedPlan,
    Phrase,
    holds,
    own_words,
    quotes,
    read_message,
    reveals,
    sentences,
    spoken,
)
from classroom_rl.rollout.text import UNSPACED, normal

KINDS = ("explicit", "recast", "metalinguistic", "repetition", "clarification", "elicitation", "none")
GIVING_KINDS = ("explicit", "recast")
"""The kinds of feedback that give the right form."""

ALIKE, HARDLY_DIFFERENT = 0.6, 0.75
"""Similarity (`SequenceMatcher.ratio`) from which a text is an attempt at a phrase, and from which one text is a
corrected version of the other."""

TERMS = re.compile(
    r"\b(?:tense|past|present|future|endings?|articles?|plural|singular|prepositions?|particles?|verbs?|adjectives?|"
    r"nouns?|pronouns?|infinitive|gender|masculine|feminine|neuter|word order|agreement|polite|politeness|formal|"
    r"informal|familiar|case|accusative|dative|genitive|conjugat\w*|auxiliary|helping verb|form|suffix|prefix|aspect|"
    r"missing|(?:last|first|second|one|wrong|extra|small) words?|comes first|goes)\b|"
    r"\b(?:look|check) (?:at|the|your)\b|\bthink about (?:the|where)\b|\bhere\s*:",
    re.IGNORECASE,
)
SAYS_WRONG = re.compile(
    r"\bnot (?:quite|right|correct|yet|exactly)\b|\b(?:is|was|are|isn't|sounds?|a bit|little|quite) "
    r"(?:wrong|incorrect|off)\b|"
    r"\b(?:a|one|small|little|the|my) (?:mistake|error|slip)\b|\b(?:almost|nearly|careful|oops|incorrect|wrong)\b|"
    r"^close\b|^(?:no|nope)\b[,.!]|\bdon't think that|\bisn't (?:right|correct)\b|\bare you sure\b|"
    r"\bdon't (?:use|say)\b",
    re.IGNORECASE,
)
_NAMES_THE_RIGHT = re.compile(
    r"\b(?:correct|right) (?:form|word|answer|sentence)\b|\bshould be\b|\byou mean\b|\b(?:it's|it is) Q|\bwe say\b|"
    r"\buse\b|\bmust be\b|\byou (?:have to|need to) say\b",
    re.IGNORECASE,
)
_CLARIFIES = re.compile(
    r"\b(?:sorry|pardon)\b[^.!]*\?|\bwhat do you mean\b|\b(?:do not|don't|didn't|did not) (?:quite )?understand\b|"
    r"\bsay that again\?|\bnot sure what\b|\bwhat did you (?:say|mean)\b",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"(?:^|[,:;.!?–—])(?P<begun>[^,:;.!?–—]*?)\s*(?:…|\.\.\.)$")
_ELICITS = re.compile(r"\bhow (?:do|would|can) (?:you|we) say\b|\bwhich (?:word|form)\b", re.IGNORECASE)
_AFTER_ME = re.compile(r"\b(?:say|repeat|copy|write)\b[^.?!:]*:\s*(?P<form>\S.*)", re.IGNORECASE)
_BLANK = re.compile(r"_{2,}|…|\.\.\.")
_HAS_SAY = re.compile(
    r"\b(?:what|how) (?:do|would|could|can|will|must|should|might) you (?:say|ask|answer|reply|tell|call)\b|"
    r"\b(?:say|ask|tell|answer) (?:it|that|so|this|them|her|him|me)\b|\bwhat is it\b",
    re.IGNORECASE,
)
"""A task to say something that the message describes elsewhere."""

_CHOICE = re.compile(r"\b(?:which|choose|pick|fits?|or)\b", re.IGNORECASE)
_STOPWORDS = frozenset(
    "a an the i you he she it we they me my your to of in on at for is are do does what how if".split()
)
_SHORT_SENTENCE = 8
_LONGEST_ATTEMPT = 300  # characters; a longer text is no attempt at a phrase, and comparing it takes too long


def feedback_kind(error: str, reply: str, plan: ParsedPlan) -> str:
    """The kind of feedback, one of `KINDS`, that a teacher's reply gives on an error.

    Args:
        error: the student's message, which holds an error.
        reply: the teacher's next message.
    """
    plain = own_words(spoken(reply))
    if gives_right_form(error, reply, plan):
        says_so = SAYS_WRONG.search(plain) or _NAMES_THE_RIGHT.search(plain)
        return "explicit" if says_so else "recast"
    if TERMS.search(_remarks(reply)):
        return "metalinguistic"
    if _repeats_as_question(error, reply):
        return "repetition"
    if _CLARIFIES.search(plain):
        return "clarification"
    if RETRY.search(plain) or any(_ELICITS.search(own_words(each)) for each in sentences(spoken(reply))):
        return "elicitation"
    return "elicitation" if begins_again(error, reply, plan) else "none"


def begins_again(error: str, text: str, plan: ParsedPlan) -> bool:
    """Whether a sentence breaks off for the student to finish it: what stands before the dots is a part of what the
    student said, or tried to say. Three dots behind anything else ask for nothing again."""
    target = nearest_phrase(error, plan) or ""
    found = (_UNFINISHED.search(each) for each in sentences(text))
    begun = [normal(each["begun"]) for each in found if each]
    return any(each and (holds(error, each) or holds(target, each)) for each in begun)


def gives_right_form(error: str, reply: str, plan: ParsedPlan) -> bool:
    """Whether the reply contains the right form of what the student got wrong."""
    if plan.lesson:
        return any(_shows_fix(slip, error, reply) for slip in find_slips(error))
    target = nearest_phrase(error, plan)
    if target and (reveals(spoken(reply), target) or _fills_in(reply, target, said=error)):
        return True
    shown = quotes(reply) + sentences(spoken(reply))
    if any(_is_put_right(error, each) for each in shown):
        return True
    said = normal(error).split()
    inside = [normal(each) for each in quotes(reply)]
    return any(each and holds(target or "", each) and not set(each.split()) <= set(said) for each in inside) or (
        bool(_NAMES_THE_RIGHT.search(own_words(reply)))
        and any(len(each.split()) <= 2 and each not in said and _is_variant(each, said) for each in inside)
    )


def _shows_fix(slip: Slip, error: str, reply: str) -> bool:
    stated = normal(" ".join(each for each in sentences(spoken(reply)) if not each.endswith("?")))
    if holds(stated, f"use {slip.fix}"):
        return True
    if slip.kind == "article":
        return holds(stated, f"{slip.fix} {slip.word}")
    if slip.kind == "preposition":
        place = re.search(rf"\b{re.escape(slip.word)} (?:the )?(\w+)", error.lower())
        return place is not None and holds(stated, f"{slip.fix} the {place[1]}")
    return holds(stated, slip.fix)


def _is_put_right(error: str, shown: str) -> bool:
    """Whether `shown` is the student's message with a change, not only a part or an extension of it."""
    before, after = normal(error), normal(shown)
    if not after or after in before or before in after:
        return False
    return _alike(before, after, HARDLY_DIFFERENT)


def _is_variant(word: str, said: list[str]) -> bool:
    return any(_alike(word, each, ALIKE) for each in said)


def _alike(one: str, other: str, least: float) -> bool:
    return _likeness(one, other, least) >= least


def _likeness(one: str, other: str, least: float = ALIKE) -> float:
    """`SequenceMatcher.ratio` of two texts. It is 0 for texts above `_LONGEST_ATTEMPT`, and where the lengths alone put
    it below `least`, which saves the comparison."""
    longest, both = max(len(one), len(other)), len(one) + len(other)
    if longest > _LONGEST_ATTEMPT or both and 2 * min(len(one), len(other)) / both < least:
        return 0.0
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def _remarks(reply: str) -> str:
    """A message's own words, without sentences that explain a phrase or ask what the student meant."""
    found = [own_words(each) for each in sentences(spoken(reply))]
    return " ".join(
        each for each in found if not re.search(r"\b(?:means|mean that)\b", each) and not _CLARIFIES.search(each)
    )


def _repeats_as_question(error: str, reply: str) -> bool:
    """Whether the reply repeats a part of the student's message, up to six words, as a question."""
    for each in sentences(spoken(reply)):
        words = normal(each)
        if each.rstrip('"”» ').endswith(("?", "？")) and words and holds(error, words) and len(words.split()) <= 6:
            return True
    return False


def nearest_phrase(text: str, plan: ParsedPlan) -> str | None:
    """The phrase of the plan that the student tried to say; None if the text is similar to none of them."""
    said = normal(text)
    best = max(plan.phrases, key=lambda phrase: _likeness(said, normal(phrase.text)), default=None)
    return best.text if best and _likeness(said, normal(best.text)) >= ALIKE else None


def falsely_corrects(reply: str) -> bool:
    """Whether a reply treats the student's message as wrong. Call it for replies to messages without an error."""
    found = [own_words(each) for each in sentences(spoken(reply))]
    for each in found:
        short = len(each.split()) <= _SHORT_SENTENCE
        if SAYS_WRONG.search(each) and (short or TERMS.search(each)) and not re.search(r"\bdon't worry\b", each):
            return True
    return bool(any(RETRY.search(each) for each in found) and any(TERMS.search(each) for each in found[:2]))


def hands_over(reply: str, produced: Callable[[str], bool], plan: ParsedPlan) -> bool:
    """Whether a teacher's message gives, word for word, what the student should say next. Call it for messages that do
    not follow an error.

    Args:
        produced: tells whether the student has already said a phrase.
    """
    said = spoken(reply)
    if plan.lesson:
        return any(holds_statement(each) for each in sentences(said) if not each.endswith("?"))
    task = read_message(reply).task_text
    after_me = _AFTER_ME.search(task)
    if after_me and len(normal(after_me["form"])) > 1 and not produced(after_me["form"]):
        return True
    new = [phrase for phrase in plan.phrases if not produced(phrase.text)]
    if any(_fills_in(reply, phrase.text) for phrase in new):
        return True
    if any(_states_part(said, phrase, produced) and _asks_elsewhere(said, task, phrase) for phrase in new):
        return True
    shown = [phrase for phrase in new if reveals(said, phrase.text)]
    asked = own_words(task)
    if not asked or offers_choice(reply, plan):
        return False
    return any(reveals(task, phrase.text) or _asks_elsewhere(said, asked, phrase) for phrase in shown)


def offers_choice(reply: str, plan: ParsedPlan) -> bool:
    """Whether a message has the student choose among at least two things that it shows: phrases of the plan, and
    quotations."""
    if not _CHOICE.search(own_words(read_message(reply).task_text)):
        return False
    said = spoken(reply)
    shown = {normal(phrase.text) for phrase in plan.phrases if holds(said, phrase.text)}
    return len(shown | {normal(each) for each in quotes(said)}) > 1


def _asks_elsewhere(said: str, task: str, phrase: Phrase) -> bool:
    """Whether a message that shows the phrase also asks for it: in its task, or by describing it in a sentence beside
    the one that shows it. To show a phrase with its meaning and ask for another one is no request for it."""
    if _asks_for(task, phrase.meaning):
        return True
    beside = [each for each in sentences(said) if not reveals(each, phrase.text)]
    return bool(_HAS_SAY.search(task)) and any(_asks_for(each, phrase.meaning) for each in beside)


def _fills_in(text: str, phrase: str, said: str = "") -> bool:
    """Whether a sentence with a blank holds more than half of the phrase's words in their order, and not only words
    that the student `said`. In scripts without spaces, letters count as words."""
    wanted = _words(phrase)
    for each in sentences(spoken(text)):
        if not _BLANK.search(each):
            continue
        found = _in_order(_words(_BLANK.sub(" ", each)), wanted)
        if 2 * len(found) > len(wanted) and not set(found) <= set(_words(said)):
            return True
    return False


def _states_part(said: str, phrase: Phrase, produced: Callable[[str], bool]) -> bool:
    """Whether the text holds a part of the phrase in one piece: at least half of its words, and two or more.

    A sentence that is nothing else is such a part. Inside of a sentence, words of the phrase's meaning do not count, as
    any task may use them, nor do words that the student has already said. In scripts without spaces, letters count as
    words.
    """
    wanted, free = _words(phrase.text), set(_words(phrase.meaning))
    half = max(2, len(wanted) / 2)
    if any(len(_words(each)) >= half and holds(phrase.text, each) for each in sentences(said)):
        return True
    blocks = SequenceMatcher(None, _words(said), wanted, autojunk=False).get_matching_blocks()
    parts = ([word for word in wanted[block.b : block.b + block.size] if word not in free] for block in blocks)
    return any(len(part) >= half and not all(map(produced, part)) for part in parts)


def _in_order(words: list[str], wanted: list[str]) -> list[str]:
    """The words of `wanted` that stand in `words` in the same order."""
    blocks = SequenceMatcher(None, words, wanted, autojunk=False).get_matching_blocks()
    return [word for block in blocks for word in wanted[block.b : block.b + block.size]]


def _words(text: str) -> list[str]:
    plain = normal(text)
    return list(plain) if UNSPACED.search(plain) else plain.split()


def _asks_for(task: str, meaning: str) -> bool:
    """Whether the task contains more than half of the content words of a meaning."""
    wanted = set(normal(meaning).split()) - _STOPWORDS
    return bool(wanted) and len(wanted & set(normal(task).split())) / len(wanted) > 0.5


def shows_uptake(error: str, kind: str, answer: str, plan: ParsedPlan) -> bool:
    """Whether the student's answer to feedback of `kind` returns to the place of the error (uptake)."""
    if kind == "none":
        return False
    if plan.lesson:
        one, other = parse_sentence(error), parse_sentence(answer)
        if one and other:
            return (one.subject, corrected(one).verb) == (other.subject, corrected(other).verb)
    target = nearest_phrase(error, plan)
    return any(
        _alike(normal(error), normal(each), HARDLY_DIFFERENT) or (target is not None and holds(each, target))
        for each in sentences(answer)
    )


def repairs(error: str, kind: str, answer: str, plan: ParsedPlan) -> bool:
    """Whether the student's answer to feedback of `kind` corrects the error (repair).

    Outside the quickstart, the answer has to contain the phrase that the student tried to say; if the error was no
    attempt at a phrase, any changed answer counts.
    """
    if not shows_uptake(error, kind, answer, plan):
        return False
    if plan.lesson:
        return not {slip.kind for slip in find_slips(error)} & {slip.kind for slip in find_slips(answer)}
    target = nearest_phrase(error, plan)
    return holds(answer, target) if target else normal(error) != normal(answer)
