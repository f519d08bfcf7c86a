"""Tool calls as text: how tools and their results are written into a model's context, and how calls are parsed.

Hermes's format is always parsed: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Llama 3's format is parsed if
the model's chat template asks for it: a message that consists only of `{"name": …, "parameters": {…}}`, perhaps after
`<|python_tag|>`; several calls are separated by `;`. Thoughts contain no calls: only the text that
`thoughts.visible_text` shows is parsed. Text that looks like a call but cannot be parsed becomes a call with an error.

If the model's chat template supports tools (`tools=`) and asks for calls in one of these formats, as those of Qwen 2.5,
Qwen3 and Llama 3.1 do, the template lists the tools and frames their results. Otherwise the program lists them in the
system message in its own words, and gives results as user messages.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from classroom_rl.errors import ConfigError
from classroom_rl.rollout.chat_template import (
    RAISED_BY_TEMPLATES,
    Message,
    ReplyFrame,
    encode_between,
    encode_chat,
    holds_markup,
    markup_around,
)
from classroom_rl.rollout.text import nests_deeper, without_surrogates
from classroom_rl.rollout.thoughts import Range, ranges_in_text, visible_ranges
from classroom_rl.rollout.tools.tool import BAD_ARGUMENTS, BAD_JSON, AskedCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")
_LLAMA_BEGINS = re.compile(r'\s*(\{)\s*"(?:name|parameters)"\s*:')
_PROTOCOL = re.compile(r"<(/?)(tool_call|tool_response|tool_result|tools|think)\b")
_SPACE = re.compile(r"\s*")
_DEEPEST = 20
FORM = f'{OPEN}{{"name": "…", "arguments": {{…}}}}{CLOSE}'
"""The form of a call, as models are told it."""


@dataclass(frozen=True)
class CallsInText:
    """A message, split into its text and its calls.

    Attributes:
        text: the text without the calls, thoughts included.
        calls: the calls in order, each with its position in `text`.
    """

    text: str
    calls: tuple[tuple[AskedCall, int], ...] = ()


def find_calls(text: str, bare_json: bool = False) -> CallsInText:
    """Parse the calls in a message. If the prompt opened a thought, the text must begin with the opening tag.
    `bare_json` says whether Llama 3's format is parsed, too."""
    ranges = visible_ranges(text)
    visible = "".join(text[start:end] for start, end in ranges)
    blocks = list(_hermes_calls(visible))
    if bare_json and not blocks:
        blocks = list(_bare_calls(visible))
    if not blocks:
        return CallsInText(text)
    rest, positions = _without(text, [ranges_in_text(ranges, start, end) for start, end, _ in blocks])
    return CallsInText(rest, tuple((call, position) for (_, _, call), position in zip(blocks, positions, strict=True)))


def _without(text: str, blocks: Sequence[Sequence[Range]]) -> tuple[str, list[int]]:
    """The text without the characters of these blocks, and the position of each block in it. A block inside a word is
    replaced by a space, so that the rest forms no new tag."""
    pieces: list[str] = []
    positions: list[int] = []
    done, length, last = 0, 0, ""  # characters of the text so far, characters and last character of the result

    def keep(piece: str) -> None:
        nonlocal length, last
        if piece:
            seam = " " if done and last and not (last.isspace() or piece[0].isspace()) else ""
            pieces.extend((seam, piece))
            length, last = length + len(seam) + len(piece), piece[-1]

    for block in blocks:
        for number, (start, end) in enumerate(block):
            keep(text[done:start])
            if number == 0:
                positions.append(length)
            done = end
    keep(text[done:])
    return "".join(pieces), positions


# Hermes --------------------------------------------------------------------------------------------------------------


def _hermes_calls(text: str) -> Iterator[tuple[int, int, AskedCall]]:
    """Yields (start, end, call). A block whose JSON ends right before `</tool_call>` is a call, whatever tags its
    strings contain; in any other block, tags are matched like brackets."""
    position = 0
    while (tag := _TAG.search(text, position)) is not None:
        if tag.group() == CLOSE:
            position = tag.end()
            yield tag.start(), position, _unreadable(CLOSE, f"{CLOSE} came without {OPEN}")
            continue
        body = _SPACE.match(text, tag.end()).end()
        parsed, end = _json_at(text, body)
        closing = _SPACE.match(text, end).end() if end is not None else -1
        if end is not None and text.startswith(CLOSE, closing):
            position = closing + len(CLOSE)
            yield tag.start(), position, _call_of(parsed, text[tag.start() : position])
        else:
            position, reason = _end_of_broken(text, tag.end())
            yield tag.start(), position, _unreadable(text[tag.start() : position], reason)


def _end_of_broken(text: str, start: int) -> tuple[int, str]:
    """The end of a block that is not a single JSON object, and what is wrong with it."""
    depth, nested = 1, False
    for tag in _TAG.finditer(text, start):
        depth += 1 if tag.group() == OPEN else -1
        nested = nested or depth > 1
        if depth == 0:
            return tag.end(), "a call stands inside of another" if nested else "what it holds is not one JSON object"
    return len(text), f"a call has no {CLOSE}"


# Llama 3 -------------------------------------------------------------------------------------------------------------


def _bare_calls(text: str) -> Iterator[tuple[int, int, AskedCall]]:
    """Yields (start, end, call) for a message that begins with a call, or from `<|python_tag|>` on."""
    beginning, start = _LLAMA_BEGINS.match(text), text.find(_PYTHON_TAG)
    if beginning is not None:
        start = beginning.start(1)
    if start < 0:
        return
    while True:
        body = _SPACE.match(text, start + (len(_PYTHON_TAG) if text.startswith(_PYTHON_TAG, start) else 0)).end()
        parsed, end = _json_at(text, body)
        if end is None:
            yield start, len(text), _unreadable(text[start:], "it is not one JSON object")
            return
        separator = _SPACE.match(text, end).end()
        goes_on = text.startswith(";", separator)
        yield start, separator + 1 if goes_on else end, _call_of(parsed, text[start:end], bare=True)
        if not goes_on:
            return
        start = _SPACE.match(text, separator + 1).end()
        if start == len(text):
            return


# JSON ----------------------------------------------------------------------------------------------------------------


def _json_at(text: str, start: int) -> tuple[Any, int | None]:
    """The JSON object that begins here, and its end; the end is None if there is no valid object. NaN, infinite
    numbers and numbers with too many digits make it invalid."""
    if not text.startswith("{", start):
        return None, None
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse_constant(number[:20])


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _call_of(parsed: Mapping[str, Any], raw: str, bare: bool = False) -> AskedCall:
    """The call in a JSON object."""
    # Models mix the keys of the two formats up, so both are accepted.
    name, keys = parsed.get("name"), ("parameters", "arguments") if bare else ("arguments", "parameters")
    arguments = next((parsed[key] for key in keys if key in parsed), {})
    if not isinstance(name, str) or not name:
        return _unreadable(raw, 'it has no "name"', bare)
    if not isinstance(arguments, dict):
        reason = f'"{keys[0]}" is no JSON object; write "{keys[0]}": {{…}}'
        return AskedCall(without_surrogates(name), {}, raw, BAD_ARGUMENTS, reason)
    if nests_deeper(arguments, _DEEPEST):
        return AskedCall(
            without_surrogates(name), {}, raw, BAD_ARGUMENTS, f"they nest more than {_DEEPEST} levels deep"
        )
    return AskedCall(without_surrogates(name), _clean(arguments), raw)


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {without_surrogates(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return without_surrogates(value) if isinstance(value, str) else value


def _unreadable(raw: str, reason: str, bare: bool = False) -> AskedCall:
    form = '{"name": "…", "parameters": {…}}' if bare else FORM
    return AskedCall("", {}, raw, BAD_JSON, f"the call cannot be read: {reason}. Write {form}, one for each call.")


# In words ------------------------------------------------------------------------------------------------------------


def tools_in_words(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The description of tools for a model whose chat template does not support tools."""
    lines = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
    return (
        "# Tools\n\nYou can call tools while you write a message. Each line is a tool, with the JSON schema of its "
        f"arguments:\n{lines}\n\nA call is written outside of your thoughts, in this form:\n{FORM}\nEnd your message "
        "after it: the result comes in <tool_response>…</tool_response>, and you go on. Nobody else sees your calls "
        "and their results, so say what follows from them."
    )


def with_tools_in_words(
    messages: Sequence[Mapping[str, str]], schemas: Sequence[Mapping[str, Any]], prompt_first: bool = False
) -> list[dict[str, str]]:
    """The messages with the description of the tools: at the end of the first message if that is a system message or
    `prompt_first` is True, otherwise in a new system message before it."""
    description = tools_in_words(schemas)
    if messages and (prompt_first or messages[0]["role"] == "system"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": description}, *map(dict, messages)]


def results_in_words(results: Sequence[str]) -> str:
    """Results as one message, for a model whose chat template does not support tools."""
    return "\n".join(f"<tool_response>\n{harmless(result)}\n</tool_response>" for result in results)


def harmless(result: str) -> str:
    """A result in which no tag of the tool protocol or of thoughts is spelled: `<tool_response>` becomes
    `< tool_response>`."""
    return _PROTOCOL.sub(r"< \1\2", result)


# The frame of a chat template --------------------------------------------------------------------------------------


_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_of_this_template",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_NAME, _ARGUMENTS = _PROBE["function"]["name"], {"word": "some words"}
_PROMPTS = (["system"], ["system", "user"])
_LLAMA_END = "<|eom_id|>"
"""The token that may end a message with a tool call of Llama 3."""


class ToolFrame:
    """The tools as one model's chat template presents them.

    Args:
        frame: the frame of replies of the same template.
        schemas: the schemas of the tools.

    Attributes:
        turn_end_id, opens_thought: as in `ReplyFrame`.
        native: whether the template lists the tools and frames their results.

    Raises:
        ConfigError: if a tool's description spells a special token of the model.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", frame: ReplyFrame, schemas: Sequence[Mapping[str, Any]]):
        self._tokenizer = tokenizer
        self._frame = frame
        self._schemas = [dict(schema) for schema in schemas]
        self.turn_end_id = frame.turn_end_id
        self.opens_thought = frame.opens_thought
        for schema in self._schemas:
            if holds_markup(tokenizer, json.dumps(schema, ensure_ascii=False)):
                raise ConfigError(
                    f"The description of the tool {schema['function']['name']} spells a special token of the model, "
                    "which would become markup in its prompt: describe the tool in other words."
                )
        self._bare_json = False
        self._pieces = self._native_pieces() if schemas else None
        self.native = self._pieces is not None
        llama_end = tokenizer.convert_tokens_to_ids(_LLAMA_END)
        has_llama_end = llama_end is not None and llama_end != tokenizer.unk_token_id
        self._ends = {self.turn_end_id, llama_end} if has_llama_end else {self.turn_end_id}

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages, with the tools, and of the generation prompt; raises as `encode_chat` does."""
        if self.native:
            return encode_chat(self._tokenizer, messages, self._schemas)
        return encode_chat(self._tokenizer, with_tools_in_words(messages, self._schemas) if self._schemas else messages)

    def find_calls(self, text: str) -> CallsInText:
        """The calls in a message of the model."""
        return find_calls(text, self._bare_json)

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether sampled ids end with a token that ends a message."""
        return bool(ids) and ids[-1] in self._ends

    def results(self, results: Sequence[str]) -> list[int]:
        """The ids after the message's end token: the framed results, and the generation prompt of what follows."""
        if self._pieces is None:
            return self._frame.reply(results_in_words(results))
        head, between, tail = self._pieces
        quoted = head.endswith('"') and tail.startswith('"')  # the template writes results as JSON strings
        pieces = [head]
        for number, result in enumerate(results):
            text = json.dumps(harmless(result), ensure_ascii=False)[1:-1] if quoted else harmless(result)
            pieces += [text, between if number + 1 < len(results) else tail]
        return encode_between(self._tokenizer, pieces)

    # What the template supports ----------------------------------------------------------------------------------

    def _native_pieces(self) -> tuple[str, str, str] | None:
        """The markup before a result, between two results, and after the last; None unless the template lists tools,
        asks for calls that can be parsed, and frames results in the same way wherever they are."""
        if not all(self._lists(roles) for roles in _PROMPTS) or not self._asks_for_readable_calls():
            return None
        one_result = markup_around(self._tokenizer, ["user", "assistant", "tool"], [_PROBE])
        two_results = markup_around(
            self._tokenizer, ["user", "assistant", "tool", "assistant", "tool", "tool"], [_PROBE]
        )
        if one_result is None or two_results is None:
            return None
        head, tail, between = one_result[2], one_result[3], two_results[5]
        head = self._after_end(head)
        if head is None or (self._after_end(two_results[4]), two_results[6]) != (head, tail):
            return None
        return head, between, tail

    def _after_end(self, head: str) -> str | None:
        """The markup before a result, without the end token of the message before; None if it lacks that token."""
        end = self._tokenizer.convert_ids_to_tokens(self.turn_end_id)
        return head.lstrip().removeprefix(end) if head.lstrip().startswith(end) else None

    def _lists(self, roles: list[str]) -> bool:
        """Whether the template shows the tools in a prompt that begins with these roles."""
        for prompt_roles in (roles, ["user", *roles[2:]]):  # many templates take no system message
            pieces = markup_around(self._tokenizer, prompt_roles, [_PROBE])
            if pieces is not None:
                return any(_NAME in piece for piece in pieces)
        return False

    def _asks_for_readable_calls(self) -> bool:
        """Whether a call that the template wrote is parsed correctly, with its arguments; sets the format."""
        call = {"type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
        messages = [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Done."},
        ]
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, tools=[_PROBE])
        except RAISED_BY_TEMPLATES:
            return False
        written = rendered[rendered.rfind(_NAME, 0, rendered.rfind("Done.")) :]
        start = rendered.rfind("{", 0, len(rendered) - len(written))
        for begin, bare in ((rendered.rfind("<tool_call>"), False), (start, True)):
            calls = find_calls(rendered[begin:], bare).calls if begin >= 0 else ()
            if calls and (calls[0][0].name, calls[0][0].arguments) == (_NAME, _ARGUMENTS):
                self._bare_json = bare
                return True
        return False
