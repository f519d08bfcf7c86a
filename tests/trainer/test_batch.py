"""A batch as tensors, and its micro-batches: the same gradient however it is divided, and none above its limit."""

from itertools import product
from pathlib import Path
from typing import Any

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
from classroom_rl.rollout.rows import POLICY, TrainingRow
from classroom_rl.trainer import batch
from classroom_rl.trainer.batch import (
    KEPT,
    NO_PADDING,
    TRIMMED,
    Batch,
    Sample,
    divide,
    micro_batches,
    micro_batches_by_rows,
    micro_batches_by_tokens,
    split_to,
    token_limit,
)
from tests.support.offline_trainer import conversation, offline_trainer, save_tiny_model

LIMIT = 150
lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 400)), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("packing") / "model", world / "blank")


def play(index: int, problem: Problem) -> ConversationRecord:
    """Conversations of uneven length: the later ones are cut to a part, and one prompt is longer."""
    record = conversation(index, problem, seed=3)
    length = len(record.completion_ids) - 3 * index if index % 2 else len(record.completion_ids)
    prompt = record.prompt_ids * 4 if index == 5 else record.prompt_ids
    cut = {name: getattr(record, name)[:length] for name in ("completion_ids", "mask", "logprobs")}
    return record.model_copy(update={**cut, "prompt_ids": prompt})


def row(prompt: list[int], completion: list[int], mask: list[int], **more: Any) -> TrainingRow:
    defaults = {"target": [0] * len(mask), "logprobs": [0.0] * len(mask), "messages": [0] * len(mask)}
    tokens = {"prompt_ids": prompt, "completion_ids": completion, "mask": mask}
    return TrainingRow(**{"conversation_id": "r", "kind": POLICY, "message": None, **tokens, **defaults, **more})


@given(rows=lengths, limit=st.integers(1, 3000), more=st.integers(0, 60), padding_free=st.booleans())
def test_every_row_is_in_one_micro_batch_within_the_limit(
    rows: list, limit: int, more: int, padding_free: bool
) -> None:
    """Also where other processes have more micro-batches: then some of this one's are halved, or empty."""
    by_tokens = micro_batches_by_tokens(*zip(*rows, strict=True), limit, padding_free)
    assert by_tokens == micro_batches_by_tokens(*zip(*rows, strict=True), limit, padding_free)
    by_rows = micro_batches_by_rows(len(rows), more + 1)
    assert [len(pack) for pack in by_rows[:-1]] == [more + 1] * (len(by_rows) - 1) and 0 < len(by_rows[-1]) <= more + 1
    split = split_to(by_tokens, len(by_tokens) + more)
    assert len(split) == len(by_tokens) + more and split_to(by_tokens, 1) == by_tokens
    assert all(split) or max(map(len, split)) == 1, "none is empty while another one can be halved"
    for packs in (by_tokens, by_rows, split):
        assert sorted(row for pack in packs for row in pack) == list(range(len(rows)))
    for pack in (*by_tokens, *split):
        if len(pack) > 1:
            padded = len(pack) * sum(max(rows[row][part] for row in pack) for part in (0, 1))
            assert (sum(map(sum, (rows[row] for row in pack))) if padding_free else padded) <= limit


def test_rows_of_like_length_go_together() -> None:
    assert micro_batches_by_tokens([10] * 5, [90, 10, 88, 12, 40], limit=200) == [[0, 2], [4, 3, 1]]


@pytest.mark.parametrize(
    ("episodes", "samples", "expected"),
    [
        (4, 4, [[0, 1], [2, 3]]),
        (4, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # each episode gives two samples
        (8, 2, [[0, 1]]),  # most give none
        (4, 5, [[0, 1, 2], [3, 4]]),
    ],
)
def test_there_are_as_many_micro_batches_as_the_episodes_fill(episodes: int, samples: int, expected) -> None:
    config = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", "train.per_device_train_batch_size=2"])
    rows = [Sample(row([1], [2] * 3, [1] * 3), [1.0] * 3)] * samples
    assert divide(Batch.of(rows, 0, torch.device("cpu")), episodes, config, KEPT) == expected


def test_uncut_micro_batches_are_as_wide_as_the_batch() -> None:
    """The longest row has 6 tokens, so two rows fill 12."""
    rows = [row([1], [2] * length, [1] * length) for length in (1, 1, 2, 5)]
    tensors = Batch.of(
        [Sample(training_row, [1.0] * len(training_row.mask)) for training_row in rows], 0, torch.device("cpu")
    )
    assert micro_batches(tensors, 1, 12, TRIMMED) == [[3, 2], [0, 1]]
    assert micro_batches(tensors, 1, 12, KEPT) == [[0, 1], [2, 3]]
    assert micro_batches(tensors, 1, 12, NO_PADDING) == [[3, 2, 0], [1]], "6 + 3 + 2 tokens in one row"


@pytest.mark.parametrize(
    ("device", "overrides", "expected"),
    [
        ("cuda", [], 2 * 1024),
        ("cuda", ["generation.max_tokens_in_conversation=500"], 2 * 500),
        ("cuda", ["teacher_model.vllm.max_length=600"], 2 * 600),
        ("cuda", ["train.max_tokens_per_micro_batch=300"], 300),
        ("cuda", ["train.loss_type=bnpo"], None),
        ("cpu", [], None),
        ("cpu", ["train.max_tokens_per_micro_batch=300"], 300),
    ],
)
def test_a_gpu_fills_micro_batches_with_the_tokens_of_their_longest_rows(
    device: str, overrides: list[str], expected: int | None
) -> None:
    lengths = ["generation.max_tokens_in_conversation=1024", "teacher_model.vllm.max_length=2048"]
    config = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", *lengths, *overrides])
    assert token_limit(config, 2, torch.device(device)) == expected


def test_a_row_s_tensors_end_where_it_ends() -> None:
    """What an episode that was left out sampled is not trained on, its corrections are."""
    sampled = row([1, 2], [3, 4, 5], [1, 0, 1], logprobs=[-0.5, 0.0, None])
    correction = row([1], [6], [0], target=[1])
    left_out = [Sample(sampled, [2.0] * 3, learns=False), Sample(correction, [0.0], learns=False)]
    tensors = Batch.of([Sample(sampled, [2.0] * 3), *left_out], 9, torch.device("cpu"))
    assert tensors.prompt_ids_BP.tolist() == [[1, 2], [1, 2], [9, 1]]
    assert tensors.prompt_mask_BP.tolist() == [[1, 1], [1, 1], [0, 1]]
    assert tensors.completion_ids_BT.tolist() == [[3, 4, 5], [3, 4, 5], [6, 9, 9]]
    assert tensors.completion_mask_BT.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert tensors.mask_BT.tolist() == [[True, False, True], [False] * 3, [False] * 3]
    assert tensors.target_BT.tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    assert tensors.advantages_BT.tolist() == [[2.0] * 3, [2.0] * 3, [0.0] * 3]
    assert tensors.sampling_logps_BT.isnan().tolist() == [[False, False, True]] * 2 + [[False] * 3]
    assert not tensors.take([]).wanted_BT.any() and len(tensors.take([]).mask_BT) == 1


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        *product(
            (f"train.loss_type={loss}" for loss in ("dapo", "grpo", "dr_grpo", "cispo", "sapo")), ("keep", "drop")
        ),
        ("train.importance_sampling_level=sequence", "keep"),
        ("train.algorithm=ppo", "keep"),
    ],
)
def test_gradients_are_the_same_in_other_micro_batches(
    own: str, groups: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled by rows or by tokens, as many as another process has. With a reference model, which is scored in
    micro-batches, too; under `drop` one group teaches nothing."""

    def uneven(index: int, problem: Problem) -> ConversationRecord:
        record = play(index, problem)
        equal = {"reward": 0.5, "rewards": {"pedagogical": 0.5}}
        return record.model_copy(update=equal) if groups == "drop" and index < 4 else record

    def found(of_another: int, more: str = "train.mu=1") -> tuple[float, dict[str, torch.Tensor], list[Batch]]:
        overrides = [own, "train.beta=0.1", f"train.groups_without_variance={groups}", more]
        monkeypatch.setattr(batch, "gather_object", lambda counts: [*counts, of_another])
        trainer = offline_trainer(tmp_path / f"{of_another} {more}", model, overrides, uneven)
        micro = trainer.batch()
        return *trainer.loss_and_gradients(micro), micro

    loss_before, before, _ = found(of_another=2)
    largest = max(gradient.abs().max() for gradient in before.values())
    assert largest > 1e-4
    tokens = f"train.max_tokens_per_micro_batch={LIMIT}"
    by_rows, by_tokens, with_empty_ones = found(3), found(1, tokens), found(12, tokens)
    in_threes = found(1, "train.per_device_train_batch_size=3")
    assert [len(micro.mask_BT) for micro in by_rows[-1]] == [2, 4, 2]
    assert [len(micro.mask_BT) for micro in in_threes[-1]] == [3, 3, 2]
    assert 1 < len(by_tokens[-1]) < 8 and len({len(micro.mask_BT) for micro in by_tokens[-1]}) > 1
    assert len(with_empty_ones[-1]) == 12 and sum(not micro.wanted_BT.any() for micro in with_empty_ones[-1]) >= 4
    for loss_now, now, _ in (by_rows, by_tokens, with_empty_ones, in_threes):
        assert loss_now == pytest.approx(loss_before, abs=1e-6)
        for name, gradient in before.items():
            assert torch.allclose(now[name], gradient, rtol=0, atol=min(1e-6, 1e-4 * largest)), name


def test_the_mean_of_each_micro_batch_needs_micro_batches_of_equal_size() -> None:
    batch = ["train.number_of_problems_per_batch=3", "train.num_samples_per_problem=3"]
    assert load(TrainRLConfig, "train_rl", batch, check_train_rl).train.per_device_train_batch_size > 9
    for more in (batch, ["train.max_tokens_per_micro_batch=100"]):
        with pytest.raises(ConfigError, match="takes the mean of each micro-batch"):
            load(TrainRLConfig, "train_rl", [*more, "train.loss_type=bnpo"], check_train_rl)
