"""Thoughts in a message: what stands between `<think>` and `</think>` is for the model alone."""

import re

_CLOSED_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def visible_text(text: str) -> str:
    """A message without thoughts, as the other models see it. An unclosed `<think>` hides the rest of the message; a
    `</think>` whose opening tag is in the prompt hides everything before it."""
    text = _CLOSED_THOUGHT.sub("", text)
    text = text.split("<think>", 1)[0]
    return text.rsplit("</think>", 1)[-1].strip()


def thoughts_in(text: str) -> list[str]:
    """The texts of a message's closed thoughts, without the tags."""
    return [re.sub("</?think>", "", found) for found in _CLOSED_THOUGHT.findall(text)]
