"""The teacher's tools: its prompt lists them, and its messages may call them. Students, judges and supervisors hear
what the teacher says, without calls and results."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.roles import Seats
from classroom_rl.rollout.chat_template import Message, ReplyFrame, encode_chat
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import Play
from classroom_rl.rollout.runner import check_answer
from classroom_rl.rollout.supervision import SampledDraft
from classroom_rl.rollout.tokens import Turn
from classroom_rl.rollout.tools.builtin import built_in_toolbox
from classroom_rl.rollout.tools.frame import ToolFrame
from classroom_rl.rollout.tools.tool import Toolbox, ToolLimits
from classroom_rl.rollout.tools.turn import SampledMessage, chat_with_tools, sample_with_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TeacherTools:
    """The tools of the teacher in its seat; without any, its prompt and its messages are as they would be without this
    class."""

    def __init__(self, generation: GenerationConfig, seats: Seats):
        self._teacher = seats.teacher
        self._toolbox = toolbox_of(generation)
        self._frame: ToolFrame | None = None
        if self._toolbox is not None and seats.teacher_has_tokens:
            self._frame = ToolFrame(seats.teacher.tokenizer, seats.teacher.frame, self._toolbox.schemas())

    def __bool__(self) -> bool:
        return self._toolbox is not None

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt of the teacher, with its tools."""
        return (
            encode_chat(self._teacher.tokenizer, messages) if self._frame is None else self._frame.encode_chat(messages)
        )

    async def sample(self, context_ids: Sequence[int], sampling: Sampling, room: int, opened: str) -> SampledMessage:
        """A message of a teacher that works on token ids; `opened` is the thought that its context ends with."""
        return await sample_with_tools(self._teacher, self._frame, context_ids, sampling, self._toolbox, room, opened)

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> SampledMessage:
        """A message of a teacher that works on text. The first message is its prompt, and gets the list of tools."""
        return await chat_with_tools(self._teacher, messages, sampling, self._toolbox, prompt_first=True)

    async def draft(
        self, play: Play[Conversation, Any], hint_ids: Sequence[int], sampling: Sampling, opened: str
    ) -> SampledDraft:
        """The teacher's next message, with all its tokens."""
        conversation = play.episode
        room = conversation.tokens_left - len(hint_ids) - 1
        message = await self.sample([*conversation.buffer.ids, *hint_ids], sampling, room, opened)
        end = self._frame.turn_end_id
        given = () if message.ids[-1:] == (end,) else (end,)
        mask = () if all(message.mask) else message.mask
        turn = turn_of(play, message)
        return SampledDraft(turn, message.ids, message.logprobs, given, tuple(hint_ids), mask=mask)


def turn_of(play: Play[Conversation, Any], message: SampledMessage) -> Turn:
    """A message of the teacher as a turn.

    Raises:
        PolicyMismatch: if parts of it were sampled with other weights than its batch began with.
    """
    for answer in message.answers:
        check_answer(play, answer)
    about = {"policy": message.policy, "tool_calls": message.calls}
    return Turn("teacher", message.text, None, message.sampled, message.ended, **about)


def toolbox_of(generation: GenerationConfig) -> Toolbox | None:
    """The tools of a configuration; None if it names none."""
    if not generation.teacher_tools:
        return None
    limits = generation.tool_limits
    return built_in_toolbox(generation.teacher_tools, ToolLimits(limits.calls, limits.seconds, limits.characters))


def encode_prompt(
    generation: GenerationConfig, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> list[int]:
    """Token ids of a prompt of the teacher under a configuration, where no teacher is loaded."""
    toolbox = toolbox_of(generation)
    if toolbox is None:
        return encode_chat(tokenizer, messages)
    return ToolFrame(tokenizer, ReplyFrame(tokenizer), toolbox.schemas()).encode_chat(messages)
