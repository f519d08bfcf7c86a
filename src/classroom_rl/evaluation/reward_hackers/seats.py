"""The seats of teacher and student, filled by scripts. Like models behind an API they return text and no token ids."""

from collections.abc import Callable, Mapping, Sequence

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Completion, EngineHealth, Sampling
from classroom_rl.rollout.tokens import approximate_tokens


class ScriptedTutor:
    """The teacher's seat.

    Args:
        reply: writes a message, from the dialogue so far.
    """

    def __init__(self, reply: Callable[[Sequence[Message]], str]):
        self._reply = reply
        self.policy = PolicyVersion()
        self.weights = "a script"

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The tutor's next message."""
        text = self._reply(dialogue_of(messages[1:], own="teacher", other="student"))
        return Completion((), (), text, True, self.policy, approximate_tokens(text))

    def health(self) -> EngineHealth:
        """No model runs here."""
        return EngineHealth(model="scripted tutor", engine="script", engine_version="", pids=[])


class ScriptedStudent:
    """The student's seat.

    Args:
        reply: writes a message, from the drawn persona and the dialogue so far.
        personas: the persona of each system prompt, as the classroom renders them for this lesson.
    """

    def __init__(self, reply: Callable[[str, Sequence[Message]], str], personas: Mapping[str, str]):
        self._reply = reply
        self._personas = personas

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The student's next message."""
        prompt, *said = messages
        text = self._reply(self._personas[prompt["content"]], dialogue_of(said, own="student", other="teacher"))
        return Completion((), (), text, True, None, approximate_tokens(text))

    def health(self) -> EngineHealth:
        """No model runs here."""
        return EngineHealth(model="scripted student", engine="script", engine_version="", pids=[])


def dialogue_of(messages: Sequence[Message], own: str, other: str) -> list[Message]:
    """A model's chat as a dialogue, {"role": "teacher" | "student", "content"}; the model is the side `own`."""
    sides = {"assistant": own, "user": other}
    return [{"role": sides[each["role"]], "content": each["content"]} for each in messages]
