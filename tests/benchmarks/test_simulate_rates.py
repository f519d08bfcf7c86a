"""The simulation against a run: what is simulated of its conversations, what is measured, and what is compared."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from benchmarks import simulate, simulate_rates
from benchmarks.simulate import Conversation, EngineRates, Rates
from benchmarks.simulate_rates import Bench, compare, conversation_of, engine_rates, fit, main, tokens_to_read
from benchmarks.step_bound import Message, Replayed
from classroom_rl.config.models import VllmConfig

ENGINE = EngineRates({1: 10.0}, prefill=100.0, slots=4)
RATES = Rates(
    *(ENGINE, ENGINE, 50.0, [0.0], 4.0, 2.0, 1, 3, [10], [20], {"teacher": 50, "student": 50}, 1, {"all": "made up"}),
    block_tokens=4,
)


def replayed(*messages: tuple[str, range, int]) -> Replayed:
    """A conversation of which these are the prompts, as numbers of their tokens, and the numbers of sampled ones."""
    built_messages = [Message(role, [*prompt], tokens) for role, prompt, tokens in messages]
    return Replayed(built_messages, ids=[*range(100)])


LESSON = replayed(("teacher", range(50), 10), ("student", range(500, 530), 20), ("teacher", range(90), 10))
"""The teacher's second prompt: its first one, the 10 tokens it sampled, and 30 with what the student said."""


def test_an_engine_reads_what_is_behind_the_last_whole_block_that_it_knows() -> None:
    """After its first message the teacher's engine knows 59 tokens, 14 blocks of 4, and has 90 - 56 to read."""
    assert tokens_to_read([LESSON], 4) == [[50, 30, 34]]
    assert tokens_to_read([LESSON], 1) == [[50, 30, 31]]
    assert tokens_to_read([LESSON], 100) == [[50, 30, 90]], "no block is whole"


def test_conversations_that_begin_alike_share_what_is_read() -> None:
    other = replayed(("teacher", [*range(48), 7, 8], 10))
    assert tokens_to_read([LESSON, LESSON, other], 4) == [[50, 30, 34], [2, 2, 2], [2]]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5), st.integers(1, 4))
def test_the_last_token_of_a_prompt_is_always_read(prompts: list[list[int]], block: int) -> None:
    batch = [Replayed([Message("teacher", prompt, 1)]) for prompt in prompts]
    for (read,), prompt in zip(tokens_to_read(batch, block), prompts, strict=True):
        assert 1 <= read <= len(prompt) and (len(prompt) - read) % block == 0


def test_a_lesson_as_it_is_simulated_may_be_opened_by_the_student() -> None:
    opened = replayed(("student", range(5), 1), ("teacher", range(30), 2))
    messages = (simulate.Message("student", 5, 1), simulate.Message("teacher", 30, 2))
    assert conversation_of(opened, [5, 30]) == Conversation(messages, 100, 0.0)


@given(st.floats(1e-4, 1e-2), st.floats(0, 1e-2), st.floats(0, 1e-2))
def test_the_parts_of_a_first_tokens_time_are_found_again(token_s: float, message_s: float, latency_s: float) -> None:
    decode = {1: 100.0, 4: 300.0, 16: 900.0}
    firsts = [
        (running, tokens, running / decode[running] + tokens * token_s + running * message_s + latency_s)
        for running in decode
        for tokens in (running, 40 * running, 13)
    ]
    assert fit(firsts, decode) == pytest.approx((token_s, message_s, latency_s), abs=1e-9)


def test_no_part_of_it_is_below_zero() -> None:
    """Readings on a busy machine may say that a longer prompt took less time."""
    token_s, message_s, latency_s = fit([(1, 10, 0.31), (1, 100, 0.3), (4, 40, 0.6)], {1: 10.0, 4: 40.0})
    assert token_s == 0 and message_s >= 0 and latency_s >= 0


class Asked:
    """An engine that remembers its prompts."""

    block_tokens, pass_tokens = 32, 4096

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def replay(self, message: Message, sampling: object) -> None:
        self.asked.append(message.prompt_ids)
        await asyncio.sleep(0)


def test_prompts_are_fresh_and_engines_are_measured_up_to_what_they_take_at_once() -> None:
    options = VllmConfig(max_num_seqs=20, max_length=1024)
    engines = {role: Asked() for role in simulate.ROLES}
    prompts = [[1, 2, 3]] * 64
    benches = {role: Bench(engine, role, options, prompts) for role, engine in engines.items()}
    assert benches["teacher"].numbers(64) == [1, 4, 16, 20] and benches["teacher"].numbers(8) == [1, 4, 8]
    fresh = [*benches["teacher"].fresh(150), *benches["teacher"].fresh(150)]
    assert len({tuple(ids[:2]) for ids in fresh}) == 300 and all(ids[2:] == [1, 2, 3] for ids in fresh)
    rates = asyncio.run(engine_rates(benches, 8))
    for role in simulate.ROLES:
        assert sorted(rates[role].decode) == [1, 4, 8] and rates[role].slots == 20
        assert rates[role].pass_tokens == 4096 and len(engines[role].asked) > 200


def lines_of(*took: tuple[float, float, float, float]) -> list[dict[str, float]]:
    return [
        {"step": step, "time": time, "seconds/rollout": rollout, "seconds/train": train, "seconds/publish": publish}
        for step, (time, rollout, train, publish) in enumerate(took, start=1)
    ]


def test_a_step_is_compared_by_its_parts() -> None:
    """Played alone, the lesson takes 0.1 s for each of its 40 tokens, and 1.14 s to read 114; its 100 tokens are
    trained on in 2 s, and its weights published in 2 s. The first step is left out."""
    lines = lines_of((100, 99, 99, 99), (110, 5, 2, 1), (122, 6, 3, 2))
    parts = compare(dict.fromkeys(range(3), [LESSON]), lines, RATES)
    assert parts["rollout"] == pytest.approx((5.14, 5.5)) and parts["train"] == pytest.approx((2.0, 2.5))
    assert parts["publish"] == pytest.approx((2.0, 1.5)) and parts["step"] == pytest.approx((9.14, 11.0))


@pytest.mark.parametrize(("took", "status"), [(9.0, 0), (10.0, 0), (11.0, 1), (7.0, 1)])
def test_more_than_15_percent_off_is_a_failure(
    took: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    lines = [json.dumps({"reward": 0.5, **line}) for line in lines_of(*((took * step, 5, 2, 2) for step in range(3)))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rates = tmp_path / "rates.yaml"
    rates.write_text(yaml.safe_dump(TypeAdapter(Rates).dump_python(RATES)))
    monkeypatch.setattr(simulate_rates, "batches_of", lambda run, config: dict.fromkeys(range(3), [LESSON]))
    monkeypatch.setattr(
        sys, "argv", ["simulate_rates", "check", str(tmp_path), str(rates), "--config-name", "quickstart"]
    )
    assert main() == status
    assert f"| step | 9.14 | {took:.2f} |" in capsys.readouterr().out
