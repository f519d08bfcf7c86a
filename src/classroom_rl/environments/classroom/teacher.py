"""The teacher's prompt and tools: its system message, the opening messages of its template, and its tool calls."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.environments.classroom.setup import ConversationType
from classroom_rl.rollout.chat_template import Message, ReplyFrame, encode_chat, encode_further_markup
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import Play
from classroom_rl.rollout.prompts import render, variables_of
from classroom_rl.rollout.runner import check_answer
from classroom_rl.rollout.supervision import SampledDraft
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn
from classroom_rl.rollout.tools.calculator import built_in_toolbox
from classroom_rl.rollout.tools.formats import ToolFrame
from classroom_rl.rollout.tools.tool import Toolbox, ToolLimits
from classroom_rl.rollout.tools.turn import SampledMessage, chat_with_tools, sample_with_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


OPENING_VARIABLES = ("user_message", "teacher_message")
THOUGHT = "<think>\n"


@cache
def opens_dialogue(path: str) -> bool:
    """Whether a template also contains the first message of the student and of the teacher, as SocraticLM's does.

    Such a template is rendered three times: with `user_message` true for the student's message, with `teacher_message`
    true for the teacher's, and with both false for the system message.
    """
    return set(OPENING_VARIABLES) <= variables_of(path)


def system_message(generation: GenerationConfig, problem: str, student_name: str | None) -> str:
    """The teacher's system message; raises as `render` does."""
    return _render(generation, problem, student_name)


def opening_turns(generation: GenerationConfig, problem: str, student_name: str | None) -> list[Turn]:
    """The messages with which the template opens the dialogue. They are not sampled; most templates have none."""
    if not opens_dialogue(generation.teacher_prompt_path):
        return []
    roles = zip(("student", "teacher"), OPENING_VARIABLES, strict=True)
    return [Turn(role, _render(generation, problem, student_name, opened_by=name), given=True) for role, name in roles]


def first_messages(
    generation: GenerationConfig, problem: str, student_name: str | None, kind: ConversationType, turns: Sequence[Turn]
) -> list[Message]:
    """The chat that becomes the teacher's first prompt.

    Args:
        turns: all turns before the teacher's first sampled one: an opening attempt, which is put into its wrapper
            template, or the template's opening and the student's answer to it.
    """
    messages = [{"role": "system", "content": system_message(generation, problem, student_name)}]
    for turn in turns:
        text = visible_text(turn.text)
        if kind is ConversationType.ATTEMPTED and generation.initial_attempt_wrapper_prompt_path:
            text = render(generation.initial_attempt_wrapper_prompt_path, attempt=text)
        messages.append({"role": "assistant" if turn.role == "teacher" else "user", "content": text})
    return messages


def chat_so_far(generation: GenerationConfig, conversation: Conversation) -> list[Message]:
    """The whole dialogue as the teacher's chat, for a teacher that works on text instead of token ids.

    The teacher's own messages keep their thoughts. If the teacher speaks first, its prompt is sent as a user message
    instead of a system message, because some APIs refuse a chat without a user message.
    """
    setup, turns = conversation.setup, conversation.turns
    first = next((index for index, turn in enumerate(turns) if turn.role == "teacher" and not turn.given), len(turns))
    problem, name = conversation.problem.text, setup.student_name
    messages = first_messages(generation, problem, name, setup.type, turns[:first])
    if first == 0:
        messages[0]["role"] = "user"
    for turn in turns[first:]:
        messages.append({"role": "assistant" if turn.role == "teacher" else "user", "content": turn.text})
    return messages


def opened_thought(generation: GenerationConfig, frame: ReplyFrame) -> str:
    """The text before every sampled message of the teacher: an opening `<think>` if `force_thinking` is set or the
    model's chat template adds it, otherwise empty."""
    return THOUGHT if generation.force_thinking or frame.opens_thought else ""


def forced_ids(generation: GenerationConfig, frame: ReplyFrame, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens of `opened_thought` to append to the teacher's context; none if its chat template adds them."""
    if not generation.force_thinking or frame.opens_thought:
        return []
    return encode_further_markup(tokenizer, THOUGHT)


def _render(generation: GenerationConfig, problem: str, student_name: str | None, opened_by: str = "") -> str:
    path = generation.teacher_prompt_path
    parts = {name: name == opened_by for name in OPENING_VARIABLES} if opens_dialogue(path) else {}
    return render(path, student_name=student_name, problem=problem, include_thinking=generation.use_thinking, **parts)


class TeacherTools:
    """The teacher's tools. Without tools, prompts are encoded as usual, and the object is false."""

    def __init__(self, generation: GenerationConfig, roles: Roles):
        self._teacher = roles.teacher
        self._toolbox = toolbox_of(generation)
        self._frame: ToolFrame | None = None
        if self._toolbox is not None and roles.teacher_has_tokens:
            self._frame = ToolFrame(roles.teacher.tokenizer, roles.teacher.frame, self._toolbox.schemas())

    def __bool__(self) -> bool:
        return self._toolbox is not None

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt of the teacher, with its tools."""
        if self._frame is None:
            return encode_chat(self._teacher.tokenizer, messages)
        return self._frame.encode_chat(messages)

    async def sample(self, context_ids: Sequence[int], sampling: Sampling, room: int, opened: str) -> SampledMessage:
        """A message of a teacher that works on token ids.

        Args:
            room: the tokens that still fit into the teacher's context.
            opened: the opened thought at the end of the context.
        """
        return await sample_with_tools(self._teacher, self._frame, context_ids, sampling, self._toolbox, room, opened)

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> SampledMessage:
        """A message of a teacher that works on text. The list of tools is added to its prompt, the first message."""
        return await chat_with_tools(self._teacher, messages, sampling, self._toolbox, prompt_first=True)

    async def draft(
        self, play: Play[Conversation, Any], hint_ids: Sequence[int], sampling: Sampling, opened: str
    ) -> SampledDraft:
        """The teacher's next message, with all its tokens."""
        conversation = play.episode
        room = conversation.tokens_left - len(hint_ids) - 1  # one token is reserved for the end of the turn
        message = await self.sample([*conversation.buffer.ids, *hint_ids], sampling, room, opened)
        end = self._frame.turn_end_id
        end_ids = () if message.ids[-1:] == (end,) else (end,)
        mask = () if all(message.mask) else message.mask  # an empty mask means that all tokens were sampled
        turn = turn_of(play, message)
        return SampledDraft(turn, message.ids, message.logprobs, end_ids, tuple(hint_ids), mask=mask)


def turn_of(play: Play[Conversation, Any], message: SampledMessage) -> Turn:
    """A message of the teacher as a turn.

    Raises:
        PolicyMismatch: if a part of it was sampled with other weights than those its batch began with.
    """
    for answer in message.answers:
        check_answer(play, answer)
    details = {"policy": message.policy, "tool_calls": message.calls}
    return Turn("teacher", message.text, None, message.sampled, message.ended, **details)


def toolbox_of(generation: GenerationConfig) -> Toolbox | None:
    """The tools of a configuration; None if it names none."""
    if not generation.teacher_tools:
        return None
    limits = generation.tool_limits
    return built_in_toolbox(generation.teacher_tools, ToolLimits(limits.calls, limits.seconds, limits.characters))


def encode_prompt(
    generation: GenerationConfig, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> list[int]:
    """Token ids of a teacher's prompt, computed from a configuration without loading the teacher."""
    toolbox = toolbox_of(generation)
    if toolbox is None:
        return encode_chat(tokenizer, messages)
    return ToolFrame(tokenizer, ReplyFrame(tokenizer), toolbox.schemas()).encode_chat(messages)
