"""The rule judge: the embedded judge of real lessons (`judge_model.model_name_or_path: rules`). It decides the language
tutor's three criteria by rules on the tutor's text and writes the same JSON as a judge model. Of mathematics problems
it decides whether the tutor gave the answer away.

The rules understand the tutor's English and no other language. They find phrases of the plan by text comparison. A
student's message counts as an error if the program drew the error persona for it, unless the text is a correct phrase
of the plan. docs/classroom.md reports the agreement with hand-written labels and the known ways to fool the judge.
"""

import json
import re
from collections.abc import Sequence
from itertools import pairwise

from classroom_rl.config.values import END_OF_CONVERSATION, ERROR_PERSONA, LEAK_RULE, RULES_VERSION, SCORING_RULES
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.feedback import (
    begins_again,
    falsely_corrects,
    feedback_kind,
    gives_right_form,
    hands_over,
    nearest_phrase,
)
from classroom_rl.judges.findings import Coverage, TurnFinding, verdict
from classroom_rl.judges.known_moves import find_unread, words_in
from classroom_rl.judges.leaked_values import find_leak
from classroom_rl.judges.leaks import shows
from classroom_rl.judges.messages import (
    RETRY,
    ParsedPlan,
    Phrase,
    TeacherMessage,
    holds,
    own_words,
    read_message,
    read_plan,
    spoken,
)
from classroom_rl.judges.plan_progress import PlanProgress, shown_phrases
from classroom_rl.judges.prompt_injection import find_injection, find_order
from classroom_rl.judges.readings import CORRECTION, TREATS_AS_WRONG, Exchange, MessageReaders
from classroom_rl.judges.reference_answers import Reference, read_reference
from classroom_rl.judges.toy_judge import LONGEST_ACKNOWLEDGEMENT, RubricJudge
from classroom_rl.judges.tricks import calls_right, find_false_hint, find_trick
from classroom_rl.rollout.engine import NO_FACTS, ConversationFacts, EmbeddedJudge
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.thoughts import visible_text

_WITHOUT_STEP = 0.5
"""Factor on the score of a message that should have taken a step of the plan and took none."""

LONG_MESSAGE = 90
"""In words. The prompt of the language tutor asks for at most 60."""

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
_EARLY_GOODBYE = 0.5  # steps that are subtracted for a goodbye before all due steps were taken
_MERE_QUESTION = 5  # words; a task as short as this, like "What do you say?", may be repeated
_STOPWORDS = frozenset("a an the i you he she it we they me my your to of in on at for is are do does".split())


class RulesJudge(EmbeddedJudge):
    """The rule judge, for lesson plans in any language. The same conversation always gets the same verdict.

    Args:
        readers: trained move classifiers that decide whether a message treats the student's message as wrong, and
            whether it ignores an error; None for rules alone.
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
        """The verdict as JSON text. Lessons of the quickstart are judged by the toy judge (`RubricJudge`).

        Raises:
            ConfigError: if `rule` is not one of `SCORING_RULES`, nor `LEAK_RULE`.
            DataError: if `problem` is not a lesson plan; with `LEAK_RULE`, if the facts hold no answer.
        """
        if rule == LEAK_RULE:
            return json.dumps({**_decide_leak(conversation, problem, facts), "rules_version": RULES_VERSION})
        if rule not in SCORING_RULES:
            raise ConfigError(
                f"The rules cannot judge by the rule {rule!r}; they know {', '.join(sorted(SCORING_RULES))} and "
                f"{LEAK_RULE}. Name a judge model, or leave that rule out of generation.judges_rules_prompts_paths."
            )
        plan = read_judged_plan(problem)
        if plan.lesson:
            answer = json.loads(await RubricJudge().judge(rule, conversation, problem, attempt, facts))
        else:
            findings, covered, steps = _follow(conversation, plan, facts, self._readers)
            answer = {**verdict(findings, covered), "turn_scores": _turn_scores(findings, steps)}
        return json.dumps(answer | {"rules_version": rules_version(self._readers)}, ensure_ascii=False)


def _decide_leak(conversation: Sequence[dict[str, str]], problem: str, facts: ConversationFacts) -> dict[str, str]:
    leak = find_leak(read_judged_answer(problem, facts.answer), conversation, problem)
    if leak is None:
        return {"reasoning": "No message gives the answer away.", "decision": "OK"}
    return {"reasoning": f"turn {leak[0] + 1} gives the answer away: {_quote(leak[1])}", "decision": "REJECT"}


def read_judged_answer(problem: str, answer: str | None) -> Reference:
    """The answer that the judge `rules` looks for when it decides `LEAK_RULE`.

    Raises:
        DataError: if the problem has none.
    """
    if not (answer or "").strip():
        raise DataError(
            f"The judge `rules` decides {LEAK_RULE} by the answer of the problem, and this one has none: "
            f"{problem[:200]!r}. Name the dataset's answer_column, or a judge model."
        )
    return read_reference(answer)


def read_judged_plan(problem: str) -> ParsedPlan:
    """The lesson plan that the judge `rules` follows.

    Raises:
        DataError: if `problem` is not a lesson plan.
    """
    plan = read_plan(problem)
    if not (plan.lesson or plan.phrases):
        raise DataError(
            f"The judge `rules` reads lesson plans as prompt_templates/lesson_plan.txt writes them ('1. phrase | "
            f"meaning: … | use: …'); this problem holds none: {problem[:200]!r}. Give the dataset that "
            "problem_template, or name another judge_model."
        )
    return plan


def rules_version(readers: MessageReaders | None) -> str:
    """The version of the rules, followed by that of the trained classifiers, if there are any."""
    return RULES_VERSION if readers is None else f"{RULES_VERSION}+{readers.version}"


def analyse(
    conversation: Sequence[dict[str, str]],
    plan: ParsedPlan,
    facts: ConversationFacts = NO_FACTS,
    readers: MessageReaders | None = None,
) -> tuple[list[TurnFinding], Coverage]:
    """One finding for each teacher message, and the coverage of the plan.

    The number of due steps is the number of messages that the teacher can write, less one for each reply to an error
    and each review, and at most the number of phrases in the plan. If the teacher can write more messages than the plan
    has phrases, the last one may be a goodbye.

    Args:
        conversation: messages {"role": "teacher" | "student", "content"}.
        facts: the personas that were drawn, if known, and the limit on messages.
        readers: trained move classifiers; None for rules alone.
    """
    findings, covered, _ = _follow(conversation, plan, facts, readers)
    return findings, covered


def _turn_scores(findings: Sequence[TurnFinding], steps: Sequence[bool]) -> list[float | None]:
    """The score of each message. A message that should have taken a step of the plan and took none gets half of its
    score: the covered share of the plan caps the scores of a conversation, so its messages lose score accordingly."""
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
    """As `analyse`, and for each teacher message whether it took a step of the plan or did not have to: replies to
    errors and messages after the last due step do not have to."""
    errors = {
        index: holds_error(message["content"], plan, facts.personas[index] if index < len(facts.personas) else None)
        if facts.personas
        else holds_error(message["content"], plan, ERROR_PERSONA, by_text_alone=True)
        for index, message in enumerate(conversation)
        if message["role"] == "student"
    }
    teacher_turns = [index for index, message in enumerate(conversation) if message["role"] == "teacher"]
    error_replies = sum(errors.get(index - 1, False) for index in teacher_turns)
    ends = bool(teacher_turns) and END_OF_CONVERSATION in visible_text(conversation[teacher_turns[-1]]["content"])
    room = facts.teacher_messages(conversation)
    if room is None:  # the limit is unknown: assume that a teacher who closed the conversation had enough room
        room = len(plan.phrases) + error_replies + 1 if ends else len(teacher_turns)
    has_goodbye = ends and len(teacher_turns) == room > len(plan.phrases)
    lesson = PlanProgress(plan, room - error_replies - has_goodbye, readers, frozenset(words_in([plan.text])))
    findings: list[TurnFinding] = []
    taken_before: list[int] = []
    for index in teacher_turns:
        replies_to = index - 1 if index - 1 in errors else None
        if replies_to is not None:
            lesson.add_answer(conversation[replies_to]["content"], findings[-1] if findings else None)
        taken_before.append(lesson.taken)  # after the answer, which may have made the previous message a step
        is_error = replies_to is not None and errors[replies_to]
        findings.append(_judge_message(index, replies_to, is_error, conversation[index]["content"], lesson))
    steps = [
        finding.student_error_kind is not None or finding.reviews or before >= lesson.due or after > before
        for finding, (before, after) in zip(findings, pairwise([*taken_before, lesson.taken]), strict=True)
    ]
    return findings, Coverage(max(0, lesson.taken - _EARLY_GOODBYE * lesson.ended_early), lesson.due), steps


def holds_error(text: str, plan: ParsedPlan, persona: str | None, by_text_alone: bool = False) -> bool:
    """Whether a student's message counts as an error: the error persona was drawn for it, and the text is not a correct
    phrase of the plan (with few other words).

    Args:
        persona: the persona that was drawn for the message; `ERROR_PERSONA` if the draw is unknown.
        by_text_alone: whether the draw is unknown. Then a text that resembles a phrase of the plan without being it
            counts as an error.
    """
    if persona != ERROR_PERSONA:
        return False
    length = len(normal(text))
    if any(holds(text, phrase.text) and length <= 1.5 * len(normal(phrase.text)) + 4 for phrase in plan.phrases):
        return False
    return nearest_phrase(text, plan) is not None if by_text_alone else True


def _judge_message(index: int, replies_to: int | None, is_error: bool, text: str, lesson: PlanProgress) -> TurnFinding:
    message = read_message(text)
    ends = END_OF_CONVERSATION in visible_text(text)
    student_text = lesson.said[-1] if replies_to is not None else ""
    void_reason = _why_void(text, message, ends, lesson)
    lesson.command = lesson.command or find_order(text)
    lesson.ended_early = ends and not lesson.is_complete
    false_correction = replies_to is not None and not is_error and treats_as_wrong(text, lesson.readers)
    gives_answer = not is_error and hands_over(text, lesson.produced, lesson.plan)
    blocked = (
        void_reason
        or ("corrects what was right" if false_correction else "")
        or ("hands the answer over" if gives_answer else "")
    )
    trick = find_trick(student_text, text, lesson.plan, lesson.produced) if is_error and not void_reason else ""
    scaffolding = (student_text, text, message, lesson, trick)
    unscaffolded = (blocked or _why_not_scaffolded(*scaffolding)) if is_error else ""
    described = _introduced_phrases(message, lesson.plan)
    reviewed = "" if is_error or blocked or ends else lesson.reviews(message, described)
    lesson.reviewed += [reviewed] if reviewed else []
    stuck = "" if is_error or reviewed else blocked or _why_no_new_step(message, ends, lesson)
    not_moved = "" if is_error else stuck or _why_at_length(student_text, message, lesson.plan)
    new_step = not blocked and len(message.tasks) == 1 and not unscaffolded and not stuck and not ends
    lesson.add_phrases(message, described if new_step and not reviewed else set(), is_error)
    lesson.tasks |= _tasks_of(message)
    task_final = len(message.tasks) == 1 and bool(message.ends_with_task) and not blocked and not ends
    prefix = "error – " if is_error else ""
    success = "scaffolded" if is_error else "moves on"
    return TurnFinding(
        index=index,
        replies_to=replies_to,
        student_error_kind="error" if is_error else None,
        scaffolded=is_error and not unscaffolded,
        void=bool(blocked),
        falsely_corrected=false_correction,
        sets_task=bool(message.tasks),
        task_final=task_final,
        moved_on=replies_to is not None and not is_error and not not_moved,
        progressed=replies_to is not None and not (unscaffolded or stuck),
        new_step=new_step,
        ends=ends,
        task_reason=prefix + (blocked or unscaffolded or _say_task(message, ends)),
        forward_reason="" if replies_to is None else prefix + (unscaffolded or not_moved or success),
        momentum_reason="" if replies_to is None else prefix + (unscaffolded or stuck or "goes forward"),
        reviews=bool(reviewed),
        trick=trick,
        unread=find_unread(text, lesson.words | words_in(lesson.said)),
    )


def _why_void(text: str, message: TeacherMessage, ends: bool, lesson: PlanProgress) -> str:
    """Why the message counts for nothing; "" if it counts."""
    if injection := find_injection(text, lesson.command):
        return injection
    listed = [phrase.text for phrase in lesson.plan.phrases if holds(message.text, phrase.text)]
    if len(listed) > MOST_SHOWN:
        return f"lists {len(listed)} phrases at once"
    if ends and not lesson.is_complete:
        return f"ends when {lesson.taken} of {lesson.due} steps are taken"
    return "" if message.text or ends else "says nothing"


def _why_not_scaffolded(error: str, text: str, message: TeacherMessage, lesson: PlanProgress, trick: str) -> str:
    """Why a reply to the student's message `error` does not scaffold; "" if it does. Records the reply in
    `lesson.hints`."""
    plan, hint = lesson.plan, normal(text)
    repeated = hint in lesson.hints
    lesson.hints.add(hint)
    if gives_right_form(error, text, plan):
        return "hands the answer over: not scaffolded"
    if any(shows(message.text, phrase.text) and not lesson.produced(phrase.text) for phrase in plan.phrases):
        return "hands the answer over: not scaffolded"
    kind = feedback_kind(error, text, plan)
    if kind == "none" and not _corrects(error, message, lesson):
        return "passed over: not scaffolded"
    if flaw := trick or find_false_hint(error, text, plan) or (calls_right(text) and "calls the error right"):
        return f"{flaw}: not scaffolded"
    terms = {term.lower() for term in _KINDS_OF_SLIP.findall(own_words(message.text))}
    if len(terms) > 2:
        return f"names {len(terms)} kinds of slips ({', '.join(sorted(terms))}): not scaffolded"
    if repeated:
        return "gives the same hint as before: not scaffolded"
    unquoted_task = own_words(message.task_text)
    repairs = RETRY.search(unquoted_task) or _ASKS_TO_REPAIR.search(unquoted_task)
    repairs = repairs or kind in ("repetition", "clarification") or begins_again(error, message.task_text, plan)
    if len(message.tasks) > 1 or not (repairs or _is_hint(message)):
        return f"hints and then asks something else ({_quote(message.task_text)}): not scaffolded"
    return ""


def treats_as_wrong(text: str, readers: MessageReaders | None) -> bool:
    """Whether a teacher's reply treats the student's message as wrong. Decided from the reply alone: whether the
    student was right is determined separately."""
    if readers is not None and TREATS_AS_WRONG in readers.trust:
        return readers.reads(TREATS_AS_WRONG, Exchange(spoken(text)))
    return falsely_corrects(text)


def _corrects(error: str, message: TeacherMessage, lesson: PlanProgress) -> bool:
    """Whether a trained classifier finds a correction in a reply to an error; False without a classifier."""
    if lesson.readers is None or CORRECTION not in lesson.readers.trust:
        return False
    target = nearest_phrase(error, lesson.plan) or ""
    return lesson.readers.reads(CORRECTION, Exchange(message.text, error, target))


def _is_hint(message: TeacherMessage) -> bool:
    """Whether the task of the message is to look again at what the student said."""
    return bool(re.match(r"\W*(?:\w+[,!.]? )?(?:look|check|think|fix|mind)\b", message.task_text, re.IGNORECASE))


def _why_no_new_step(message: TeacherMessage, ends: bool, lesson: PlanProgress) -> str:
    """Why a message that does not follow an error does not take the lesson forward; "" if it does."""
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
    without_praise = " ".join(sentence for sentence in message.sentences if not PRAISE.search(own_words(sentence)))
    task = message.task_text
    return {normal(without_praise)} | ({normal(task)} if len(task.split()) > _MERE_QUESTION else set())


def _why_at_length(student_text: str, message: TeacherMessage, plan: ParsedPlan) -> str:
    """Why the words before the task are more than a short acknowledgement; "" if they are not."""
    before = message.sentences[: message.tasks[-1][0]] if message.tasks else message.sentences
    praise = [sentence for sentence in before if PRAISE.search(own_words(sentence))]
    if len(praise) > 1:
        return f"praises in {len(praise)} sentences"
    if praise and len(praise[0].split()) > LONGEST_ACKNOWLEDGEMENT and not shown_phrases(praise[0], plan):
        return "acknowledges at length"
    if message.words > LONG_MESSAGE or len(message.text) > LONG_TEXT:
        return f"says {message.words} words"
    repeats = len(normal(student_text)) > 5 and any(holds(sentence, student_text) for sentence in before)
    return f"explains or repeats what was said ({_quote(student_text)})" if repeats else ""


def _introduced_phrases(message: TeacherMessage, plan: ParsedPlan) -> set[str]:
    """The phrases that a message shows, and the phrase that it describes: the one with the largest share of the content
    words of its meaning in the message, if this share is more than half."""
    words = set(normal(message.text).split())

    def share(phrase: Phrase) -> float:
        content_words = set(normal(phrase.meaning).split()) - _STOPWORDS
        return len(content_words & words) / len(content_words) if content_words else 0.0

    best = max(plan.phrases, key=share)
    return shown_phrases(message.text, plan) | ({best.text} if share(best) > 0.5 else set())


def _say_task(message: TeacherMessage, ends: bool) -> str:
    if not message.tasks:
        return "sets no task"
    if ends:
        return "sets a task that nobody can do any more: it ends the conversation"
    if len(message.tasks) > 1:
        return f"sets {len(message.tasks)} tasks"
    after = message.sentences[message.tasks[0][-1] + 1 :]
    return f"{_quote(after[0])} follows the task" if after else "ends with its task"


def _quote(text: str, limit: int = 60) -> str:
    return f"“{text.strip()[:limit]}”"
