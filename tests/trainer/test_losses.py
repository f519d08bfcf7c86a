"""The losses of GRPO and PPO on numbers worked out by hand, and GRPO's beside those of TRL."""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOTrainer

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import ImportanceSamplingMode, LossType
from classroom_rl.errors import ConfigError
from classroom_rl.trainer import arguments
from classroom_rl.trainer.advantages import moments
from classroom_rl.trainer.batch import Batch, Totals
from classroom_rl.trainer.grpo import GRPO
from classroom_rl.trainer.log_probs import Scores
from classroom_rl.trainer.losses import (
    TOKENS,
    LossOptions,
    approximate_kl,
    at_sequence_level,
    clipped,
    importance_ratio,
    is_clipped,
    is_value_clipped,
    kl_to_reference,
    policy_loss_of,
    value_loss,
)
from classroom_rl.trainer.ppo import explained_variance

LOSSES = get_args(LossType)
OBJECTIVE = {
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None,
    "use_liger_kernel": False,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "warmup_steps": 0,
    "average_tokens_across_devices": False,
}
"""What changes the objective and has no key of its own."""


def test_an_option_that_changes_the_objective_is_set_and_not_left_to_transformers(tmp_path: Path, monkeypatch) -> None:
    passed_options: dict[str, Any] = {}
    one_gpu = SimpleNamespace(n_gpu=1)
    monkeypatch.setattr(arguments, "TrainingArguments", lambda **options: passed_options.update(options) or one_gpu)
    arguments.training_arguments(load(TrainRLConfig, "train_rl", [], check_train_rl), tmp_path)
    assert {name: passed_options.get(name, "left to transformers") for name in OBJECTIVE} == OBJECTIVE


# The loss of a micro-batch ----------------------------------------------------------------------------------------


def grpo(loss: str, *overrides: str) -> GRPO:
    options = [f"train.loss_type={loss}", "generation.max_tokens_in_conversation=64", *overrides]
    return GRPO(load(TrainRLConfig, "train_rl", options, check_train_rl))


def micro_batch(mask: Tensor, old: Tensor, advantages: Tensor, engine: Tensor, reference: Tensor | None) -> Batch:
    """A micro-batch with these log-probs; its tokens do not matter."""
    zeros = torch.zeros_like(mask, dtype=torch.long)
    return Batch(
        *(zeros, zeros, zeros, mask.long(), mask, torch.zeros_like(mask), advantages, engine),
        old_logps_BT=old,
        ref_logps_BT=reference,
    )


RATIOS = torch.tensor([[1.5, 3.0, 1.1, 0.9], [0.7, 1.0, 5.0, 5.0]])
"""π / π_old of each token; what the second row's last two say, and the first row's second, is masked."""
TO_REFERENCE = torch.tensor([[2.0, 9.0, 1.0, 1.0], [0.5, 1.0, 9.0, 9.0]])
"""π_reference / π."""
ENGINE = torch.tensor([[1.0, 9.0, 2.0, 1.0], [0.5, 1.0, 9.0, 9.0]])
"""π_old / π of the engine."""
LOGPS = torch.tensor([[-1.0, -9.0, -2.0, -3.0], [-0.5, -1.5, -9.0, -9.0]])
MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()
BY_HAND = {
    # −min(ρA, clip(ρ, 0.8, 1.28)A) · engine, A = 1 and −0.5: −1.28, −2.2, −0.9; 0.2, 0.5. Sums: −4.38 and 0.7.
    # KL · ρ: (2 − ln 2 − 1) · 1.5 = 0.460279, 0, 0; (0.5 + ln 2 − 1) · 0.7 = 0.135203, 0; times β = 0.1.
    "dapo": (-4.38 + 0.0460279 + 0.7 + 0.0135203) / 5,
    "bnpo": (-4.38 + 0.0460279 + 0.7 + 0.0135203) / 5,
    "grpo": ((-4.38 + 0.0460279) / 3 + (0.7 + 0.0135203) / 2) / 2,
    "dr_grpo": (-4.38 + 0.0460279 + 0.7 + 0.0135203) / (2 * 64),
    # −min(ρ, 5) · A · ln π · engine: 1.5, 4.4, 2.7; −0.7 · 0.5 · 0.5 · 0.5 = −0.0875, −1 · 0.5 · 1.5 = −0.75.
    "cispo": (8.6 + 0.0460279 - 0.8375 + 0.0135203) / 5,
    # −σ(τ(ρ − 1)) · 4/τ · A · engine; τ = 1: −2.4898373, −4.1998335, −1.9000832; τ = 1.05: 0.4018046, 0.9523810.
    "sapo": ((-8.5897540 + 0.0460279) / 3 + (1.3541856 + 0.0135203) / 2) / 2,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_two_conversations_by_hand(loss: str) -> None:
    clip = [] if loss == "cispo" else ["train.epsilon_high=0.28"]
    old, advantages = LOGPS - RATIOS.log(), torch.tensor([[1.0], [-0.5]]).expand(2, 4)
    micro = micro_batch(MASK, old, advantages, old - ENGINE.log(), LOGPS + TO_REFERENCE.log())
    totals = Totals(rows=2, tokens=5, targets=1, micro_batches=1, values=1)
    scores = Scores(LOGPS, torch.zeros_like(LOGPS), None, None)
    loss_value = grpo(loss, "train.beta=0.1", *clip).loss(scores, micro, totals, first_pass=True)
    assert loss_value.item() == pytest.approx(BY_HAND[loss], abs=1e-6)


@pytest.mark.parametrize("mode", get_args(ImportanceSamplingMode))
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_gradient_and_figures_are_those_of_trl(loss: str, beta: float, mode: str) -> None:
    """Of one of two micro-batches. A later version of TRL that computes something else fails here."""
    generator = torch.Generator().manual_seed(LOSSES.index(loss))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(6, 9, generator=generator) > 0.4
    mask[:, 0] = True
    logps, entropies = random(6, 9) - 3, random(6, 9).exp()
    old, engine, reference = (logps + 1.5 * random(6, 9) for _ in range(3))
    micro = micro_batch(mask, old, random(6, 9), engine, reference if beta else None)
    totals = Totals(rows=12, tokens=77, targets=1, micro_batches=2, values=1)
    algorithm = grpo(loss, f"train.beta={beta}", f"train.importance_sampling_mode={mode}")

    our_logps = logps.clone().requires_grad_()
    our_loss = algorithm.loss(Scores(our_logps, entropies, None, None), micro, totals, first_pass=False)
    our_loss.backward()
    trl_logps = logps.clone().requires_grad_()
    trl_loss, figures = loss_of_trl(algorithm, trl_logps, entropies, micro, totals)
    trl_loss.backward()

    assert our_loss.item() == pytest.approx(trl_loss.item(), rel=0, abs=1e-12)
    assert our_logps.grad.any() and torch.allclose(our_logps.grad, trl_logps.grad, rtol=0, atol=1e-12)
    logged = algorithm.end_pass(False, Accelerator(cpu=True), None)
    extremes = {"clip_ratio/low_min", "clip_ratio/high_max"}
    assert logged == pytest.approx({name: value for name, value in figures.items() if name not in extremes}, rel=1e-5)


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_whole_samples_is_that_of_trl(loss: str, mode: str) -> None:
    """With one advantage for all tokens of a sample, as GSPO has it."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(6, 9, generator=generator) > 0.4
    mask[:, 0] = True
    logps = random(6, 9) - 3
    old, engine = logps + 0.5 * random(6, 9), logps + 0.5 * random(6, 9)
    micro = micro_batch(mask, old, random(6, 1).expand(6, 9), engine, None)
    totals = Totals(rows=12, tokens=77, targets=1, micro_batches=2, values=1)
    options = (f"train.importance_sampling_mode={mode}", "train.importance_sampling_level=sequence", "train.beta=0")
    algorithm = grpo(loss, *options)

    our_logps, trl_logps = (logps.clone().requires_grad_() for _ in range(2))
    our_loss = algorithm.loss(Scores(our_logps, random(6, 9).exp(), None, None), micro, totals, first_pass=False)
    our_loss.backward()
    trl_loss, _ = loss_of_trl(algorithm, trl_logps, random(6, 9).exp(), micro, totals)
    trl_loss.backward()
    assert our_logps.grad.any() and torch.allclose(our_logps.grad, trl_logps.grad, rtol=0, atol=1e-12)
    assert our_loss.item() == pytest.approx(trl_loss.item(), rel=0, abs=1e-12)


def test_the_ratio_of_a_sample_by_hand() -> None:
    """Log-ratios 0.3 and 0.1, and −0.5 that does not count: their mean is 0.2 everywhere, and each token's gradient is
    its own advantage's."""
    logps = tokens(0.3, 0.1, -0.5).requires_grad_()
    old = at_sequence_level(logps, torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))
    assert (logps - old)[0].tolist() == pytest.approx([0.2, 0.2, 0.2])
    (torch.exp(logps - old) * tokens(1, -2, 0)).sum().backward()
    assert logps.grad[0].tolist() == pytest.approx([math.exp(0.2), -2 * math.exp(0.2), 0])
    assert at_sequence_level(logps, logps.detach(), torch.zeros(1, 3)).isfinite().all()


def loss_of_trl(
    algorithm: GRPO, logps: Tensor, entropies: Tensor, micro: Batch, totals: Totals
) -> tuple[Tensor, dict[str, float]]:
    """What `GRPOTrainer._compute_loss` gives and logs, of an object with the attributes that it reads."""
    train, options = algorithm.train, algorithm.options
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(
            delta=None,
            sapo_temperature_neg=options.temperature_neg,
            sapo_temperature_pos=options.temperature_pos,
            steps_per_generation=totals.micro_batches,
            use_bias_correction_kl=True,
        ),
        aux_loss_enabled=False,
        beta=train.beta,
        current_gradient_accumulation_steps=totals.micro_batches,
        epsilon_high=options.epsilon_high,
        epsilon_low=options.epsilon_low,
        importance_sampling_level=train.importance_sampling_level,
        loss_type=train.loss_type,
        max_completion_length=options.max_completion_length,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
    )
    mode, most = train.importance_sampling_mode, train.importance_sampling_clip_max
    inputs = {
        "prompt_ids": micro.prompt_ids_BP,
        "prompt_mask": micro.prompt_mask_BP,
        "completion_ids": micro.completion_ids_BT,
        "completion_mask": torch.ones_like(micro.completion_mask_BT),
        "tool_mask": micro.mask_BT.long(),
        "advantages": micro.advantages_BT,
        "old_per_token_logps": micro.old_logps_BT,
        "ref_per_token_logps": micro.ref_logps_BT,
        "importance_sampling_ratio": importance_ratio(
            micro.old_logps_BT, micro.sampling_logps_BT, micro.mask_BT, mode, most
        ),
        "num_items_in_batch": torch.tensor(totals.tokens),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, {name: value for name, [value] in trainer._metrics["train"].items()}


def test_a_loss_of_your_own_is_found_by_its_name_and_is_a_mean_over_tokens() -> None:
    assert policy_loss_of("classroom_rl.trainer.losses:clipped") == (clipped, TOKENS)
    with pytest.raises(ConfigError, match="train.loss_type names grp0; did you mean grpo?"):
        policy_loss_of("grp0")


# The numbers of tokens ----------------------------------------------------------------------------------------------


def tokens(*numbers: float) -> Tensor:
    return torch.tensor([numbers])


OLD = torch.zeros(1, 5)
OF_PPO = tokens(1.5, 1.5, 0.5, 0.5, 1.1).log()
ADVANTAGES = tokens(2, -2, 2, -2, 1)


def test_the_policy_s_loss_is_clipped_where_the_advantage_pushes_further() -> None:
    """min(1.5·2, 1.2·2), min(−3, −2.4), min(1, 1.6), min(−1, −1.6), 1.1; with the other sign. A clipped token has no
    gradient, the others −ratio · A."""
    logps, options = OF_PPO.clone().requires_grad_(), LossOptions(0.2, 0.2)
    loss = clipped(logps, OLD, ADVANTAGES, torch.ones(1, 5), options)
    assert loss[0].tolist() == pytest.approx([-2.4, 3, -1, 1.6, -1.1])
    loss.sum().backward()
    assert logps.grad[0].tolist() == pytest.approx([0, 3, -1, 0, -1.1])
    below, above = is_clipped(OF_PPO, OLD, ADVANTAGES, options)
    assert below[0].tolist() == [False, False, False, True, False]
    assert above[0].tolist() == [True, False, False, False, False]


def test_the_two_sides_of_the_clip_are_their_own() -> None:
    losses = clipped(tokens(1.5, 0.5).log(), tokens(0, 0), tokens(1, -1), torch.ones(1, 2), LossOptions(0.1, 0.3))
    assert losses[0].tolist() == pytest.approx([-1.3, 0.9])


def test_ratios_to_the_engine_by_hand() -> None:
    trained, mask = tokens(0.5, 0.4, 0.9).log(), torch.tensor([[1, 1, 0]])
    sampled = tokens(0.25, 0.8, 0.1).log()

    def ratio(mode: str, most: float) -> list[float]:
        return importance_ratio(trained, sampled, mask, mode, most).flatten().tolist()

    assert ratio("token_truncate", 1.5) == pytest.approx([1.5, 0.5, 1.0])
    assert ratio("token_mask", 1.5) == pytest.approx([0.0, 0.5, 1.0])
    assert ratio("sequence_truncate", 0.9) == pytest.approx([0.9])
    assert ratio("sequence_mask", 0.9) == pytest.approx([0.0])
    assert importance_ratio(trained, sampled * torch.nan, mask, "token_mask", 1.5).tolist() == [[1.0, 1.0, 1.0]]


def test_the_critic_s_loss_is_the_larger_one_of_two() -> None:
    """Old 0, clip 0.2. Value 0.5, return 1: (0.5)² and (0.2 − 1)² = 0.64. Value 0.5, return 0.4: 0.01 and 0.04.
    Value 0.1, return 1: 0.81 twice. Half of it."""
    values, returns = tokens(0.5, 0.5, 0.1), tokens(1, 0.4, 1)
    assert value_loss(values, torch.zeros(1, 3), returns, 0.2)[0].tolist() == pytest.approx([0.32, 0.02, 0.405])
    assert value_loss(values, torch.zeros(1, 3), returns, None)[0].tolist() == pytest.approx([0.125, 0.005, 0.405])
    assert is_value_clipped(values, torch.zeros(1, 3), 0.2)[0].tolist() == [True, True, False]
    assert not is_value_clipped(values, torch.zeros(1, 3), None).any()


def test_explained_variance() -> None:
    """Returns 0, 1, 2, 3 with variance 1.25; errors 0.5, −0.5, 0.5, −0.5 with variance 0.25: 0.8."""
    returns, mask = tokens(0, 1, 2, 3), torch.ones(1, 4)

    def explained(values: Tensor) -> float | None:
        return explained_variance(moments(returns - values, mask), moments(returns, mask))

    assert explained(tokens(-0.5, 1.5, 1.5, 3.5)) == pytest.approx(0.8)
    assert explained(returns) == pytest.approx(1)
    assert explained(tokens(7, 7, 7, 7)) == pytest.approx(0), "a constant explains nothing"
    assert explained(-returns) == pytest.approx(-3)
    assert explained_variance(moments(returns, mask), moments(torch.ones(1, 4), mask)) is None


def test_the_kl_is_k3() -> None:
    """Ratio 1.5: 0.5 − ln 1.5; ratio 0.5: −0.5 − ln 0.5. The mean over samples of π_old is the KL: with π_old = (½, ½)
    and π = (¾, ¼), ½ ln(½ / ¾) + ½ ln(½ / ¼)."""
    kl = approximate_kl(tokens(0.75, 0.25).log(), tokens(0.5, 0.5).log())
    assert kl[0].tolist() == pytest.approx([0.5 - math.log(1.5), -0.5 - math.log(0.5)])
    assert kl.mean().item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


@pytest.mark.parametrize("moved", [False, True], ids=["first pass", "later pass"])
def test_the_gradient_of_the_kl_to_the_reference_is_that_of_kl_policy_reference(moved: bool) -> None:
    """In expectation over three tokens that π_old samples, whether the policy is still π_old or has moved. On the
    logits it is π · (ln π/π_reference − KL), here with KL = 0.274887. As a loss, k3 alone has in the first pass the
    gradient of KL(reference ‖ π), which is π − π_reference."""
    old, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    start = torch.tensor([0.7, 0.2, 0.1]).double() if moved else old

    def gradient(of: Callable[[Tensor], Tensor]) -> list[float]:
        logits = start.log().clone().requires_grad_()
        of(logits.log_softmax(-1)).backward()
        return logits.grad.tolist()

    actual = gradient(lambda logps: (old * kl_to_reference(logps, old.log(), reference.log())).sum())
    exact = gradient(lambda logps: (logps.exp() * (logps - reference.log())).sum())
    assert actual == pytest.approx(exact, abs=1e-12)
    assert moved or actual == pytest.approx([0.320702, -0.082466, -0.238236], abs=1e-5)
    k3 = gradient(lambda logps: (old * approximate_kl(reference.log(), logps)).sum())
    assert k3 != pytest.approx(exact, abs=0.01) and (moved or k3 == pytest.approx([0.3, 0.0, -0.3]))
