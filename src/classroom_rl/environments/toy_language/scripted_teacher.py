"""Scripted tutors, used for example as control arms of a comparison. They run in the same classroom as a model."""

import random
import re
from collections.abc import Callable, Sequence

from classroom_rl.config.evaluation import ACKNOWLEDGES, IDEAL
from classroom_rl.config.values import SCRIPT
from classroom_rl.environments.toy_language.grammar import answer, corrected, parse_sentence
from classroom_rl.environments.toy_language.lessons import Lesson, parse_problem
from classroom_rl.environments.toy_language.scripts import DialogueMessage, ideal, move_on, next_question, slip_in_last
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Completion, EngineHealth, Sampling
from classroom_rl.rollout.tokens import approximate_tokens

_LESSON = re.compile(r"Lesson: .+\nPlan: .+")


def acknowledges(messages: Sequence[Message]) -> str:
    """Says "Good!" to everything. Its score is the baseline of a tutor that teaches nothing."""
    return "Good!"


def plays_the_ideal(messages: Sequence[Message]) -> str:
    """The quickstart's ideal teacher: hints at each slip, and asks the next question after a right answer.

    Raises:
        DataError: if the prompt contains no lesson of the quickstart.
    """
    return ideal(_parse_lesson(messages[0]["content"]), _dialogue(messages))


def gives_away(messages: Sequence[Message]) -> str:
    """Says the right answer with each question of the plan, and the corrected sentence after a slip.

    Raises:
        DataError: if the prompt contains no lesson of the quickstart.
    """
    dialogue, lesson = _dialogue(messages), _parse_lesson(messages[0]["content"])
    if correction := _spoken_correction(dialogue):
        return correction
    question = next_question(lesson, dialogue)
    if question is None:
        return move_on(lesson, dialogue)
    sentence = answer(question, random.Random(f"{len(dialogue)}|{question.text}")).text
    return f"{move_on(lesson, dialogue)} Say: {sentence}"


def corrects(messages: Sequence[Message]) -> str:
    """Asks the questions of the plan, and says the corrected sentence after a slip. Raises as `gives_away` does."""
    dialogue, lesson = _dialogue(messages), _parse_lesson(messages[0]["content"])
    return _spoken_correction(dialogue) or move_on(lesson, dialogue)


def _spoken_correction(dialogue: Sequence[DialogueMessage]) -> str:
    """The student's last sentence without its slips, for the student to repeat; "" if it has no slip."""
    sentence = parse_sentence(dialogue[-1]["content"]) if slip_in_last(dialogue) is not None else None
    return f"Say: {corrected(sentence).text}" if sentence else ""


def _dialogue(messages: Sequence[Message]) -> list[DialogueMessage]:
    return [{"role": _DIALOGUE_ROLES[message["role"]], "content": message["content"]} for message in messages[1:]]


_DIALOGUE_ROLES = {"assistant": "teacher", "user": "student"}
SCRIPTS: dict[str, Callable[[Sequence[Message]], str]] = {
    ACKNOWLEDGES: acknowledges,
    IDEAL: plays_the_ideal,
    "gives_away": gives_away,
    "corrects": corrects,
}


def _parse_lesson(prompt: str) -> Lesson:
    match = _LESSON.search(prompt)
    if match is None:
        raise DataError(
            f"The scripted ideal teaches lessons of the quickstart; none is in its prompt: {prompt[:200]!r}"
        )
    return parse_problem(match[0])


class ScriptedTeacher:
    """A teacher whose messages come from a script. Like a teacher behind an API, it returns text without token ids.

    Args:
        name: the prefix `SCRIPT` and a key of `SCRIPTS`.

    Raises:
        ConfigError: if there is no such script.
    """

    def __init__(self, name: str):
        script = name.removeprefix(SCRIPT)
        if script not in SCRIPTS:
            raise ConfigError(
                f"There is no scripted tutor {name!r}; there are "
                f"{', '.join(SCRIPT + known_script for known_script in SCRIPTS)}."
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
        """The health of an engine whose model's name is that of the script."""
        return EngineHealth(model=self._name, engine="script", engine_version="", pids=[])
