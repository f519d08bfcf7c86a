"""Parses a teacher's message into sentences and tasks, and a problem's text into a lesson plan, by rules.

The rules expect English instructions around text in any language. Text in quotation marks counts as an example, not as
a task. docs/evaluation.md reports their agreement with hand-labelled conversations.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.toy_language.grammar import SUBJECTS, find_slips, parse_question, parse_sentence
from classroom_rl.environments.toy_language.lessons import Lesson, parse_problem
from classroom_rl.errors import DataError
from classroom_rl.judges.prompt_injection import undisguised
from classroom_rl.rollout.text import UNSPACED, normal
from classroom_rl.rollout.thoughts import visible_text

_QUOTED = re.compile(r"\"[^\"]+\"|“[^“”]+”|«[^«»]+»|„[^„“”]+[“”]|「[^「」]+」")
_INNER_DOTS = re.compile(r"(?:…|\.\.\.)(?=\s+(?P<next>[^\W\d_]))")
_SENTENCE = re.compile(r"[^.?!…。？！\n]*(?:\.\.\.|[.?!…。？！])+[\")”»]*|[^.?!…。？！\n]+")
_CUE = re.compile(r"\([^()]*\)\s*(?=\S)")
"""A stage direction in parentheses before the text of a line in a role-play."""

ROLE_PLAY_LINE = re.compile(r"(?:^|\s)[–—]\s+(?=\S)")
"""The beginning of what another person says in a role-play."""

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

MEANING = re.compile(
    r"\bwhat (?:does|do) (?P<word>.+?) mean\b|\bwhat is the meaning of (?P<of>.+?)\?|"
    r"\bhow (?:would|could|can|do) you explain (?P<explained>.+?)\?",
    re.IGNORECASE,
)
"""A question about what something means, in one of the named groups."""

_TEACHES = re.compile(
    r"\b(?:say (?:it|that) (?:again|once more)|repeat after|can you (?:say|repeat)|well done|good (?:job|try|work)|"
    r"very good|check the|your turn|let's (?:practise|practice|continue)|the correct (?:answer|form))\b",
    re.IGNORECASE,
)

_ENGLISH = frozenset(
    "the a an you your i it is are was do does did what which who how when where to of in on at for and or not now say "
    "tell ask that this with means mean good yes no one two can could would like want here there".split()
)
_ENGLISH_SHARE = 0.25
"""A text counts as English if at least this share of its words is in `_ENGLISH`."""

_FRAGMENT_WORDS = 3
"""If one of two successive questions has at most so many words, both belong to the same task."""


def holds(text: str, phrase: str) -> bool:
    """Whether the text contains the phrase after normalisation; in scripts that separate words by spaces, only as whole
    words."""
    target, normalised = normal(phrase), normal(text)
    if not target:
        return False
    return target in normalised if UNSPACED.search(target) else f" {target} " in f" {normalised} "


def spoken(text: str) -> str:
    """The part of a teacher's message that the student sees: without thoughts, `END_OF_CONVERSATION` and invisible
    characters."""
    return undisguised(visible_text(text)).replace(END_OF_CONVERSATION, "").strip()


def quotes(text: str) -> list[str]:
    """The texts in quotation marks, without the marks."""
    return [quotation[1:-1] for quotation in _QUOTED.findall(text)]


def own_words(text: str) -> str:
    """The text with every quotation replaced by "Q"."""
    return _QUOTED.sub("Q", text)


def is_english(text: str) -> bool:
    """Whether a text is mostly English outside quotations."""
    words = re.findall(r"[^\W\d_]+", own_words(text).casefold())
    return bool(words) and sum(word in _ENGLISH for word in words) / len(words) >= _ENGLISH_SHARE


def sentences(text: str) -> list[str]:
    """The sentences of a text. Punctuation inside a quotation does not end a sentence."""
    # A NUL character stands for each quotation while the text is split; then the quotations are put back in order.
    text = text.replace("\x00", "")
    quotations = iter(_QUOTED.findall(text))
    masked = _INNER_DOTS.sub(lambda dots: dots[0] if dots["next"].isupper() else "", _QUOTED.sub("\x00", text))
    parts = [part.strip() for part in _SENTENCE.findall(masked) if part.strip(" .!?…。？！–—)\n\t")]
    return [re.sub("\x00", lambda _: next(quotations), part) for part in parts]


@dataclass(frozen=True)
class TeacherMessage:
    """A parsed teacher message.

    Attributes:
        text: the part that the student sees.
        sentences: its sentences in order.
        tasks: for each task, the indices of its sentences. A question and a following "Say it again." are one task.
    """

    text: str
    sentences: tuple[str, ...]
    tasks: tuple[tuple[int, ...], ...]

    @property
    def ends_with_task(self) -> bool | None:
        """Whether the last sentence belongs to a task; None if there is no task."""
        return self.tasks[-1][-1] == len(self.sentences) - 1 if self.tasks else None

    @property
    def task_text(self) -> str:
        """The sentences of the last task; "" if there is no task."""
        return " ".join(self.sentences[index] for index in self.tasks[-1]) if self.tasks else ""

    @property
    def words(self) -> int:
        """The number of words, split at white space."""
        return len(self.text.split())


@lru_cache(maxsize=4096)
def read_message(text: str) -> TeacherMessage:
    """Parse a teacher's message."""
    visible = spoken(text)
    narration, *lines = ROLE_PLAY_LINE.split(_CUE.sub("", visible), maxsplit=1)
    parts = sentences(narration)
    tasks = _group(parts)
    if lines:  # the student has to answer the line of the other person in a role-play, whatever came before it
        spoken_lines = sentences(lines[0])
        if spoken_lines:
            tasks.append(tuple(range(len(parts), len(parts) + len(spoken_lines))))
            parts += spoken_lines
    return TeacherMessage(visible, tuple(parts), tuple(tasks))


def _group(parts: list[str]) -> list[tuple[int, ...]]:
    """The indices of the sentences of each task. Sentences that ask for the same thing are one task. Without a question
    or an instruction, the last hint is the task."""
    kinds = [_kind(sentence) for sentence in parts]
    requests = [index for index, kind in enumerate(kinds) if kind in ("question", "task")]
    if not requests:
        return [(index,) for index, kind in enumerate(kinds) if kind == "hint"][-1:]
    groups: list[list[int]] = []
    for index in requests:
        if groups and _is_same_task(parts, kinds, groups[-1][-1], index):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [tuple(group) for group in groups]


def _is_same_task(parts: list[str], kinds: list[str], previous: int, index: int) -> bool:
    """Whether the sentence at `index` belongs to the same task as the one at `previous`."""
    if _SAME_TASK.search(own_words(parts[index])):
        return True
    if kinds[previous] == kinds[index] == "question":
        return any(len(own_words(parts[i]).split()) <= _FRAGMENT_WORDS for i in (previous, index))
    return False


def _kind(sentence: str) -> str:
    """The kind of a sentence: "question", "task", "hint", or "" for anything else."""
    unquoted = own_words(sentence).strip()
    if _NO_TASK.search(unquoted):
        return ""
    if re.search(r"[?？][\")”»]*$|か[。.]?$", unquoted):
        return "question"
    if _IMPERATIVE.search(unquoted) or _ELLIPTIC.search(unquoted) or re.search(r"(?:…|\.\.\.)$", unquoted):
        return "task"
    return "hint" if _HINT.search(unquoted) else ""


_CHUNK = re.compile(r"^\d+\. (?P<phrase>.+?) \| meaning: (?P<meaning>.+?) \| use: (?P<use>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Phrase:
    """A phrase of a lesson plan that the student should learn to say, its meaning in English, and how it is used."""

    text: str
    meaning: str
    use: str = ""


@dataclass(frozen=True)
class ParsedPlan:
    """A parsed lesson plan: the `phrases` of a problem that was rendered with prompt_templates/lesson_plan.txt, or the
    `lesson` of the quickstart. Any other text has neither, and metrics that need a plan are not computed on it. `text`
    is the problem's whole text."""

    phrases: tuple[Phrase, ...] = ()
    lesson: Lesson | None = None
    text: str = ""

    @property
    def items(self) -> int:
        """The number of phrases or questions that the lesson should introduce and the student should produce."""
        return len(self.lesson.questions) if self.lesson else len(self.phrases)

    def find_error(self, text: str) -> bool | None:
        """Whether a student's text contains an error; None outside the quickstart, where rules cannot tell."""
        return bool(find_slips(text)) if self.lesson else None


@lru_cache(maxsize=4096)
def read_plan(problem: str) -> ParsedPlan:
    """Parse the lesson plan in a problem's text."""
    try:
        return ParsedPlan(lesson=parse_problem(problem), text=problem)
    except DataError:
        matches = _CHUNK.finditer(problem)
        phrases = tuple(Phrase(match["phrase"], match["meaning"], match["use"]) for match in matches)
        return ParsedPlan(phrases, text=problem)


def questions_asked(text: str) -> set[str]:
    """The questions of the quickstart's language in a teacher's message, spelt as in `Question.text`."""
    parsed = (parse_question(part) for part in re.findall(r"[^.?!]*\?", text))
    return {question.text for question in parsed if question is not None}


def answers(text: str, lesson: Lesson) -> set[str]:
    """The questions of the lesson that a student's sentence answers; none if the sentence contains a slip (an error in
    the toy language)."""
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


# The student's messages -----------------------------------------------------------------------------------------------


def flips_role(text: str, teacher: str, plan: ParsedPlan) -> bool:
    """Whether the student speaks as the teacher: it praises, corrects or sets tasks in English, or (in the quickstart)
    asks a lesson question that does not repeat the teacher's words."""
    if _TEACHES.search(text):
        return True
    return plan.lesson is not None and parse_question(text) is not None and not parrots(text, teacher)


def parrots(text: str, teacher: str) -> bool:
    """Whether the student repeats the teacher's words: its task or, if the teacher set no task, anything it said."""
    own_sentences = [normal(sentence) for sentence in sentences(text)]
    message = read_message(teacher)
    teacher_sentences = {normal(sentence) for sentence in message.sentences}
    if not own_sentences or not all(own_sentences):
        return False
    if not message.tasks:
        return len(" ".join(own_sentences).split()) > 2 and " ".join(own_sentences) in normal(spoken(teacher))
    tasks = {
        normal(message.sentences[index])
        for task in message.tasks
        for index in task
        if _has_own_words(message.sentences[index])
    }
    return set(own_sentences) <= teacher_sentences and bool(set(own_sentences) & tasks)


def _has_own_words(sentence: str) -> bool:
    """Whether a sentence holds words outside of quotation marks."""
    return bool(normal(own_words(sentence).replace("Q", "")))
