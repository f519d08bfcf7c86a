"""QLoRA on tiny models: what is in 4 bits, what is trained, served and saved, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig

from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.four_bit import check_quantised, keep_packed, quantisation, write_base
from classroom_rl.models.lora import ADAPTER_CONFIG, check_checkpoint, check_published, merge_adapter
from classroom_rl.trainer import model_loading
from classroom_rl.trainer.sharded_save import save_adapter_together, save_together
from classroom_rl.trainer.weight_delta import parameter_movement
from tests.support.configs import training
from tests.support.offline_trainer import offline_trainer, save_tiny_model

IN_4_BITS = ["teacher_model.lora={enable: true, rank: 4, dropout: 0}", "teacher_model.load_in_4bit=true"]
IDS = torch.arange(40).reshape(2, 20)


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float().log_softmax(-1)


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def packed(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter for name, parameter in trainer.model.named_parameters() if hasattr(parameter, "quant_state")
    }


@pytest.fixture(scope="module")
def source(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("source") / "model", world / "blank")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_moves_the_adapter_and_engine_files_and_trainer_agree(source: Path, tmp_path: Path, dtype: str) -> None:
    loop = offline_trainer(tmp_path / "run", source, [*IN_4_BITS, "train.learning_rate=0.1", f"train.dtype={dtype}"])
    linear = [name for name, module in loop.model.named_modules() if isinstance(module, Linear4bit)]
    frozen = {name: parameter.data.clone() for name, parameter in packed(loop).items()}
    assert len(linear) == len(frozen) == 2 * 7 and {tensor.dtype for tensor in frozen.values()} == {torch.uint8}
    learned = {
        name: parameter.detach().clone() for name, parameter in loop.model.named_parameters() if parameter.requires_grad
    }
    assert len(learned) == 2 * 2 * 7 and all("lora_" in name for name in learned)
    for _ in range(2):  # B begins with zeros, so A moves in the second step
        loop.loss_and_gradients(loop.batch())
        loop.optimizer.step()
    parameters_after = dict(loop.model.named_parameters())
    assert all(not torch.equal(tensor, parameters_after[name]) for name, tensor in learned.items())
    assert all(torch.equal(tensor, parameters_after[name]) for name, tensor in frozen.items())
    base = Path(loop.run_config.served_teacher)
    write_base(base, str(source), dtype)
    save_adapter_together(loop, lambda save: save(tmp_path / "adapter"))
    save_together(loop, lambda save: save(tmp_path / "model"))
    merge_adapter(tmp_path / "adapter", None, tmp_path / "merged")  # into the base that the adapter names
    # All else computes in float32; CPUs with and without AMX or AVX512-BF16 multiply bfloat16 in other ways.
    trained, tolerance = logprobs(loop.model), 1e-5 if dtype == "float32" else 0.07
    served = logprobs(PeftModel.from_pretrained(read(base), tmp_path / "adapter"))
    for candidate in (served, logprobs(read(tmp_path / "model")), logprobs(read(tmp_path / "merged"))):
        assert (candidate - trained).abs().max() < tolerance
    over_the_original = logprobs(PeftModel.from_pretrained(read(source), tmp_path / "adapter"))
    assert (over_the_original - served).abs().max() > 100 * 1e-5
    assert not hasattr(read(tmp_path / "model").config, "quantization_config")
    assert parameter_movement(loop, str(source)).relative_norm > 0.01


def test_weights_stay_as_they_were_packed_on_every_cpu() -> None:
    layer = Linear4bit(64, 32, quant_type="nf4").to("cpu")  # packs it
    layer.support_avx512bf16_for_cpu = True  # as bitsandbytes finds on some
    keep_packed(torch.nn.Sequential(layer))
    packed_weight = layer.weight.data.clone()
    with torch.no_grad():
        layer.eval()(torch.ones(1, 64))
    assert torch.equal(layer.weight.data, packed_weight)


def test_without_a_trained_adapter_the_saved_model_is_the_base(source: Path, tmp_path: Path) -> None:
    """Also where only some of the layers have an adapter."""
    one_module = ["teacher_model.lora.target_modules=[q_proj]"]
    loop = offline_trainer(tmp_path / "run", source, [*IN_4_BITS, *one_module])
    write_base(Path(loop.run_config.served_teacher), str(source), "float32")
    save_together(loop, lambda save: save(tmp_path / "model"))
    saved, base, original = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "model", Path(loop.run_config.served_teacher), source)
    )
    assert saved.keys() == base.keys() == original.keys()
    assert all(torch.equal(saved[name], base[name]) for name in base)
    changed = {name for name in base if not torch.equal(base[name], original[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}


def test_an_adapter_belongs_to_the_rounded_base_also_after_the_run_has_moved(source: Path, tmp_path: Path) -> None:
    config = training(*IN_4_BITS, f"teacher_model.model_name_or_path={source}", f"logging.save_dir={tmp_path}/run")
    other = training(*IN_4_BITS, f"teacher_model.model_name_or_path={tmp_path}", f"logging.save_dir={tmp_path}/run")
    adapter, lora = tmp_path / "adapter", config.teacher_model.adapter
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    moved_base = f"/elsewhere/{Path(config.served_teacher).name}"
    for name in (config.served_teacher, moved_base):
        adapter_config = {"base_model_name_or_path": name, "r": lora.rank, "lora_alpha": lora.alpha}
        (adapter / ADAPTER_CONFIG).write_text(json.dumps(adapter_config))
        check_published(adapter, config.served_teacher, lora)
        check_checkpoint(adapter, config.served_teacher, lora)
        for other_base in (str(source), other.served_teacher):
            with pytest.raises(DataError, match="an adapter for another base"):
                check_published(adapter, other_base, lora)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["teacher_model.load_in_4bit=true"], "cannot be trained themselves: set teacher_model.lora.enable=true"),
        ([*IN_4_BITS, "generation.server_urls=[http://127.0.0.1:1,http://127.0.0.1:2]"], "server_urls names several"),
        ([*IN_4_BITS, "train.publish_through=nccl"], "engines load adapters from files"),
    ],
)
def test_what_does_not_go_with_it_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        training(*overrides)


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_UNSUITABLE = {
    "weights that are not of linear layers": MixtralConfig(**_SMALL, num_key_value_heads=2, vocab_size=64),
    "layers that bitsandbytes transposes": GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16),
}


@pytest.mark.parametrize("words", _UNSUITABLE)
def test_a_model_of_which_little_would_be_in_4_bits_is_refused(tmp_path: Path, words: str) -> None:
    AutoModelForCausalLM.from_config(_UNSUITABLE[words]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantisation(str(tmp_path), "float32"))
    with pytest.raises(ConfigError, match=f"consists of {words}: .* Set it to false"):
        check_quantised(model, str(tmp_path))


def test_a_model_that_is_quantised_already_is_refused(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="is quantised already"):
        quantisation(str(tmp_path), "bfloat16")


@pytest.mark.parametrize("launched", ["ZeRO-3", "two processes"])
def test_launches_that_split_weights_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: str
) -> None:
    if launched == "ZeRO-3":
        monkeypatch.setattr(model_loading, "is_deepspeed_zero3_enabled", lambda: True)
    else:
        monkeypatch.setattr(model_loading, "PartialState", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(ConfigError, match="for one process without DeepSpeed's ZeRO-3"):
        offline_trainer(tmp_path, source, IN_4_BITS)
