"""The simulation against a run: what is simulated of its conversations, and what is compared."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from benchmarks import simulate_rates
from benchmarks.simulate import Conversation, EngineRates, Rates
from benchmarks.simulate_rates import compare, conversation_of, growth, main, other_prompts
from benchmarks.step_bound import Message, Replayed

ENGINE = EngineRates({1: 10.0}, prefill=100.0, slots=4, reading_holds_up=True)
RATES = Rates(ENGINE, ENGINE, 50.0, [0.0], 4.0, 2.0, 1, 3, [10], [20], 50, 1, {"all": "made up"})


def replayed(*lengths: tuple[str, int, int]) -> Replayed:
    return Replayed([Message(seat, [7] * prompt, tokens) for seat, prompt, tokens in lengths])


LESSON = replayed(("teacher", 50, 10), ("student", 30, 20), ("teacher", 90, 10))


def test_a_lesson_as_it_is_simulated() -> None:
    assert conversation_of(LESSON) == Conversation(50, (10, 20, 10), 0.0)
    assert list(growth(LESSON.messages[::2])) == [50, 40]
    with pytest.raises(ValueError, match="in turns, not .'student', 'teacher'"):
        conversation_of(replayed(("student", 5, 1), ("teacher", 5, 1)))


def test_prompts_that_no_engine_has_read_begin_differently() -> None:
    assert other_prompts([LESSON, LESSON], "teacher", 3) == [[3, *[7] * 90], [4, *[7] * 90]]


def test_a_step_is_compared_by_its_parts() -> None:
    """Played alone, the lesson takes 5.3 s (tests/benchmarks/test_simulate.py), its 90 tokens are trained on in 1.8 s,
    and its weights published in 2 s. The first step is left out."""
    lines = [
        {"time": 100.0, "seconds/rollout": 99.0, "seconds/train": 99.0, "seconds/publish": 99.0},
        {"time": 110.0, "seconds/rollout": 5.0, "seconds/train": 2.0, "seconds/publish": 1.0},
        {"time": 122.0, "seconds/rollout": 6.0, "seconds/train": 3.0, "seconds/publish": 2.0},
    ]
    found = compare([[LESSON]] * 3, lines, RATES)
    assert found["rollout"] == pytest.approx((5.3, 5.5)) and found["train"] == pytest.approx((1.8, 2.5))
    assert found["publish"] == pytest.approx((2.0, 1.5)) and found["step"] == pytest.approx((9.1, 11.0))


@pytest.mark.parametrize(("took", "status"), [(9.0, 0), (10.0, 0), (11.0, 1), (7.0, 1)])
def test_more_than_15_percent_off_is_a_failure(
    took: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    line = {"reward": 0.5, "seconds/rollout": 5.0, "seconds/train": 2.0, "seconds/publish": 2.0}
    lines = [json.dumps(line | {"time": took * step}) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rates = tmp_path / "rates.yaml"
    rates.write_text(yaml.safe_dump(TypeAdapter(Rates).dump_python(RATES)))
    monkeypatch.setattr(simulate_rates, "batches_of", lambda run, config: [[LESSON]] * 3)
    monkeypatch.setattr(
        sys, "argv", ["simulate_rates", "check", str(tmp_path), str(rates), "--config-name", "quickstart"]
    )
    assert main() == status
    assert f"| step | 9.10 | {took:.2f} |" in capsys.readouterr().out
