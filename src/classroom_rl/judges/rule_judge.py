"""The embedded judge of real lessons, `judge_model.model_name_or_path: rules`. It decides the language tutor's three
criteria by rules on the tutor's text and writes the same JSON as a judge model.

The rules read the tutor's English and no other language. They find phrases of the plan by comparing text. A student's
message counts as an error if the program drew the error persona for it, unless the text is a correct phrase of the
plan. docs/classroom.md says how well the judge agrees with hand-written labels, and what fools it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from classroom_rl.config.values import END_OF_CONVERSATION, ERROR_PERSONA, RULES_VERSION, SCORING_RULES
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.feedback import (
    begins_again,
    falsely_corrects,
    feedback_kind,
    gives_right_form,
    hands_over,
    nearest_phrase,
    offers_choice,
)
from classroom_rl.judges.messages import (
    RETRY,
    ParsedPlan,
    Phrase,
    TeacherMessage,
    holds,
    own_words,
    read_message,
    read_plan,
    reveals,
    spoken,
)
from classroom_rl.judges.prompt_injection import find_injection
from classroom_rl.judges.readings import CORRECTION, TREATS_AS_WRONG, Exchange, MessageReaders
from classroom_rl.judges.toy_judge import (
    LONGEST_ACKNOWLEDGEMENT,
    Coverage,
    RubricJudge,
    TurnFinding,
    steps_forward,
    verdict,
)
from classroom_rl.rollout.engine import NO_FACTS, ConversationFacts, EmbeddedJudge
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.thoughts import visible_text

_WITHOUT_STEP = 0.5
LONG_MESSAGE = 90
"""In words; the language tutor's prompt asks for at most 60."""

LONG_TEXT = 700
"""The same bound in characters, for languages that are written without spaces."""

MOST_SHOWN = 3
"""A message that shows more phrases of the plan than this is a list, not an introduction."""

PRAISE = re.compile(
    r"\b(?:great|good(?! (?:morning|day|evening|afternoon|night|bye))|well done|excellent|perfect|wonderful|amazing|"
    r"awesome|fantastic|brilliant|super|nice(?! to meet)|bravo|"
    r"clever|proud|impressive|love (?:it|that|how)|keep (?:it )?up|doing (?:so |really |very )?well|talented)\b",
    re.IGNORECASE,
)
_KINDS_OF_SLIP = re.compile(
    r"\b(tense|ending|article|plural|singular|preposition|particle|gender|word order|agreement|politeness|formal|"
    r"informal|case|pronoun|spelling|suffix|prefix|aspect)s?\b",
    re.IGNORECASE,
)
_ASKS_TO_REPAIR = re.compile(
    r"\b(?:which|what|where|how)\b.{0,60}\b(?:form|word|ending|article|tense|particle|preposition|pronoun|case|gender|"
    r"verb|goes|go|say (?:it|that)|put)\b|"
    r"\b(?:masculine|feminine|neuter|polite|formal|singular|plural)\b|"
    r"\b(?:correct|fix|change|rewrite|repair)\b",
    re.IGNORECASE,
)
_EARLY_GOODBYE = 0.5  # steps that a goodbye before the due steps are taken takes back
_MERE_QUESTION = 5  # words; a task as short as this, like "What do you say?", may be repeated
_STOPWORDS = frozenset("a an the i you he she it we they me my your to of in on at for is are do does".split())


class RulesJudge(EmbeddedJudge):
    """A judge without a model, for lesson plans in any language. The same conversation always gets the same verdict.

    Args:
        readers: trained readers that decide whether a message treats the student's as wrong, and whether it passes over
            an error; None for rules alone.
    """

    def __init__(self, readers: MessageReaders | None = None):
        self._readers = readers

    async def judge(
        self,
        rule: str,
        conversation: list[dict[str, str]],
        problem: str,
        attempt: int,
        facts: ConversationFacts = NO_FACTS,
    ) -> str:
        """The verdict as JSON text. `RubricJudge` judges lessons of the quickstart.

        Raises:
            ConfigError: if `rule` is not one of `SCORING_RULES`.
            DataError: if `problem` is no lesson plan.
        """
        if rule not in SCORING_RULES:
            raise ConfigError(
                f"The rules cannot judge by the rule {rule!r}; they know {', '.join(sorted(SCORING_RULES))}. "
                "Name a judge model, or leave that rule out of generation.judges_rules_prompts_paths."
            )
        plan = read_plan(problem)
        if plan.lesson:
            found = json.loads(await RubricJudge().judge(rule, conversation, problem, attempt, facts))
        elif plan.phrases:
            findings, covered, steps = _follow(conversation, plan, facts, self._readers)
            found = {**verdict(findings, covered), "turn_scores": _turn_scores(findings, steps)}
        else:
            raise DataError(
                f"The judge `rules` reads lesson plans as prompt_templates/lesson_plan.txt writes them ('1. phrase | "
                f"meaning: … | use: …'); this problem holds none: {problem[:200]!r}. Give the dataset that "
                "problem_template, or name another judge_model."
            )
        return json.dumps(found | {"rules_version": rules_version(self._readers)}, ensure_ascii=False)


def rules_version(readers: MessageReaders | None) -> str:
    """The version of the rules, and with trained readers which they are."""
    return RULES_VERSION if readers is None else f"{RULES_VERSION}+{readers.version}"


@dataclass
class _LessonProgress:
    """How far a conversation has come in its plan.

    A step is a teacher message that sets a new task and introduces a phrase, or makes the student attempt one.

    Attributes:
        due: how many steps the conversation has room for, which is how many it has to take.
        covered: phrases that the teacher introduced, or that the student attempted after a task.
        asked: those of them that the student had to find: the teacher described them without showing them, or let the
            student choose among several, or the student attempted them and the message before did not show them.
        order: the positions of the covered phrases in the plan, in the order in which they came.
        steps: the number of steps so far.
        last_is_step: whether the last teacher message was a step by its own text, before the student answered.
        on_show: the phrases that the last teacher message shows, unless it has the student choose among them.
        introduced: phrases that came with a new task, each with whether the message showed it (else it described it).
        said: the student's messages so far.
        tasks, hints: the teacher's tasks and its replies to errors so far, normalised.
        ended_early: whether the last teacher message said goodbye before the due steps were taken.
        readers: trained readers; None for rules alone.
    """

    plan: ParsedPlan
    due: int
    readers: MessageReaders | None = None
    covered: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    steps: int = 0
    last_is_step: bool = False
    on_show: set[str] = field(default_factory=set)
    introduced: set[tuple[str, bool]] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    tasks: set[str] = field(default_factory=set)
    hints: set[str] = field(default_factory=set)
    ended_early: bool = False

    @property
    def is_complete(self) -> bool:
        return self.taken >= self.due

    @property
    def taken(self) -> int:
        """Steps of the plan that were taken: the number of covered phrases, but at most one for each step, two for each
        phrase that the student had to find, and one in all if the lesson runs backwards through the plan."""
        back = sum(now < before for before, now in pairwise(self.order))
        return min(steps_forward(len(self.covered), back), self.steps, 2 * len(self.asked))

    def cover(self, phrases: set[str]) -> None:
        """Record phrases that a message introduced, or that the student attempted."""
        texts = [each.text for each in self.plan.phrases]
        self.order += sorted(texts.index(each) for each in phrases - self.covered)
        self.covered |= phrases

    def add_phrases(self, message: TeacherMessage, phrases: set[str], error: bool) -> None:
        """Record the phrases that a message with a new task introduces. The message is a step if it is the first to
        show one of them, or the first to describe one that it does not show, and replies to no error."""
        self.cover(phrases)
        shown = _shown(message.text, self.plan)
        self.asked |= phrases - shown
        self.on_show = set() if offers_choice(message.text, self.plan) else shown
        introduced = set() if error else {(each, each in shown) for each in phrases}
        self.last_is_step = not introduced <= self.introduced
        self.steps += self.last_is_step
        self.introduced |= introduced

    def add_answer(self, text: str, before: TurnFinding | None) -> None:
        """Record the student's answer to the teacher message `before`. If the answer attempts a phrase that was not
        covered yet, a new task that introduced none becomes a step."""
        self.said.append(text)
        target = nearest_phrase(text, self.plan) if before and not before.void else None
        if before is None or target is None:
            return
        if target not in self.on_show:
            self.asked.add(target)
        if target in self.covered:
            return
        self.cover({target})
        self.steps += before.new_step and before.student_error_kind is None and not self.last_is_step

    def produced(self, form: str) -> bool:
        """Whether the student has already said this."""
        return any(holds(each, form) for each in self.said)


def analyse(
    conversation: Sequence[dict[str, str]],
    plan: ParsedPlan,
    facts: ConversationFacts = NO_FACTS,
    readers: MessageReaders | None = None,
) -> tuple[list[TurnFinding], Coverage]:
    """One finding for each teacher message, and the coverage of the plan.

    As many steps are due as the teacher has messages, less one for each reply to an error, and never more than the plan
    holds. Where there are more messages than the plan has phrases, the last of them may be a goodbye.

    Args:
        conversation: messages {"role": "teacher" | "student", "content"}.
        facts: the personas that were drawn, if known, and the limit on messages.
        readers: trained readers; None for rules alone.
    """
    findings, covered, _ = _follow(conversation, plan, facts, readers)
    return findings, covered


def _turn_scores(findings: Sequence[TurnFinding], steps: Sequence[bool]) -> list[float | None]:
    """The score of each message. One that should have taken a step of the plan, and took none, gets half of it: no
    score of a conversation is above the share of the plan that was taken, and its messages are what takes it."""
    return [
        finding.score if finding.score is None or step else finding.score * _WITHOUT_STEP
        for finding, step in zip(findings, steps, strict=True)
    ]


def _follow(
    conversation: Sequence[dict[str, str]],
    plan: ParsedPlan,
    facts: ConversationFacts,
    readers: MessageReaders | None = None,
) -> tuple[list[TurnFinding], Coverage, list[bool]]:
    """As `analyse`, and for each teacher message whether it took a step of the plan, or none was due: in a reply to an
    error, and once the plan is through."""
    errors = {
        place: holds_error(each["content"], plan, facts.personas[place] if place < len(facts.personas) else None)
        if facts.personas
        else holds_error(each["content"], plan, ERROR_PERSONA, by_text_alone=True)
        for place, each in enumerate(conversation)
        if each["role"] == "student"
    }
    teacher = [place for place, each in enumerate(conversation) if each["role"] == "teacher"]
    answered = sum(errors.get(place - 1, False) for place in teacher)
    ends = bool(teacher) and END_OF_CONVERSATION in visible_text(conversation[teacher[-1]]["content"])
    room = facts.teacher_messages(conversation)
    if room is None:
        room = len(plan.phrases) + answered + 1 if ends else len(teacher)
    goodbye = ends and len(teacher) == room > len(plan.phrases)
    lesson = _LessonProgress(plan, max(1, min(len(plan.phrases), room - answered - goodbye)), readers)
    findings: list[TurnFinding] = []
    reached: list[int] = []
    for place in teacher:
        follows = place - 1 if place - 1 in errors else None
        if follows is not None:
            lesson.add_answer(conversation[follows]["content"], findings[-1] if findings else None)
        reached.append(lesson.taken)  # the student's answer may have made a step of the message before
        error = follows is not None and errors[follows]
        findings.append(_judge_message(place, follows, error, conversation[place]["content"], lesson))
    steps = [
        finding.student_error_kind is not None or before >= lesson.due or now > before
        for finding, (before, now) in zip(findings, pairwise([*reached, lesson.taken]), strict=True)
    ]
    return findings, Coverage(max(0, lesson.taken - _EARLY_GOODBYE * lesson.ended_early), lesson.due), steps


def holds_error(text: str, plan: ParsedPlan, persona: str | None, by_text_alone: bool = False) -> bool:
    """Whether a student's message counts as an error: the error persona was drawn for it, and the text is not a correct
    phrase of the plan (with few other words).

    Args:
        persona: the persona that was drawn for the message.
        by_text_alone: the draw is unknown. Then a text that resembles a phrase of the plan without being it counts as
            an error; pass `ERROR_PERSONA`.
    """
    if persona != ERROR_PERSONA:
        return False
    said = normal(text)
    if any(holds(text, each.text) and len(said) <= 1.5 * len(normal(each.text)) + 4 for each in plan.phrases):
        return False
    return nearest_phrase(text, plan) is not None if by_text_alone else True


def _judge_message(place: int, follows: int | None, error: bool, text: str, lesson: _LessonProgress) -> TurnFinding:
    message = read_message(text)
    ends = END_OF_CONVERSATION in visible_text(text)
    said = lesson.said[-1] if follows is not None else ""
    refused = _why_void(text, message, ends, lesson)
    lesson.ended_early = ends and not lesson.is_complete
    falsely = follows is not None and not error and treats_as_wrong(text, lesson.readers)
    gives = not error and hands_over(text, lesson.produced, lesson.plan)
    blocked = refused or ("corrects what was right" if falsely else "") or ("hands the answer over" if gives else "")
    unscaffolded = (blocked or _why_not_scaffolded(said, text, message, lesson)) if error else ""
    stuck = "" if error else blocked or _why_no_new_step(message, ends, lesson)
    not_moved = "" if error else stuck or _why_at_length(said, message, lesson.plan)
    new_step = not blocked and len(message.tasks) == 1 and not unscaffolded and not stuck and not ends
    brought = _introduced_phrases(message, lesson.plan) if new_step else set()
    lesson.add_phrases(message, brought, error)
    lesson.tasks |= _tasks_of(message)
    final = len(message.tasks) == 1 and bool(message.ends_with_task) and not blocked and not ends
    heard = "error – " if error else ""
    return TurnFinding(
        index=place,
        replies_to=follows,
        student_error_kind="error" if error else None,
        scaffolded=error and not unscaffolded,
        void=bool(blocked),
        falsely_corrected=falsely,
        sets_task=bool(message.tasks),
        task_final=final,
        moved_on=follows is not None and not error and not not_moved,
        progressed=follows is not None and not (unscaffolded or stuck),
        new_step=new_step,
        ends=ends,
        task_reason=heard + (blocked or unscaffolded or _say_task(message, ends)),
        forward_reason="" if follows is None else heard + (unscaffolded or not_moved or _say_good(error)),
        momentum_reason="" if follows is None else heard + (unscaffolded or stuck or "goes forward"),
    )


def _why_void(text: str, message: TeacherMessage, ends: bool, lesson: _LessonProgress) -> str:
    """Why nothing in the message counts; empty if it counts."""
    if foul := find_injection(text):
        return foul
    listed = [phrase.text for phrase in lesson.plan.phrases if holds(message.text, phrase.text)]
    if len(listed) > MOST_SHOWN:
        return f"lists {len(listed)} phrases at once"
    if ends and not lesson.is_complete:
        return f"ends when {lesson.taken} of {lesson.due} steps are taken"
    return "" if message.text or ends else "says nothing"


def _why_not_scaffolded(error: str, text: str, message: TeacherMessage, lesson: _LessonProgress) -> str:
    plan, hint = lesson.plan, normal(text)
    repeated, _ = hint in lesson.hints, lesson.hints.add(hint)
    if gives_right_form(error, text, plan):
        return "hands the answer over: not scaffolded"
    if any(reveals(message.text, each.text) and not lesson.produced(each.text) for each in plan.phrases):
        return "hands the answer over: not scaffolded"
    kind = feedback_kind(error, text, plan)
    if kind == "none" and not _corrects(error, message, lesson):
        return "passed over: not scaffolded"
    named = {each.lower() for each in _KINDS_OF_SLIP.findall(own_words(message.text))}
    if len(named) > 2:
        return f"names {len(named)} kinds of slips ({', '.join(sorted(named))}): not scaffolded"
    if repeated:
        return "gives the same hint as before: not scaffolded"
    asked = own_words(message.task_text)
    repairs = RETRY.search(asked) or _ASKS_TO_REPAIR.search(asked) or kind in ("repetition", "clarification")
    repairs = repairs or begins_again(error, message.task_text, plan)
    if len(message.tasks) > 1 or not (repairs or _is_hint(message)):
        return f"hints and then asks something else ({_quote(message.task_text)}): not scaffolded"
    return ""


def treats_as_wrong(text: str, readers: MessageReaders | None) -> bool:
    """Whether a reply treats the student's message as wrong: by the message alone, as whether the student was right is
    known from elsewhere."""
    if readers is not None and TREATS_AS_WRONG in readers.trust:
        return readers.reads(TREATS_AS_WRONG, Exchange(spoken(text)))
    return falsely_corrects(text)


def _corrects(error: str, message: TeacherMessage, lesson: _LessonProgress) -> bool:
    """Whether a trained reader finds a correction in a reply to an error; False without one."""
    if lesson.readers is None or CORRECTION not in lesson.readers.trust:
        return False
    target = nearest_phrase(error, lesson.plan) or ""
    return lesson.readers.reads(CORRECTION, Exchange(message.text, error, target))


def _is_hint(message: TeacherMessage) -> bool:
    """Whether the message's task is to look again at what the student said."""
    return bool(re.match(r"\W*(?:\w+[,!.]? )?(?:look|check|think|fix|mind)\b", message.task_text, re.IGNORECASE))


def _why_no_new_step(message: TeacherMessage, ends: bool, lesson: _LessonProgress) -> str:
    """Why a message that follows no error does not take the lesson forward; empty if it does."""
    if ends or lesson.is_complete and not message.tasks:
        return ""
    if not message.tasks:
        return "asks nothing new"
    if len(message.tasks) > 1:
        return f"sets {len(message.tasks)} tasks at once"
    if RETRY.search(own_words(message.task_text)):
        return f"asks for the same again ({_quote(message.task_text)})"
    return f"repeats a task ({_quote(message.task_text)})" if _tasks_of(message) & lesson.tasks else ""


def _tasks_of(message: TeacherMessage) -> set[str]:
    """The normalised texts by which a repeated task is recognised: the whole message without praise, and its last task
    if that has more than `_MERE_QUESTION` words."""
    found = {normal(" ".join(each for each in message.sentences if not PRAISE.search(own_words(each))))}
    return found | ({normal(message.task_text)} if len(message.task_text.split()) > _MERE_QUESTION else set())


def _why_at_length(said: str, message: TeacherMessage, plan: ParsedPlan) -> str:
    """Why the words before the task are more than a short acknowledgement; empty if they are not."""
    before = message.sentences[: message.tasks[-1][0]] if message.tasks else message.sentences
    praise = [each for each in before if PRAISE.search(own_words(each))]
    if len(praise) > 1:
        return f"praises in {len(praise)} sentences"
    if praise and len(praise[0].split()) > LONGEST_ACKNOWLEDGEMENT and not _shown(praise[0], plan):
        return "acknowledges at length"
    if message.words > LONG_MESSAGE or len(message.text) > LONG_TEXT:
        return f"says {message.words} words"
    again = len(normal(said)) > 5 and any(holds(each, said) for each in before)
    return f"explains or repeats what was said ({_quote(said)})" if again else ""


def _shown(text: str, plan: ParsedPlan) -> set[str]:
    return {phrase.text for phrase in plan.phrases if holds(text, phrase.text)}


def _introduced_phrases(message: TeacherMessage, plan: ParsedPlan) -> set[str]:
    """The phrases that a message shows, and the phrase that it describes: the one whose meaning has the largest share
    of its content words in the message, if that share is more than half."""
    words = set(normal(message.text).split())

    def share(phrase: Phrase) -> float:
        wanted = set(normal(phrase.meaning).split()) - _STOPWORDS
        return len(wanted & words) / len(wanted) if wanted else 0.0

    best = max(plan.phrases, key=share)
    return _shown(message.text, plan) | ({best.text} if share(best) > 0.5 else set())


def _say_task(message: TeacherMessage, ends: bool) -> str:
    if not message.tasks:
        return "sets no task"
    if ends:
        return "sets a task that nobody can do any more: it ends the conversation"
    if len(message.tasks) > 1:
        return f"sets {len(message.tasks)} tasks"
    after = message.sentences[message.tasks[0][-1] + 1 :]
    return f"{_quote(after[0])} follows the task" if after else "ends with its task"


def _say_good(error: bool) -> str:
    return "scaffolded" if error else "moves on"


def _quote(text: str, limit: int = 60) -> str:
    return f"“{text.strip()[:limit]}”"
