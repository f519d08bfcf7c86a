"""Fine-tuning an adapter: the files it leaves, the dtype of its weights, and resuming."""

import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from classroom_rl.errors import ConfigError
from classroom_rl.trainer.sft import run as sft
from tests.conftest import ROOT, free_port
from tests.trainer.sft.test_run import ROWS, blank, corpus, make_config, one_thread, trainer_of  # noqa: F401
from tests.trainer.test_sharded_save import weights_in

LORA = ("model.lora={enable: true, rank: 8, alpha: 32}", "train.optimizer=adamw_torch")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, blank, corpus):  # noqa: F811
    run_folder = tmp_path_factory.mktemp("lora")
    config = make_config(run_folder, blank, corpus, *LORA, "train.max_steps=60", "train.learning_rate=2e-2")
    assert sft.train(config) == run_folder / "model"
    return run_folder


def test_the_adapter_and_the_model_with_it_are_left(tuned, blank):  # noqa: F811
    assert sorted(path.name for path in tuned.iterdir()) == ["adapter", "config", "metrics.jsonl", "model", "run_id"]
    merged = AutoModelForCausalLM.from_pretrained(tuned / "model")
    base = AutoModelForCausalLM.from_pretrained(blank, dtype=torch.float32)
    ids = torch.randint(0, 60, (2, 20))
    with torch.no_grad():
        base_logits, merged_logits = base(ids).logits, merged(ids).logits
        adapter_logits = PeftModel.from_pretrained(base, tuned / "adapter").eval()(ids).logits
    assert torch.allclose(merged_logits, adapter_logits, atol=1e-4) and not torch.allclose(
        merged_logits, base_logits, atol=0.1
    )
    assert set(weights_in(tuned / "model")) == set(weights_in(blank))
    assert AutoTokenizer.from_pretrained(tuned / "model").chat_template


def test_only_the_adapter_learns_and_in_float32_beside_16_bits(tmp_path, blank, corpus):  # noqa: F811
    trainer = trainer_of(make_config(tmp_path, blank, corpus, *LORA, "train.dtype=bfloat16"))
    learning = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert learning and all(".lora_" in name and weight.dtype == torch.float32 for name, weight in learning.items())
    assert {weight.dtype for name, weight in trainer.model.named_parameters() if name not in learning} == {
        torch.bfloat16
    }


def test_16_bits_are_trained_and_left(tmp_path, blank, corpus):  # noqa: F811
    config = make_config(tmp_path, blank, corpus, *LORA, "train.dtype=bfloat16", "train.gradient_checkpointing=true")
    sft.train(config)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert {weight.dtype for weight in load_file(tmp_path / "adapter/adapter_model.safetensors").values()} == {
        torch.float32
    }


def test_an_interrupted_run_goes_on_to_the_same_adapter(tmp_path, blank, corpus, monkeypatch):  # noqa: F811
    overrides = (*LORA, "train.max_steps=6", "logging.save_steps=3", "model.lora.dropout=0")
    sft.train(make_config(tmp_path / "whole", blank, corpus, *overrides))
    config = make_config(tmp_path / "broken", blank, corpus, *overrides)
    on_log, stop_after = sft.MetricsCallback.on_log, 4

    def counted(self, args, state, control, logs=None, **_):
        on_log(self, args, state, control, logs)
        if state.global_step == stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(sft.MetricsCallback, "on_log", counted)
    with pytest.raises(KeyboardInterrupt):
        sft.train(config)
    checkpoint = tmp_path / "broken" / "checkpoints" / "checkpoint-3"
    assert (checkpoint / "adapter_model.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    stop_after = None
    other_config = make_config(tmp_path / "broken", blank, corpus, *overrides, "model.lora.rank=4")
    with pytest.raises(ConfigError, match="was made with lora.rank=8, not 4"):
        sft.train(other_config)
    sft.train(config)
    whole, resumed = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("whole", "broken"))
    assert all(torch.allclose(whole[name], resumed[name], atol=1e-6) for name in whole)
    assert any(weight.abs().max() > 0 for name, weight in whole.items() if "lora_B" in name)


@pytest.mark.full
def test_two_processes_leave_adapter_and_model_under_zero3(tmp_path, blank, corpus):  # noqa: F811
    config = make_config(tmp_path / "run", blank, corpus, *LORA)
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "config/deepspeed/zero3_2CPU.yaml"),
        *("--main_process_port", str(free_port()), "train_sft.py", *LORA, f"logging.save_dir={tmp_path / 'run'}"),
        *(f"model.model_name_or_path={blank}", "model.max_length=128", "train.max_steps=3", "train.learning_rate=1e-2"),
        f"dataset.train_datasets=[{{name_or_path: {config.dataset.train_datasets[0].name_or_path}}}]",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    base = AutoModelForCausalLM.from_pretrained(blank, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    ids = torch.randint(0, 60, (2, 20))
    with torch.no_grad():
        base_logits, merged_logits = base(ids).logits, merged(ids).logits
        adapter_logits = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()(ids).logits
    assert torch.allclose(merged_logits, adapter_logits, atol=1e-4) and not torch.allclose(
        merged_logits, base_logits, atol=0.01
    )


def test_modules_that_the_model_has_not_are_refused(tmp_path, blank, corpus):  # noqa: F811
    config = make_config(tmp_path, blank, corpus, *LORA, "model.lora.target_modules=[q]")
    with pytest.raises(ConfigError, match="model.lora does not fit"):
        sft.train(config)
