"""Rows beside conversations in the real trainer's step: what gets which gradient, and nothing else."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.tokens import AuxSample
from classroom_rl.trainer.grpo.trl_hooks import TrlHooks
from tests.support.offline_trainer import PROBLEMS, OfflineTrainer, conversation, offline_trainer, save_tiny_model

SUPERVISED = ["train.beta=0", "supervisor_model.model_name_or_path=rules"]
CREDIT = ["train.turn_credit.mode=immediate", "train.turn_credit.weight=0.5"]
CORRECTIONS = ["train.corrections.mode=same_step", "train.corrections.weight=0.25"]
LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo")


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
    for place, penalty in zip((0, 2, 4), penalties, strict=True):
        review = Review(None if penalty is None else penalty == 0, "task", penalty, "Why.", "What is right?")
        turns[place] = replace(turns[place], review=review)
    for each in branches:
        if each.kind == "draft":
            draft = Draft("rejected", len(each.ids), Review(False, "task", -1.0))
            turns[each.turn] = replace(turns[each.turn], drafts=(draft,))
    return record.model_copy(update={"branches": branches, "turns": turns, "turn_rewards": {"supervisor": penalties}})


def gradients_by_token(trainer: OfflineTrainer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradient of a micro-batch's loss on the log-prob of every completion token, of shape (rows, tokens)."""
    found = {}
    original = TrlHooks._get_per_token_logps_and_entropies

    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        logps, *rest = original(self, *arguments, **named)
        found["logps"] = logps.detach().requires_grad_()
        self._logps = found["logps"]
        return found["logps"], *rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrlHooks, "_get_per_token_logps_and_entropies", watched)
        trainer.compute_loss(trainer.model, batch).backward()
    return found["logps"].grad


def rows_in(batch: dict[str, torch.Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt ids, completion ids) of each row, without padding."""
    found = []
    for name in range(len(batch["prompt_ids"])):
        parts = (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask"))
        found.append(tuple(tuple(batch[ids][name][batch[mask][name].bool()].tolist()) for ids, mask in parts))
    return found


@settings(max_examples=12)
@given(seed=st.integers(1, 10_000), loss=st.sampled_from(LOSSES), data=st.data())
def test_gradients_are_where_they_may_be_and_nowhere_else(
    seed: int, loss: str, data: st.DataObject, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No policy gradient at a token that was not sampled, no gradient of the cross-entropy at one that is no target;
    and each row of the batch is there once."""
    kinds = st.lists(st.sampled_from(["draft", "policy", "correction"]), max_size=3).map(tuple)
    each = [data.draw(kinds) for _ in range(8)]
    records = {}

    def play(index: int, problem: Problem) -> ConversationRecord:
        records[index] = supervised(index, problem, seed, each[index])
        return records[index]

    folder = tmp_path_factory.mktemp("fuzz")
    trainer = offline_trainer(folder, model, [*SUPERVISED, *CREDIT, *CORRECTIONS, f"train.loss_type={loss}"], play)
    batches = trainer.batch()
    wanted = {
        (tuple(row.prompt_ids), tuple(row.completion_ids)): row
        for record in records.values()
        for row in rows_of(record)
    }
    seen = []
    for batch in batches:
        gradients = gradients_by_token(trainer, batch)
        for key, gradient in zip(rows_in(batch), gradients, strict=True):
            row = wanted.get(key)
            if row is None:  # padding
                assert not gradient.any()
                continue
            seen.append(key)
            allowed = torch.tensor(row.mask) + torch.tensor(row.target)
            assert not gradient[: len(allowed)][allowed == 0].any() and not gradient[len(allowed) :].any()
            if any(row.target):
                assert (gradient[: len(allowed)][torch.tensor(row.target) == 1] < 0).all(), "it makes them likelier"
    assert sorted(seen) == sorted(wanted), "every row once"


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
        own = [0.0, -1.0, 0.0] if index % 2 else [-1.0, 0.0, 0.0]
        return record.model_copy(update={"turn_rewards": {"supervisor": own}})

    trainer = offline_trainer(tmp_path, model, [*SUPERVISED, *CREDIT], play)
    for batch in trainer.batch():
        for advantages, mask in zip(batch["advantages"], batch["tool_mask"] * batch["completion_mask"], strict=True):
            runs = advantages[mask.bool()]
            values = runs.unique_consecutive().tolist()
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


@pytest.mark.parametrize("loss", [each for each in LOSSES if each != "bnpo"])
def test_more_corrections_do_not_thin_out_the_policy_gradient(loss: str, model: Path, tmp_path: Path) -> None:
    """The policy gradient at the sampled tokens is the same with three corrections a conversation as with none. (bnpo
    divides by the tokens of a micro-batch, so it depends on how a batch is cut.)"""

    def sampled(folder: str, kinds: tuple[str, ...]) -> dict[tuple, torch.Tensor]:
        def play(index: int, problem: Problem) -> ConversationRecord:
            return supervised(index, problem, 4, kinds)

        overrides = [*SUPERVISED, *CORRECTIONS, "train.corrections.rows_per_batch=100", f"train.loss_type={loss}"]
        trainer = offline_trainer(tmp_path / folder, model, overrides, play)
        found = {}
        for batch in trainer.batch():
            gradients = gradients_by_token(trainer, batch)
            for key, gradient, mask in zip(rows_in(batch), gradients, batch["tool_mask"], strict=True):
                own = gradient[: len(key[1])][mask[: len(key[1])].bool()]
                if len(own):
                    found[key] = own
        return found

    alone, beside = sampled("alone", ()), sampled("beside", ("correction",) * 3)
    assert alone.keys() == beside.keys() and len(alone) == 8
    for key, gradient in alone.items():
        assert torch.allclose(beside[key], gradient, rtol=1e-4, atol=1e-9)


def test_the_cross_entropy_is_a_mean_over_all_targets(model: Path, tmp_path: Path) -> None:
    """By hand: −μ·τ/N at each of the N target tokens, whatever the rest of the batch is."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        return supervised(index, problem, 4, ("correction", "correction"))

    overrides = [*SUPERVISED, *CORRECTIONS, "teacher_model.vllm.temperature=0.5", "train.corrections.rows_per_batch=99"]
    trainer = offline_trainer(tmp_path, model, overrides, play)
    batches = trainer.batch()
    targets = sum(batch["correction_targets"].sum().item() for batch in batches)
    assert targets == batches[0]["correction_items"].item()
    for batch in batches:
        gradients = gradients_by_token(trainer, batch)[batch["correction_targets"].bool()]
        assert torch.allclose(gradients, torch.full_like(gradients, -0.25 * 0.5 / targets), rtol=1e-5)


def test_the_cross_entropy_may_leave_out_what_the_policy_wrote_itself(model: Path, tmp_path: Path) -> None:
    """Each correction begins with the first two tokens of its message; then come two of its own."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        record = supervised(index, problem, 9, ("correction",))
        [own] = record.branches
        said = record.completion_ids[slice(*record.turns[own.turn].span)]
        own = replace(own, ids=(*said[:2], 498, 499), hint_ids=())
        return record.model_copy(update={"branches": [own]})

    overrides = [*SUPERVISED, *CORRECTIONS, "train.corrections.targets=changed"]
    trainer = offline_trainer(tmp_path, model, overrides, play)
    seen = 0
    for batch in trainer.batch():
        targets, gradients = batch["correction_targets"].bool(), gradients_by_token(trainer, batch)
        for ids, own, gradient in zip(batch["completion_ids"], targets, gradients, strict=True):
            if own.any():
                assert ids[own].tolist() == [498, 499] and (gradient[own] < 0).all() and not gradient[~own].any()
                seen += 1
    assert seen == 8


def test_no_more_corrections_than_configured_are_in_a_step(model: Path, tmp_path: Path) -> None:
    def play(index: int, problem: Problem) -> ConversationRecord:
        return supervised(index, problem, 4, ("correction", "correction"))

    trainer = offline_trainer(
        tmp_path, model, [*SUPERVISED, *CORRECTIONS, "train.corrections.rows_per_batch=3"], play, PROBLEMS
    )
    batches = trainer.batch()
    assert sum(batch["correction_targets"].any(dim=1).sum().item() for batch in batches) == 3
    assert {len(batch["prompt_ids"]) for batch in batches} == {6}, "8 conversations, 3 corrections, 1 of padding"


def test_drafts_beside_a_conversation_without_a_verdict_teach_nothing_and_corrections_do(
    model: Path, tmp_path: Path
) -> None:
    records = {}

    def play(index: int, problem: Problem) -> ConversationRecord:
        nothing = {} if index else {"reward": None, "rewards": {"pedagogical": None}, "verdicts": []}
        records[index] = supervised(index, problem, 4).model_copy(update=nothing)
        return records[index]

    overrides = [*SUPERVISED, *CREDIT, *CORRECTIONS, "judge_model.max_failed_share=1"]
    trainer = offline_trainer(tmp_path, model, overrides, play)
    taught = {}
    for batch in trainer.batch():
        for key, gradient in zip(rows_in(batch), gradients_by_token(trainer, batch), strict=True):
            taught[key] = gradient.any().item()
    rows = rows_of(records[0])
    assert [taught[tuple(row.prompt_ids), tuple(row.completion_ids)] for row in rows] == [False, False, True]
    assert [row.kind for row in rows] == ["policy", "draft", "correction"]
