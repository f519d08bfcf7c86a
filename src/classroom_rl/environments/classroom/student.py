"""The student: the chats of its model before the dialogue and at each of its turns, and its messages when it is the
model under training. Each of these has a prompt of its own, with the persona drawn for it, and so is a sample of its
own; the teacher works on text and stays as it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.errors import ContextOverflow
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.environment import Play
from classroom_rl.rollout.policy_turn import PolicyModel, add_policy_message, sample_draft
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.supervision import unreviewed
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import TokenBuffer, Turn

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


class TrainedStudent:
    """Samples the messages of a student under training, and records their tokens.

    Args:
        context: the context length of the student's model, in tokens.
    """

    def __init__(self, roles: Roles, journal: Journal, context: int):
        self._policy, self._sampling = PolicyModel(roles.student), roles.student_sampling
        self._journal, self._context = journal, context
        self.end_ids = [self._policy.engine.frame.turn_end_id]

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt, cut so that there is room for the end of a message."""
        return self._policy.encode_chat(messages)[: self._context - len(self.end_ids)]

    async def speak(self, play: Play[Conversation, Any], messages: Sequence[Message], persona: str) -> Turn:
        """Sample the student's next message, and write it to the journal and into the samples of the conversation: the
        first one opens the context, each later one branches off with its own prompt.

        Raises:
            ContextOverflow: if the prompt leaves no room.
            PolicyMismatch, EngineFailure: as `sample_draft`.
        """
        conversation, prompt_ids = play.episode, tuple(self._policy.encode_chat(messages))
        room = self._context - len(prompt_ids) - 1
        if room < 1:
            raise ContextOverflow(f"The student's prompt has {len(prompt_ids)} tokens, its context {self._context}.")
        is_first, opening = conversation.buffer is None, {}
        own_prompt = () if is_first else prompt_ids
        draft = await sample_draft(play, self._policy, prompt_ids, self._sampling, room, prompt_ids=own_prompt)
        turn = replace(draft.turn, role="student", text=visible_text(draft.turn.text), persona=persona)
        message = unreviewed(replace(draft, turn=turn), (len(conversation.turns), 0))
        if is_first:
            conversation.buffer = TokenBuffer(prompt_ids)
            opening = {"prompt_ids": prompt_ids}
        else:
            message = replace(message, ids=(), logprobs=())
        return add_policy_message(self._journal, conversation, message, opening)
