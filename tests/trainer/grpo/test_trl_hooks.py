"""The loss of GRPO on numbers worked out by hand, the options of TRL that it hangs on, and what leaves it."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from trl import GRPOConfig

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.problem import Problem
from classroom_rl.trainer.grpo import config as grpo
from classroom_rl.trainer.grpo.trl_hooks import TrlHooks
from tests.support.offline_trainer import conversation, offline_trainer, save_tiny_model

LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo")

OPTIONS = {
    "use_bias_correction_kl": True,
    "importance_sampling_level": "token",
    "delta": None,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "vllm_importance_sampling_clip_min": None,
    "mask_truncated_completions": False,
    "multi_objective_aggregation": "sum_then_normalize",
    "reward_weights": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "router_aux_loss_coef": None,
    "sync_ref_model": False,
    "disable_dropout": False,
    "cast_lm_head_to_fp32": False,
    "shuffle_dataset": True,
    "use_liger_kernel": False,
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "warmup_steps": 0,
}
"""What changes the objective and has no key of its own."""
BESIDE_THE_OBJECTIVE = """
    cache_implementation chat_template_kwargs ds3_gather_for_generation generation_batch_size generation_kwargs
    max_tool_calling_iterations min_p num_generations_eval repetition_penalty top_k top_p trust_remote_code
    transformers_continuous_batching_config use_transformers_continuous_batching use_transformers_paged use_vllm
    vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length vllm_mode vllm_model_impl
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_tensor_parallel_size vllm_importance_sampling_cap
    log_completions log_completions_hub_repo log_multimodal log_unique_prompts num_completions_to_print
    pad_to_multiple_of
    entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target ref_model_mixup_alpha ref_model_sync_steps
    vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
""".split()
"""TRL's options of its own generation and its own log, and of what is switched off."""


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("loss") / "model", world / "blank")


def options_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the translation sets, whatever TRL's defaults are."""
    seen = {}
    monkeypatch.setattr(grpo, "GRPOConfig", lambda **options: seen.update(options))
    grpo.grpo_config(load(TrainRLConfig, "train_rl", [], check_train_rl), folder)
    return seen


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_changes_the_objective_is_set_and_not_left_to_trl(name: str, tmp_path, monkeypatch) -> None:
    assert options_set(tmp_path, monkeypatch).get(name, "left to TRL") == OPTIONS[name]


def test_every_option_of_trl_is_set_or_known_to_leave_the_objective_as_it_is(tmp_path: Path, monkeypatch) -> None:
    """An option that a later version of TRL adds fails here, until somebody has read what it does."""
    own = {each.name for each in dataclasses.fields(GRPOConfig)} - {
        each.name for each in dataclasses.fields(TrainingArguments)
    }
    assert own - set(options_set(tmp_path, monkeypatch)) == set(BESIDE_THE_OBJECTIVE)


RATIOS = torch.tensor([[1.5, 3.0, 1.1, 0.9], [0.7, 1.0, 5.0, 5.0]])
"""π / π_old of each token; what the second row's last two say, and the first row's second, is masked."""
TO_REFERENCE = torch.tensor([[2.0, 9.0, 1.0, 1.0], [0.5, 1.0, 9.0, 9.0]])
"""π_reference / π."""
ENGINE = torch.tensor([[1.0, 9.0, 2.0, 1.0], [0.5, 1.0, 9.0, 9.0]])
"""π_old / π of the engine."""
LOGPS = torch.tensor([[-1.0, -9.0, -2.0, -3.0], [-0.5, -1.5, -9.0, -9.0]])
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
def test_the_loss_of_two_conversations_by_hand(loss: str, model: Path, tmp_path: Path, monkeypatch) -> None:
    clip = [] if loss == "cispo" else ["train.epsilon_high=0.28"]
    more = ["train.per_device_train_batch_size=8", "generation.max_tokens_in_conversation=64"]
    trainer = offline_trainer(tmp_path, model, ["train.beta=0.1", f"train.loss_type={loss}", *clip, *more])
    trainer.use_vllm, trainer.current_gradient_accumulation_steps = True, 1
    found = (LOGPS, torch.zeros_like(LOGPS), None)
    monkeypatch.setattr(TrlHooks, "_get_per_token_logps_and_entropies", lambda *_, **__: found)
    inputs = {
        "prompt_ids": torch.ones(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.ones(2, 4, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]]),
        "advantages": torch.tensor([1.0, -0.5]),
        "old_per_token_logps": LOGPS - RATIOS.log(),
        "ref_per_token_logps": LOGPS + TO_REFERENCE.log(),
        "importance_sampling_ratio": ENGINE,
        "num_items_in_batch": torch.tensor(5.0),
        "row_scale": torch.tensor(1.0),
    }
    assert trainer._compute_loss(trainer.model, inputs).item() == pytest.approx(BY_HAND[loss], abs=1e-6)


def judged(index: int) -> bool:
    return index not in (1, 2, 4)


def unjudged(**changes: Any) -> Callable[[int, Problem], ConversationRecord]:
    """Conversations of which three have no verdict; the changes are theirs alone."""

    def play(index: int, problem: Problem) -> ConversationRecord:
        nothing = {"reward": None, "rewards": {"pedagogical": None}, "verdicts": []}
        record = conversation(index, problem, seed=1)
        return record if judged(index) else record.model_copy(update=nothing | changes)

    return play


UNJUDGED = ["judge_model.max_failed_share=1", "train.beta=0.1"]


@pytest.mark.parametrize("rows", [1, 4], ids=["rows of their own", "shared micro-batches"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_a_mean_over_conversations_with_a_verdict_alone(
    loss: str, rows: int, model: Path, tmp_path: Path
) -> None:
    """The gradient at a judged conversation's tokens is that of a batch of the judged ones: −A of its token, divided by
    their tokens, or by their rows. Those without a verdict have none, of the KL either."""
    cut = f"train.per_device_train_batch_size={rows}"
    trainer = offline_trainer(tmp_path, model, [*UNJUDGED, f"train.loss_type={loss}", cut], unjudged())
    batch = trainer.batch()
    for inputs in batch:
        inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] - 0.7
    found = [by_row(trainer, inputs) for inputs in batch]
    records = {tuple(record.prompt_ids): record for record in map(play_one, range(8))}
    known = [record for index, record in enumerate(records.values()) if judged(index)]
    tokens = sum(sum(record.mask) for record in known)
    micro = [[records[prompt] for prompt, *_ in each if records[prompt].reward is not None] for each in found]
    seen = 0
    for each, own in zip(found, micro, strict=True):
        in_micro = sum(sum(record.mask) for record in own)
        for prompt, gradient, advantage, ratio in each:
            record = records[prompt]
            mask = torch.tensor(record.mask).bool()
            if record.reward is None:
                assert not gradient.any()
                continue
            divided = {
                "grpo": len(known) * sum(record.mask),
                "sapo": len(known) * sum(record.mask),
                "dr_grpo": len(known) * trainer.max_completion_length,
                "bnpo": in_micro * sum(map(bool, micro)),
            }.get(loss, tokens)
            wanted = (-advantage * ratio[: len(mask)] + 0.1 * 0.7)[mask] / divided
            assert torch.allclose(gradient[: len(mask)][mask], wanted, rtol=1e-4, atol=1e-8)
            seen += 1
    assert seen == 5


def play_one(index: int) -> ConversationRecord:
    return unjudged()(index, Problem.of(f"lesson {index}", ""))


def by_row(trainer: Any, inputs: dict[str, torch.Tensor]) -> list[tuple]:
    """(prompt, the gradient of a micro-batch's loss at each completion token, its advantage, the engine's ratios)."""
    found = {}
    original = TrlHooks._get_per_token_logps_and_entropies

    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        logps, *rest = original(self, *arguments, **named)
        found["logps"] = logps.detach().requires_grad_()
        return found["logps"], *rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrlHooks, "_get_per_token_logps_and_entropies", watched)
        trainer.compute_loss(trainer.model, inputs).backward()
    prompts = [
        tuple(ids[mask.bool()].tolist()) for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
    ]
    gradients, ratios = found["logps"].grad, inputs["importance_sampling_ratio"]
    return list(zip(prompts, gradients, inputs["advantages"], ratios, strict=True))


def test_what_a_conversation_without_a_verdict_says_changes_nothing(model: Path, tmp_path: Path) -> None:
    """Neither the loss, nor a gradient, nor the logged KL, nor the mismatch."""
    found = []
    for name, changes in (("one", {}), ("two", {"completion_ids": [7] * 9, "mask": [1] * 9, "logprobs": [-9.0] * 9})):
        trainer = offline_trainer(tmp_path / name, model, [*UNJUDGED, "train.mu=2"], unjudged(**changes))
        batch = trainer.batch()
        for inputs in batch:
            inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] - 0.7
        loss, gradients = trainer.loss_and_gradients(batch)
        logged = trainer._metrics["train"]
        kl = sum(logged["kl"])
        found.append((loss, gradients, kl, logged["mismatch/mean_abs_logprob_diff"][-1]))
    (loss, gradients, *logged), (other_loss, other_gradients, *other_logged) = found
    assert loss == pytest.approx(other_loss, abs=1e-6) and logged == pytest.approx(other_logged, abs=1e-6)
    assert all(torch.allclose(gradients[key], other_gradients[key], atol=1e-6) for key in gradients)


def test_a_batch_without_any_verdict_teaches_nothing(model: Path, tmp_path: Path) -> None:
    nothing = {"reward": None, "rewards": {"pedagogical": None}, "verdicts": []}
    overrides = [*UNJUDGED, "train.loss_type=grpo"]
    trainer = offline_trainer(tmp_path, model, overrides, lambda i, problem: conversation(i, problem, 1, **nothing))
    loss, gradients = trainer.loss_and_gradients(trainer.batch())
    assert loss == 0 and not any(each.any() for each in gradients.values())
    assert math.isfinite(loss)
