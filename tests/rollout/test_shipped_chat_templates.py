"""Every chat template that TRL ships: a conversation has the ids that the template would give it, or is refused with a
reason. A template that a newer TRL adds should need no line in the tables below."""

import re
from functools import cache
from pathlib import Path

import pytest
import trl

from classroom_rl.errors import ConfigError
from classroom_rl.rollout.chat_template import ReplyFrame, encode_chat, roles_as_rendered
from classroom_rl.rollout.tokens import TokenBuffer
from tests.rollout.test_chat_template import make_tokenizer

FILES = {path.stem: path for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}
NO_SYSTEM = r"gemma(_training)?"
NO_SYSTEM_ALONE = r"(gemma|gemma3|qwen3_5_nothink|qwen3_5_think|qwen3_6|qwen3_8)(_training)?"
IMAGES = "leaves out, repeats or moves what the system, the user, the assistant said"
REFUSED = {
    r"gptoss.*": r"begins an assistant's message with '.*<\|channel\|>final<\|message\|>', a prompt for one ends with",
    r"muse_glimmer.*": r"begins an assistant's message with '.* to=user<\|message\|>', a prompt for one ends with",
    r"(idefics3|smolvlm).*": IMAGES,
    r"llava_next.*": "takes no system, user, assistant, user: 'str object' has no attribute 'text'",
}
NO_THOUGHT = "<think>\n\n</think>\n\n"
IN_HISTORY = {
    r"deepseek.*": ("<｜Assistant｜>", "<｜Assistant｜><think>\n"),
    r"glm4moe.*": ("<|assistant|>\n<think></think>\n", "<|assistant|>"),
    r"nemotron.*": ("<think></think>", "<think>\n"),
    r"qwen3_training": (f"assistant\n{NO_THOUGHT}", "assistant\n"),
    r"qwen3_5_nothink": ("assistant\n", f"assistant\n{NO_THOUGHT}"),
    r"qwen3_5_think|qwen3_6": ("assistant\n", "assistant\n<think>\n"),
    r"qwen3_8.*|(qwen3_5_think|qwen3_6)_training": (f"assistant\n{NO_THOUGHT}", "assistant\n<think>\n"),
}
"""How templates begin an earlier message of the assistant, where that differs from how they begin the next: thoughts of
earlier messages go. What was sampled after the one is never changed into the other."""

SYSTEM, ATTEMPT, FIRST, SECOND, LAST = "Teach Ann.", "She goed.", "What did she do?", "She cooked eggs.", "Who else?"


def of(table: dict, name: str):
    """What a table of patterns says about a template."""
    return next((entry for pattern, entry in table.items() if re.fullmatch(pattern, name)), None)


TAKEN = [name for name in FILES if of(REFUSED, name) is None]


@cache
def tokenizer_for(name: str):
    """A tokenizer with the template and, as tokens, all that looks like a marker in what it renders."""
    text = FILES[name].read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    markers = sorted(set(re.findall(r"<[|｜/]?[A-Za-z][^<>\s'\"{}]*[|｜]?>|\[/?INST]", text)))
    tokenizer.add_tokens(markers, special_tokens=True)
    return tokenizer


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def rendered(tokenizer, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def sampled(tokenizer, frame: ReplyFrame, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), frame.turn_end_id]


def test_trl_ships_them_where_they_are_looked_for():
    assert {"gemma3", "llama3", "qwen2_5", "qwen3", "qwen3_5_think"} <= set(TAKEN)


@pytest.mark.parametrize("name", TAKEN)
def test_a_dialogue_has_the_ids_that_the_template_gives_it(name):
    tokenizer = tokenizer_for(name)
    frame = ReplyFrame(tokenizer)
    buffer = TokenBuffer(encode_chat(tokenizer, [system(SYSTEM), user(ATTEMPT)]))
    for taught, answered in ((FIRST, SECOND), (SECOND, LAST)):
        ids = sampled(tokenizer, frame, taught)
        buffer.append_sampled(ids, [-1.0] * len(ids))
        buffer.append_given(frame.reply(answered))

    opened = [user(f"{SYSTEM}\n\n{ATTEMPT}")] if re.fullmatch(NO_SYSTEM, name) else [system(SYSTEM), user(ATTEMPT)]
    dialogue = [
        {"role": "assistant", "content": FIRST},
        user(SECOND),
        {"role": "assistant", "content": SECOND},
        user(LAST),
    ]
    expected = rendered(tokenizer, opened + dialogue)
    if difference := of(IN_HISTORY, name):
        for text in (FIRST, SECOND):
            assert difference[0] + text in expected
            expected = expected.replace(difference[0] + text, difference[1] + text)
    assert tokenizer.decode(buffer.ids) == expected
    assert buffer.ids == tokenizer.encode(expected, add_special_tokens=False)
    first_end = buffer.completion_ids[buffer.mask.index(0) - 1]
    assert first_end == frame.turn_end_id and first_end in tokenizer.added_tokens_decoder


@pytest.mark.parametrize("name", TAKEN)
def test_the_teacher_s_prompt_reaches_the_model(name):
    tokenizer = tokenizer_for(name)
    as_user = bool(re.fullmatch(NO_SYSTEM_ALONE, name))
    assert roles_as_rendered(tokenizer, ["system"]) == (["user"] if as_user else ["system"])
    expected = rendered(tokenizer, [user(SYSTEM) if as_user else system(SYSTEM)])
    ids = encode_chat(tokenizer, [system(SYSTEM)])
    assert ids == tokenizer.encode(expected, add_special_tokens=False)
    assert expected.count(SYSTEM) == 1
    reply = tokenizer.decode(ReplyFrame(tokenizer).reply(SECOND))
    assert expected.rpartition(SYSTEM)[2][-12:] == reply.rpartition(SECOND)[2][-12:], "a message opens as the next do"


@pytest.mark.parametrize("name", sorted({*FILES} - {*TAKEN}))
def test_a_template_that_fits_no_conversation_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=of(REFUSED, name)):
        ReplyFrame(tokenizer_for(name))
