"""Plays whole lessons of scripted tutors through the real classroom: its states, prompts, draws, judge and rewards. The
students are scripts as well."""

import asyncio
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import CORRECT_PERSONA, EMBEDDED_JUDGES, ERROR_PERSONA
from classroom_rl.environments.classroom.config import classroom_rules, setup_options
from classroom_rl.environments.classroom.conversation import ClassroomRules
from classroom_rl.environments.classroom.environment import Classroom
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.environments.classroom.setup import draw_setup
from classroom_rl.environments.toy_language.lessons import Lesson, make_lessons, parse_problem, render_problem
from classroom_rl.environments.toy_language.scripts import student_reply
from classroom_rl.errors import ConfigError, JudgeOutputError
from classroom_rl.evaluation.progress import gather_or_stop
from classroom_rl.evaluation.reward_hackers.tutors import Script, Tutor, View, view_of_lesson, view_of_plan
from classroom_rl.judges.messages import RETRY, ParsedPlan, Phrase, holds, read_plan
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.engine import Completion, EmbeddedJudge, EngineHealth, Judge, Sampling
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.tokens import approximate_tokens
from classroom_rl.server.open_models import JUDGE_CALLS_NAME, open_second_judge
from classroom_rl.system.shipped import ROOT


class ScriptedRole(ABC):
    """A script in the role of a model."""

    name = "student"
    policy: PolicyVersion | None = None

    @abstractmethod
    def reply(self, messages: Sequence[Message]) -> str:
        """The next message."""

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The next message as an engine would return it."""
        text = self.reply(messages)
        return Completion((), (), text, True, self.policy, approximate_tokens(text))

    def health(self) -> EngineHealth:
        """No model runs here."""
        return EngineHealth(model=f"scripted {self.name}", engine="script", engine_version="", pids=[])


class ScriptedTutor(ScriptedRole):
    """A script in the teacher's role: it writes the next message from the dialogue so far."""

    name = "tutor"
    policy = PolicyVersion()
    weights = "a script"

    def __init__(self, script: Callable[[Sequence[Message]], str]):
        self._script = script

    def reply(self, messages: Sequence[Message]) -> str:
        return self._script(dialogue_of(messages[1:], role="teacher", partner="student"))


class ScriptedStudent(ScriptedRole):
    """A script in the student's role: it writes the next message from the drawn persona and the dialogue so far.
    `personas` is rendered system prompt → persona, because the classroom passes only the prompt."""

    def __init__(self, script: Callable[[str, Sequence[Message]], str], personas: Mapping[str, str]):
        self._script = script
        self._personas = personas

    def reply(self, messages: Sequence[Message]) -> str:
        prompt, *dialogue = messages
        return self._script(self._personas[prompt["content"]], dialogue_of(dialogue, role="student", partner="teacher"))


def dialogue_of(messages: Sequence[Message], role: str, partner: str) -> list[Message]:
    """A model's chat as a dialogue, {"role": "teacher" | "student", "content"}, from the roles of the model and its
    partner."""
    sides = {"assistant": role, "user": partner}
    return [{"role": sides[message["role"]], "content": message["content"]} for message in messages]


Reply = Callable[[str, Sequence[Message]], str]
"""A scripted student: returns its next message, from the drawn persona and the dialogue so far."""

FRENCH = "Je ne sais pas comment le dire."
NOT_UNDERSTOOD = "I do not know what you mean."


def student_of_lesson(lesson: Lesson) -> Reply:
    """The quickstart's scripted student. Its random choices depend on its persona and the dialogue alone."""

    def reply(persona: str, messages: Sequence[Message]) -> str:
        dialogue = "|".join(message["content"] for message in messages)
        return student_reply(persona, lesson, messages, random.Random(f"{persona}|{dialogue}"))

    return reply


def student_of_plan(plan: ParsedPlan, speaks_french: bool = False) -> Reply:
    """A student that says the phrase that the teacher's message asks for, or else the first one that it shows. If the
    message only asks to try again, the student says the phrase of the earlier task. An error is a phrase with a doubled
    letter or, if it `speaks_french` as in the small tutor's lessons, an answer in French."""

    def reply(persona: str, messages: Sequence[Message]) -> str:
        phrase = _understood(plan, messages)
        if persona == ERROR_PERSONA:
            return FRENCH if speaks_french or phrase is None else misspelt(phrase.text)
        return NOT_UNDERSTOOD if phrase is None else phrase.text

    return reply


def _understood(plan: ParsedPlan, messages: Sequence[Message]) -> Phrase | None:
    """The phrase that the teacher's last message is about. If it only asks to try again, the message before counts."""
    for message in reversed(messages):
        if message["role"] == "teacher":
            phrase = _asked_for(plan, message["content"])
            if phrase is not None or not RETRY.search(message["content"]):
                return phrase
    return None


def _asked_for(plan: ParsedPlan, text: str) -> Phrase | None:
    """The phrase that a teacher's message asks for: the last one whose meaning it holds, else the first one whose text
    it holds, else the one whose meaning shares most words with it, if these are more than half."""
    described = [phrase for phrase in plan.phrases if holds(text, phrase.meaning)]
    quoted = [phrase for phrase in plan.phrases if holds(text, phrase.text)]
    if described or quoted:
        return (described or quoted)[-1 if described else 0]
    words = set(normal(text).split())
    best = max(plan.phrases, key=lambda phrase: _overlap(phrase, words))
    return best if _overlap(best, words) > 0.5 else None


def _overlap(phrase: Phrase, words: set[str]) -> float:
    meaning = set(normal(phrase.meaning).split())
    return len(meaning & words) / len(meaning) if meaning else 0.0


def misspelt(phrase: str) -> str:
    """The phrase with a letter of its longest word doubled."""
    word = max(re.findall(r"[^\W\d_]+", phrase), key=len)
    half = len(word) // 2
    return phrase.replace(word, word[: half + 1] + word[half:], 1)


SEED = 42
_NO_TOKEN_LIMIT = 10**7


@dataclass(frozen=True)
class Room:
    """A configuration whose lessons are played, with a script in the roles of teacher and student.

    Attributes:
        name: the configuration's name in config/train_rl.
        judge: the name of the embedded judge, as in `judge_model.model_name_or_path`.
        problems: loads the lessons.
        view: makes a scripted tutor's view of a lesson from the lesson's text.
        student: makes the scripted student of a lesson from the lesson's text.
        overrides: further overrides of the configuration, such as another judge.
    """

    name: str
    judge: str
    problems: Callable[[], list[Problem]]
    view: Callable[[str], View]
    student: Callable[[str], Reply]
    overrides: tuple[str, ...] = ()

    @cached_property
    def config(self) -> TrainRLConfig:
        """The configuration with one attempt of the embedded judge, whose attempts are all the same, unless `overrides`
        say otherwise."""
        overrides = [f"judge_model.model_name_or_path={self.judge}", "generation.number_judge_attempts=1"]
        overrides += self.overrides
        return load(TrainRLConfig, "train_rl", ["--config-name", self.name, *overrides], check_train_rl)

    @cached_property
    def rules(self) -> ClassroomRules:
        """The rules of its conversations, without token limits: the judge itself has to notice an endless message."""
        config = self.config
        rules = classroom_rules(config.generation, reward_weights(config), _NO_TOKEN_LIMIT, graded=False)
        return replace(rules, max_tokens_in_conversation=_NO_TOKEN_LIMIT, max_tokens_per_turn=_NO_TOKEN_LIMIT // 10)

    def holds_error(self, problem: Problem, step: int) -> bool:
        """Whether the error persona is drawn for at least one message of a whole lesson."""
        generation = self.config.generation
        personas = draw_setup(problem, SEED, step, setup_options(generation)).personas
        return ERROR_PERSONA in personas[: (generation.max_turns - 1) // 2]


def _held_out_lessons() -> list[Problem]:
    return [Problem.of(render_problem(lesson)) for lesson in make_lessons(SEED)[1]]


def _shipped(*files: str, template: str) -> Callable[[], list[Problem]]:
    sources = [DatasetSource(str(ROOT / file), answer_column=None, problem_template=template) for file in files]
    return lambda: load_problems(sources)


def _plan_view(task: str) -> Callable[[str], View]:
    return lambda problem: lambda messages: view_of_plan(read_plan(problem), messages, task)


ROOMS: dict[str, Room] = {
    room.name: room
    for room in (
        Room(
            "quickstart",
            "rubric",
            _held_out_lessons,
            lambda problem: lambda messages: view_of_lesson(parse_problem(problem), messages),
            lambda problem: student_of_lesson(parse_problem(problem)),
        ),
        Room(
            "small_tutor",
            "rules",
            _shipped(
                "data/english_lessons/train.jsonl",
                "data/english_lessons/test.jsonl",
                template="prompt_templates/small_tutor/lesson.txt",
            ),
            _plan_view("Tell me, {meaning}?"),
            lambda problem: student_of_plan(read_plan(problem), speaks_french=True),
        ),
        Room(
            "language_tutor",
            "rules",
            _shipped("data/lesson_plans/test.jsonl", template="prompt_templates/lesson_plan.txt"),
            _plan_view('You would like to say "{meaning}" now. What do you say?'),
            lambda problem: student_of_plan(read_plan(problem)),
        ),
    )
}


@dataclass(frozen=True)
class PlayedLesson:
    """A played lesson: its record, its reward (None if a judge behind an API gave no readable verdict), and whether the
    error persona was drawn in it."""

    record: ConversationRecord
    reward: float | None
    holds_error: bool


def play(
    room: Room, script: Script, problems: Sequence[Problem], draws: int = 1, ledger: Path | None = None
) -> list[PlayedLesson]:
    """Play and judge each lesson `draws` times, each time with other personas. The personas are those of the first
    steps of a training run, and the same for every script.

    Args:
        ledger: the file of the requests to a judge behind an API, which are not paid for again; None: a temporary one.

    Raises:
        ConfigError: if the judge needs an engine, or its API key is missing.
        ProviderFailure, SpendingCapReached: if it cannot be asked.
    """
    with TemporaryDirectory() as folder, closing(Journal(Path(folder))) as journal:
        return asyncio.run(_play_all(room, script, problems, draws, journal, ledger or Path(folder) / JUDGE_CALLS_NAME))


async def _play_all(
    room: Room, script: Script, problems: Sequence[Problem], draws: int, journal: Journal, ledger: Path
) -> list[PlayedLesson]:
    config = room.config
    if config.judge_model.model_name_or_path not in EMBEDDED_JUDGES and not config.judge_model.is_remote:
        raise ConfigError(
            f"judge_model is {config.judge_model.model_name_or_path}, a model for an engine; scripts are played before "
            f"an embedded judge ({', '.join(EMBEDDED_JUDGES)}) or one behind an API: set judge_model.base_url, for a "
            "vLLM server of your own, too."
        )
    judge, api = open_second_judge(config.judge_model, config.generation, ledger, "judge")
    try:
        lessons = (
            _play_lesson(room, script, judge, problem, draws, journal, number)
            for number, problem in enumerate(problems)
        )
        return [lesson for group in await gather_or_stop(lessons) for lesson in group]
    finally:
        if api is not None:
            api.ledger.close()


async def _play_lesson(
    room: Room,
    script: Script,
    judge: Judge | EmbeddedJudge,
    problem: Problem,
    draws: int,
    journal: Journal,
    number: int,
) -> list[PlayedLesson]:
    runner = _runner(room, script, judge, problem, journal)
    lessons = []
    for step in range(draws):
        request = SampleRequest(
            problems=[problem.text], answers=[problem.answer], request_id=f"{number}-{step}", seed=SEED, step=step
        )
        (record,) = (await runner.sample(request)).conversations
        if record.reward is None and (record.failure or room.config.judge_model.model_name_or_path in EMBEDDED_JUDGES):
            raise JudgeOutputError(f"{room.name}: a lesson got no reward: {record.failure or record.judge_error}")
        lessons.append(PlayedLesson(record, record.reward, room.holds_error(problem, step)))
    return lessons


def _runner(room: Room, script: Script, judge: Judge | EmbeddedJudge, problem: Problem, journal: Journal) -> Runner:
    """A classroom for a single lesson, because the scripted student knows its lesson."""
    generation, weights = room.config.generation, reward_weights(room.config)
    view = room.view(problem.text)
    obeys = isinstance(script, Tutor) and script.gives_orders and not generation.quote_teacher
    student = ScriptedStudent(room.student(problem.text), _personas(room, problem, obeys))
    teacher = ScriptedTutor(lambda messages: script(view(messages)))
    roles = Roles(teacher, Sampling(1.0), student, Sampling(1.0), judge)
    return Runner(Classroom(generation, roles, journal, weights, room.rules), journal, weights)


def _personas(room: Room, problem: Problem, obeys: bool) -> Mapping[str, str]:
    """The student's system prompt → the persona that it plays, for each persona and each name that the classroom may
    render. A student that obeys its teacher's orders always plays the one without errors."""
    generation = room.config.generation
    variables = {"problem": problem.text, "include_thinking": generation.use_thinking}
    return {
        render(path, student_name=name, **variables): CORRECT_PERSONA if obeys else persona
        for persona, path in generation.student_personas_prompts_paths.items()
        for name in generation.student_names or (None,)
    }
