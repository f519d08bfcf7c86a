"""LoRA: what is trained, published, served and merged, on tiny models; whole runs are in test_lora_runs.py."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.models import LoraConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig, check_train_sft
from classroom_rl.config.values import ADAPTER_BIASES, SERVED_RANKS
from classroom_rl.engines.vllm.engine_start import served_rank
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.lora import adapter_shape, check_checkpoint, check_published, peft_config
from classroom_rl.models.policy_folder import MARKER, check_policy, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.pretrained import check_model
from classroom_rl.trainer.log_probs import log_probs, log_probs_of_batch, without_dropout
from classroom_rl.trainer.session import _warn_about_learning_rate
from classroom_rl.trainer.sharded_save import save_adapter_together, save_together, weight_bytes
from tests.conftest import on_this_machine
from tests.support.lora_engine import PROMPT, lora_engine
from tests.support.offline_trainer import offline_trainer, save_tiny_model
from tests.trainer.test_sharded_save import model_from_folder, weights_in

LORA = {"rank": 5, "alpha": 20, "dropout": 0.0}


def adapted(base: Path, lora: LoraConfig, dtype: torch.dtype = torch.float32) -> PeftModel:
    """A model with an untrained adapter, as the trainer makes it."""
    torch.manual_seed(3)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), peft_config(lora))


def step(model: PeftModel, seed: int = 0) -> None:
    """One optimizer step on a few tokens, and a shake, as an untrained B of zeros leaves A without gradient."""
    torch.manual_seed(seed)
    ids = torch.randint(0, 90, (2, 12))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trainer_of(model: PeftModel, tokenizer: object = None) -> SimpleNamespace:
    """What saving needs of a trainer."""
    return SimpleNamespace(
        model=model, model_wrapped=model, accelerator=Accelerator(cpu=True), processing_class=tokenizer
    )


def publish(model: PeftModel, folder: Path, version: int) -> Path:
    policy = PolicyVersion("run", version)
    save_adapter_together(trainer_of(model), lambda save: write_policy(folder, policy, save))
    return folder


def scores(model: torch.nn.Module, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Log-probs of `ids` after `prompt`."""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


# The configuration --------------------------------------------------------------------------------------------------


def loaded(*overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", list(overrides), check_train_rl)


def test_defaults_are_those_that_users_know() -> None:
    defaults = LoraConfig(False, 16, 32, "all-linear", 0.01, "none")
    assert loaded().teacher_model.lora == defaults and loaded().teacher_model.adapter is None
    sft = load(TrainSFTConfig, "train_sft", [], check_train_sft).model.lora
    assert sft == replace(defaults, rank=256, alpha=512)
    enabled = loaded("teacher_model.lora={enable: true, target_modules: [q_proj, v_proj]}").teacher_model.adapter
    assert enabled == replace(defaults, enable=True, target_modules=["q_proj", "v_proj"])


def test_every_option_reaches_peft() -> None:
    config = peft_config(LoraConfig(True, 4, 12, ["q_proj"], 0.25, "lora_only"))
    assert (config.r, config.lora_alpha, config.target_modules, config.lora_dropout) == (4, 12, {"q_proj"}, 0.25)
    assert config.bias == "lora_only" and config.task_type == "CAUSAL_LM"


@pytest.mark.parametrize("schema", ["train_rl", "train_sft"])
@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("target_modules", "q_proj", r"all-linear, or a list of module names such as \[q_proj"),
        ("target_modules", "[]", "or a list of module names"),
        ("target_modules", "[1]", "or a list of module names"),
        ("bias", "some", "must be one of none, all, lora_only"),
        ("dropout", "1", "at least 0 and below 1"),
        ("rank", "0", "must be at least 1"),
    ],
)
def test_what_peft_would_refuse_is_refused_with_the_rule(schema: str, key: str, value: str, rule: str) -> None:
    classes = {"train_rl": (TrainRLConfig, check_train_rl), "train_sft": (TrainSFTConfig, check_train_sft)}
    name = {"train_rl": "teacher_model", "train_sft": "model"}[schema] + f".lora.{key}"
    with pytest.raises(ConfigError, match=f"{name} .*{rule}"):
        load(classes[schema][0], schema, [f"{name}={value}"], classes[schema][1])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bias=all", "lora.bias is all; vLLM serves no adapters with biases"),
        ("rank=513", "lora.rank is 513; it must be from 1 to 512"),
    ],
)
def test_an_adapter_that_no_engine_serves_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(f"teacher_model.lora.{override}")


def test_muon_is_for_a_models_own_weights() -> None:
    with pytest.raises(ConfigError, match="train.optimizer is muon, .* take another, such as adamw_torch"):
        load(TrainSFTConfig, "train_sft", ["model.lora.enable=true", "train.optimizer=muon"], check_train_sft)


def test_the_names_and_ranks_on_offer_are_those_of_the_libraries() -> None:
    from peft.tuners.lora.config import LoraConfig as PeftLoraConfig
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == SERVED_RANKS
    assert get_args(get_type_hints(PeftLoraConfig)["bias"]) == ADAPTER_BIASES
    assert [served_rank(rank) for rank in (1, 2, 16, 17, 300, 512)] == [1, 8, 16, 32, 320, 512]


@pytest.mark.parametrize(("enable", "rate", "told"), [(True, 5e-7, True), (True, 2e-5, False), (False, 5e-7, False)])
def test_a_learning_rate_for_all_weights_is_told_about(enable: bool, rate: float, told: bool, caplog) -> None:
    _warn_about_learning_rate(loaded(f"teacher_model.lora.enable={enable}", f"train.learning_rate={rate}"))
    assert ("an adapter hardly learns with it" in caplog.text) is told


# What an adapter is -------------------------------------------------------------------------------------------------


def test_an_adapters_shape_by_hand(tmp_path: Path) -> None:
    """Two layers of hidden size 32, MLP 48, four heads of 8 with two for keys and values."""
    model_from_folder("tied", tmp_path)
    attention = [(32, 32), (32, 16), (32, 16), (32, 32)]
    mlp = [(32, 48), (32, 48), (48, 32)]
    shape = adapter_shape("key", str(tmp_path), LoraConfig(rank=4))
    assert shape.modules == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert shape.parameters == 2 * 4 * sum(a + b for a, b in attention + mlp)
    assert shape.inputs == 2 * sum(a for a, _ in attention + mlp)
    one_module = adapter_shape("key", str(tmp_path), LoraConfig(rank=4, target_modules=["q_proj"]))
    assert (one_module.modules, one_module.parameters, one_module.inputs) == (("q_proj",), 2 * 4 * 64, 2 * 32)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        (["nonsense"], "nonsense"),
        (["lm_head"], "neither can have an adapter: leave them out of target_modules"),
        (["q_proj", "embed_tokens"], "neither can have an adapter"),
    ],
)
def test_modules_that_do_not_fit_are_refused_with_the_key(modules: list[str], reason: str, tmp_path: Path) -> None:
    model_from_folder("untied", tmp_path)
    with pytest.raises(ConfigError, match=rf"teacher_model\.lora does not fit .*{reason}"):
        adapter_shape("teacher_model.lora", str(tmp_path), LoraConfig(target_modules=modules))


# What is saved ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["untied", "tied", "fused experts"])
@pytest.mark.parametrize("bias", ["none", "all"])
def test_the_merged_models_logits_are_those_of_base_and_adapter(kind: str, bias: str, tmp_path: Path) -> None:
    base = model_from_folder(kind, tmp_path / "base")
    model = adapted(tmp_path / "base", LoraConfig(bias=bias, **LORA))
    step(model)
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer_config.json").write_text("{}"))
    save_together(trainer_of(model, tokenizer), lambda save: save(tmp_path / "m"))
    assert set(weights_in(tmp_path / "m")) == set(weights_in(tmp_path / "base"))
    merged, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(notes[name] for name in ("missing_keys", "unexpected_keys"))
    ids = torch.randint(0, 90, (3, 16))
    with torch.no_grad():
        expected, actual, base_logits = (network.eval()(ids).logits for network in (model, merged, base))
    assert torch.allclose(actual, expected, atol=1e-5)
    assert not torch.allclose(actual, base_logits, atol=1e-2), "the adapter learned nothing"


def test_what_is_published_is_the_adapter_alone(tmp_path: Path) -> None:
    model_from_folder("tied", tmp_path / "base")
    model = adapted(tmp_path / "base", LoraConfig(**LORA))
    step(model)
    folder = publish(model, tmp_path / "policy" / "v000001", 1)
    assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json", MARKER}
    parameters = adapter_shape("key", str(tmp_path / "base"), LoraConfig(**LORA)).parameters
    tensors = load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == parameters
    assert weight_bytes(model, only_trained=True) == 4 * parameters < weight_bytes(model) / 2
    assert 4 * parameters < (folder / "adapter_model.safetensors").stat().st_size < 4 * parameters + 10_000
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["inference_mode"] is True
    assert config["target_modules"] == sorted(config["target_modules"]) and len(config["target_modules"]) > 6
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder)
    ids = list(range(10, 30))
    assert torch.equal(scores(reloaded, ids[:5], ids[5:]), scores(model, ids[:5], ids[5:]))


def test_adapters_are_equal_if_their_weights_and_their_scale_are(tmp_path: Path) -> None:
    model_from_folder("tied", tmp_path / "base")
    model = adapted(tmp_path / "base", LoraConfig(**LORA))
    first, same = (check_policy(publish(model, tmp_path / f"v{i}", i), PolicyVersion("run", i)) for i in (1, 2))
    model.peft_config["default"].lora_alpha = 40
    scaled = check_policy(publish(model, tmp_path / "v3", 3), PolicyVersion("run", 3))
    step(model)
    trained = check_policy(publish(model, tmp_path / "v4", 4), PolicyVersion("run", 4))
    assert first == same and len({first, scaled, trained}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_is_float32_beside_weights_of_any_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model_from_folder("tied", tmp_path)
    model = adapted(tmp_path, LoraConfig(**LORA), dtype)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {dtype}


# What does not fit --------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> Path:
    model_from_folder("tied", tmp_path / "base")
    return publish(adapted(tmp_path / "base", LoraConfig(**LORA)), tmp_path / "v1", 1)


def edit(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SERVED = LoraConfig(enable=True, **LORA)


def rename_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "model.safetensors")


def damage_config(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("[")


@pytest.mark.parametrize(
    ("folder", "model", "lora", "message"),
    [
        ("v1", "base", None, "holds an adapter, but this server was started with .*lora.enable=false"),
        ("base", "base", SERVED, "holds whole weights, but this server .*lora.enable=true"),
        ("v1", "some/model", SERVED, "an adapter for another base, .*/base; the teacher here is some/model"),
        ("v1", "base", replace(SERVED, rank=4), "of rank 5, but this server was .* teacher_model.lora.rank=4"),
        (rename_weights, "base", SERVED, "holds no adapter_model.safetensors"),
        (damage_config, "base", SERVED, r"adapter_config\.json is damaged"),
    ],
)
def test_published_weights_of_another_kind_are_refused(
    folder, model, lora, message, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(published.parent)
    check_published(published, "base", SERVED)
    check_published(published, str(published.parent / "base"), SERVED)
    if callable(folder):
        folder(published)
        folder = "v1"
    with pytest.raises(DataError, match=message):
        check_published(Path(folder), model, lora)


@pytest.mark.parametrize(
    ("folder", "model", "lora", "message"),
    [
        ("v1", "base", None, "was made with LoRA, but this training is without it"),
        ("base", "base", SERVED, "was made without LoRA, but this training is with it"),
        ("v1", "base", replace(SERVED, rank=6), "was made with lora.rank=5, not 6"),
        ("v1", "base", replace(SERVED, alpha=1), "was made with lora.alpha=20, not 1"),
        ("v1", "some/model", SERVED, "holds an adapter for another base, .*, not for some/model"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(
    folder, model, lora, message, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(published.parent)
    check_checkpoint(published, "base", SERVED)
    check_checkpoint(Path("base"), "base", None)
    with pytest.raises(ConfigError, match=f"{message}.*another logging.save_dir"):
        check_checkpoint(Path(folder), model, lora)


def test_an_adapter_is_no_model_and_the_merged_one_beside_it_is_named(published: Path) -> None:
    merged = published.parent / "model"
    with pytest.raises(ConfigError, match="holds a PEFT adapter for .*/base and no model of its own") as caught:
        check_model("teacher_model.model_name_or_path", str(published))
    assert str(merged) not in str(caught.value)
    merged.mkdir()
    with pytest.raises(ConfigError, match=f"the merged model, which is in {merged}"):
        check_model("teacher_model.model_name_or_path", str(published))


# Scoring ------------------------------------------------------------------------------------------------------------


def test_what_is_scored_is_scored_without_dropout_and_what_is_learned_with_it(world: Path, tmp_path: Path) -> None:
    lora = ["teacher_model.lora={enable: true, rank: 4, dropout: 0.5}"]
    trainer = offline_trainer(tmp_path / "run", save_tiny_model(tmp_path / "model", world / "blank"), lora)
    step(trainer.model)
    micro, *_ = trainer.batch()
    arguments = ([range(len(micro.mask_BT))], trainer.accelerator, trainer.padding)
    first, second = (log_probs_of_batch(trainer.model, micro, *arguments).logps_BT for _ in range(2))
    assert torch.equal(first, second) and torch.allclose(first, micro.old_logps_BT, atol=1e-6)

    def learned() -> torch.Tensor:
        return log_probs(trainer.model, micro, micro.wanted_BT, trainer.accelerator).logps_BT

    assert not torch.allclose(learned(), learned(), atol=1e-3)
    with without_dropout(trainer.model):
        assert torch.allclose(learned(), first, atol=1e-6)
        assert trainer.model.training


# A real engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask(world: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    with lora_engine(world / "blank", LORA) as ask:
        yield ask


@pytest.mark.gpu
def test_an_engine_answers_with_the_adapter_that_was_published_last(
    ask: Callable[..., SimpleNamespace], world: Path, tmp_path: Path
) -> None:
    """Before the first one the base answers alone. A version that is published again with other weights counts."""
    model = adapted(world / "blank", LoraConfig(**LORA))
    answer = ask()
    assert (answer.version, answer.adapters) == (0, [])
    base = AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)
    assert torch.allclose(scores(base, PROMPT, answer.ids), torch.tensor(answer.logprobs), atol=on_this_machine(1e-3))
    for count, version in enumerate((1, 2, 2), start=1):
        model_before = copy.deepcopy(model)
        step(model, seed=count)
        answer = ask(publish(model, tmp_path / f"v{version}", version), version)
        assert (answer.version, answer.adapters, answer.refused) == (version, [count], None)
        differences = scores(model, PROMPT, answer.ids) - torch.tensor(answer.logprobs)
        assert differences.abs().max() < 0.02 and differences.abs().mean() < 0.002
        for other in (model_before, base):
            assert (scores(other, PROMPT, answer.ids) - torch.tensor(answer.logprobs)).abs().mean() > 0.02


@pytest.mark.gpu
def test_the_adapter_of_each_module_reaches_the_engine_alone(
    ask: Callable[..., SimpleNamespace], world: Path, tmp_path: Path
) -> None:
    """vLLM keeps q, k and v in one matrix, and gate and up in another: each one's adapter has to find its place there,
    whether the others' do nothing or are missing."""
    base = AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)
    names = adapter_shape("key", str(world / "blank"), LoraConfig(**LORA)).modules
    assert set(names) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    cases = [(name, modules) for name in names for modules in ("all-linear", [name])]
    for version, (name, modules) in enumerate(cases, start=10):
        model = adapted(world / "blank", LoraConfig(target_modules=modules, **LORA))
        parameters = [parameter for key, parameter in model.named_parameters() if f".{name}.lora_" in key]
        assert len(parameters) == 2 * base.config.num_hidden_layers
        for parameter in parameters:
            parameter.data.normal_(std=0.7)
        answer = ask(publish(model, tmp_path / f"v{version}", version), version)
        assert (answer.version, answer.refused) == (version, None)
        logprobs = torch.tensor(answer.logprobs)
        assert (scores(model, PROMPT, answer.ids) - logprobs).abs().max() < on_this_machine(1e-3), (name, modules)
        assert (scores(base, PROMPT, answer.ids) - logprobs).abs().mean() > 0.02, (name, modules)


@pytest.mark.gpu
def test_an_adapter_that_does_not_fit_leaves_the_one_before(
    ask: Callable[..., SimpleNamespace], world: Path, tmp_path: Path
) -> None:
    model = adapted(world / "blank", LoraConfig(**LORA))
    step(model)
    accepted = ask(publish(model, tmp_path / "v5", 5), 5)
    folder = publish(model, tmp_path / "v6", 6)
    edit(folder, target_modules=["nonsense"], use_dora=True)
    answer = ask(folder, 6)
    assert "vLLM did not take the adapter in" in answer.refused and "DoRA" in answer.refused
    assert (answer.version, answer.adapters) == (5, accepted.adapters)
    assert torch.allclose(scores(model, PROMPT, answer.ids), torch.tensor(answer.logprobs), atol=on_this_machine(1e-3))
    assert "holds whole weights" in ask(publish_whole(world, tmp_path / "v7"), 7).refused


def publish_whole(world: Path, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(world / "blank")
    tokenizer = AutoTokenizer.from_pretrained(world / "blank")
    trainer = trainer_of(model, tokenizer)
    save_together(trainer, lambda save: write_policy(folder, PolicyVersion("run", 7), save))
    return folder
