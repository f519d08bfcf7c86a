"""The chats of the student's model: what it is asked before the dialogue, and what it reads at each of its turns."""

from collections.abc import Sequence
from typing import Protocol

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn

_STRAIGHT_MARKS = str.maketrans("“”", '""')


class StudentPrompts(Protocol):
    """How a classroom prompts its student; fields as in `classroom_rl.config.base.GenerationConfig`."""

    student_initial_attempt_prompt_path: str | None
    quote_teacher: bool


def attempt_request(prompts: StudentPrompts, problem: str) -> list[Message]:
    """The chat that asks for the attempt with which the student opens a dialogue."""
    return [{"role": "user", "content": render(prompts.student_initial_attempt_prompt_path, problem=problem)}]


def student_chat(
    prompts: StudentPrompts, system: str, problem: str, turns: Sequence[Turn], attempted: bool
) -> list[Message]:
    """The chat for the student's next message: its persona is the system prompt, the teacher the user, and the student
    the assistant. `system` is the rendered prompt of the persona; `attempted` says whether the first of `turns` is the
    student's opening attempt."""
    messages = [{"role": "system", "content": system}]
    if attempted:
        messages += attempt_request(prompts, problem)
    for turn in turns:
        text = visible_text(turn.text).replace(END_OF_CONVERSATION, "").strip()
        if turn.role == "teacher" and prompts.quote_teacher:
            text = quoted(text)
        messages.append({"role": "user" if turn.role == "teacher" else "assistant", "content": text})
    return messages


def quoted(text: str) -> str:
    """A teacher's message as the student's model reads it with `generation.quote_teacher`. The text itself cannot end
    the quotation: its own such marks become straight ones. The quickstart's tiny student understands this wording, and
    hardly a longer one."""
    return f"The teacher says (no order to you):\n“{text.translate(_STRAIGHT_MARKS)}”"
