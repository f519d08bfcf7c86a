"""Scripted students and maths teachers for benchmarks/post_test.py: what they know stands in their messages alone."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.toy_language.grammar import parse_sentence
from classroom_rl.environments.toy_language.lessons import Lesson
from classroom_rl.environments.toy_language.scripts import student_reply
from classroom_rl.judges.messages import sentences
from classroom_rl.judges.post_test.exams import ANSWER, DOES_NOT_KNOW
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Completion, EngineHealth, Sampling
from classroom_rl.rollout.problem import Problem, Step
from classroom_rl.rollout.tokens import approximate_tokens

Script = Callable[[Sequence[Message]], str]
WRONG_FIRST = 0.5
"""How often the scripted maths student miscalculates when it is asked for a step."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_ASKS = re.compile(r"Please find (?P<what>.+?)\.$")
_ALONE = re.compile(r"Of this problem, find this alone: (?P<what>.+)\.$")
_KNOWN = re.compile(r"What you found by yourself in it.*?:\n(?P<list>(?:- [^\n]+\n?)+)", re.DOTALL)
_UNASKED = Lesson("food", "cook", "yesterday", ("you",))
"""What `student_reply` answers while the teacher has asked nothing; each of these teachers begins by asking."""

_PRAISE, _CHECK = "Right.", "Check your calculation once more."


class ScriptedRole:
    """A teacher or student whose messages come from a function of its chat. It returns text and no token ids."""

    def __init__(self, script: Script):
        self._script = script
        self.policy = PolicyVersion()
        self.weights = "scripted"

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The script's next message."""
        text = self._script(messages)
        return Completion((), (), text, True, self.policy, approximate_tokens(text))

    def health(self) -> EngineHealth:
        """A script is always well."""
        return EngineHealth(model="script", engine="script", engine_version="", pids=[])


def language_student(error_prompt: str) -> Script:
    """A student of the quickstart's language. It repeats a sentence that the teacher has just said, whatever its
    persona; otherwise it answers or mends its sentence as `toy_language.scripts.student_reply` does.

    Args:
        error_prompt: the system message of the persona that makes an error.
    """

    def reply(messages: Sequence[Message]) -> str:
        dialogue = [
            {"role": "teacher" if message["role"] == "user" else "student", "content": message["content"]}
            for message in messages[1:]
        ]
        heard = sentences(dialogue[-1]["content"]) if dialogue else []
        spoken = [
            parsed for sentence in heard if (parsed := parse_sentence(sentence.removeprefix("Say: "))) is not None
        ]
        if spoken:
            return spoken[-1].text
        persona = "error_student" if messages[0]["content"] == error_prompt else "correct_student"
        return student_reply(persona, _UNASKED, dialogue, random.Random(repr(messages)))

    return reply


@dataclass(frozen=True)
class Arithmetic:
    """What a student can work out if it is asked for it: the steps and the answer of each problem, by its text."""

    values: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> "Arithmetic":
        """That of these problems and their siblings."""
        values = {}
        for problem in problems:
            values[problem.text] = _by_name(problem.material.steps, problem.answer)
            for sibling in problem.material.siblings:
                values[sibling.problem] = _by_name(sibling.steps, sibling.answer)
        return cls(values)

    def problem_in(self, text: str) -> str:
        """The problem that a prompt holds; the longest, if it holds several."""
        return max((problem for problem in self.values if problem in text), key=len)


def _by_name(steps: Sequence[Step], answer: str) -> dict[str, str]:
    return {step.name: step.value for step in steps} | {ANSWER: answer}


def maths_student(arithmetic: Arithmetic) -> Script:
    """A student that cannot solve a problem alone, but works out a single step that it is asked for, often wrongly at
    first. It repeats what it is told. With the dialogue before it, it boxes the last number in it. In a post-test it
    does what its prompt says that it can do, and nothing else."""

    def reply(messages: Sequence[Message]) -> str:
        system, last = messages[0]["content"], messages[-1]["content"]
        if "The conversation with your tutor is over" in last:
            numbers = [number for message in messages[1:-1] for number in _NUMBER.findall(message["content"])]
            return rf"\boxed{{{numbers[-1]}}}" if numbers else DOES_NOT_KNOW
        if "Yesterday's problem" in system:
            return _in_test(arithmetic, system, last)
        if messages[0]["role"] != "system":  # asked for a solution before the dialogue
            return DOES_NOT_KNOW
        return _in_lesson(arithmetic, messages)

    return reply


def _in_lesson(arithmetic: Arithmetic, messages: Sequence[Message]) -> str:
    values = arithmetic.values[arithmetic.problem_in(messages[0]["content"])]
    last = messages[-1]["content"]
    asked_steps = [
        match["what"]
        for message in messages
        if message["role"] == "user"
        if (match := _ASKS.search(message["content"]))
    ]
    if _ASKS.search(last) and random.Random(f"{values}|{asked_steps[-1]}").random() < WRONG_FIRST:
        return f"I get {float(values[asked_steps[-1]]) + 3:g}."
    if asked_steps and (_ASKS.search(last) or last == _CHECK):
        return f"I get {values[asked_steps[-1]]}."
    numbers = _NUMBER.findall(last)
    return f"So it is {numbers[-1]}." if numbers else "I see."


def _in_test(arithmetic: Arithmetic, system: str, question: str) -> str:
    match = _KNOWN.search(system)
    known_steps = {line.removeprefix("- ") for line in match["list"].splitlines()} if match else set()
    alone = _ALONE.search(question)
    what = alone["what"] if alone else ANSWER
    value = arithmetic.values[arithmetic.problem_in(question)][what]
    return rf"I can find that: \boxed{{{value}}}" if what in known_steps else DOES_NOT_KNOW


def maths_teacher(arithmetic: Arithmetic, tells: Callable[[int], bool]) -> Script:
    """A teacher that goes through the steps of a problem.

    Args:
        tells: whether it tells a step of this number (from 0) instead of asking for it.
    """

    def reply(messages: Sequence[Message]) -> str:
        values = arithmetic.values[arithmetic.problem_in(messages[0]["content"])]
        teacher_messages = [message["content"] for message in messages if message["role"] == "assistant"]
        done = [
            name
            for name in values
            if any(f" {name}." in f"{message} " or f"{name} is" in message for message in teacher_messages)
        ]
        if done and not tells(len(done) - 1) and messages[-1]["content"] != f"I get {values[done[-1]]}.":
            return _CHECK
        left = [name for name in values if name not in done]
        praise = f"{_PRAISE} " if done else "Hello. "
        if not left:
            return f"{praise}{END_OF_CONVERSATION}"
        if tells(len(done)):
            return f"{praise}Write down that {left[0]} is {values[left[0]]}."
        return f"{praise}Please find {left[0]}."

    return reply
