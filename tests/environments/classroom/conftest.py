"""Configurations that several tests of the classroom play."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.rollout.tools.formats import CLOSE, OPEN
from tests.support.scripted_engine import ScriptedJudge
from tests.support.scripted_room import Room

ACCEPTS = '{"reasoning": "", "decision": "OK"}'
REJECTS = '{"reasoning": "told it", "decision": "REJECT"}'
SOCRATIC = (
    "{% if user_message %}Help me with {{ problem }}.{% elif teacher_message %}What is asked?"
    "{% else %}You teach by asking.{% if include_thinking %} Think.{% endif %}{% endif %}"
)
"""A teacher's prompt that opens the dialogue."""


def tool_call(expression: str, name: str = "calculator") -> str:
    """How a teacher writes a call."""
    return f"{OPEN}{json.dumps({'name': name, 'arguments': {'expression': expression}})}{CLOSE}"


CALLING_LINES = (
    [tool_call("6*7"), f"It is wrong, 42.{tool_call('1')}", "Really."],
    [f"So wrong.{tool_call('2+2')}", "It is 4."],
    "Say hello.",
    [f"<think>a</think>{tool_call('3+3')}", "<think>b</think>Also wrong: 6."],
    "Fine.",
)
"""The drafts of a teacher with tools, for a supervisor that finds `wrong` ones."""


@pytest.fixture
def maths(room: Room, generation: GenerationConfig) -> GenerationConfig:
    """Conversations that an attempt opens and a rule decides about, with two solutions; the room's judge accepts."""
    room.judge = ScriptedJudge(lambda *_: ACCEPTS)
    rules = {"does_not_leak_answer": "scripted"}
    return replace(generation, judges_rules_prompts_paths=rules, forced_conversation_type="attempt")


@pytest.fixture
def tooled(generation: GenerationConfig) -> GenerationConfig:
    """The rules of the other tests with a calculator, and with room for what it says."""
    return replace(generation, teacher_tools=["calculator"], max_tokens_in_conversation=6000, max_tokens_per_turn=300)


@pytest.fixture
def socratic(generation: GenerationConfig, template: Callable[[str], str]) -> GenerationConfig:
    """The rules of the other tests with a prompt that opens the dialogue."""
    return replace(generation, teacher_prompt_path=template(SOCRATIC))


@pytest.fixture
def template(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a template, and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / f"template{len(list(tmp_path.glob('template*')))}.txt"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
