"""From chat messages to token ids with a model's own chat template, without letting text turn into markup.

Each message's content is replaced by a placeholder, and the template is rendered. Its markup is taken apart at its
tokens; what stands between two of them, markup and content, is encoded as plain text: a student who writes `<|im_end|>`
writes ten characters, not a special token. The ids are those that the tokenizer gives for the rendered text as a whole.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from os.path import commonprefix
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from src.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
_Part = int | str
"""A token of markup, or plain text."""
_PLACEHOLDER = "\u2e22{}\u2e25"
_PLACEHOLDER_PATTERN = re.compile("\u2e22(\\d+)\u2e25")
_ANCHOR = "\u2e22"
"""Merges with nothing, in any vocabulary that is known."""
_RAISED_BY_TEMPLATES = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
_THOUGHTS = re.compile(r"<think>(.*?</think>|\s*$)|\s+", re.DOTALL)
_SAMPLE = "Ann's 3rd try:\nWhere does she go? To a café."


def encode_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` up to and with the assistant's opening: a prompt for the next assistant message.

    Where a chat template does not take the messages as they are, neighbours of one role become one message; where that
    does not help, the system's message goes as the user's, or at the head of the user's first. Many templates know no
    system, or lose one that no user follows.

    Raises:
        ConfigError: if the template does not take them in that way, either.
    """
    return _encode(tokenizer, _parts(tokenizer, messages, reply_follows=True))


def encode_dialogue(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` and nothing after them, for a model that reads and does not reply; raises as
    `encode_chat` does."""
    return _encode(tokenizer, _parts(tokenizer, messages, reply_follows=False))


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of plain text; spellings of special tokens are encoded as the characters they are."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def encode_further_markup(tokenizer: "PreTrainedTokenizerBase", markup: str) -> list[int]:
    """Token ids of markup that stands somewhere behind the beginning of a prompt."""
    return _encode(tokenizer, _split(tokenizer, markup), further=True)


def roles_as_rendered(tokenizer: "PreTrainedTokenizerBase", roles: Sequence[str]) -> list[str]:
    """The roles in which messages of these roles reach the model; raises as `encode_chat` does."""
    return [message["role"] for message in _arrange(tokenizer, [_message(role, role) for role in roles], True)[1]]


# Rendering -----------------------------------------------------------------------------------------------------------


def _parts(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], reply_follows: bool) -> list[_Part]:
    rendered, arranged = _arrange(tokenizer, messages, reply_follows)
    parts: list[_Part] = []
    for i, piece in enumerate(_PLACEHOLDER_PATTERN.split(rendered)):
        parts += [arranged[int(piece)]["content"]] if i % 2 else _split(tokenizer, piece)
    return parts


def _arrange(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], reply_follows: bool
) -> tuple[str, list[Message]]:
    """The rendered template, with placeholders, and the messages that these stand for."""
    reasons = []
    for arranged in _arrangements(messages):
        roles = [message["role"] for message in arranged]
        try:
            rendered = _render(tokenizer, roles, reply_follows)
        except _RAISED_BY_TEMPLATES as error:
            reasons.append(f"The model's chat template takes no {', '.join(roles)}: {error}")
            continue
        if [int(found) for found in _PLACEHOLDER_PATTERN.findall(rendered)] != list(range(len(roles))):
            reasons.append(
                f"The model's chat template leaves out, repeats or moves what the {', the '.join(dict.fromkeys(roles))}"
                " said"
            )
        elif roles == ["system"] and reply_follows and not rendered.endswith(_opening(tokenizer)):
            reasons.append("The model's chat template opens no reply to a system's message alone")
        else:
            return rendered, arranged
    raise ConfigError(
        f"{reasons[0].rstrip('.')}. It cannot hold a conversation; take another model, or give its tokenizer a chat "
        "template that does."
    )


def _arrangements(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Ways to say the same: as it is, without neighbours of one role, and without a system besides."""
    yield list(messages)
    yield _without_neighbours(messages)
    if messages[0]["role"] == "system":
        yield _without_neighbours([{**messages[0], "role": "user"}, *messages[1:]])


def _without_neighbours(messages: Sequence[Message]) -> list[Message]:
    runs = groupby(messages, key=lambda message: message["role"])
    return [_message(role, "\n\n".join(each["content"] for each in run)) for role, run in runs]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _render(tokenizer: "PreTrainedTokenizerBase", roles: Sequence[str], reply_follows: bool = True) -> str:
    messages = [_message(role, _PLACEHOLDER.format(i)) for i, role in enumerate(roles)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply_follows)


def _opening(tokenizer: "PreTrainedTokenizerBase") -> str:
    """What the template puts after a user's message if a reply is to follow; empty if it puts the same anyway."""
    try:
        with_reply, without = _render(tokenizer, ["user"], True), _render(tokenizer, ["user"], False)
    except _RAISED_BY_TEMPLATES:
        return ""
    return with_reply[len(commonprefix([with_reply, without])) :]


# Encoding ------------------------------------------------------------------------------------------------------------


def _split(tokenizer: "PreTrainedTokenizerBase", markup: str) -> list[_Part]:
    """Markup taken apart at its tokens, as the tokenizer takes it apart: some of them swallow white space."""
    markers = {content: marker for content, marker in _markers(tokenizer, len(tokenizer)).items() if content in markup}
    if not markers:
        return [markup]
    longest_first = sorted(markers, key=len, reverse=True)
    parts: list[_Part] = []
    position = 0
    for found in re.finditer("|".join(markers[content][1] for content in longest_first), markup):
        parts += [markup[position : found.start()], markers[found[found.lastindex]][0]]
        position = found.end()
    return [*parts, markup[position:]]


@lru_cache(maxsize=8)
def _markers(tokenizer: "PreTrainedTokenizerBase", size: int) -> dict[str, tuple[int, str]]:
    """From the spelling of each added token to its id and the pattern of what it stands for, itself as a group. Left to
    the tokenizer are runs of white space and what counts as whole words only."""
    found = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if not token.single_word and (token.special or token.content.strip()):
            before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
            found[token.content] = token_id, f"{before}({re.escape(token.content)}){after}"
    return found


def _encode(tokenizer: "PreTrainedTokenizerBase", parts: Sequence[_Part], further: bool = False) -> list[int]:
    """Token ids of markup and texts; `further` if they are not the beginning of a prompt."""
    ids: list[int] = []
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if not is_text:
            ids += run
            continue
        text = "".join(run)
        if text and (ids or further) and _marks_beginnings(tokenizer, len(tokenizer)):
            ids += encode_text(tokenizer, _ANCHOR + text)[len(encode_text(tokenizer, _ANCHOR)) :]
        elif text:
            ids += encode_text(tokenizer, text)
    return ids


@lru_cache(maxsize=8)
def _marks_beginnings(tokenizer: "PreTrainedTokenizerBase", size: int) -> bool:
    """Whether text gets other ids at the beginning of all than after a token of markup: SentencePiece puts a space
    there, in the manner of some models."""
    for content, (token_id, pattern) in _markers(tokenizer, size).items():
        if not pattern.endswith("*"):
            return tokenizer.encode(content + "a", add_special_tokens=False) != [token_id, *encode_text(tokenizer, "a")]
    return False


# Between two messages of the assistant -------------------------------------------------------------------------------


class ReplyFrame:
    """What the chat template puts between two assistant messages around a user's reply.

    The frame is found once per tokenizer by rendering system, user, assistant, user and taking what follows the
    assistant's content, so templates that rewrite earlier messages (dropping their `<think>` blocks, say) have no
    say in the tokens of what was already sampled.

    Attributes:
        turn_end_id: the token that ends an assistant's message.
        opens_thought: whether the template begins each of its messages with `<think>`.

    Raises:
        ConfigError: if the template does not take such a dialogue or frames it in a way that no sampled message fits
            into, or if the tokenizer changes what is said.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        before, head, tail = _around_reply(tokenizer, ["system", "user", "assistant", "user"])
        _refuse_other_frames(tokenizer, head, tail)
        _refuse_unsampled_markup(before, tail)
        self.turn_end_id, self._head = _turn_end(_split(tokenizer, head))
        self._tail = _split(tokenizer, tail)
        self.opens_thought: bool = tail.rstrip().endswith("<think>")
        self._refuse_changed_text()

    def reply(self, text: str) -> list[int]:
        """Ids that follow the teacher's end-of-turn token: the framed reply and the opening of the next turn."""
        return _encode(self._tokenizer, [*self._head, text, *self._tail], further=True)

    def _refuse_changed_text(self) -> None:
        for ids in (encode_text(self._tokenizer, _SAMPLE), self.reply(_SAMPLE)):
            found = self._tokenizer.decode(ids, skip_special_tokens=False)
            if _SAMPLE not in found:
                raise ConfigError(
                    f"The model's tokenizer changes what is said: of {_SAMPLE!r} it makes {found!r}. What a teacher "
                    "says would reach the student in other words; take a model whose tokenizer keeps text as it is."
                )


def _around_reply(tokenizer: "PreTrainedTokenizerBase", roles: Sequence[str]) -> tuple[str, str, str]:
    """The markup before the last message of the assistant, between it and the user's last, and after that."""
    rendered, arranged = _arrange(tokenizer, [_message(role, "") for role in roles], reply_follows=True)
    pieces = _PLACEHOLDER_PATTERN.split(rendered)[::2]
    return pieces[len(arranged) - 2], pieces[-2], pieces[-1]


def _refuse_other_frames(tokenizer: "PreTrainedTokenizerBase", head: str, tail: str) -> None:
    further = _around_reply(tokenizer, ["system", "user", "assistant", "user", "assistant", "user"])
    if further[1:] != (head, tail):
        raise ConfigError(
            f"The model's chat template frames a first reply of the user with {head!r} and {tail!r}, a second one with "
            f"{further[1]!r} and {further[2]!r}. Give its tokenizer a chat template that treats all alike."
        )


def _refuse_unsampled_markup(before: str, tail: str) -> None:
    """The model has to write what stands in the template's history and is not in its prompt: thoughts, nothing else."""
    stands, given = _THOUGHTS.sub("", before), _THOUGHTS.sub("", tail)
    if not given.startswith(stands):
        raise ConfigError(
            f"The model's chat template begins an assistant's message with {before!r}, a prompt for one ends with "
            f"{tail!r}: the model is to write the rest of the markup (channels, recipients), which this project does "
            "not read. Take another model, or give its tokenizer a chat template whose prompts end with all of it."
        )


def _turn_end(head: Sequence[_Part]) -> tuple[int, list[_Part]]:
    """The token that ends the assistant's message, and what comes after it."""
    rest = list(head)
    while rest and isinstance(rest[0], str) and not rest[0].strip():  # white space before it is the model's own
        rest.pop(0)
    if not rest:
        raise ConfigError("The model's chat template puts nothing between an assistant's message and the user's reply.")
    if isinstance(rest[0], str):
        raise ConfigError(
            f"The model's chat template ends an assistant's message with {rest[0]!r}, which is no token of its own in "
            "the model's vocabulary: the model could not end its turn with it. Add the template's markers to the "
            "tokenizer as special tokens, or take an instruct model."
        )
    return rest[0], rest[1:]
