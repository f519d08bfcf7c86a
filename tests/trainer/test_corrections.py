"""The correction set, and the passes over it, with the real trainer on scripted conversations."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from classroom_rl.config.train_rl import CorrectionsConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import DataError
from classroom_rl.results.corrections import (
    CORRECTIONS_NAME,
    Correction,
    CorrectionDecision,
    append_decision,
    read_corrections,
)
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.tokens import AuxSample
from classroom_rl.trainer.correction_set import CURSOR_NAME, CorrectionSet, corrections_of
from classroom_rl.trainer.corrections import CorrectionPasses, _batches, learning_rate, run_pass
from tests.support.offline_trainer import PROBLEMS, OfflineLoop, conversation, offline_trainer, save_tiny_model

PASS = ["supervisor_model.model_name_or_path=rules", "train.corrections.mode=pass", "train.beta=0"]
TARGET = (31, 32, 33, 5)


def corrected(index: int, problem: Problem, seed: int = 1, step: int = 0) -> ConversationRecord:
    """A conversation whose second message was corrected once, and whose third once for a draft and once for itself."""
    record = conversation(index, problem, seed, step=step, id=f"r{step}-{index:04d}")
    turns = list(record.turns)

    def wrong(said: str) -> Review:
        return Review(False, "leak", -2.0, f"Not {said}.", f"{said} is right?", source="rules")

    turns[2] = replace(turns[2], review=wrong("two"))
    turns[4] = replace(turns[4], review=wrong("four"), drafts=(Draft("a draft", 2, wrong("draft")),))
    second, third = turns[2].span[0], turns[4].span[0]
    branches = [
        AuxSample("correction", 2, second, TARGET),
        AuxSample("draft", 4, third, (41, 42), (-0.5, -0.25), reward=-2.0, draft=0),
        AuxSample("correction", 4, third, (*TARGET, 6), hint_ids=(9,), draft=0),
        AuxSample("correction", 4, third, (*TARGET, 7), draft=-1),
    ]
    return record.model_copy(update={"turns": turns, "branches": branches})


def a_set(folder: Path, capacity: int = 100, **more: Any) -> CorrectionSet:
    return CorrectionSet(folder, capacity, "tokenizer", lambda text: [len(text), 5], **more)


def _without_logprobs(corrections: list[Correction]) -> list[Correction]:
    """The file keeps log-probs in single precision."""
    return [replace(correction, draft_logprobs=[]) for correction in corrections]


def test_a_correction_holds_what_it_is_about() -> None:
    record = corrected(0, PROBLEMS[0])
    one, draft, other = corrections_of(record)
    start, end = record.turns[2].span
    assert one.prompt_ids == [*record.prompt_ids, *record.completion_ids[:start]]
    assert one.draft_ids == record.completion_ids[start:end] and one.draft_logprobs == record.logprobs[start:end]
    assert (one.target_text, one.target_ids, one.category, one.critique) == (
        *("two is right?", list(TARGET)),
        *("leak", "Not two."),
    )
    assert draft.draft_ids == [41, 42] and draft.target_text == "draft is right?" and draft.prompt_ids[-1] == 9
    assert (draft.turn, draft.draft, other.turn, other.draft) == (4, 0, 4, -1)
    assert other.draft_ids == record.completion_ids[slice(*record.turns[4].span)]


def mended(record: ConversationRecord, equal: int, thoughts: int = 0) -> ConversationRecord:
    """The record with one correction that begins as its second message does, behind some of its tokens as thoughts."""
    start, end = record.turns[2].span
    message_ids = record.completion_ids[start:end]
    target = (*message_ids[thoughts : thoughts + equal], 499, 5)
    branch = AuxSample("correction", 2, start, target, hint_ids=tuple(message_ids[:thoughts]))
    return record.model_copy(update={"branches": [branch]})


@pytest.mark.parametrize(("equal", "thoughts"), [(0, 0), (2, 0), (1, 1)])
def test_what_the_policy_wrote_itself_is_known(equal: int, thoughts: int) -> None:
    record = mended(corrected(0, PROBLEMS[0]), equal, thoughts)
    [correction], [_, row] = corrections_of(record), rows_of(record)
    assert correction.unchanged == row.unchanged == equal
    [branch] = record.branches
    same = replace(branch, ids=tuple(correction.draft_ids[thoughts:]))
    [correction] = corrections_of(record.model_copy(update={"branches": [same]}))
    assert correction.unchanged == len(correction.target_ids) - 1, "one token is always trained on"


def test_the_file_holds_the_set_and_comes_back(tmp_path: Path) -> None:
    corrections = a_set(tmp_path)
    corrections.add(Accelerator(cpu=True), 0, [corrected(0, PROBLEMS[0])])
    corrections.add(Accelerator(cpu=True), 1, [corrected(0, PROBLEMS[1], step=1)])
    stored, fingerprint = read_corrections(tmp_path / CORRECTIONS_NAME)
    assert fingerprint == "tokenizer" and [correction.step for correction in stored] == [0, 0, 0, 1, 1, 1]
    assert _without_logprobs(stored) == _without_logprobs(corrections.waiting(Accelerator(cpu=True)))
    assert stored[0].draft_logprobs == pytest.approx(corrections.waiting(Accelerator(cpu=True))[0].draft_logprobs)


def test_a_step_that_is_played_again_replaces_its_corrections(tmp_path: Path) -> None:
    accelerator, corrections = Accelerator(cpu=True), a_set(tmp_path)
    for step in (0, 1, 2):
        corrections.add(accelerator, step, [corrected(0, PROBLEMS[0], step=step)])
    again = a_set(tmp_path, resumed_step=1)
    assert [correction.step for correction in again.waiting(accelerator)] == [0, 0, 0]
    again.add(accelerator, 1, [corrected(1, PROBLEMS[0], step=1)])
    assert [correction.conversation for correction in again.waiting(accelerator)][3:] == ["r1-0001"] * 3
    new_run = a_set(tmp_path)
    assert new_run.waiting(accelerator) == []


def test_the_cursor_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    accelerator, corrections = Accelerator(cpu=True), a_set(tmp_path)
    for step in (0, 1):
        corrections.add(accelerator, step, [corrected(0, PROBLEMS[0], step=step)])
    corrections.passed(1, 3)
    assert [correction.step for correction in corrections.waiting(accelerator)] == [1, 1, 1] and corrections.count == 3
    corrections.save_cursor(tmp_path)
    assert json.loads((tmp_path / CURSOR_NAME).read_text()) == {"passes": 1, "examples": 3, "next_step": 1}
    again = a_set(tmp_path, cursor_of=tmp_path, resumed_step=2)
    assert again.cursor == corrections.cursor
    assert _without_logprobs(again.waiting(accelerator)) == _without_logprobs(corrections.waiting(accelerator))
    assert a_set(tmp_path, cursor_of=tmp_path / "older").cursor.passes == 0


def test_the_newest_corrections_wait_if_there_are_too_many(tmp_path: Path) -> None:
    accelerator, corrections = Accelerator(cpu=True), a_set(tmp_path, capacity=4)
    for step in range(5):
        corrections.add(accelerator, step, [corrected(0, PROBLEMS[0], step=step)])
    assert [entry.step for entry in corrections.waiting(accelerator)] == [3, 4, 4, 4] and corrections.count == 4


def test_earlier_corrections_are_drawn_again(tmp_path: Path) -> None:
    accelerator, corrections = Accelerator(cpu=True), a_set(tmp_path)
    for step in range(4):
        corrections.add(accelerator, step, [corrected(0, PROBLEMS[0], step=step)])
    assert corrections.earlier(accelerator, 5, seed=1) == [], "nothing was in a pass yet"
    corrections.passed(3, 9)
    drawn = corrections.earlier(accelerator, 5, seed=1)
    assert len(drawn) == 5 and all(correction.step < 3 for correction in drawn)
    assert len({(correction.step, correction.turn, correction.draft) for correction in drawn}) == 5, "none twice"
    assert drawn == corrections.earlier(accelerator, 5, seed=1) != corrections.earlier(accelerator, 5, seed=2)
    assert len(corrections.earlier(accelerator, 100, seed=1)) == 9
    again = a_set(tmp_path, resumed_step=4)
    again.passed(3, 9)
    assert _without_logprobs(again.earlier(accelerator, 5, seed=1)) == _without_logprobs(drawn), "after a crash, too"


def test_what_people_decide_counts(tmp_path: Path) -> None:
    """The first correction is rejected, the second edited, the third accepted; a decision about other words is none."""
    accelerator, corrections = Accelerator(cpu=True), a_set(tmp_path)
    corrections.add(accelerator, 0, [corrected(0, PROBLEMS[0]), corrected(1, PROBLEMS[0])])

    def decide(turn: int, draft: int, decision: str, conversation: str = "r0-0000", **more: Any) -> None:
        about = {"time": 1.0, "conversation": conversation, "turn": turn, "draft": draft, "decision": decision}
        append_decision(tmp_path, CorrectionDecision(**about, **more))

    decide(2, -1, "reject", correction="two is right?")
    decide(4, 0, "edit", text="What else?")
    decide(4, -1, "accept")
    decide(2, -1, "reject", "r0-0001", correction="words of a conversation that was played before")
    edited, accepted, *untouched = corrections.waiting(accelerator)
    assert (edited.target_text, edited.target_ids, edited.source) == ("What else?", [10, 5], "human")
    assert edited.prompt_ids == corrections_of(corrected(0, PROBLEMS[0]))[1].prompt_ids
    assert (accepted.target_text, accepted.source) == ("four is right?", "rules")
    assert untouched == corrections_of(corrected(1, PROBLEMS[0]))


@given(
    count=st.integers(1, 50),
    processes=st.integers(1, 4),
    batch=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_pass_trains_on_every_correction_once_an_epoch(
    count: int, processes: int, batch: int, epochs: int, seed: int
) -> None:
    corrections = [Correction(str(i), 0, 0, -1, "", [], [], [], "", [], "", "", "") for i in range(count)]
    shares = list(_batches(corrections, epochs, batch * processes, seed))
    on_ranks = [correction for share in shares for rank in range(processes) for correction in share[rank::processes]]
    assert sorted(correction.conversation for correction in on_ranks) == sorted(
        str(i) for i in range(count) for _ in range(epochs)
    )
    assert all(len(share[rank::processes]) <= batch for share in shares for rank in range(processes))


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("corrections") / "model", world / "blank")


def trained(folder: Path, model: Path, *overrides: str) -> OfflineLoop:
    """A trainer that has played a batch and is about to run a pass."""
    trainer = offline_trainer(folder, model, [*PASS, *overrides], corrected)
    trainer.batch()
    trainer.create_scheduler(100)
    return trainer


@torch.no_grad()
def log_probs_of(trainer: OfflineLoop, correction: Correction) -> torch.Tensor:
    """Of each target token, from the model's logits."""
    target = torch.tensor(correction.target_ids)
    ids = torch.tensor([[*correction.prompt_ids, *correction.target_ids]])
    logps = trainer.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return logps[-len(target) :].gather(1, target.unsqueeze(1)).squeeze(1)


def log_prob(trainer: OfflineLoop, corrections: list[Correction]) -> float:
    return torch.cat([log_probs_of(trainer, correction) for correction in corrections]).mean().item()


def test_a_pass_makes_the_corrections_likelier(model: Path, tmp_path: Path) -> None:
    trainer = trained(tmp_path, model)
    corrections = trainer.corrections.waiting(trainer.accelerator)
    before = log_prob(trainer, corrections)
    options = CorrectionsConfig(epochs=2, learning_rate=1e-2, max_kl=1e6)
    result = run_pass(trainer, corrections, options, batch=4, seed=1)
    assert len(corrections) == 24 and result.examples == 48 and result.steps == 12 and not result.stopped
    assert log_prob(trainer, corrections) > before + 1 and result.last_loss < result.first_loss - 1
    assert result.first_loss == pytest.approx(-before, abs=0.5) and result.kl > 0


def test_a_pass_may_train_on_changed_tokens_alone(model: Path, tmp_path: Path) -> None:
    trainer = trained(tmp_path, model)
    corrections = corrections_of(mended(corrected(0, PROBLEMS[0]), 2)) + corrections_of(corrected(1, PROBLEMS[1]))
    logps = [log_probs_of(trainer, correction) for correction in corrections]
    for targets, trained_on in (("whole", logps), ("changed", [logps[0][2:], *logps[1:]])):
        options = CorrectionsConfig(learning_rate=0.0, targets=targets)
        result = run_pass(trainer, corrections, options, batch=4, seed=1)
        assert result.first_loss == pytest.approx(-torch.cat(trained_on).mean().item(), rel=1e-4)


def test_max_kl_stops_a_pass(model: Path, tmp_path: Path) -> None:
    """At a learning rate far too high, the first step moves the policy too far, and is the last."""
    trainer = trained(tmp_path, model)
    corrections = trainer.corrections.waiting(trainer.accelerator)
    result = run_pass(trainer, corrections, CorrectionsConfig(learning_rate=1.0, max_kl=0.05), batch=4, seed=1)
    assert result.stopped and result.steps == 1 and result.kl > 0.05
    trainer = trained(tmp_path / "slow", model)
    result = run_pass(trainer, corrections, CorrectionsConfig(learning_rate=1e-6, max_kl=0.05), batch=4, seed=1)
    assert not result.stopped and result.steps == 6 and 0 <= result.kl < 0.05


def test_a_pass_leaves_rate_and_schedule_as_they_were(model: Path, tmp_path: Path) -> None:
    trainer = trained(tmp_path, model, "train.lr_scheduler_type=cosine", "train.learning_rate=0.5")
    trainer.lr_scheduler.step()
    before = (trainer.optimizer.param_groups[0]["lr"], trainer.lr_scheduler.state_dict())
    with learning_rate(trainer, 1e-3):
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {1e-3}
        trainer.lr_scheduler.step()
    assert (trainer.optimizer.param_groups[0]["lr"], trainer.lr_scheduler.state_dict()) == before
    with learning_rate(trainer, None):
        assert trainer.optimizer.param_groups[0]["lr"] == before[0]


def test_a_pass_with_a_rate_of_zero_changes_no_weight(model: Path, tmp_path: Path) -> None:
    trainer = trained(tmp_path, model)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    corrections = trainer.corrections.waiting(trainer.accelerator)
    result = run_pass(trainer, corrections, CorrectionsConfig(learning_rate=0.0), batch=4, seed=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert result.kl == 0 and result.steps == 6


def end_step(trainer: OfflineLoop, step: int, **options: Any) -> None:
    """What the trainer does behind an optimizer step, with these options of its passes."""
    config = deepcopy(trainer.run_config)
    config.train.corrections = CorrectionsConfig(**options)
    passes = CorrectionPasses(trainer, config)
    passes.on_step_end(trainer.args, TrainerState(global_step=step), TrainerControl())


@pytest.mark.parametrize(
    ("step", "least", "runs"), [(4, 10, True), (3, 10, False), (4, 25, False)], ids=["due", "not due", "too few"]
)
def test_passes_run_when_they_are_due(step: int, least: int, runs: bool, model: Path, tmp_path: Path) -> None:
    """An interval of 3 steps with two steps a batch: every fourth step."""
    trainer = trained(tmp_path, model, "train.mu=2")
    end_step(trainer, step, interval=3, min_examples=least, learning_rate=1e-4)
    assert (trainer.corrections.cursor.passes, trainer.corrections.cursor.next_step) == ((1, 4) if runs else (0, 0))
    assert ("corrections/pass_kl" in trainer._figures) == runs
    if runs:
        assert trainer.corrections.waiting(trainer.accelerator) == [], "a new set has begun"


@pytest.mark.parametrize("own_rate", [None, 1e-4])
def test_no_pass_runs_at_the_end_of_a_schedule_that_falls_to_0(own_rate: float | None, model: Path, tmp_path: Path):
    trainer = trained(tmp_path, model)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    waiting = len(trainer.corrections.waiting(trainer.accelerator))
    end_step(trainer, 2, interval=1, min_examples=1, learning_rate=own_rate)
    assert trainer.corrections.cursor.passes == (0 if own_rate is None else 1)
    assert len(trainer.corrections.waiting(trainer.accelerator)) == (waiting if own_rate is None else 0)


def test_a_pass_takes_earlier_corrections_again(model: Path, tmp_path: Path) -> None:
    trainer = trained(tmp_path, model)
    corrections = trainer.corrections
    corrections.passed(1, len(corrections.waiting(trainer.accelerator)))
    before = corrections.cursor.examples
    corrections.add(trainer.accelerator, 1, [corrected(index, PROBLEMS[0], step=1) for index in (0, 1)])
    end_step(trainer, 2, interval=1, min_examples=1, learning_rate=1e-4, replay=0.5)
    assert corrections.cursor.examples - before == 6 + 3


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / CORRECTIONS_NAME).write_bytes(b"no parquet")
    with pytest.raises(DataError, match=CORRECTIONS_NAME):
        a_set(tmp_path, resumed_step=3)
