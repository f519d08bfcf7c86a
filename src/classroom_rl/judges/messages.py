"""Parses a teacher's message by rules: its sentences, the tasks in it, and what the lesson's plan asks for.

The rules read English instructions around text in any language. Text in quotation marks is an example, not a task.
docs/evaluation.md says how well the rules agree with hand-labelled conversations.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.toy_language.grammar import SUBJECTS, find_slips, parse_question, parse_sentence
from classroom_rl.environments.toy_language.lessons import Lesson, parse_problem
from classroom_rl.errors import DataError
from classroom_rl.judges.prompt_injection import hides, readings, undisguised
from classroom_rl.rollout.text import UNSPACED, normal
from classroom_rl.rollout.thoughts import visible_text

_QUOTED = re.compile(r"\"[^\"]+\"|“[^“”]+”|«[^«»]+»|„[^„“”]+[“”]|「[^「」]+」")
_INNER_DOTS = re.compile(r"(?:…|\.\.\.)(?=\s+[a-z])")
_SENTENCE = re.compile(r"[^.?!…。？！\n]*(?:\.\.\.|[.?!…。？！])+[\")”»]*|[^.?!…。？！\n]+")
_CUE = re.compile(r"\([^()]*\)\s*(?=\S)")
"""A stage direction in brackets, followed by more text, in a line of a role-play."""

_LINE = re.compile(r"(?:^|\s)[–—]\s+(?=\S)")
_FILLERS = r"(?:(?:now|please|and|then|so|ok|okay|but|or|next|also|well|just|yes|no|again)[, ]+){0,4}"
_VERBS = (
    "say|tell|ask|try|repeat|answer|write|choose|complete|describe|give|translate|finish|explain|warn|remind|"
    r"thank(?! you\b)|complain|suggest|pick|greet|invite|reply|respond|name|introduce|read|spell|make|form|correct|"
    "rewrite|change|order"
)
_IMPERATIVE = re.compile(rf"(?:^|[,:;–]\s*){_FILLERS}(?:{_VERBS})\b", re.IGNORECASE)
_ELLIPTIC = re.compile(r"^(?:once more|again|your turn|go ahead|and now you)\b", re.IGNORECASE)
_HINT = re.compile(rf"(?:^|[,:;–]\s*){_FILLERS}(?:look|check|think|fix|mind|watch|remember)\b", re.IGNORECASE)
_NO_TASK = re.compile(r"\btake your (?:time|pick)\b|\bdon't worry\b|\btry not to\b", re.IGNORECASE)
_SAME_TASK = re.compile(
    rf"^{_FILLERS}(?:say|try|answer|tell me|ask|write)?\b[^:]*\b(?:again|once more)\b|"
    rf"^{_FILLERS}(?:tell me|answer|answer me)[.!]*$|^{_FILLERS}answer in \w+[.!]*$|^{_FILLERS}once more\b",
    re.IGNORECASE,
)
RETRY = re.compile(r"\b(?:again|once more|one more time)\b|\btry (?:it|that|to)\b", re.IGNORECASE)
"""A request to say something again."""

_FRAGMENT_WORDS = 3


def holds(text: str, phrase: str) -> bool:
    """Whether the text contains the phrase, as whole words in scripts that separate words by spaces."""
    inner, outer = normal(phrase), normal(text)
    if not inner:
        return False
    return inner in outer if UNSPACED.search(inner) else f" {inner} " in f" {outer} "


def reveals(text: str, phrase: str) -> bool:
    """Whether the text contains the phrase openly or in a disguise, such as letters set apart or read backwards."""
    return any(holds(one, other) for one in readings(text) for other in readings(phrase)) or hides(text, phrase)


def spoken(text: str) -> str:
    """The part of a teacher's message that the student reads, as it looks: without thoughts, `END_OF_CONVERSATION` and
    invisible characters."""
    return undisguised(visible_text(text)).replace(END_OF_CONVERSATION, "").strip()


def quotes(text: str) -> list[str]:
    """The texts in quotation marks, without the marks."""
    return [found[1:-1] for found in _QUOTED.findall(text)]


def own_words(text: str) -> str:
    """The text with every quotation replaced by "Q"."""
    return _QUOTED.sub("Q", text)


def sentences(text: str) -> list[str]:
    """The sentences of a text. Punctuation inside a quotation does not end a sentence."""
    text = text.replace("\x00", "")
    kept = _QUOTED.findall(text)
    marked = _INNER_DOTS.sub("", _QUOTED.sub("\x00", text))
    found = [each.strip() for each in _SENTENCE.findall(marked) if each.strip(" .!?…。？！–—)\n\t")]
    remaining = iter(kept)
    return [re.sub("\x00", lambda _: next(remaining), each) for each in found]


@dataclass(frozen=True)
class TeacherMessage:
    """A parsed teacher message.

    Attributes:
        text: the part that the student reads.
        sentences: its sentences in order.
        tasks: for each task, the positions of its sentences. A question and a following "Say it again." are one task.
    """

    text: str
    sentences: tuple[str, ...]
    tasks: tuple[tuple[int, ...], ...]

    @property
    def ends_with_task(self) -> bool | None:
        """Whether the last sentence belongs to a task; None without a task."""
        return self.tasks[-1][-1] == len(self.sentences) - 1 if self.tasks else None

    @property
    def task_text(self) -> str:
        """The sentences of the last task; empty without one."""
        return " ".join(self.sentences[place] for place in self.tasks[-1]) if self.tasks else ""

    @property
    def words(self) -> int:
        """The number of words, split at white space."""
        return len(self.text.split())


@lru_cache(maxsize=4096)
def read_message(text: str) -> TeacherMessage:
    """Parse a teacher's message."""
    said = spoken(text)
    narration, *lines = _LINE.split(_CUE.sub("", said), maxsplit=1)
    found = sentences(narration)
    tasks = _group(found)
    if lines:  # the student has to answer the line of the other person in a role-play, whatever came before it
        spoken_lines = sentences(lines[0])
        if spoken_lines:
            tasks.append(tuple(range(len(found), len(found) + len(spoken_lines))))
            found += spoken_lines
    return TeacherMessage(said, tuple(found), tuple(tasks))


def _group(found: list[str]) -> list[tuple[int, ...]]:
    """The positions of the sentences of each task. Sentences that ask for the same thing are one task."""
    kinds = [_kind(sentence) for sentence in found]
    places = [place for place, kind in enumerate(kinds) if kind in ("question", "task")]
    if not places:
        return [(place,) for place, kind in enumerate(kinds) if kind == "hint"][-1:]
    groups: list[list[int]] = []
    for place in places:
        if groups and _belongs(found, kinds, groups[-1][-1], place):
            groups[-1].append(place)
        else:
            groups.append([place])
    return [tuple(group) for group in groups]


def _belongs(found: list[str], kinds: list[str], before: int, place: int) -> bool:
    """Whether the sentence at `place` belongs to the same task as the one at `before`."""
    if _SAME_TASK.search(own_words(found[place])):
        return True
    if kinds[before] == kinds[place] == "question":
        return any(len(own_words(found[each]).split()) <= _FRAGMENT_WORDS for each in (before, place))
    return False


def _kind(sentence: str) -> str:
    """The kind of a sentence: "question", "task", "hint", or "" for anything else."""
    plain = own_words(sentence).strip()
    if _NO_TASK.search(plain):
        return ""
    if re.search(r"[?？][\")”»]*$|か[。.]?$", plain):
        return "question"
    if _IMPERATIVE.search(plain) or _ELLIPTIC.search(plain) or re.search(r"(?:…|\.\.\.)$", plain):
        return "task"
    return "hint" if _HINT.search(plain) else ""


_CHUNK = re.compile(r"^\d+\. (?P<phrase>.+?) \| meaning: (?P<meaning>.+?) \| use: ", re.MULTILINE)


@dataclass(frozen=True)
class Phrase:
    """A phrase of a lesson plan that the student should learn to say, and its meaning in English."""

    text: str
    meaning: str


@dataclass(frozen=True)
class ParsedPlan:
    """A parsed lesson plan: its `phrases`, if prompt_templates/lesson_plan.txt rendered the problem, or the `lesson` of
    the quickstart. Any other text has neither; figures that need a plan are not measured on it."""

    phrases: tuple[Phrase, ...] = ()
    lesson: Lesson | None = None

    @property
    def items(self) -> int:
        """The number of phrases or questions that should be introduced and produced."""
        return len(self.lesson.questions) if self.lesson else len(self.phrases)

    def find_error(self, text: str) -> bool | None:
        """Whether a student's text holds an error. None in lessons other than the quickstart's: rules cannot tell."""
        return bool(find_slips(text)) if self.lesson else None


@lru_cache(maxsize=4096)
def read_plan(problem: str) -> ParsedPlan:
    """The plan in a problem's text."""
    try:
        return ParsedPlan(lesson=parse_problem(problem))
    except DataError:
        return ParsedPlan(tuple(Phrase(found["phrase"], found["meaning"]) for found in _CHUNK.finditer(problem)))


def questions_asked(text: str) -> set[str]:
    """The questions of the quickstart's language in a teacher's message, spelt as in `Question.text`."""
    asked = (parse_question(part) for part in re.findall(r"[^.?!]*\?", text))
    return {question.text for question in asked if question is not None}


def answers(text: str, lesson: Lesson) -> set[str]:
    """The questions of the lesson that a student's sentence answers; none if the sentence holds a slip."""
    sentence = parse_sentence(text)
    if sentence is None or find_slips(text):
        return set()
    return {
        question.text
        for question in lesson.questions
        if SUBJECTS[question.subject] == sentence.subject
        and question.time.lower() == sentence.time.lower()
        and sentence.verb.startswith(question.verb)
    }
