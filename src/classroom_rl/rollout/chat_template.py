"""Turns chat messages into token ids with a model's own chat template, and never turns message text into markup.

Each message's content is replaced by a placeholder, and the template is rendered. The rendered markup is split at its
markers: the tokens that were added to the vocabulary, special ones such as `<|im_end|>` and others such as `<think>`.
The text between two markers, both markup and content, is encoded as plain text. So a student who writes `<think>`
writes seven characters, not a marker. For messages that spell no marker, the ids are those that the tokenizer gives for
the rendered text as a whole.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from classroom_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
Schema = dict[str, Any]
_Part = int | str
"""The id of a marker, or plain text."""
_PLACEHOLDER = "\u2e22{}\u2e25"
_PLACEHOLDER_PATTERN = re.compile("\u2e22(\\d+)\u2e25")
_ANCHOR = "\u2e22"
"""A character that is merged with no other in any known vocabulary."""
RAISED_BY_TEMPLATES = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What rendering a chat template may raise."""
_THOUGHTS = re.compile(r"<think>(.*?</think>|\s*$)|\s+", re.DOTALL)
_SAMPLE = "Ann's 3rd try:\nWhere does she go? To a café."


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], tools: Sequence[Schema] | None = None
) -> list[int]:
    """Token ids of `messages` and of the generation prompt: a prompt for the next assistant message.

    If the chat template rejects the messages, consecutive messages of one role are merged. If it rejects these, too,
    the system message becomes a user message, or the beginning of the first one: many templates support no system
    message, or drop one that no user message follows.

    Args:
        tools: the schemas of tools that the template lists; they must not spell markup (`ToolFrame` checks it).

    Raises:
        ConfigError: if the template rejects that form, too.
    """
    return _encode(tokenizer, _parts(tokenizer, messages, True, tools))


def encode_dialogue(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` without a generation prompt, for a model that only reads; raises as `encode_chat`
    does."""
    return _encode(tokenizer, _parts(tokenizer, messages, False))


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of plain text; spellings of markers are encoded as ordinary characters."""
    return list(_text_ids(tokenizer, len(tokenizer), text))


@lru_cache(maxsize=8192)
def _text_ids(tokenizer: "PreTrainedTokenizerBase", size: int, text: str) -> tuple[int, ...]:
    """Cached, because a student is shown the whole dialogue again at each of its turns.

    Here and below, `size` is the length of the vocabulary. It is only part of the cache's key: tokens that are added to
    a tokenizer change what it encodes.
    """
    encode = _plain_encoder(tokenizer, size)
    ids = encode(text)
    # Vocabularies converted from SentencePiece may hold a marker as an ordinary piece, too. Some have thousands of
    # markers, so the text is only searched for them if one of its ids is a marker's.
    if not _marker_ids(tokenizer, size).isdisjoint(ids):
        markers = _markers(tokenizer, size)
        markers_in_text = [marker for marker in markers if len(marker) > 1 and marker in text]
        if not {markers[marker][0] for marker in markers_in_text}.isdisjoint(ids):
            ids = _encode_cut(encode, text, markers_in_text)
    return tuple(ids)


@lru_cache(maxsize=8)
def _marker_ids(tokenizer: "PreTrainedTokenizerBase", size: int) -> frozenset[int]:
    return frozenset(token_id for content, (token_id, _) in _markers(tokenizer, size).items() if len(content) > 1)


@lru_cache(maxsize=8)
def _plain_encoder(tokenizer: "PreTrainedTokenizerBase", size: int) -> Callable[[str], list[int]]:
    """A function that encodes text without turning any of it into a marker. If all markers are special tokens, the
    tokenizer can do that itself; otherwise a copy of it does, in which all markers are special."""
    markers = _markers(tokenizer, size)
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.content in markers]
    if all(token.special for token in tokens) or not tokenizer.is_fast:
        return partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in markers
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(content))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def _encode_cut(encode: Callable[[str], list[int]], text: str, markers: Iterable[str]) -> list[int]:
    """Encode text that is cut after the first character of each marker in it."""
    pattern = "|".join(f"(?={re.escape(marker)})" for marker in markers)
    cuts = [match.start() + 1 for match in re.finditer(pattern, text)]
    ids, anchor_length = encode(text[: cuts[0]]), len(encode(_ANCHOR))
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        # The anchor keeps the tokenizer from encoding a piece as the beginning of a text.
        ids += encode(_ANCHOR + text[start:end])[anchor_length:]
    return ids


def encode_further_markup(tokenizer: "PreTrainedTokenizerBase", markup: str) -> list[int]:
    """Token ids of markup that is not at the beginning of a prompt."""
    return _encode(tokenizer, _split(tokenizer, markup), further=True)


def encode_further_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of plain text that is not at the beginning of a prompt."""
    return _encode(tokenizer, [text], further=True)


def encode_reply(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a whole assistant message: its text and its end token; raises as `ReplyFrame` does."""
    return [*encode_further_text(tokenizer, text), ReplyFrame(tokenizer).turn_end_id]


def roles_as_rendered(tokenizer: "PreTrainedTokenizerBase", roles: Sequence[str]) -> list[str]:
    """The roles in the rendered prompt of messages with these roles (see `encode_chat`, which also says what is
    raised)."""
    return [message["role"] for message in _arrange(tokenizer, [_message(role, role) for role in roles], True)[1]]


def set_variables(tokenizer: "PreTrainedTokenizerBase", values: Mapping[str, Any]) -> None:
    """Give variables of a tokenizer's chat template these values, wherever it is rendered from now on. Raises a
    `ConfigError` if the template does not use one of them."""
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {"": tokenizer.chat_template}
    used = set().union(*(re.findall(r"\w+", template) for template in templates.values()))
    unused = sorted(set(values) - used)
    if unused:
        raise ConfigError(
            f"vllm.chat_template_kwargs sets {', '.join(unused)}, which the model's chat template does not use."
        )
    set_first = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in values.items())
    templates = {name: set_first + template for name, template in templates.items()}
    tokenizer.chat_template = templates.get("", templates)


def why_other_tokens(own: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> str | None:
    """Why token ids of one tokenizer mean something else in another; None if the vocabularies are equal, and so are the
    ids of a chat in which each role speaks."""
    own_vocab, other_vocab = own.get_vocab(), other.get_vocab()
    differing = sorted(
        token for token in own_vocab.keys() | other_vocab.keys() if own_vocab.get(token) != other_vocab.get(token)
    )
    if differing:
        ids = " and ".join(str(vocab.get(differing[0], "no token")) for vocab in (own_vocab, other_vocab))
        return f"{len(differing)} tokens of their vocabularies differ, such as {differing[0]!r}, which is {ids}"
    chat = [_message(role, _SAMPLE) for role in ("system", "user", "assistant", "user")]
    own_ids, other_ids = (encode_chat(tokenizer, chat) for tokenizer in (own, other))
    if own_ids != other_ids:
        prefix_length = len(commonprefix([own_ids, other_ids]))
        texts = " and ".join(
            repr(tokenizer.decode(ids[prefix_length : prefix_length + 8]))
            for tokenizer, ids in ((own, own_ids), (other, other_ids))
        )
        return f"their chat templates differ: after {prefix_length} tokens, the same chat goes on with {texts}"
    return None


# Rendering -----------------------------------------------------------------------------------------------------------


def _parts(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    reply_follows: bool,
    tools: Sequence[Schema] | None = None,
) -> list[_Part]:
    rendered, arranged = _arrange(tokenizer, messages, reply_follows, tools)
    parts: list[_Part] = []
    for i, piece in enumerate(_PLACEHOLDER_PATTERN.split(rendered)):
        parts += [arranged[int(piece)]["content"]] if i % 2 else _split(tokenizer, piece)
    return parts


def _arrange(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    reply_follows: bool,
    tools: Sequence[Schema] | None = None,
) -> tuple[str, list[Message]]:
    """The rendered template with placeholders, and the messages whose contents the placeholders stand for."""
    reasons = []
    for arranged in _arrangements(messages):
        roles = [message["role"] for message in arranged]
        try:
            rendered = _render(tokenizer, roles, reply_follows, tools)
        except RAISED_BY_TEMPLATES as error:
            reasons.append(f"The model's chat template takes no {', '.join(roles)}: {error}")
            continue
        if [int(number) for number in _PLACEHOLDER_PATTERN.findall(rendered)] != list(range(len(roles))):
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
    """Yields equivalent forms of the messages: as they are; with consecutive messages of one role merged; and with the
    system message as a user message, and merged."""
    yield list(messages)
    yield _merged(messages)
    if messages[0]["role"] == "system":
        yield _merged([{**messages[0], "role": "user"}, *messages[1:]])


def _merged(messages: Sequence[Message]) -> list[Message]:
    """The messages with consecutive ones of the same role joined by an empty line."""
    runs = groupby(messages, key=lambda message: message["role"])
    return [_message(role, "\n\n".join(message["content"] for message in run)) for role, run in runs]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    roles: Sequence[str],
    reply_follows: bool = True,
    tools: Sequence[Schema] | None = None,
) -> str:
    messages = [_message(role, _PLACEHOLDER.format(i)) for i, role in enumerate(roles)]
    # Llama 3 lists tools in the user's first message by default; a conversation that the assistant opens has none.
    options = {} if tools is None else {"tools": list(tools), "tools_in_user_message": False}
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply_follows, **options)


def markup_around(
    tokenizer: "PreTrainedTokenizerBase", roles: Sequence[str], tools: Sequence[Schema]
) -> list[str] | None:
    """The markup before, between and after the contents of messages of these roles, in a prompt for the next message;
    None if the template does not take them as they are."""
    try:
        rendered = _render(tokenizer, roles, True, tools)
    except RAISED_BY_TEMPLATES:
        return None
    in_order = [int(number) for number in _PLACEHOLDER_PATTERN.findall(rendered)] == list(range(len(roles)))
    return _PLACEHOLDER_PATTERN.split(rendered)[::2] if in_order else None


def encode_between(tokenizer: "PreTrainedTokenizerBase", pieces: Sequence[str]) -> list[int]:
    """Token ids of alternating markup and plain text, markup first, that are not at the beginning of a prompt."""
    parts: list[_Part] = []
    for i, piece in enumerate(pieces):
        parts += [piece] if i % 2 else _split(tokenizer, piece)
    return _encode(tokenizer, parts, further=True)


def holds_markup(tokenizer: "PreTrainedTokenizerBase", text: str) -> bool:
    """Whether a text spells a marker, or the beginning of this module's placeholders."""
    return _ANCHOR in text or any(content in text for content in _markers(tokenizer, len(tokenizer)))


def _opening(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The generation prompt that the template adds after a user message; empty if it adds none."""
    try:
        with_reply, without_reply = _render(tokenizer, ["user"], True), _render(tokenizer, ["user"], False)
    except RAISED_BY_TEMPLATES:
        return ""
    return with_reply[len(commonprefix([with_reply, without_reply])) :]


# Encoding ------------------------------------------------------------------------------------------------------------


def _split(tokenizer: "PreTrainedTokenizerBase", markup: str) -> list[_Part]:
    """Split markup at its markers, as the tokenizer does: some markers absorb the white space around them."""
    markers = {content: marker for content, marker in _markers(tokenizer, len(tokenizer)).items() if content in markup}
    if not markers:
        return [markup]
    longest_first = sorted(markers, key=len, reverse=True)
    parts: list[_Part] = []
    position = 0
    for match in re.finditer("|".join(markers[content][1] for content in longest_first), markup):
        parts += [markup[position : match.start()], markers[match[match.lastindex]][0]]
        position = match.end()
    return [*parts, markup[position:]]


@lru_cache(maxsize=8)
def _markers(tokenizer: "PreTrainedTokenizerBase", size: int) -> dict[str, tuple[int, str]]:
    """Map the spelling of each added token to its id and to a pattern that matches it, with the token itself as a
    group. Runs of white space that are no special tokens count as ordinary text, which the tokenizer handles."""
    markers = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special or token.content.strip():
            before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
            edges = (r"(?<!\w)", r"(?!\w)") if token.single_word else ("", "")
            markers[token.content] = token_id, f"{before}{edges[0]}({re.escape(token.content)}){edges[1]}{after}"
    return markers


def _encode(tokenizer: "PreTrainedTokenizerBase", parts: Sequence[_Part], further: bool = False) -> list[int]:
    """Token ids of markers and text; `further` if they are not at the beginning of a prompt."""
    ids: list[int] = []
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if not is_text:
            ids += run
            continue
        text = "".join(run)
        if text and (ids or further) and _marks_beginnings(tokenizer, len(tokenizer)):
            # Encoded behind an anchor, whose ids are cut off again, the text is not at a beginning.
            ids += encode_text(tokenizer, _ANCHOR + text)[len(encode_text(tokenizer, _ANCHOR)) :]
        elif text:
            ids += encode_text(tokenizer, text)
    return ids


@lru_cache(maxsize=8)
def _marks_beginnings(tokenizer: "PreTrainedTokenizerBase", size: int) -> bool:
    """Whether text gets other ids at the beginning of a prompt than after a marker: for some models, SentencePiece puts
    a space there."""
    for content, (token_id, pattern) in _markers(tokenizer, size).items():
        if pattern.endswith(f"({re.escape(content)})"):
            return tokenizer.encode(content + "a", add_special_tokens=False) != [token_id, *encode_text(tokenizer, "a")]
    return False


# Between two messages of the assistant -------------------------------------------------------------------------------


class ReplyFrame:
    """The markup that the chat template puts around a user's reply between two assistant messages.

    It is found once per tokenizer: a dialogue of system, user, assistant and user is rendered, and everything after the
    assistant's content except the user's content is the frame. So templates that rewrite earlier messages (by dropping
    `<think>` blocks, for example) cannot change tokens that were sampled already.

    Attributes:
        turn_end_id: the id of the token that ends an assistant's message.
        opens_thought: whether the template begins each assistant message with `<think>`.

    Raises:
        ConfigError: if the template rejects such a dialogue, or puts markup around assistant messages that sampled
            messages would lack, or if decoding the tokens does not give the same text.
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
        """The ids after the policy's end-of-turn token: the framed reply and the generation prompt of the next
        turn."""
        return _encode(self._tokenizer, [*self._head, text, *self._tail], further=True)

    def _refuse_changed_text(self) -> None:
        for ids in (encode_text(self._tokenizer, _SAMPLE), self.reply(_SAMPLE)):
            decoded = self._tokenizer.decode(ids, skip_special_tokens=False)
            if _SAMPLE not in decoded:
                raise ConfigError(
                    f"The model's tokenizer changes what is said: of {_SAMPLE!r} it makes {decoded!r}. What a teacher "
                    "says would reach the student in other words; take a model whose tokenizer keeps text as it is."
                )


def _around_reply(tokenizer: "PreTrainedTokenizerBase", roles: Sequence[str]) -> tuple[str, str, str]:
    """The markup before the assistant's last message, between it and the user's last message, and after that."""
    rendered, arranged = _arrange(tokenizer, [_message(role, "") for role in roles], reply_follows=True)
    pieces = _PLACEHOLDER_PATTERN.split(rendered)[::2]
    return pieces[len(arranged) - 2], pieces[-2], pieces[-1]


def _refuse_other_frames(tokenizer: "PreTrainedTokenizerBase", head: str, tail: str) -> None:
    """Refuse a template that puts other markup around a second reply of the user than around the first."""
    _, second_head, second_tail = _around_reply(tokenizer, ["system", "user", "assistant", "user", "assistant", "user"])
    if (second_head, second_tail) != (head, tail):
        raise ConfigError(
            f"The model's chat template frames a first reply of the user with {head!r} and {tail!r}, a second one with "
            f"{second_head!r} and {second_tail!r}. Give its tokenizer a chat template that treats all alike."
        )


def _refuse_unsampled_markup(before: str, tail: str) -> None:
    """Refuse a template whose earlier assistant messages begin with markup that its generation prompt lacks, other than
    thoughts: the model would have to write that markup itself."""
    in_history, in_prompt = _THOUGHTS.sub("", before), _THOUGHTS.sub("", tail)
    if not in_prompt.startswith(in_history):
        raise ConfigError(
            f"The model's chat template begins an assistant's message with {before!r}, a prompt for one ends with "
            f"{tail!r}: the model is to write the rest of the markup (channels, recipients), which this project does "
            "not read. Take another model, or give its tokenizer a chat template whose prompts end with all of it."
        )


def _turn_end(head: Sequence[_Part]) -> tuple[int, list[_Part]]:
    """The id of the token that ends an assistant message, and the markup after it."""
    rest = list(head)
    while rest and isinstance(rest[0], str) and not rest[0].strip():  # the model writes white space before it itself
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
