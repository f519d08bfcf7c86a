"""What an engine is asked, what it answers, and what the program knows for certain about a conversation."""

import asyncio
from types import SimpleNamespace

import pytest

from classroom_rl.rollout.engine import Completion, ConversationFacts, EmbeddedJudge, Sampling, ask_judge

TEACHER, STUDENT = {"role": "teacher", "content": "Hi."}, {"role": "student", "content": "Hi."}


def test_a_model_s_options_say_how_it_is_sampled() -> None:
    options = SimpleNamespace(temperature=0.5, top_p=0.9, top_k=40)
    assert Sampling.of(options, 64) == Sampling(0.5, 0.9, 40, 64)


@pytest.mark.parametrize(("counted", "tokens"), [(None, 2), (7, 7), (0, 0)])
def test_a_provider_s_count_of_tokens_takes_precedence(counted: int | None, tokens: int) -> None:
    assert Completion((1, 2), (-0.1, -0.2), "", True, counted=counted).tokens == tokens


@pytest.mark.parametrize(
    ("max_turns", "conversation", "messages"),
    [
        (None, [TEACHER], None),
        (4, [TEACHER, STUDENT], 3),
        (5, [TEACHER], 3),
        (4, [STUDENT], 2),
        (5, [STUDENT], 3),
        (4, [], 3),
    ],
)
def test_the_most_messages_of_a_teacher_depend_on_who_opens(max_turns, conversation, messages) -> None:
    assert ConversationFacts(max_turns=max_turns).teacher_messages(conversation) == messages


def test_only_an_embedded_judge_gets_the_facts() -> None:
    class Embedded(EmbeddedJudge):
        async def judge(self, *given):
            return given

    class Model:
        async def judge(self, *given):
            return given

    arguments = ("rule", [TEACHER], "problem", 0)
    facts = ConversationFacts(max_turns=3)
    assert asyncio.run(ask_judge(Embedded(), *arguments, facts)) == (*arguments, facts)
    assert asyncio.run(ask_judge(Model(), *arguments, facts)) == arguments
