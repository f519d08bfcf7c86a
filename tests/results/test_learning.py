"""Tests of the conclusion whether a tutor learned, on the evidence of real runs, and of collecting the evidence."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from classroom_rl.results.learning import (
    LEARNED,
    LEAST_RISE,
    NO_EVIDENCE,
    LearningEvidence,
    Movement,
    Trend,
    conclude,
    describe_learning,
    trend_of,
    write_learning,
)
from classroom_rl.results.rollout_files import ConversationReward, write_rollouts
from classroom_rl.trainer.weight_delta import parameter_movement
from tests.support.synthetic_run import record_of, scored, step_line, write_training
from tests.trainer.test_sharded_save import model_from_folder


def estimate(mean: float, low: float, high: float, n: int = 116, p: float = 0.0001) -> dict:
    return {"mean": mean, "ci95": [low, high], "n": n, "p": p}


# The quickstart (seed 42), its 50 steps measured on 116 held-out lessons.
GOOD = LearningEvidence(
    steps=50,
    movement=Movement(0.0297, 878_976, 878_976),
    without_variance=0.22,
    gradient_norm=0.098,
    held_out={"sampled": estimate(0.487, 0.449, 0.526), "greedy": estimate(0.250, 0.209, 0.290)},
    training=Trend(10, 0.666, 0.972, estimate(0.306, 0.274, 0.340, 160)),
)
# The same with train.learning_rate=0, and with train.shuffle_rewards=true.
STILL = replace(
    GOOD,
    movement=Movement(0.0, 878_976, 878_976),
    without_variance=0.0,
    gradient_norm=0.13,
    held_out={"sampled": estimate(0.0, 0.0, 0.0, p=1.0), "greedy": estimate(0.0, 0.0, 0.0, p=1.0)},
    training=Trend(10, 0.531, 0.524, estimate(-0.007, -0.064, 0.049, 160, 0.8)),
)
SHUFFLED = replace(
    GOOD,
    movement=Movement(0.0512, 878_976, 878_976),
    without_variance=0.01,
    held_out={"sampled": estimate(-0.184, -0.226, -0.143), "greedy": estimate(-0.243, -0.291, -0.196)},
    training=Trend(10, 0.512, 0.371, estimate(-0.141, -0.190, -0.093, 160)),
)


def test_a_run_that_learned_is_told_from_two_that_did_not() -> None:
    good, still, shuffled = map(conclude, (GOOD, STILL, SHUFFLED))
    assert good.verdict == LEARNED and good.learned
    assert still.verdict == shuffled.verdict == NO_EVIDENCE and not shuffled.learned
    assert good.reasons[0] == (
        "On held-out lessons (sampled) the reward rose by 0.487 (95 % interval +0.449 to +0.526), 116 lessons."
    )
    assert "The parameters moved by 2.97 % of their norm." in good.reasons
    assert still.reasons[0].startswith("The parameters did not move at all")
    assert shuffled.reasons[0].startswith(
        "On held-out lessons (sampled) the reward fell by 0.184 (95 % interval −0.226"
    )
    assert describe_learning(shuffled).splitlines()[0] == "Did the tutor learn? No evidence of learning."


def test_the_same_three_without_a_held_out_measurement() -> None:
    """The trainer knows only this much at its end."""
    good, still, shuffled = (conclude(replace(evidence, held_out={})) for evidence in (GOOD, STILL, SHUFFLED))
    assert [learning.verdict for learning in (good, still, shuffled)] == [LEARNED, NO_EVIDENCE, NO_EVIDENCE]
    assert good.reasons[0] == "The reward was not measured on held-out lessons before and after."
    assert describe_learning(good).startswith("Did the tutor learn? Learned in training.\n")
    assert describe_learning(conclude(GOOD)).startswith("Did the tutor learn? Learned.\n")
    assert "In training the reward rose by 0.306" in good.reasons[1] and "first 10 batches (0.666)" in good.reasons[1]


def test_a_reward_that_rose_while_no_parameter_moved_is_no_learning() -> None:
    assert conclude(replace(GOOD, movement=STILL.movement)).verdict == NO_EVIDENCE


def test_held_out_lessons_count_and_training_problems_do_not_beside_them() -> None:
    assert conclude(replace(GOOD, held_out=SHUFFLED.held_out)).verdict == NO_EVIDENCE
    by_chance = {"sampled": estimate(0.02, -0.01, 0.05, p=0.2)}
    learning = conclude(replace(GOOD, held_out=by_chance))
    assert learning.verdict == NO_EVIDENCE and "did not change by more than chance: +0.020" in learning.reasons[0]
    assert conclude(replace(SHUFFLED, held_out={"greedy": GOOD.held_out["greedy"]})).verdict == LEARNED


def test_a_supervised_measurement_decides_nothing() -> None:
    supervised = {"supervised": GOOD.held_out["sampled"]}
    learning = conclude(replace(SHUFFLED, held_out=supervised))
    assert learning.verdict == NO_EVIDENCE and "(supervised) the reward rose" in learning.reasons[0]
    assert conclude(replace(SHUFFLED, held_out=supervised | {"greedy": GOOD.held_out["greedy"]})).verdict == LEARNED
    assert conclude(replace(SHUFFLED, held_out=supervised | SHUFFLED.held_out)).verdict == NO_EVIDENCE


def test_a_rise_that_random_weights_would_bring_is_no_evidence() -> None:
    """A rise as measured in a training on shuffled rewards, and the smallest rise that counts."""
    trend = Trend(6, 0.097, 0.105, estimate(0.008, 0.001, 0.014, 48))
    learning = conclude(replace(SHUFFLED, held_out={}, training=trend))
    assert learning.verdict == NO_EVIDENCE
    assert learning.reasons[2] == (
        "A rise of less than 0.02 is no evidence: weights pushed about at random bring as much."
    )
    for mean, verdict in ((LEAST_RISE, LEARNED), (LEAST_RISE - 1e-9, NO_EVIDENCE)):
        assert conclude(replace(GOOD, held_out={"sampled": estimate(mean, 0.001, 0.03)})).verdict == verdict


def test_what_is_not_known_is_no_evidence_and_is_named() -> None:
    learning = conclude(LearningEvidence(steps=1))
    assert learning.verdict == NO_EVIDENCE
    assert learning.reasons == (
        "The reward was not measured on held-out lessons before and after.",
        "There are too few batches to tell whether the reward rose in training.",
        "How far the parameters moved is not known.",
    )
    without_interval = {"sampled": {"mean": 0.4, "ci95": None, "n": 1}}
    assert conclude(LearningEvidence(steps=1, held_out=without_interval)).verdict == NO_EVIDENCE


def test_signs_of_nothing_to_learn_from() -> None:
    reasons = conclude(replace(STILL, without_variance=0.9, gradient_norm=0.0)).reasons
    assert "90 % of the groups had equal rewards throughout: little to learn from." in reasons
    assert "The gradient's norm was 0 in the median step: nothing was to be learned." in reasons


def test_doubts_about_the_judge_are_told_along_with_the_verdict() -> None:
    learning = conclude(replace(GOOD, judge_checks=5, judge_warnings=2))
    assert learning.learned and learning.reasons[-1] == (
        "2 of 5 checks of the judge warned that it can be fooled, so what its rewards show is in doubt: see "
        "judge_checks.jsonl."
    )
    assert conclude(replace(GOOD, judge_checks=5)).reasons[-1].startswith("0 of 5 checks of the judge warned")
    failed = conclude(replace(GOOD, judge_checks=0, judge_checks_failed=3)).reasons
    assert failed[-1] == "3 of 3 attempts to check the judge brought no score."
    assert not any("warned" in reason for reason in failed)


# The training's reward, by hand -----------------------------------------------------------------------------------


def outcomes(*batches: dict[str, list[float | None]]) -> list[ConversationReward]:
    return [
        ConversationReward(step, problem, reward)
        for step, batch in enumerate(batches)
        for problem, rewards in batch.items()
        for reward in rewards
    ]


def side(*values: float, names: str = "abcdefgh") -> dict[str, list[float | None]]:
    return {name: [value] for name, value in zip(names, values, strict=False)}


EASY, HARD = side(*[0.9] * 7, 0.8), side(*[0.1] * 7, 0.2, names="stuvwxyz")


def test_problems_that_differ_show_no_learning_unless_chance_dealt_them_out() -> None:
    """Harder problems first, by the same tutor: 100 % of such runs used to have learned."""
    hard_first = outcomes(HARD, EASY)
    for curriculum, reason in ((None, "Fewer than 6 were played on both sides"), (True, "A curriculum chose them")):
        trend = trend_of(hard_first, curriculum)
        assert reason in trend.decides_not
        learning = conclude(replace(GOOD, held_out={}, training=trend))
        assert learning.verdict == NO_EVIDENCE and reason in learning.reasons[1]
    dealt = trend_of(hard_first, curriculum=False)
    assert conclude(replace(GOOD, held_out={}, training=dealt)).verdict == LEARNED
    # Of the 12,870 ways to deal out 16 problems, 2 are as far apart.
    assert dealt.change["p"] < 0.001 and dealt.change["n"] == 16 and dealt.change["ci95"][0] > 0


def test_a_curriculum_shows_no_learning_even_on_the_same_problems() -> None:
    """It plays again what went wrong, and by chance that goes better."""
    trend = trend_of(outcomes(side(*[0.1] * 8), side(*[0.9] * 8)), curriculum=True)
    assert trend.change["p"] < 0.05 and "A curriculum chose them" in trend.decides_not
    assert conclude(replace(GOOD, held_out={}, training=trend)).verdict == NO_EVIDENCE


def test_problems_on_both_sides_are_compared_with_themselves() -> None:
    first, last = side(*[0.1, 0.9] * 4), side(*[0.2, 1.0] * 4)
    trend = trend_of(outcomes(first, last))
    assert trend.change["mean"] == pytest.approx(0.1) and trend.change["p"] == 2 / 2**8 and not trend.decides_not
    trend = trend_of(outcomes(first | {"x": [0.0]}, last | {"y": [1.0]}))
    assert trend.change["n"] == 8, "x and y are not known to be equally hard"
    few = trend_of(outcomes(side(0.1, 0.9), side(0.3, 1.0)))
    assert few.change["ci95"] is None and few.change["p"] == 0.5


def test_problems_in_part_on_both_sides_change_sides_with_themselves() -> None:
    """Four problems on both sides have changed by nothing; of four others it is chance which came first."""
    common = side(*[0.5] * 4)
    trend = trend_of(outcomes(common | {"x": [0.0], "y": [0.0]}, common | {"v": [1.0], "w": [1.0]}), curriculum=False)
    assert trend.change["mean"] == pytest.approx(1 / 3) and trend.change["p"] == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("lessons", [2, 3, 5])
def test_fewer_than_six_lessons_never_give_a_verdict(lessons: int) -> None:
    held_out = {"sampled": estimate(0.5, 0.4, 0.6, lessons)}
    assert conclude(replace(GOOD, held_out=held_out, training=None)).verdict == NO_EVIDENCE
    assert conclude(replace(GOOD, held_out=held_out)).verdict == LEARNED, "by the trend in training"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            estimate(0.3, 0.1, 0.5, p=0.05),
            "did not change by more than chance: +0.300 (95 % interval +0.100 to +0.500, p",
        ),
        (estimate(0.3, -0.1, 0.5), "did not change by more than chance"),
        (estimate(0.3, 0.1, 0.5) | {"ci95": None}, "changed by +0.300, in too few lessons, or too equal ones"),
        (estimate(0.3, 0.1, 0.5) | {"p": None}, "was not tested against chance: measure it again"),
    ],
)
def test_an_interval_and_a_test_are_both_needed(change: dict, says: str) -> None:
    learning = conclude(replace(GOOD, held_out={"sampled": change}))
    assert learning.verdict == NO_EVIDENCE and says in learning.reasons[0]


def test_a_quarter_of_the_batches_on_each_side_and_ten_at_most() -> None:
    steps = [{"a": [step / 100], "b": [step / 100]} for step in range(100)]
    assert trend_of(outcomes(*steps[:9])).batches == 2
    trend = trend_of(outcomes(*steps))
    assert (trend.batches, trend.first, trend.last) == (10, pytest.approx(0.045), pytest.approx(0.945))
    assert trend_of(outcomes({"a": [1.0], "b": [1.0]})) is None
    assert trend_of(outcomes({"a": [0.0]}, {"b": [1.0]})).change["ci95"] is None, "one problem has no spread"


# How far the parameters moved --------------------------------------------------------------------------------------


def trainer_of(model: torch.nn.Module) -> SimpleNamespace:
    return SimpleNamespace(accelerator=Accelerator(cpu=True), model_wrapped=model)


@pytest.mark.parametrize("kind", ["untied", "tied", "fused experts"])
def test_movement_by_hand(kind: str, tmp_path: Path) -> None:
    """Weights that all grow by half have moved by half of their norm."""
    trainer = trainer_of(model_from_folder(kind, tmp_path))
    assert parameter_movement(trainer, str(tmp_path)).relative_norm == 0
    for parameter in trainer.model_wrapped.parameters():
        parameter.data.mul_(1.5)
    movement = parameter_movement(trainer, str(tmp_path))
    assert movement.relative_norm == pytest.approx(0.5) and movement.compared == movement.of


def test_a_start_that_is_gone_or_another_is_said_and_stops_nothing(tmp_path: Path, caplog) -> None:
    trainer = trainer_of(model_from_folder("tied", tmp_path / "start"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"broken")
    assert parameter_movement(trainer, str(tmp_path / "broken")) is None
    (tmp_path / "empty").mkdir()
    assert parameter_movement(trainer, str(tmp_path / "empty")) is None
    assert "cannot be read" in caplog.text and "holds no .safetensors file" in caplog.text


def test_an_adapter_is_measured_by_what_it_adds(tmp_path: Path) -> None:
    start = model_from_folder("untied", tmp_path)
    weight = start.model.layers[0].self_attn.q_proj.weight.detach().clone()
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["layers.0.self_attn.q_proj"]}
    trainer = trainer_of(get_peft_model(start, LoraConfig(**options)))
    assert parameter_movement(trainer, str(tmp_path)).relative_norm == 0, "B begins as 0"
    layer = trainer.model_wrapped.base_model.model.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    added = 2 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach()  # alpha / r
    movement = parameter_movement(trainer, str(tmp_path))
    assert movement.relative_norm == pytest.approx(float(added.norm() / weight.norm()), rel=1e-5)
    assert movement.of == 2 * 2 * 32


# learning.json -----------------------------------------------------------------------------------------------------


def test_what_the_trainer_wrote_down_is_kept_for_the_report(tmp_path: Path) -> None:
    write_training(tmp_path, [step_line(step, 0.5, grad_norm=0.1, frac_reward_zero_std=0.25) for step in (1, 2)])
    for step in range(2):
        records = [record_of(str(i), [], [scored(1, 1, 1)], index=i, reward=step / 2 + i / 100) for i in range(8)]
        write_rollouts(tmp_path, step, 0, [record.model_copy(update={"step": step}) for record in records])
    assert write_learning(tmp_path, Movement(0.01, 5, 5)).learned
    assert write_learning(tmp_path).learned  # a report has no model to compare with
    written = json.loads((tmp_path / "learning.json").read_text())
    assert written["verdict"] == LEARNED and written["figures"]["movement"] == {
        "relative_norm": 0.01,
        "compared": 5,
        "of": 5,
    }
    assert written["figures"]["without_variance"] == 0.25 and written["figures"]["gradient_norm"] == 0.1
    assert written["figures"]["training"]["change"]["mean"] == pytest.approx(0.5)
    assert not write_learning(tmp_path, Movement(0.0, 5, 5)).learned
