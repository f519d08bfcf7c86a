"""On-policy distillation on scripted batches: its gradient beside a plain float64 reference and TRL's GKD, a model that
is distilled into itself, what a strong tutor is told besides, and which tutors are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError
from classroom_rl.launch.before_start import check_prompts_fit
from classroom_rl.rollout.chat_template import encode_chat
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.rows import TrainingRow, rows_of
from classroom_rl.trainer import distributions, model_loading
from classroom_rl.trainer.losses import LossOptions, clipped
from tests.support.configs import training
from tests.support.offline_trainer import conversation, offline_trainer, save_tiny_model
from tests.trainer.test_online_dpo import move

PLAIN = ["train.beta=0", "train.importance_sampling_correction=false"]
ALONE, LORA = ["train.reward_weights={pedagogical: 0}"], ["teacher_model.lora={enable: true, dropout: 0}"]
PADDING_FREE = ["train.padding_free=true", "train.attn_implementation=sdpa", "train.max_tokens_per_micro_batch=150"]
WEIGHT, TEMPERATURE = 0.5, 0.7
ALL_BUT_ONE = -1


def lively(index: int, problem: Problem) -> ConversationRecord:
    return conversation(index, problem, seed=1)


def unrewarded(index: int, problem: Problem) -> ConversationRecord:
    return conversation(index, problem, seed=1, rewards={"pedagogical": 0.5}, reward=0.0)


@pytest.fixture(scope="module")
def start(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("distillation") / "model", world / "blank")


@pytest.fixture(scope="module")
def strong(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer."""
    return altered(start, tmp_path_factory.mktemp("distillation") / "strong")


def altered(start: Path, folder: Path, token: str = "", template: str = "") -> Path:
    """The model with other weights, one more token in its vocabulary, or something before its chat template."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    move(model)
    if token:
        tokenizer.add_tokens([token])
        model.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = template + tokenizer.chat_template
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def trainer_of(start: Path, tmp_path: Path) -> Callable[..., Any]:
    def made(*overrides: str, play: Any = lively) -> Any:
        return offline_trainer(tmp_path / "run", start, [*PLAIN, *overrides], play)

    return made


def of_all(model: torch.nn.Module, row: TrainingRow, temperature: float) -> torch.Tensor:
    """The log-probs of the vocabulary for every completion token, from the model's logits."""
    logits = model(input_ids=torch.tensor([[*row.prompt_ids, *row.completion_ids]])).logits[0, :-1] / temperature
    return logits.log_softmax(-1)[-len(row.completion_ids) :]


def of_adapter(model: torch.nn.Module, of_weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of a new adapter's B matrices, which are 0 still, from those of the weights W + s · BA."""
    gradients = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            of_weight = of_weights[f"{name.removeprefix('base_model.model.')}.weight"]
            inputs = layer.lora_A["default"].weight.detach().double()
            gradients[f"{name}.lora_B.default.weight"] = layer.scaling["default"] * of_weight @ inputs.T
    return gradients


def of_sampled(model: torch.nn.Module, row: TrainingRow, temperature: float = 1.0) -> torch.Tensor:
    """The log-prob of every completion token, from the model's logits."""
    logps = of_all(model, row, temperature)
    return logps.gather(1, torch.tensor(row.completion_ids).unsqueeze(1)).squeeze(1)


# The gradient --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["train.mu=1"],
        ["train.mu=2", "train.max_tokens_per_micro_batch=80"],
        ["train.mu=1", "train.loss_type=cispo", *PADDING_FREE],
        ["train.mu=2", "train.importance_sampling_level=sequence"],
        ["train.algorithm=ppo", "judge_model.mode=absolute"],
    ],
    ids=["one pass", "by tokens", "cispo without padding", "sequences", "PPO"],
)
def test_the_gradient_that_it_adds_is_that_of_a_plain_reference(
    trainer_of: Any, start: Path, strong: Path, options: list[str]
) -> None:
    options = [*options, f"teacher_model.vllm.temperature={TEMPERATURE}"]
    distillation = [f"train.distillation.model={strong}", f"train.distillation.weight={WEIGHT}"]
    without, trainer = trainer_of(*options), trainer_of(*options, *distillation)
    (_, before), (_, after) = (loop.loss_and_gradients(loop.batch()) for loop in (without, trainer))
    policy, tutor = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (start, strong))
    loss, kl, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for index in range(8):
        for row in rows_of(lively(index, Problem.of(f"lesson {index}", ""))):
            logps, mask = of_sampled(policy, row, TEMPERATURE), torch.tensor(row.mask)
            above = (of_sampled(tutor, row, TEMPERATURE) - logps).detach()
            loss = loss - (mask * WEIGHT * above * logps).sum()
            kl, count = kl - (mask * above).sum().item(), count + sum(row.mask)
    (loss / count).backward()
    for name, parameter in policy.named_parameters():
        assert (after[name] - before[name] - parameter.grad).abs().max() < 1e-6 < parameter.grad.abs().max(), name
    assert trainer._figures["distillation/kl"] == [pytest.approx(kl / count, abs=1e-5)]
    assert "distillation/kl" not in without._figures


COMPARED: dict[str, list[Any]] = {
    "forward, two passes by tokens": ["forward", None, "train.mu=2", "train.max_tokens_per_micro_batch=80"],
    "forward, PPO": ["forward", None, "train.algorithm=ppo", "judge_model.mode=absolute"],
    "jsd, LoRA with checkpoints": ["jsd", None, "train.mu=1", *LORA, "train.gradient_checkpointing=true"],
    "jsd without padding": ["jsd", None, "train.mu=1", *PADDING_FREE],
    "reverse of nearly all": ["reverse", ALL_BUT_ONE, "train.mu=2", "train.importance_sampling_level=sequence"],
    "forward of 5 with checkpoints": ["forward", 5, "train.gradient_checkpointing=true", "train.loss_type=grpo"],
    "jsd of 1, LoRA": ["jsd", 1, "train.mu=2", *LORA],
    "jsd of 5, PPO without padding": ["jsd", 5, "train.algorithm=ppo", "judge_model.mode=absolute", *PADDING_FREE],
}


@pytest.mark.parametrize("case", COMPARED)
def test_the_gradient_of_a_divergence_is_that_of_gkd(
    trainer_of: Any, start: Path, strong: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Over whole models in float64, with TRL's loss; tiles hold three tokens."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    policy, tutor = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (start, strong))
    (kl, top_k, *options), vocabulary = COMPARED[case], policy.config.vocab_size
    top_k = vocabulary - 1 if top_k == ALL_BUT_ONE else top_k
    monkeypatch.setattr(distributions, "DISTRIBUTIONS_TILE", 3 * vocabulary)
    options = [*options, f"teacher_model.vllm.temperature={TEMPERATURE}"]
    distillation = [f"train.distillation.{key}" for key in (f"model={strong}", f"weight={WEIGHT}", f"kl={kl}")]
    distillation += [] if top_k is None else [f"train.distillation.top_k={top_k}"]
    without, trainer = trainer_of(*options), trainer_of(*options, *distillation)
    if "train.gradient_checkpointing=true" in options:
        trainer.model.gradient_checkpointing_enable()
    (_, before), (_, after) = (loop.loss_and_gradients(loop.batch()) for loop in (without, trainer))
    by_row = "train.loss_type=grpo" in options
    rows = [row for index in range(8) for row in rows_of(lively(index, Problem.of(f"lesson {index}", "")))]
    loss, mean, count = torch.zeros((), dtype=torch.float64), 0.0, sum(sum(row.mask) for row in rows)
    for row in rows:
        mask = torch.tensor(row.mask).bool()
        logps = [of_all(model, row, TEMPERATURE)[mask] for model in (policy, tutor)]
        if top_k is not None:
            order = logps[1].argsort(dim=-1, descending=True)
            logps = [model_logps.gather(-1, order) for model_logps in logps]
            others = [model_logps[:, top_k:].exp().sum(-1, keepdim=True).log() for model_logps in logps]
            logps = [
                torch.cat([model_logps[:, :top_k], other], dim=-1)
                for model_logps, other in zip(logps, others, strict=True)
            ]
        beta = {"forward": 0, "jsd": 0.5, "reverse": 1}[kl]
        of_row = GKDTrainer.generalized_jsd_loss(*logps, beta=beta, reduction="none").sum()
        loss = loss + WEIGHT * of_row / (sum(row.mask) * len(rows) if by_row else count)
        mean += of_row.item() / count
    loss.backward()
    expected = {name: parameter.grad for name, parameter in policy.named_parameters()}
    if trainer.has_adapter:
        expected = of_adapter(trainer.model, expected)
    for name, gradient in expected.items():
        assert (after[name] - before[name] - gradient).abs().max() < 1e-6, name
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-5
    assert trainer._figures["distillation/kl"] == [pytest.approx(mean, abs=2e-6)] and mean > 1e-4


def test_in_the_mean_over_what_may_be_sampled_it_is_the_gradient_of_trls_reverse_kl(
    trainer_of: Any, strong: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One state, in which each of 50 tokens is sampled once and counts by its probability."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    trainer = trainer_of(f"train.distillation.model={strong}")
    logits, tutors = torch.randn(2, 1, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    student_logits, trl_logits = (logits.clone().requires_grad_() for _ in range(2))
    logps, mask = student_logits.log_softmax(-1), torch.ones(1, 50, dtype=torch.bool)
    tensors = {"advantages_BT": torch.zeros(1, 50), "strong_logps_BT": tutors.log_softmax(-1)}
    micro = replace(trainer.batch()[0], mask_BT=mask, **tensors)
    advantages = trainer.algorithm.distilled(micro, logps.detach()).advantages_BT
    (clipped(logps, logps.detach(), advantages, mask, LossOptions(0.2, 0.2)) * logps.detach().exp()).sum().backward()
    GKDTrainer.generalized_jsd_loss(trl_logits[None], tutors[None], beta=1, reduction="sum").backward()
    assert (student_logits.grad - trl_logits.grad).abs().max() < 1e-12 < 1e-3 < student_logits.grad.abs().max()


@pytest.mark.parametrize(
    "options",
    [
        ["train.mu=1"],
        ["train.mu=2"],
        ["train.mu=1", *LORA],
        ["train.mu=1", *PADDING_FREE],
        ["train.distillation.kl=forward", *LORA],
        ["train.distillation.kl=jsd", *PADDING_FREE],
        ["train.distillation.top_k=5"],
        ["train.distillation.kl=forward", "train.distillation.top_k=5", *PADDING_FREE],
        ["train.distillation.kl=jsd", "train.distillation.top_k=5", *LORA],
    ],
    ids=lambda options: " ".join(options[:2]).replace("train.", ""),
)
def test_a_model_that_is_distilled_into_itself_learns_nothing(trainer_of: Any, start: Path, options: list[str]) -> None:
    """To the bit, but for the mixture of the Jensen-Shannon divergence, which is rounded."""
    trainer = trainer_of(*options, *ALONE, f"train.distillation.model={start}", play=unrewarded)
    loss, gradients = trainer.loss_and_gradients(trainer.batch())
    tolerance = 1e-6 if "train.distillation.kl=jsd" in options else 0
    assert abs(loss) <= tolerance and abs(trainer._figures["distillation/kl"][0]) <= tolerance and gradients
    assert all(gradient.abs().max() <= tolerance for gradient in gradients.values())


@pytest.mark.parametrize(
    "scaled",
    [
        {"model_type": "gemma2", "final_logit_softcapping": 0.5, "head_dim": 8, "num_key_value_heads": 2},
        {"model_type": "cohere", "logit_scale": 0.3, "pad_token_id": 0},
        {"model_type": "granite", "logits_scaling": 4.0},
    ],
    ids=lambda scaled: scaled["model_type"],
)
def test_a_shared_head_gives_the_log_probs_of_trls_fused_one(scaled: dict[str, Any]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(**scaled, **sizes, vocab_size=40)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    move(model)
    add_fused_lm_head(model, temperature=TEMPERATURE)
    distributions.share_head(model, TEMPERATURE)
    ids = torch.arange(1, 13).view(2, 6)
    output = model(
        input_ids=ids,
        labels=ids,
        fused_lm_head=True,
        head_hook=lambda head, hidden: head.logits(hidden).log_softmax(-1),
    )
    logps = output.hook_output.gather(1, ids[:, 1:].reshape(-1, 1)).view(2, 5)
    assert (logps - output.log_probs).abs().max() < 1e-5 < logps.std()


# What the strong tutor is told ----------------------------------------------------------------------------------------


def test_a_strong_tutor_that_knows_more_reads_the_same_tokens_behind_a_prompt_of_its_own(
    trainer_of: Any, start: Path, tmp_path: Path
) -> None:
    paths = {name: tmp_path / f"{name}.txt" for name in ("teacher", "informed")}
    paths["teacher"].write_text("Teach {{ problem }}.")
    paths["informed"].write_text("Teach {{ problem }}; it is {{ answer }}, {{ personas | join(' ') }}.")
    tokenizer = AutoTokenizer.from_pretrained(start)

    def encoded(text: str) -> list[int]:
        return encode_chat(tokenizer, [{"role": "system", "content": text}])

    records = {}

    def play(index: int, problem: Problem) -> ConversationRecord:
        """The prompt of every other conversation is not that of the template."""
        record = lively(index, problem)
        turns = [replace(turn, persona=None if turn.role == "teacher" else "shy") for turn in record.turns]
        prompt_ids = encoded(render(str(paths["teacher"]), problem=problem.text)) if index % 2 else record.prompt_ids
        records[index] = record.model_copy(update={"prompt_ids": prompt_ids, "turns": turns, "answer": "42"})
        return records[index]

    options = [f"generation.teacher_prompt_path={paths['teacher']}", f"train.distillation.model={start}"]
    trainer = trainer_of(*options, f"train.distillation.prompt_path={paths['informed']}", "train.mu=1", play=play)
    rows = {}
    for micro in trainer.batch():
        for ids, mask, logps in zip(micro.completion_ids_BT, micro.mask_BT, micro.strong_logps_BT, strict=True):
            rows[tuple(ids[mask].tolist())] = logps[mask]
    tutor = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    for index, record in records.items():
        [row] = rows_of(record)
        if index % 2:
            row = replace(row, prompt_ids=encoded(f"Teach {record.problem}; it is 42, shy shy."))
        mask = torch.tensor(row.mask).bool()
        strong_logps = rows.pop(tuple(torch.tensor(row.completion_ids)[mask].tolist()))
        assert (strong_logps - of_sampled(tutor, row)[mask]).abs().max() < 1e-5
    assert not rows and trainer._figures["distillation/informed"] == [0.5]


# Who is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token": "<other>"}, r"1 tokens of their vocabularies differ, such as '<other>', which is no token and \d+"),
        ({"template": "Hello"}, r"chat templates differ: after 0 tokens, the same chat goes on with .* and 'Hello"),
    ],
)
def test_a_strong_tutor_with_other_tokens_is_refused(
    trainer_of: Any, start: Path, tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    model = f"train.distillation.model={altered(start, tmp_path / 'other', **changes)}"
    with pytest.raises(ConfigError, match=rf"^train\.distillation\.model is .*whose tokenizer is not that of .*{said}"):
        trainer_of(model)
    with pytest.raises(ConfigError, match=said):  # by every program, before it starts
        check_prompts_fit(training(model, f"teacher_model.model_name_or_path={start}"))


def test_more_tokens_than_there_are_and_heads_of_other_sizes_are_refused(
    trainer_of: Any, start: Path, tmp_path: Path
) -> None:
    """But for a few tokens, heads may have rows that no token has."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    size = model.config.vocab_size
    with pytest.raises(ConfigError, match=rf"top_k is {size}, but .* has {size} tokens, and one at least must be left"):
        trainer_of(f"train.distillation.model={start}", f"train.distillation.top_k={size}")
    model.resize_token_embeddings(size + 8)
    move(model)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "wider")
    distilled = [f"train.distillation.model={tmp_path / 'wider'}", "train.distillation.kl=forward"]
    with pytest.raises(ConfigError, match=rf"whose vocab_size is {size + 8}, and that of .* is {size}: .*Set .*top_k"):
        trainer_of(*distilled)
    trainer = trainer_of(*distilled, "train.distillation.top_k=5", *ALONE, play=unrewarded)
    loss, _ = trainer.loss_and_gradients(trainer.batch())
    assert loss == pytest.approx(trainer._figures["distillation/kl"][0], rel=1e-4) and loss > 1e-3


@pytest.mark.parametrize("split", ["is_deepspeed_zero3_enabled", "is_fsdp_enabled"])
def test_distributions_are_not_compared_where_the_output_layer_is_split(
    trainer_of: Any, strong: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setattr(model_loading, split, lambda: True)
    with pytest.raises(ConfigError, match=r"kl=jsd with top_k=None compares .* ZeRO-3 and FSDP split it: start with"):
        trainer_of(f"train.distillation.model={strong}", "train.distillation.kl=jsd")
