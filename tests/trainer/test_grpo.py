"""A step of the real trainer: which rows there are, what gets which gradient, and nothing else."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.config.values import ImportanceSamplingMode, LossType
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.tokens import AuxSample
from classroom_rl.trainer.batch import Batch, totals
from classroom_rl.trainer.log_probs import log_probs
from tests.support.offline_trainer import OfflineLoop, conversation, offline_trainer, save_tiny_model

SUPERVISED = ["train.beta=0", "supervisor_model.model_name_or_path=rules"]
CREDIT = ["train.turn_credit.mode=immediate", "train.turn_credit.weight=0.5"]
CORRECTIONS = ["train.corrections.mode=same_step", "train.corrections.weight=0.25"]
LOSSES = get_args(LossType)


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("rows") / "model", world / "blank")


def branch(rng: random.Random, kind: str, turn: int, start: int, reward: float | None = None) -> AuxSample:
    ids = tuple(rng.randrange(20, 500) for _ in range(rng.randrange(1, 6)))
    logprobs = () if kind == "correction" else tuple(-rng.random() - 5.5 for _ in ids)
    hint = tuple(rng.randrange(20, 500) for _ in range(rng.randrange(3))) if kind != "draft" else ()
    own_prompt = tuple(rng.randrange(20, 500) for _ in range(rng.choice([0, 0, 4])))
    start = 0 if own_prompt else start
    return AuxSample(kind, turn, start, ids, logprobs, hint, reward, 0 if kind == "draft" else -1, (), own_prompt)


def supervised(index: int, problem: Problem, seed: int, kinds: tuple[str, ...] = ("draft", "correction")) -> Any:
    """A conversation with penalties, and with these kinds of branches at random places."""
    rng = random.Random(seed * 77 + index)
    record = conversation(index, problem, seed)
    branches, turns = [], list(record.turns)
    for kind in kinds:
        turn = rng.choice([0, 2, 4])
        branches.append(branch(rng, kind, turn, turns[turn].span[0], -1.0 if kind != "correction" else None))
    penalties = [rng.choice([0.0, -0.5, -2.0, None]) for _ in range(3)]
    for turn_index, penalty in zip((0, 2, 4), penalties, strict=True):
        review = Review(None if penalty is None else penalty == 0, "task", penalty, "Why.", "What is right?")
        turns[turn_index] = replace(turns[turn_index], review=review)
    for sample in branches:
        if sample.kind == "draft":
            draft = Draft("rejected", len(sample.ids), Review(False, "task", -1.0))
            turns[sample.turn] = replace(turns[sample.turn], drafts=(draft,))
    return record.model_copy(update={"branches": branches, "turns": turns, "turn_rewards": {"supervisor": penalties}})


def gradients_by_token(trainer: OfflineLoop, batch: Sequence[Batch]) -> list[torch.Tensor]:
    """For each micro-batch the gradient of its loss on the log-prob of every completion token."""
    gradients, batch_totals = [], totals(batch, trainer.accelerator)
    for micro in batch:
        scores = log_probs(trainer.model, micro, micro.wanted_BT, trainer.accelerator)
        logps = scores.logps_BT.detach().requires_grad_()
        trainer.algorithm.loss(replace(scores, logps_BT=logps), micro, batch_totals, first_pass=True).backward()
        gradients.append(logps.grad)
    return gradients


def rows_in(micro: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt ids, completion ids) of each row, without padding."""

    def unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, ...]]:
        return [tuple(row_ids[row_mask.bool()].tolist()) for row_ids, row_mask in zip(ids, mask, strict=True)]

    prompts = unpadded(micro.prompt_ids_BP, micro.prompt_mask_BP)
    return list(zip(prompts, unpadded(micro.completion_ids_BT, micro.completion_mask_BT), strict=True))


@settings(max_examples=12)
@given(seed=st.integers(1, 10_000), loss=st.sampled_from(LOSSES), data=st.data())
def test_gradients_are_where_they_may_be_and_nowhere_else(
    seed: int, loss: str, data: st.DataObject, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No policy gradient at a token that was not sampled, no gradient of the cross-entropy at one that is no target;
    and each row of the batch is there once."""
    kinds = st.lists(st.sampled_from(["draft", "policy", "correction"]), max_size=3).map(tuple)
    kinds_by_index = [data.draw(kinds) for _ in range(8)]
    records = {}

    def play(index: int, problem: Problem) -> ConversationRecord:
        records[index] = supervised(index, problem, seed, kinds_by_index[index])
        return records[index]

    folder = tmp_path_factory.mktemp("fuzz")
    options = [*SUPERVISED, *CREDIT, *CORRECTIONS, "train.corrections.rows_per_batch=24", f"train.loss_type={loss}"]
    trainer = offline_trainer(folder, model, options, play)
    batch = trainer.batch()
    rows = {
        (tuple(row.prompt_ids), tuple(row.completion_ids)): row
        for record in records.values()
        for row in rows_of(record)
    }
    seen = []
    for micro, gradients in zip(batch, gradients_by_token(trainer, batch), strict=True):
        for key, gradient in zip(rows_in(micro), gradients, strict=True):
            seen.append(key)
            sampled, target = (torch.tensor(mask).bool() for mask in (rows[key].mask, rows[key].target))
            length = len(sampled)
            assert not gradient[:length][~(sampled | target)].any() and not gradient[length:].any()
            assert (gradient[:length][target] < 0).all(), "it makes them likelier"
    assert sorted(seen) == sorted(rows), "every row once"


def test_a_message_behind_a_prompt_of_its_own_is_a_row_behind_that_alone() -> None:
    record = conversation(0, Problem.of("lesson", ""), seed=1)
    sampled = AuxSample("policy", 2, 0, (31, 32), (-0.5, -0.25), (), prompt_ids=(20, 21, 22))
    target = AuxSample("correction", 2, 0, (31, 40), prompt_ids=(20, 21, 22))
    _, policy, correction = rows_of(record.model_copy(update={"branches": [sampled, target]}))
    assert (policy.prompt_ids, policy.completion_ids, policy.logprobs) == ([20, 21, 22], [31, 32], [-0.5, -0.25])
    assert (policy.message, policy.mask, policy.messages) == (1, [1, 1], [1, 1])
    assert (correction.prompt_ids, correction.completion_ids, correction.target) == ([20, 21, 22], [31, 40], [1, 1])
    assert correction.unchanged == 1


def test_turn_credit_puts_opposite_signs_on_a_good_and_a_bad_turn(model: Path, tmp_path: Path) -> None:
    """Of a real batch whose outcomes are all equal, so that only the turns differ."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        record = conversation(index, problem, seed=5, rewards={"pedagogical": 0.5}, reward=0.5)
        penalties = [0.0, -1.0, 0.0] if index % 2 else [-1.0, 0.0, 0.0]
        return record.model_copy(update={"turn_rewards": {"supervisor": penalties}})

    trainer = offline_trainer(tmp_path, model, [*SUPERVISED, *CREDIT], play)
    for micro in trainer.batch():
        for advantages, mask in zip(micro.advantages_BT, micro.mask_BT, strict=True):
            values = advantages[mask].unique_consecutive().tolist()
            assert values in ([0.25, -0.25, 0.0], [-0.25, 0.25, 0.0])


def test_without_weight_corrections_change_nothing_at_all(model: Path, tmp_path: Path) -> None:
    """μ = 0 equals no corrections, to the last bit."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        return supervised(index, problem, 4, ("correction",))

    def found(folder: str, *more: str) -> tuple[float, dict[str, torch.Tensor]]:
        trainer = offline_trainer(tmp_path / folder, model, [*SUPERVISED, *CREDIT, *more], play)
        return trainer.loss_and_gradients(trainer.batch())

    loss, gradients = found("none")
    zero_loss, zero_gradients = found("zero", "train.corrections.mode=same_step", "train.corrections.weight=0")
    assert zero_loss == loss
    assert all(torch.equal(zero_gradients[name], gradients[name]) for name in gradients)
    some_loss, some_gradients = found("some", *CORRECTIONS)
    assert some_loss != loss and not torch.equal(some_gradients["model.norm.weight"], gradients["model.norm.weight"])


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "bnpo"])
def test_more_corrections_do_not_thin_out_the_policy_gradient(loss: str, model: Path, tmp_path: Path) -> None:
    """The policy gradient at the sampled tokens is the same with three corrections a conversation as with none. (bnpo
    divides by the tokens of a micro-batch, so it depends on how a batch is cut.)"""

    def sampled(folder: str, kinds: tuple[str, ...]) -> dict[tuple, torch.Tensor]:
        def play(index: int, problem: Problem) -> ConversationRecord:
            return supervised(index, problem, 4, kinds)

        overrides = [*SUPERVISED, *CORRECTIONS, "train.corrections.rows_per_batch=100", f"train.loss_type={loss}"]
        trainer = offline_trainer(tmp_path / folder, model, overrides, play)
        batch, by_row = trainer.batch(), {}
        for micro, gradients in zip(batch, gradients_by_token(trainer, batch), strict=True):
            for key, gradient, mask in zip(rows_in(micro), gradients, micro.mask_BT, strict=True):
                if mask.any():
                    by_row[key] = gradient[mask]
        return by_row

    alone, with_corrections = sampled("alone", ()), sampled("beside", ("correction",) * 3)
    assert alone.keys() == with_corrections.keys() and len(alone) == 8
    for key, gradient in alone.items():
        assert torch.allclose(with_corrections[key], gradient, rtol=1e-4, atol=1e-9)


def test_the_cross_entropy_is_a_mean_over_all_targets(model: Path, tmp_path: Path) -> None:
    """By hand: −μ·τ/N at each of the N target tokens, whatever the rest of the batch is."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        return supervised(index, problem, 4, ("correction", "correction"))

    overrides = [*SUPERVISED, *CORRECTIONS, "teacher_model.vllm.temperature=0.5", "train.corrections.rows_per_batch=99"]
    trainer = offline_trainer(tmp_path, model, overrides, play)
    batch = trainer.batch()
    targets = sum(micro.target_BT.sum().item() for micro in batch)
    assert targets == totals(batch, trainer.accelerator).targets > 0
    for micro, gradients in zip(batch, gradients_by_token(trainer, batch), strict=True):
        target_gradients = gradients[micro.target_BT]
        assert torch.allclose(target_gradients, torch.full_like(target_gradients, -0.25 * 0.5 / targets), rtol=1e-5)


def test_the_cross_entropy_may_leave_out_what_the_policy_wrote_itself(model: Path, tmp_path: Path) -> None:
    """Each correction begins with the first two tokens of its message; then come two of its own."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        record = supervised(index, problem, 9, ("correction",))
        [correction] = record.branches
        message_ids = record.completion_ids[slice(*record.turns[correction.turn].span)]
        correction = replace(correction, ids=(*message_ids[:2], 498, 499), hint_ids=())
        return record.model_copy(update={"branches": [correction]})

    overrides = [*SUPERVISED, *CORRECTIONS, "train.corrections.targets=changed"]
    trainer = offline_trainer(tmp_path, model, overrides, play)
    batch, seen = trainer.batch(), 0
    for micro, gradients in zip(batch, gradients_by_token(trainer, batch), strict=True):
        for ids, mask, gradient in zip(micro.completion_ids_BT, micro.target_BT, gradients, strict=True):
            if mask.any():
                assert ids[mask].tolist() == [498, 499] and (gradient[mask] < 0).all() and not gradient[~mask].any()
                seen += 1
    assert seen == 8


def test_no_more_corrections_than_configured_are_in_a_step(model: Path, tmp_path: Path) -> None:
    def play(index: int, problem: Problem) -> ConversationRecord:
        return supervised(index, problem, 4, ("correction", "correction"))

    trainer = offline_trainer(tmp_path, model, [*SUPERVISED, *CORRECTIONS, "train.corrections.rows_per_batch=3"], play)
    batch = trainer.batch()
    assert sum(micro.target_BT.any(dim=1).sum().item() for micro in batch) == 3
    assert [len(micro.mask_BT) for micro in batch] == [6, 5], "8 conversations and 3 corrections"


def test_drafts_beside_a_conversation_without_a_verdict_teach_nothing_and_corrections_do(
    model: Path, tmp_path: Path
) -> None:
    records = {}

    def play(index: int, problem: Problem) -> ConversationRecord:
        nothing = {} if index else NO_VERDICT
        records[index] = supervised(index, problem, 4).model_copy(update=nothing)
        return records[index]

    overrides = [*SUPERVISED, *CREDIT, *CORRECTIONS, "judge_model.max_failed_share=1"]
    trainer = offline_trainer(tmp_path, model, overrides, play)
    batch, taught = trainer.batch(), {}
    for micro, gradients in zip(batch, gradients_by_token(trainer, batch), strict=True):
        for key, gradient in zip(rows_in(micro), gradients, strict=True):
            taught[key] = gradient.any().item()
    rows = rows_of(records[0])
    assert [taught[tuple(row.prompt_ids), tuple(row.completion_ids)] for row in rows] == [False, False, True]
    assert [row.kind for row in rows] == ["policy", "draft", "correction"]


# Conversations without a verdict -----------------------------------------------------------------------------------

UNJUDGED = ["judge_model.max_failed_share=1", "train.beta=0.1"]
NO_VERDICT = {"reward": None, "rewards": {"pedagogical": None}, "verdicts": []}


def unjudged(**changes: Any) -> Callable[[int, Problem], ConversationRecord]:
    """Conversations of which three have no verdict; the changes are theirs alone."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        record = conversation(index, problem, seed=1)
        return record.model_copy(update=NO_VERDICT | changes) if index in (1, 2, 4) else record

    return play


def with_a_distant_reference(batch: Sequence[Batch]) -> list[Batch]:
    """The same, but the reference finds every token e^0.7 times less likely."""
    return [replace(micro, ref_logps_BT=micro.ref_logps_BT - 0.7) for micro in batch]


@pytest.mark.parametrize("rows", [1, 4], ids=["rows of their own", "shared micro-batches"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_a_mean_over_conversations_with_a_verdict_alone(
    loss: str, rows: int, model: Path, tmp_path: Path
) -> None:
    """The gradient at a judged conversation's tokens is that of a batch of the judged ones: −A of its token and the
    KL's, divided by their tokens, or by their rows. Those without a verdict have none, of the KL either."""
    more = [f"train.per_device_train_batch_size={rows}", "train.importance_sampling_correction=false"]
    trainer = offline_trainer(tmp_path, model, [*UNJUDGED, f"train.loss_type={loss}", *more], unjudged())
    batch = with_a_distant_reference(trainer.batch())
    records = [unjudged()(index, Problem.of(f"lesson {index}", "")) for index in range(8)]
    lengths = {tuple(record.prompt_ids): sum(record.mask) for record in records if record.reward is not None}
    seen = []
    for micro, gradients in zip(batch, gradients_by_token(trainer, batch), strict=True):
        judged = [lengths.get(prompt, 0) for prompt, _ in rows_in(micro)]
        for (prompt, _), sampled, gradient, advantages, mask in zip(
            rows_in(micro), judged, gradients, micro.advantages_BT, micro.mask_BT, strict=True
        ):
            assert mask.sum() == sampled and not gradient[~mask].any()
            if not sampled:
                continue
            divisor = {
                "grpo": len(lengths) * sampled,
                "sapo": len(lengths) * sampled,
                "dr_grpo": len(lengths) * trainer.algorithm.options.max_completion_length,
                "bnpo": sum(judged) * sum(bool(micro_batch.mask_BT.any()) for micro_batch in batch),
            }.get(loss, sum(lengths.values()))
            expected = (-advantages + 0.1 * 0.7)[mask] / divisor
            assert torch.allclose(gradient[mask], expected, rtol=1e-4, atol=1e-8)
            seen.append(prompt)
    assert sorted(seen) == sorted(lengths) and len(seen) == 5


def test_what_a_conversation_without_a_verdict_says_changes_nothing(model: Path, tmp_path: Path) -> None:
    """Neither the loss, nor a gradient, nor the logged KL, nor the mismatch."""
    results = []
    for name, changes in (("one", {}), ("two", {"completion_ids": [7] * 9, "mask": [1] * 9, "logprobs": [-9.0] * 9})):
        trainer = offline_trainer(tmp_path / name, model, [*UNJUDGED, "train.mu=2"], unjudged(**changes))
        loss, gradients, logged = learned(trainer, with_a_distant_reference(trainer.batch()))
        results.append((gradients, [loss, logged["kl"], logged["mismatch/mean_abs_logprob_diff"]]))
    (gradients, numbers), (other_gradients, other_numbers) = results
    assert numbers == pytest.approx(other_numbers, abs=1e-6) and numbers[1] > 0.1
    assert all(torch.allclose(gradients[key], other_gradients[key], atol=1e-6) for key in gradients)


def learned(trainer: OfflineLoop, batch: list[Batch]) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Loss, gradients and figures of a batch."""
    logged: dict[str, float] = {}
    trainer.keep_figures = logged.update
    return *trainer.loss_and_gradients(batch), logged


def test_a_batch_without_any_verdict_teaches_nothing(model: Path, tmp_path: Path) -> None:
    overrides = [*UNJUDGED, "train.loss_type=grpo"]
    trainer = offline_trainer(tmp_path, model, overrides, lambda i, problem: conversation(i, problem, 1, **NO_VERDICT))
    loss, gradients = trainer.loss_and_gradients(trainer.batch())
    assert loss == 0 and math.isfinite(loss) and not any(gradient.any() for gradient in gradients.values())


# The log-probs of before the step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", get_args(ImportanceSamplingMode))
@pytest.mark.parametrize("corrected", ["true", "false"])
def test_one_forward_pass_gives_the_same_loss_gradient_and_figures(
    mode: str, corrected: str, model: Path, tmp_path: Path
) -> None:
    """As if the old log-probs had been computed."""
    overrides = [
        f"train.importance_sampling_mode={mode}",
        "train.importance_sampling_clip_max=1.1",
        f"train.importance_sampling_correction={corrected}",
        "train.per_device_train_batch_size=2",
    ]
    results = []
    for needed in (False, True):
        trainer = offline_trainer(tmp_path / str(needed), model, overrides)
        trainer.algorithm.needs_old_log_probs = needed
        passes: list[int] = []
        trainer.model.register_forward_hook(lambda *_, own=passes: own.append(1))
        results.append((*learned(trainer, trainer.batch()), len(passes)))
    (loss, gradients, figures, passes), (old_loss, old_gradients, old_figures, old_passes) = results
    assert (passes, old_passes) == (4, 8)
    assert loss == pytest.approx(old_loss, abs=1e-6)
    largest = max(gradient.abs().max() for gradient in old_gradients.values())
    assert largest > 1e-6
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, old_gradients[name], rtol=0, atol=1e-4 * largest), name
    assert figures == pytest.approx(old_figures, abs=1e-5)
    assert sum(name.startswith(("sampling/", "mismatch/")) for name in figures) == 7
    assert figures["mismatch/mean_abs_logprob_diff"] > 0.01


@pytest.mark.parametrize("overrides", [["train.mu=2"], ["teacher_model.lora={enable: true, dropout: 0.1}"]])
def test_old_log_probs_are_computed_where_the_loss_has_others(
    overrides: list[str], model: Path, tmp_path: Path
) -> None:
    trainer = offline_trainer(tmp_path, model, overrides)
    assert all(micro.old_logps_BT is not None for micro in trainer.batch())
