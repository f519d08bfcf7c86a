"""How the tools get into a model's prompt, and their results into its context.

If the model's chat template knows tools (`tools=`) and asks for calls in a form that tool_formats.py reads, as those of
Qwen 2.5, Qwen3 and Llama 3.1 do, the template lists them and frames their results. Otherwise the program lists them in
the system message in its own words, and gives results as messages of the user.
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
"""What Llama 3 may end a message with that calls a tool."""


class ToolFrame:
    """The tools as one model's chat template shows them.

    Args:
        frame: the same template's frame of replies.
        schemas: the tools.

    Attributes:
        turn_end_id, opens_thought: as in `ReplyFrame`.
        native: whether the template lists the tools and frames their results.

    Raises:
        ConfigError: if a tool's description spells a special token of the model.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", frame: ReplyFrame, schemas: Sequence[Mapping[str, Any]]):
        self._tokenizer = tokenizer
        self._frame = frame
        self._schemas = [dict(each) for each in schemas]
        self.turn_end_id = frame.turn_end_id
        self.opens_thought = frame.opens_thought
        for each in self._schemas:
            if holds_markup(tokenizer, json.dumps(each, ensure_ascii=False)):
                raise ConfigError(
                    f"The description of the tool {each['function']['name']} spells a special token of the model, "
                    "which would become markup in its prompt: describe the tool in other words."
                )
        self._bare_json = False
        self._pieces = self._native_pieces() if schemas else None
        self.native = self._pieces is not None
        end = tokenizer.convert_tokens_to_ids(_LLAMA_END)
        own = end is not None and end != tokenizer.unk_token_id
        self._ends = {self.turn_end_id, end} if own else {self.turn_end_id}

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages, with the tools, and of the generation prompt; raises as `encode_chat` does."""
        if self.native:
            return encode_chat(self._tokenizer, messages, self._schemas)
        told = with_tools_in_words(messages, self._schemas) if self._schemas else messages
        return encode_chat(self._tokenizer, told)

    def find_calls(self, text: str) -> CallsInText:
        """The calls in what the model said."""
        return find_calls(text, self._bare_json)

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether sampled ids end with a token that ends a message."""
        return bool(ids) and ids[-1] in self._ends

    def results(self, results: Sequence[str]) -> list[int]:
        """The ids after the message's end: the framed results, and the beginning of what the model writes next."""
        if self._pieces is None:
            return self._frame.reply(results_in_words(results))
        head, between, tail = self._pieces
        quoted = head.endswith('"') and tail.startswith('"')
        pieces = [head]
        for number, result in enumerate(results):
            text = json.dumps(harmless(result), ensure_ascii=False)[1:-1] if quoted else harmless(result)
            pieces += [text, between if number + 1 < len(results) else tail]
        return encode_between(self._tokenizer, pieces)

    # What the template knows -------------------------------------------------------------------------------------

    def _native_pieces(self) -> tuple[str, str, str] | None:
        """The markup before a result, between two results, and after the last; None unless the template lists tools,
        asks for calls that can be read, and frames results alike wherever they stand."""
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
        """The markup before a result without the token that ends the call."""
        end = self._tokenizer.convert_ids_to_tokens(self.turn_end_id)
        return head.lstrip().removeprefix(end) if head.lstrip().startswith(end) else None

    def _lists(self, roles: list[str]) -> bool:
        """Whether the template shows the tools in a prompt that begins with these roles."""
        for asked in (roles, ["user", *roles[2:]]):  # many templates take no system message
            found = markup_around(self._tokenizer, asked, [_PROBE])
            if found is not None:
                return any(_NAME in piece for piece in found)
        return False

    def _asks_for_readable_calls(self) -> bool:
        """Whether a call, as the template writes one, is found again with its arguments; sets the format."""
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
            found = find_calls(rendered[begin:], bare) if begin >= 0 else None
            if found and found.calls and (found.calls[0][0].name, found.calls[0][0].arguments) == (_NAME, _ARGUMENTS):
                self._bare_json = bare
                return True
        return False
