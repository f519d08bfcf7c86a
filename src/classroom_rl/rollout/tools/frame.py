"""Writes the tools into a model's prompt, and their results into its context.

If the model's chat template supports tools (`tools=`) and asks for calls in a format that tools/formats.py parses, as
those of Qwen 2.5, Qwen3 and Llama 3.1 do, the template lists them and frames their results. Otherwise the program lists
them in the system message in its own words, and gives results as user messages.
"""

import json
from collections.abc import Mapping, Sequence
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
from classroom_rl.rollout.tools.formats import (
    CallsInText,
    find_calls,
    harmless,
    results_in_words,
    with_tools_in_words,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        once = markup_around(self._tokenizer, ["user", "assistant", "tool"], [_PROBE])
        twice = markup_around(self._tokenizer, ["user", "assistant", "tool", "assistant", "tool", "tool"], [_PROBE])
        if once is None or twice is None:
            return None
        head, tail, between = once[2], once[3], twice[5]
        head = self._after_end(head)
        if head is None or (self._after_end(twice[4]), twice[6]) != (head, tail):
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
