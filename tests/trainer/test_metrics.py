"""Figures of training steps: on numbers worked out by hand, and under the names that TRL's users know."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from classroom_rl.trainer.losses import importance_ratio
from classroom_rl.trainer.metrics import MismatchFigures, TokenMeans, completion_figures
from tests.support.offline_trainer import offline_trainer, save_tiny_model


def mismatch(mode: str, *micro_batches: tuple[list, list, list]) -> dict[str, float]:
    mismatch_figures = MismatchFigures()
    for trained, sampled, masks in micro_batches:
        rows, mask = (torch.tensor(trained), torch.tensor(sampled)), torch.tensor(masks).bool()
        mismatch_figures.add(*rows, mask, importance_ratio(*rows, mask, mode, 2.0))
    return mismatch_figures.figures(lambda tensor: tensor)


ONE = ([[-1.0, -1.0]], [[-1.1, float("nan")]], [[1, 1]])
TWO = ([[-1.0, -2.0]], [[-1.3, -1.8]], [[1, 1]])
NOTHING = ([[-1.0, -2.0]], [[-9.0, -9.0]], [[0, 0]])


def test_the_mismatch_counts_tokens_however_they_are_divided_and_leaves_out_unknown_ones() -> None:
    figures = mismatch("token_truncate", ONE, TWO, NOTHING)
    assert figures["mismatch/mean_abs_logprob_diff"] == pytest.approx(0.2)
    assert figures["sampling/sampling_logp_difference/mean"] == pytest.approx(0.2)
    assert figures["sampling/sampling_logp_difference/max"] == pytest.approx(0.3)
    # e^0.1 − 1.1, e^0.3 − 1.3, e^−0.2 − 0.8
    assert figures["mismatch/k3_kl"] == pytest.approx((0.0051709 + 0.0498588 + 0.0187308) / 3, abs=1e-6)
    assert figures["sampling/importance_sampling_ratio/min"] == pytest.approx(0.818731, abs=1e-6)
    assert figures["sampling/importance_sampling_ratio/mean"] == pytest.approx((1.105171 + 1 + 1.349859 + 0.818731) / 4)
    assert figures["sampling/importance_sampling_ratio/max"] == pytest.approx(1.349859, abs=1e-6)
    assert mismatch("token_truncate", NOTHING) == {}


def test_ratios_of_samples_are_those_of_samples_that_are_trained_on() -> None:
    """e^0.1 twice, which any other sample would bring nearer to 1."""
    figures = mismatch("sequence_truncate", ONE, TWO, NOTHING)
    assert figures["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.105171, abs=1e-6)


def test_means_are_over_the_tokens_of_all_micro_batches() -> None:
    means = TokenMeans()
    for numbers, mask in (([[1.0, 2.0, 9.0]], [[1, 1, 0]]), ([[6.0, 9.0, 9.0]], [[1, 0, 0]])):
        means.add("kl", torch.tensor(numbers), torch.tensor(mask).bool())
        means.add("of no token", torch.tensor(numbers), torch.zeros(1, 3).bool())
    assert means.means(Accelerator(cpu=True)) == {"kl": 3.0}


def test_lengths_are_those_of_what_was_sampled_and_an_episode_without_an_end_was_clipped() -> None:
    def record(completion: list[int], mask: list[int]) -> SimpleNamespace:
        return SimpleNamespace(prompt_ids=[1, 2], completion_ids=completion, mask=mask)

    records = [record([3, 5], [1, 1]), record([3, 4, 3, 5], [1, 0, 1, 1]), record([3] * 7, [1] * 7), record([], [])]
    assert completion_figures(records, [5], Accelerator(cpu=True)) == {
        "batch_tokens": 20,
        "completions/mean_length": 3,
        "completions/min_length": 0,
        "completions/max_length": 7,
        "completions/clipped_ratio": 0.5,
        "completions/mean_terminated_length": 2.5,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 3,
    }
    assert completion_figures(records[2:], [5], Accelerator(cpu=True))["completions/max_terminated_length"] == 0


OF_EVERY_STEP = """
    loss grad_norm learning_rate epoch step_time num_tokens reward reward_std frac_reward_zero_std entropy
    clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean
    completions/mean_length completions/min_length completions/max_length completions/clipped_ratio
    completions/mean_terminated_length completions/min_terminated_length completions/max_terminated_length
    sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
    sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean
    sampling/importance_sampling_ratio/max
""".split()
"""Names of TRL's, as of its version 1.16."""


def test_a_step_is_logged_under_trls_names_and_rewards_under_their_own(world: Path, tmp_path: Path) -> None:
    options = ["train.max_steps=4", "train.mu=2", "train.beta=0.1"]
    trainer = offline_trainer(tmp_path / "run", save_tiny_model(tmp_path / "model", world / "blank"), options)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 4
    assert set(OF_EVERY_STEP) | {"kl", "rewards/pedagogical/mean", "mismatch/k3_kl"} <= lines[0].keys()
    assert [name for name in lines[0] if name.startswith("rewards/")] == [
        "rewards/pedagogical/mean",
        "rewards/pedagogical/std",
    ]
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6) and lines[1]["kl"] > 0
    assert ["reward" in line for line in lines] == [True, False, True, False], "of a batch, in the first of its steps"
    assert lines[2]["num_tokens"] == 2 * lines[0]["num_tokens"] == trainer.state.num_input_tokens_seen


def test_a_message_may_end_with_the_models_own_tokens_and_the_tokenizers(world: Path, tmp_path: Path) -> None:
    """As with the end of a turn, beside that of a text; the scripted messages end with token 5."""
    options = ["train.max_steps=1", "train.beta=0"]
    trainer = offline_trainer(tmp_path / "run", save_tiny_model(tmp_path / "model", world / "blank"), options)
    for of_model, of_tokenizer, clipped in ((4, 6, 1), (5, 6, 0), ([4, 5], 6, 0), (4, 5, 0), (None, 5, 0)):
        trainer.model.generation_config.eos_token_id = of_model
        trainer.processing_class.eos_token = trainer.processing_class.convert_ids_to_tokens(of_tokenizer)
        trainer.batch()
        assert trainer._figures["completions/clipped_ratio"].pop() == clipped, (of_model, of_tokenizer)
