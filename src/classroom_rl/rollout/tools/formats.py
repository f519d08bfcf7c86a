"""Reads tool calls in what a model said, and says in words which tools there are.

Hermes's format is read everywhere: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Llama 3's is read where the
model's chat template asks for it: a message that is nothing but `{"name": …, "parameters": {…}}`, perhaps after
`<|python_tag|>`, several of them with `;` in between. What is thought is no call: the text is read as
`thoughts.visible_text` shows it. What looks like a call and cannot be read is a call with an error.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from classroom_rl.rollout.text import nests_deeper, without_surrogates
from classroom_rl.rollout.tools.tool import BAD_ARGUMENTS, BAD_JSON, AskedCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")
_LLAMA_BEGINS = re.compile(r'\s*(\{)\s*"(?:name|parameters)"\s*:')
_PROTOCOL = re.compile(r"<(/?)(tool_call|tool_response|tool_result|tools|think)\b")
_SPACE = re.compile(r"\s*")
_DEEPEST = 20
FORM = f'{OPEN}{{"name": "…", "arguments": {{…}}}}{CLOSE}'
"""How a call is written, as models are told."""


@dataclass(frozen=True)
class CallsInText:
    """What a model said, and the calls in it.

    Attributes:
        text: the text without its calls, thoughts included.
        calls: the calls in order, each with its position in `text`.
    """

    text: str
    calls: tuple[tuple[AskedCall, int], ...] = ()


def find_calls(text: str, bare_json: bool = False) -> CallsInText:
    """Read the calls in a message. A thought that the prompt opened has to be opened in the text, too.

    Args:
        bare_json: whether Llama 3's format is read as well.
    """
    said = _said_ranges(text)
    visible = "".join(text[start:end] for start, end in said)
    found = list(_hermes_calls(visible))
    if bare_json and not found:
        found = list(_bare_calls(visible))
    if not found:
        return CallsInText(text)
    kept, positions = _without(text, [_in_text(said, *block[:2]) for block in found])
    return CallsInText(kept, tuple((block[2], at) for block, at in zip(found, positions, strict=True)))


def _said_ranges(text: str) -> list[tuple[int, int]]:
    """Where the characters are that `thoughts.visible_text` shows, white space at both ends included."""
    ranges: list[tuple[int, int]] = []
    end = 0
    while (start := text.find("<think>", end)) >= 0 and (closed := text.find("</think>", start)) >= 0:
        ranges.append((end, start))
        end = closed + len("</think>")
    ranges.append((end, len(text)))
    rest = "".join(text[start:end] for start, end in ranges)  # in which tags may have come together
    cut = rest.find("<think>")
    stop = len(rest) if cut < 0 else cut
    closed = rest.rfind("</think>", 0, stop)
    return _in_text(ranges, 0 if closed < 0 else closed + len("</think>"), stop)


def _in_text(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Where the characters from `start` to `end` of what is in these ranges are in the text itself."""
    found, before = [], 0
    for first, last in ranges:
        low, high = max(start - before, 0), min(end - before, last - first)
        if low < high:
            found.append((first + low, first + high))
        before += last - first
    return found


def _without(text: str, blocks: Sequence[Sequence[tuple[int, int]]]) -> tuple[str, list[int]]:
    """The text without the characters of these blocks, and the position of each block in it. A space stands for a block
    inside of a word, so that what is left forms no new tag."""
    pieces: list[str] = []
    positions: list[int] = []
    place, length, last = 0, 0, ""

    def keep(piece: str) -> None:
        nonlocal length, last
        if piece:
            seam = " " if place and last and not (last.isspace() or piece[0].isspace()) else ""
            pieces.extend((seam, piece))
            length, last = length + len(seam) + len(piece), piece[-1]

    for block in blocks:
        for number, (start, end) in enumerate(block):
            keep(text[place:start])
            if number == 0:
                positions.append(length)
            place = end
    keep(text[place:])
    return "".join(pieces), positions


# Hermes --------------------------------------------------------------------------------------------------------------


def _hermes_calls(text: str) -> Iterator[tuple[int, int, AskedCall]]:
    """Yields (start, end, call). A block whose JSON ends right before `</tool_call>` is a call, whatever tags its texts
    hold; in any other block, tags are matched as brackets."""
    place = 0
    while (tag := _TAG.search(text, place)) is not None:
        if tag.group() == CLOSE:
            place = tag.end()
            yield tag.start(), place, _unreadable(CLOSE, f"{CLOSE} came without {OPEN}")
            continue
        body = _SPACE.match(text, tag.end()).end()
        parsed, end = _json_at(text, body)
        closing = _SPACE.match(text, end).end() if end is not None else -1
        if end is not None and text.startswith(CLOSE, closing):
            place = closing + len(CLOSE)
            yield tag.start(), place, _call_of(parsed, text[tag.start() : place])
        else:
            place, reason = _end_of_broken(text, tag.end())
            yield tag.start(), place, _unreadable(text[tag.start() : place], reason)


def _end_of_broken(text: str, start: int) -> tuple[int, str]:
    """Where a block that holds no single JSON object ends, and what is wrong with it."""
    depth, nested = 1, False
    for tag in _TAG.finditer(text, start):
        depth += 1 if tag.group() == OPEN else -1
        nested = nested or depth > 1
        if depth == 0:
            return tag.end(), "a call stands inside of another" if nested else "what it holds is not one JSON object"
    return len(text), f"a call has no {CLOSE}"


# Llama 3 -------------------------------------------------------------------------------------------------------------


def _bare_calls(text: str) -> Iterator[tuple[int, int, AskedCall]]:
    """Yields (start, end, call) for a message that begins as a call, or from `<|python_tag|>` on."""
    begins, start = _LLAMA_BEGINS.match(text), text.find(_PYTHON_TAG)
    if begins is not None:
        start = begins.start(1)
    if start < 0:
        return
    while True:
        body = _SPACE.match(text, start + (len(_PYTHON_TAG) if text.startswith(_PYTHON_TAG, start) else 0)).end()
        parsed, end = _json_at(text, body)
        if end is None:
            yield start, len(text), _unreadable(text[start:], "it is not one JSON object")
            return
        more = _SPACE.match(text, end).end()
        goes_on = text.startswith(";", more)
        yield start, more + 1 if goes_on else end, _call_of(parsed, text[start:end], bare=True)
        if not goes_on:
            return
        start = _SPACE.match(text, more + 1).end()
        if start == len(text):
            return


# JSON ----------------------------------------------------------------------------------------------------------------


def _json_at(text: str, start: int) -> tuple[Any, int | None]:
    """The JSON object that begins here, and where it ends; None for the end if there is none. Numbers that are no
    numbers, or too long, make it unreadable."""
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
    name, own = parsed.get("name"), ("parameters", "arguments") if bare else ("arguments", "parameters")
    arguments = next((parsed[key] for key in own if key in parsed), {})
    if not isinstance(name, str) or not name:
        return _unreadable(raw, 'it has no "name"', bare)
    if not isinstance(arguments, dict):
        form = f'"{own[0]}" is no JSON object; write "{own[0]}": {{…}}'
        return AskedCall(without_surrogates(name), {}, raw, BAD_ARGUMENTS, form)
    if nests_deeper(arguments, _DEEPEST):
        return AskedCall(
            without_surrogates(name), {}, raw, BAD_ARGUMENTS, f"they nest more than {_DEEPEST} levels deep"
        )
    return AskedCall(without_surrogates(name), _clean(arguments), raw)


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {without_surrogates(key): _clean(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_clean(each) for each in value]
    return without_surrogates(value) if isinstance(value, str) else value


def _unreadable(raw: str, reason: str, bare: bool = False) -> AskedCall:
    form = '{"name": "…", "parameters": {…}}' if bare else FORM
    return AskedCall("", {}, raw, BAD_JSON, f"the call cannot be read: {reason}. Write {form}, one for each call.")


# In words ------------------------------------------------------------------------------------------------------------


def tools_in_words(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What a model is told of the tools whose chat template knows none."""
    listed = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in schemas)
    return (
        "# Tools\n\nYou can call tools while you write a message. Each line is a tool, with the JSON schema of its "
        f"arguments:\n{listed}\n\nA call is written outside of your thoughts, in this form:\n{FORM}\nEnd your message "
        "after it: the result comes in <tool_response>…</tool_response>, and you go on. Nobody else sees your calls "
        "and their results, so say what follows from them."
    )


def with_tools_in_words(
    messages: Sequence[Mapping[str, str]], schemas: Sequence[Mapping[str, Any]], prompt_first: bool = False
) -> list[dict[str, str]]:
    """The messages with the tools in the first one, if that is the system's or `prompt_first`, and else in a system
    message before."""
    told = tools_in_words(schemas)
    if messages and (prompt_first or messages[0]["role"] == "system"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": told}, *map(dict, messages)]


def results_in_words(results: Sequence[str]) -> str:
    """Results as a message to a model whose chat template knows none."""
    return "\n".join(f"<tool_response>\n{harmless(each)}\n</tool_response>" for each in results)


def harmless(result: str) -> str:
    """A result in which no tag of the protocol, and none of thoughts, is spelled out: `<tool_response>` becomes
    `< tool_response>`."""
    return _PROTOCOL.sub(r"< \1\2", result)
