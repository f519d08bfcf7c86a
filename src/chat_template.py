"""From chat messages to token ids with a model's own chat template, without letting text turn into markup.

Each message's content is replaced by a placeholder, the template is rendered, and content and markup are tokenised
apart: a student who writes `<|im_end|>` writes seven characters of text, not a special token.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from src.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
_PLACEHOLDER = "\u2e22{}\u2e25"
_PLACEHOLDER_PATTERN = re.compile("\u2e22(\\d+)\u2e25")


def encode_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` up to and with the assistant's opening: a prompt for the next assistant message."""
    rendered = _render(tokenizer, [message["role"] for message in messages])
    return _encode_rendered(tokenizer, rendered, [message["content"] for message in messages])


def encode_dialogue(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` and nothing after them: for a model that reads and does not reply."""
    rendered = _render(tokenizer, [message["role"] for message in messages], reply_follows=False)
    return _encode_rendered(tokenizer, rendered, [message["content"] for message in messages])


def _render(tokenizer: "PreTrainedTokenizerBase", roles: Sequence[str], reply_follows: bool = True) -> str:
    messages = [{"role": role, "content": _PLACEHOLDER.format(i)} for i, role in enumerate(roles)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply_follows)


def _encode_rendered(tokenizer: "PreTrainedTokenizerBase", rendered: str, contents: Sequence[str]) -> list[int]:
    ids: list[int] = []
    for i, piece in enumerate(_PLACEHOLDER_PATTERN.split(rendered)):
        if i % 2 == 0:
            ids += tokenizer.encode(piece, add_special_tokens=False)
        else:
            ids += encode_text(tokenizer, contents[int(piece)])
    return ids


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of plain text; spellings of special tokens are encoded as the characters they are."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


class ReplyFrame:
    """What the chat template puts between two assistant messages around a user's reply.

    The frame is found once per tokenizer by rendering system, user, assistant, user and taking what follows the
    assistant's content, so templates that rewrite earlier messages (dropping their `<think>` blocks, say) have no
    say in the tokens of what was already sampled.

    Attributes:
        turn_end_id: the token that ends an assistant's message.
        opens_thought: whether the template begins each of its messages with `<think>`.

    Raises:
        ConfigError: if the template does not take such a dialogue.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        try:
            rendered = _render(tokenizer, ["system", "user", "assistant", "user"])
        except TemplateError as error:
            raise ConfigError(f"The model's chat template takes no system, user, assistant, user: {error}") from error
        after_assistant = rendered.partition(_PLACEHOLDER.format(2))[2]
        head, reply, self._tail = after_assistant.partition(_PLACEHOLDER.format(3))
        if not reply:
            raise ConfigError("The model's chat template leaves out what the assistant or the user says.")
        head_ids = tokenizer.encode(head, add_special_tokens=False)
        if not head_ids:
            raise ConfigError(
                "The model's chat template puts nothing between an assistant's message and the user's reply."
            )
        self.turn_end_id: int = head_ids[0]
        self._head_ids = head_ids[1:]
        self._tail_ids = tokenizer.encode(self._tail, add_special_tokens=False)
        self.opens_thought: bool = self._tail.rstrip().endswith("<think>")

    def reply(self, text: str) -> list[int]:
        """Ids that follow the teacher's end-of-turn token: the framed reply and the opening of the next turn."""
        return self._head_ids + encode_text(self._tokenizer, text) + self._tail_ids
