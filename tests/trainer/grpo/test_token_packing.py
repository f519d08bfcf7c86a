"""Micro-batches filled by tokens: the same gradient as with rows, and no micro-batch above the limit."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.problem import Problem
from classroom_rl.trainer.grpo.log_probs import pack_rows, split_to
from tests.support.offline_trainer import conversation, offline_trainer, save_tiny_model

LIMIT = 150
lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 400)), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("packing") / "model", world / "blank")


def play(index: int, problem: Problem) -> ConversationRecord:
    """Conversations of uneven length: the later ones are cut to a part, and one prompt is longer."""
    record = conversation(index, problem, seed=3)
    kept = len(record.completion_ids) - 3 * index if index % 2 else len(record.completion_ids)
    prompt = record.prompt_ids * 4 if index == 5 else record.prompt_ids
    cut = {name: getattr(record, name)[:kept] for name in ("completion_ids", "mask", "logprobs")}
    return record.model_copy(update={**cut, "prompt_ids": prompt})


@given(rows=lengths, limit=st.integers(1, 3000), more=st.integers(0, 5))
def test_every_row_is_in_one_micro_batch_within_the_limit(rows: list, limit: int, more: int) -> None:
    packs = pack_rows(*zip(*rows, strict=True), limit)
    assert packs == pack_rows(*zip(*rows, strict=True), limit)
    split = split_to(packs, min(len(packs) + more, len(rows)))
    assert len(split) == min(len(packs) + more, len(rows))
    for found in (packs, split):
        assert sorted(row for pack in found for row in pack) == list(range(len(rows)))
        for pack in found:
            width = max(rows[row][0] for row in pack) + max(rows[row][1] for row in pack)
            assert len(pack) == 1 or (pack and len(pack) * width <= limit)


def test_rows_of_like_length_go_together() -> None:
    assert pack_rows([10] * 5, [90, 10, 88, 12, 40], limit=200) == [[0, 2], [4, 3, 1]]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "cispo", "sapo"])
@pytest.mark.parametrize("groups", ["keep", "drop"])
def test_gradients_are_those_of_micro_batches_of_rows(loss: str, groups: str, model: Path, tmp_path: Path) -> None:
    """With a reference model, which is scored in packs, too; under `drop` one group teaches nothing."""

    def uneven(index: int, problem: Problem) -> ConversationRecord:
        record = play(index, problem)
        equal = {"reward": 0.5, "rewards": {"pedagogical": 0.5}}
        return record.model_copy(update=equal) if groups == "drop" and index < 4 else record

    found = []
    for name, more in (("rows", ["train.per_device_train_batch_size=4"]), ("tokens", [])):
        own = [f"train.loss_type={loss}", "train.beta=0.1", f"train.groups_without_variance={groups}", *more]
        own += [f"train.max_tokens_per_micro_batch={LIMIT}"] if name == "tokens" else []
        own += ["train.epsilon_high=5"] if loss == "cispo" else []
        trainer = offline_trainer(tmp_path / name, model, own, uneven)
        batches = trainer.batch()
        found.append(trainer.loss_and_gradients(batches))
        real = [batch for batch in batches if batch is not None]
    (loss_rows, by_rows), (loss_tokens, by_tokens) = found
    assert batches[-1] is not None and 1 < len(real) < 8 and len({len(batch["prompt_ids"]) for batch in real}) > 1
    assert loss_tokens == pytest.approx(loss_rows, abs=1e-6)
    largest = max(each.abs().max() for each in by_rows.values())
    assert largest > 1e-4
    for name, gradient in by_rows.items():
        assert torch.allclose(by_tokens[name], gradient, rtol=0, atol=min(1e-6, 1e-4 * largest)), name


def test_rows_of_a_micro_batch_bind_nobody_where_tokens_fill_it() -> None:
    batch = ["train.number_of_problems_per_batch=3", "train.num_samples_per_problem=3"]
    with pytest.raises(ConfigError, match="per_device_train_batch_size"):
        load(TrainRLConfig, "train_rl", batch, check_train_rl)
    tokens = [*batch, "train.max_tokens_per_micro_batch=100"]
    assert load(TrainRLConfig, "train_rl", tokens, check_train_rl).train.max_tokens_per_micro_batch == 100


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("train.loss_type=bnpo", "takes the mean of each micro-batch"),
        ("train.algorithm=ppo", "train.algorithm=ppo divides"),
        ("supervisor_model.model_name_or_path=rules", "with a supervisor"),
    ],
)
def test_what_cannot_be_divided_by_tokens_is_refused(more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(TrainRLConfig, "train_rl", ["train.max_tokens_per_micro_batch=100", more], check_train_rl)
