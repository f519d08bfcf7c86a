"""Scripted tutors, such as the control arms of a comparison. They run in the same classroom as any other tutor."""

import random
import re
from collections.abc import Callable, Sequence

from classroom_rl.config.evaluation import ACKNOWLEDGES, IDEAL
from classroom_rl.config.values import SCRIPT
from classroom_rl.environments.toy_language.grammar import answer, corrected, parse_sentence
from classroom_rl.environments.toy_language.lessons import Lesson, parse_problem
from classroom_rl.environments.toy_language.scripts import (
    DialogueMessage,
    ideal,
    move_on,
    next_question,
    slip_in_last,
)
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Completion, EngineHealth, Sampling
from classroom_rl.rollout.tokens import approximate_tokens

_LESSON = re.compile(r"Lesson: .+\nPlan: .+")


def acknowledges(messages: Sequence[Message]) -> str:
    """Says "Good!" to everything; its score is that of a tutor that teaches nothing."""
    return "Good!"


def plays_the_ideal(messages: Sequence[Message]) -> str:
    """The quickstart's ideal teacher: hints at each slip, and asks the next question after a right answer.

    Raises:
        DataError: if the prompt holds no lesson of the quickstart.
    """
    return ideal(_lesson_in(messages[0]["content"]), _dialogue(messages))


def gives_away(messages: Sequence[Message]) -> str:
    """Says the right answer with each question of the plan, and the corrected sentence after a slip.

    Raises:
        DataError: if the prompt holds no lesson of the quickstart.
    """
    said, lesson = _dialogue(messages), _lesson_in(messages[0]["content"])
    if mended := _mended(said):
        return mended
    question = next_question(lesson, said)
    if question is None:
        return move_on(lesson, said)
    shown = answer(question, random.Random(f"{len(said)}|{question.text}")).text
    return f"{move_on(lesson, said)} Say: {shown}"


def corrects(messages: Sequence[Message]) -> str:
    """Asks the questions of the plan, and says the corrected sentence after a slip. Raises as `gives_away` does."""
    said, lesson = _dialogue(messages), _lesson_in(messages[0]["content"])
    return _mended(said) or move_on(lesson, said)


def _mended(said: Sequence[DialogueMessage]) -> str:
    """The student's last sentence without its slips, to say after the teacher; "" if it holds none."""
    sentence = parse_sentence(said[-1]["content"]) if slip_in_last(said) is not None else None
    return f"Say: {corrected(sentence).text}" if sentence else ""


def _dialogue(messages: Sequence[Message]) -> list[DialogueMessage]:
    return [{"role": _SIDES[each["role"]], "content": each["content"]} for each in messages[1:]]


_SIDES = {"assistant": "teacher", "user": "student"}
SCRIPTS: dict[str, Callable[[Sequence[Message]], str]] = {
    ACKNOWLEDGES: acknowledges,
    IDEAL: plays_the_ideal,
    "gives_away": gives_away,
    "corrects": corrects,
}


def _lesson_in(prompt: str) -> Lesson:
    found = _LESSON.search(prompt)
    if found is None:
        raise DataError(
            f"The scripted ideal teaches lessons of the quickstart; none is in its prompt: {prompt[:200]!r}"
        )
    return parse_problem(found[0])


class ScriptedTeacher:
    """A teacher role whose messages come from a script. Like a teacher behind an API, it returns text and no token ids.

    Raises:
        ConfigError: if there is no such script.
    """

    def __init__(self, name: str):
        script = name.removeprefix(SCRIPT)
        if script not in SCRIPTS:
            raise ConfigError(
                f"There is no scripted tutor {name!r}; there are {', '.join(SCRIPT + s for s in SCRIPTS)}."
            )
        self._script = SCRIPTS[script]
        self._name = name
        self.policy = PolicyVersion()
        self.weights = f"the script {script}"

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The script's next message."""
        text = self._script(messages)
        return Completion((), (), text, True, self.policy, approximate_tokens(text))

    def health(self) -> EngineHealth:
        """The name of the script, as a model's name."""
        return EngineHealth(model=self._name, engine="script", engine_version="", pids=[])
