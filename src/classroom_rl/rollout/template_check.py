"""Renders a prompt template before a run begins, so that a mistake in it does not stop the run hours later."""

from collections.abc import Mapping
from typing import Any

from classroom_rl.errors import DataError
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.prompts import render, variables_of


def _transcript(said: str) -> list[Message]:
    return [{"role": role, "content": f"{said} {number}"} for number in range(3) for role in ("teacher", "student")]


_GROUP_SIZE = 3
TRANSCRIPT, _OTHER_TRANSCRIPT = _transcript("How are you?"), _transcript("Where do you live?")
OF_SUPERVISORS = {"conversation": TRANSCRIPT, "message": "Well?", "problem": "…", "answer": "…"}
"""What the template of a supervisor may use."""
GROUP = [TRANSCRIPT] * _GROUP_SIZE
"""Conversations on one problem, as the template of a judge of groups gets them."""


def check_template(key: str, path: str, variables: Mapping[str, Any]) -> None:
    """Render a template with the variables that it may use.

    Args:
        key: the configuration key of the template.

    Raises:
        DataError: if the template is wrong or uses another variable, or if it does not show the conversation or the
            message that it may use; the error names key and template.
    """
    try:
        unknown = sorted(variables_of(path) - set(variables))
        if unknown:  # also in branches that are not taken with these values
            raise DataError(f"{path} uses {', '.join(unknown)}. It may use: {', '.join(sorted(variables))}.")
        shown = render(path, **variables)
        if "conversation" in variables and shown == render(path, **{**variables, "conversation": _OTHER_TRANSCRIPT}):
            _refuse_blind_judge(path)
        if "conversations" in variables:
            for place in range(_GROUP_SIZE):
                other = [_OTHER_TRANSCRIPT if place == i else each for i, each in enumerate(GROUP)]
                if shown == render(path, **{**variables, "conversations": other}):
                    _refuse_blind_judge_of_groups(path)
        if "message" in variables and "message" not in variables_of(path):
            raise DataError(f"{path} never uses message, the one that the supervisor is asked about.")
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _refuse_blind_judge_of_groups(path: str) -> None:
    raise DataError(
        f"{path} does not show every one of conversations: the judge would rank lessons that it has not read. Write "
        "them out, for example {% for conversation in conversations %}Lesson {{ loop.index }}: {% for message in "
        "conversation %}{{ message.role }}: {{ message.content }}{% endfor %}{% endfor %}."
    )


def _refuse_blind_judge(path: str) -> None:
    used = "conversation" in variables_of(path)
    what = "uses conversation, but what was said does not get into the prompt" if used else "never uses conversation"
    raise DataError(
        f"{path} {what}: the judge would give its verdict without having read the lesson. Write the messages out, for "
        "example {% for message in conversation %}{{ message.role }}: {{ message.content }}{% endfor %}."
    )
