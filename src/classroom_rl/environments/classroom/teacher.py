"""The teacher's prompt and tools: its system message, and the opening messages of its template."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.setup import ConversationType
from classroom_rl.rollout.chat_template import Message, ReplyFrame, encode_chat, encode_further_markup
from classroom_rl.rollout.prompts import render, variables_of
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn
from classroom_rl.rollout.tools.calculator import built_in_toolbox
from classroom_rl.rollout.tools.formats import ToolFrame
from classroom_rl.rollout.tools.tool import Toolbox, ToolLimits

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


INFORMED = {"student_name": "…", "problem": "…", "include_thinking": True, "answer": "…", "personas": ["…"]}
"""The variables of the template at `train.distillation.prompt_path`."""


def informed_prompt(
    config: TrainRLConfig, tokenizer: "PreTrainedTokenizerBase", record: ConversationRecord
) -> list[int] | None:
    """Token ids of the teacher's first prompt in a finished conversation, with the system message of
    `train.distillation.prompt_path` in place of its own. None if its own prompt cannot be made again: then the two
    would differ in more than that.

    Raises:
        DataError: if the template cannot be filled in.
    """
    generation, turns, kind = config.generation, record.turns, ConversationType(record.type)
    first_sampled = next(
        (index for index, turn in enumerate(turns) if turn.role == "teacher" and not turn.given), len(turns)
    )
    messages = first_messages(generation, record.problem, record.student_name, kind, turns[:first_sampled])
    forced = forced_ids(generation, ReplyFrame(tokenizer), tokenizer)
    if [*encode_prompt(generation, tokenizer, messages), *forced] != record.prompt_ids:
        return None
    messages[0]["content"] = render(
        config.train.distillation.prompt_path,
        student_name=record.student_name,
        problem=record.problem,
        include_thinking=generation.use_thinking,
        answer=record.answer,
        personas=[turn.persona for turn in turns if turn.role == "student"],
    )
    return [*encode_prompt(generation, tokenizer, messages), *forced]


def chat_so_far(generation: GenerationConfig, conversation: Conversation, with_user: bool = True) -> list[Message]:
    """The whole dialogue as the teacher's chat, for a teacher that works on text instead of token ids.

    The teacher's own messages keep their thoughts.

    Args:
        with_user: if the teacher speaks first, its prompt is a user message instead of a system message, because some
            APIs refuse a chat without a user message.
    """
    setup, turns = conversation.setup, conversation.turns
    first_sampled = next(
        (index for index, turn in enumerate(turns) if turn.role == "teacher" and not turn.given), len(turns)
    )
    problem, name = conversation.problem.text, setup.student_name
    messages = first_messages(generation, problem, name, setup.type, turns[:first_sampled])
    if first_sampled == 0 and with_user:
        messages[0]["role"] = "user"
    for turn in turns[first_sampled:]:
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
