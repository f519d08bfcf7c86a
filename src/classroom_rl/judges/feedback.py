"""Classifies by text rules how a teacher replies to a student's error (corrective feedback), and how the student
responds (uptake and repair).

The categories are those of Lyster and Ranta (1997), "Corrective feedback and learner uptake", Studies in Second
Language Acquisition 19. If a message gives several kinds of feedback, the first in `KINDS` counts.
"""

import re
from collections.abc import Callable
from difflib import SequenceMatcher

from classroom_rl.environments.toy_language.grammar import Slip, corrected, find_slips, holds_statement, parse_sentence
from classroom_rl.judges.leaks import shows
from classroom_rl.judges.messages import (
    RETRY,
    ParsedPlan,
    Phrase,
    holds,
    own_words,
    quotes,
    read_message,
    sentences,
    spoken,
)
from classroom_rl.rollout.text import UNSPACED, normal

KINDS = ("explicit", "recast", "metalinguistic", "repetition", "clarification", "elicitation", "none")
GIVING_KINDS = ("explicit", "recast")
"""The kinds of feedback that give the correct form."""

ALIKE, HARDLY_DIFFERENT = 0.6, 0.75
"""Minimum similarity (`SequenceMatcher.ratio`) of an attempt at a phrase to the phrase, and of a text to its corrected
version."""

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
_NAMES_CORRECT_FORM = re.compile(
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
"""A request to say something that the message describes in another sentence."""

_CHOICE = re.compile(r"\b(?:which|choose|pick|fits?|or)\b", re.IGNORECASE)
_STOPWORDS = frozenset(
    "a an the i you he she it we they me my your to of in on at for is are do does what how if".split()
)
_OPENINGS = frozenset("so and ah oh okay ok well hmm hm".split())
_SHORT_SENTENCE = 8  # words
_LONGEST_ATTEMPT = 300
"""In characters. Longer texts are no attempts at a phrase, and `SequenceMatcher` takes quadratic time on them."""


def feedback_kind(error: str, reply: str, plan: ParsedPlan) -> str:
    """The kind of feedback, one of `KINDS`, that a teacher's reply gives on a student's message with an error."""
    unquoted = own_words(spoken(reply))
    if gives_right_form(error, reply, plan):
        is_explicit = SAYS_WRONG.search(unquoted) or _NAMES_CORRECT_FORM.search(unquoted)
        return "explicit" if is_explicit else "recast"
    if TERMS.search(_remarks(reply)):
        return "metalinguistic"
    if _repeats_as_question(error, reply):
        return "repetition"
    if _CLARIFIES.search(unquoted):
        return "clarification"
    if RETRY.search(unquoted) or any(_ELICITS.search(own_words(part)) for part in sentences(spoken(reply))):
        return "elicitation"
    return "elicitation" if begins_again(error, reply, plan) else "none"


def begins_again(error: str, text: str, plan: ParsedPlan) -> bool:
    """Whether a sentence breaks off for the student to finish it: the words before the dots are a part of what the
    student said, or of the phrase that it tried to say. Dots after other words do not count."""
    target = nearest_phrase(error, plan) or ""
    matches = (_UNFINISHED.search(sentence) for sentence in sentences(text))
    beginnings = [normal(match["begun"]) for match in matches if match]
    return any(words and (holds(error, words) or holds(target, words)) for words in beginnings)


def gives_right_form(error: str, reply: str, plan: ParsedPlan) -> bool:
    """Whether the reply contains the correct form of what the student got wrong."""
    if plan.lesson:
        return any(_shows_fix(slip, error, reply) for slip in find_slips(error))
    target = nearest_phrase(error, plan)
    if target and (shows(spoken(reply), target) or _fills_in(reply, target, said=error)):
        return True
    if any(_is_corrected_version(error, text) for text in quotes(reply) + sentences(spoken(reply))):
        return True
    student_words = normal(error).split()
    quotations = [normal(quotation) for quotation in quotes(reply)]
    # A quotation shows the correct form if it is a part of the target with a word that the student did not say.
    if any(text and holds(target or "", text) and not set(text.split()) <= set(student_words) for text in quotations):
        return True
    # So does a short variant of a word that the student said, if the reply announces the correct form.
    return bool(_NAMES_CORRECT_FORM.search(own_words(reply))) and any(
        len(text.split()) <= 2
        and text not in student_words
        and any(_is_similar(text, word, ALIKE) for word in student_words)
        for text in quotations
    )


def _shows_fix(slip: Slip, error: str, reply: str) -> bool:
    """Whether a reply in the toy language shows the correction of a slip outside of its questions."""
    stated = normal(" ".join(sentence for sentence in sentences(spoken(reply)) if not sentence.endswith("?")))
    if holds(stated, f"use {slip.fix}"):
        return True
    if slip.kind == "article":
        return holds(stated, f"{slip.fix} {slip.word}")
    if slip.kind == "preposition":
        match = re.search(rf"\b{re.escape(slip.word)} (?:the )?(\w+)", error.lower())
        return match is not None and holds(stated, f"{slip.fix} the {match[1]}")
    return holds(stated, slip.fix)


def _is_corrected_version(error: str, text: str) -> bool:
    """Whether a text is the student's message with a change, and not only a part or an extension of it."""
    before, after = normal(error), normal(text)
    if not after or after in before or before in after or _leaves_out(before.split(), after.split()):
        return False
    return _is_similar(before, after, HARDLY_DIFFERENT)


def _leaves_out(before: list[str], after: list[str]) -> bool:
    """Whether a text only leaves something out of the student's words, perhaps after an opening word ("So …"). Another
    word at its beginning may be the correction of the student's first one."""
    words = after[1:] if len(after) > 1 and after[0] in _OPENINGS and before[:1] != after[:1] else after
    rest = iter(before)
    return all(word in rest for word in words)


def _is_similar(one: str, other: str, least: float) -> bool:
    return _similarity(one, other, least) >= least


def _similarity(one: str, other: str, least: float = ALIKE) -> float:
    """`SequenceMatcher.ratio` of two texts; 0 if one is longer than `_LONGEST_ATTEMPT`, or if their lengths alone show
    that the ratio is below `least`, which saves the comparison."""
    longest, total = max(len(one), len(other)), len(one) + len(other)
    if longest > _LONGEST_ATTEMPT or total and 2 * min(len(one), len(other)) / total < least:
        return 0.0
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def _remarks(reply: str) -> str:
    """A message without its quotations, and without sentences that explain a phrase or ask what the student meant."""
    parts = [own_words(sentence) for sentence in sentences(spoken(reply))]
    return " ".join(
        part for part in parts if not re.search(r"\b(?:means|mean that)\b", part) and not _CLARIFIES.search(part)
    )


def _repeats_as_question(error: str, reply: str) -> bool:
    """Whether the reply repeats a part of the student's message, up to six words, as a question."""
    for sentence in sentences(spoken(reply)):
        words, is_question = normal(sentence), sentence.rstrip('"”» ').endswith(("?", "？"))
        if is_question and words and holds(error, words) and len(words.split()) <= 6:
            return True
    return False


def nearest_phrase(text: str, plan: ParsedPlan) -> str | None:
    """The phrase of the plan that the student tried to say; None if the text is similar to none of them."""
    normalised = normal(text)
    best = max(plan.phrases, key=lambda phrase: _similarity(normalised, normal(phrase.text)), default=None)
    return best.text if best and _is_similar(normalised, normal(best.text), ALIKE) else None


def falsely_corrects(reply: str) -> bool:
    """Whether a reply treats the student's message as wrong. Meant for replies to messages without an error."""
    parts = [own_words(sentence) for sentence in sentences(spoken(reply))]
    for part in parts:
        is_short = len(part.split()) <= _SHORT_SENTENCE
        if SAYS_WRONG.search(part) and (is_short or TERMS.search(part)) and not re.search(r"\bdon't worry\b", part):
            return True
    return bool(any(RETRY.search(part) for part in parts) and any(TERMS.search(part) for part in parts[:2]))


def hands_over(reply: str, produced: Callable[[str], bool], plan: ParsedPlan) -> bool:
    """Whether a teacher's message gives, word for word, what the student should say next. Meant for messages that do
    not follow an error. `produced` tells whether the student has already said a phrase."""
    visible = spoken(reply)
    if plan.lesson:
        return any(holds_statement(sentence) for sentence in sentences(visible) if not sentence.endswith("?"))
    task = read_message(reply).task_text
    after_me = _AFTER_ME.search(task)
    if after_me and len(normal(after_me["form"])) > 1 and not produced(after_me["form"]):
        return True
    new_phrases = [phrase for phrase in plan.phrases if not produced(phrase.text)]
    if any(_fills_in(reply, phrase.text) for phrase in new_phrases):
        return True
    if any(
        _states_part(visible, phrase, produced) and _asks_elsewhere(visible, task, phrase) for phrase in new_phrases
    ):
        return True
    visible_phrases = [phrase for phrase in new_phrases if _shows(visible, phrase)]
    unquoted_task = own_words(task)
    if not unquoted_task or offers_choice(reply, plan):
        return False
    return any(_shows(task, phrase) or _asks_elsewhere(visible, unquoted_task, phrase) for phrase in visible_phrases)


def _shows(text: str, phrase: Phrase) -> bool:
    """Whether a text shows a phrase. One whose words are all in its meaning, which any task may hold, counts only as it
    is."""
    if set(_words(phrase.text)) <= set(_words(phrase.meaning)):
        return holds(text, phrase.text)
    return shows(text, phrase.text)


def offers_choice(reply: str, plan: ParsedPlan) -> bool:
    """Whether a message lets the student choose among at least two options that it shows: phrases of the plan, and
    quotations."""
    if not _CHOICE.search(own_words(read_message(reply).task_text)):
        return False
    visible = spoken(reply)
    options = {normal(phrase.text) for phrase in plan.phrases if holds(visible, phrase.text)}
    return len(options | {normal(quotation) for quotation in quotes(visible)}) > 1


def _asks_elsewhere(text: str, task: str, phrase: Phrase) -> bool:
    """Whether a message that shows the phrase also asks for it: in its task, or by describing it in a sentence other
    than the one that shows it. A message that explains a phrase and asks for another one does not ask for the first."""
    if _asks_for(task, phrase.meaning):
        return True
    other_sentences = [sentence for sentence in sentences(text) if not _shows(sentence, phrase)]
    return bool(_HAS_SAY.search(task)) and any(_asks_for(sentence, phrase.meaning) for sentence in other_sentences)


def _fills_in(text: str, phrase: str, said: str = "") -> bool:
    """Whether a sentence with a blank contains more than half of the phrase's words in their order, and not only words
    that the student `said`. In scripts without spaces, letters count as words."""
    target = _words(phrase)
    for sentence in sentences(spoken(text)):
        if not _BLANK.search(sentence):
            continue
        common_words = _in_order(_words(_BLANK.sub(" ", sentence)), target)
        if 2 * len(common_words) > len(target) and not set(common_words) <= set(_words(said)):
            return True
    return False


def _states_part(text: str, phrase: Phrase, produced: Callable[[str], bool]) -> bool:
    """Whether the text contains a contiguous part of the phrase: at least half of its words, and at least two.

    A sentence that consists of such a part always counts. Inside a longer sentence, words of the phrase's meaning do
    not count, as any task may use them, and neither does a part whose words the student has all said. In scripts
    without spaces, letters count as words.
    """
    target, ignored = _words(phrase.text), set(_words(phrase.meaning))
    half = max(2, len(target) / 2)
    if any(len(_words(sentence)) >= half and holds(phrase.text, sentence) for sentence in sentences(text)):
        return True
    blocks = SequenceMatcher(None, _words(text), target, autojunk=False).get_matching_blocks()
    parts = ([word for word in target[block.b : block.b + block.size] if word not in ignored] for block in blocks)
    return any(len(part) >= half and not all(map(produced, part)) for part in parts)


def _in_order(words: list[str], target: list[str]) -> list[str]:
    """The words of `target` that occur in `words` in the same order."""
    blocks = SequenceMatcher(None, words, target, autojunk=False).get_matching_blocks()
    return [word for block in blocks for word in target[block.b : block.b + block.size]]


def _words(text: str) -> list[str]:
    """The normalised words of a text; its letters in scripts without spaces."""
    normalised = normal(text)
    return list(normalised) if UNSPACED.search(normalised) else normalised.split()


def _asks_for(task: str, meaning: str) -> bool:
    """Whether the task contains more than half of the content words of a meaning."""
    content_words = set(normal(meaning).split()) - _STOPWORDS
    return bool(content_words) and len(content_words & set(normal(task).split())) / len(content_words) > 0.5


def shows_uptake(error: str, kind: str, answer: str, plan: ParsedPlan) -> bool:
    """Whether the student's answer to feedback of `kind` attempts the erroneous part again (uptake)."""
    if kind == "none":
        return False
    if plan.lesson:
        first, second = parse_sentence(error), parse_sentence(answer)
        if first and second:
            return (first.subject, corrected(first).verb) == (second.subject, corrected(second).verb)
    target = nearest_phrase(error, plan)
    return any(
        _is_similar(normal(error), normal(sentence), HARDLY_DIFFERENT)
        or (target is not None and holds(sentence, target))
        for sentence in sentences(answer)
    )


def repairs(error: str, kind: str, answer: str, plan: ParsedPlan) -> bool:
    """Whether the student's answer to feedback of `kind` corrects the error (repair).

    Outside the quickstart, the answer must contain the phrase that the student tried to say. If the error was no
    attempt at a phrase, any changed answer counts.
    """
    if not shows_uptake(error, kind, answer, plan):
        return False
    if plan.lesson:
        return not {slip.kind for slip in find_slips(error)} & {slip.kind for slip in find_slips(answer)}
    target = nearest_phrase(error, plan)
    return holds(answer, target) if target else normal(error) != normal(answer)
