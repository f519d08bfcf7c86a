"""A model's longest context: computed as vLLM does, and reported before anything is loaded."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.memory.report import report
from classroom_rl.models.pretrained import context_length, too_long_for
from classroom_rl.server.open_models import open_roles
from tests.models.test_pretrained import edit

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "as it is": ({}, 2048),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 4096),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 1.5}}, 3072),
    "yarn": ({"max_position_embeddings": 8192, "rope_scaling": YARN}, 8192),
    "llama 3": ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1024}}, 2048),
    "a shorter length besides": ({"max_seq_len": 1024}, 1024),
    "a longer one besides": ({"model_max_length": 4096}, 4096),
    "gemma 3": (
        {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "head_dim": 16},
        2048,
    ),
    "gpt 2": (
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 512, "n_embd": 64, "n_head": 4},
        512,
    ),
}


def write_model(folder: Path, changes: dict) -> Path:
    settings = LLAMA | changes
    if settings["model_type"] == "gpt2":
        del settings["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def by_vllm(model: Path, length: int) -> int:
    """What vLLM makes of a wanted length; it raises a ValueError if that is too long."""
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    found = get_config(str(model), trust_remote_code=False)
    shape = SimpleNamespace(
        derived_max_model_len_and_key=ModelArchConfigConvertorBase(found, found).derive_max_model_len_and_key()
    )
    return _get_and_verify_max_len(found, shape, None, length, disable_sliding_window=False, sliding_window=None)


@pytest.mark.parametrize("case", CASES)
def test_a_context_is_as_long_as_vllm_takes_it(case: str, tmp_path: Path) -> None:
    changes, length = CASES[case]
    model = write_model(tmp_path, changes)
    assert context_length(AutoConfig.from_pretrained(model)) == length
    assert by_vllm(model, length) == length
    with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
        by_vllm(model, length + 1)


def test_where_vllm_was_told_to_allow_more_so_it_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.from_pretrained(write_model(tmp_path, {}))
    assert too_long_for("key", "model", config, 2048) is None
    assert "key is 2049, but model was made for at most 2048 tokens" in too_long_for("key", "model", config, 2049)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert too_long_for("key", "model", config, 2049) is None


def test_a_configuration_that_names_no_length_takes_any(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_model(tmp_path, {"model_type": "mamba"}))
    for name in ("max_position_embeddings", "model_max_length"):
        if hasattr(config, name):
            delattr(config, name)
    assert context_length(config) is None and too_long_for("key", "model", config, 10**6) is None


def test_a_dry_run_says_so_of_every_role_that_is_too_long(tmp_path: Path) -> None:
    model = write_model(tmp_path, {})
    long, short = (f"{{model_name_or_path: {model}, vllm: {{max_length: {length}}}}}" for length in (6144, 2048))
    overrides = [f"teacher_model={long}", f"student_model={short}", "train.gpu_memory_gib=null"]
    found = report(load(TrainRLConfig, "train_rl", overrides, check_train_rl), None)
    assert len(found.refusals) == 1
    assert found.refusals[0].startswith(
        f"teacher_model.vllm.max_length is 6144, but {model} was made for at most 2048 tokens"
    )
    assert "set teacher_model.vllm.max_length=2048 or less" in found.refusals[0]


def test_a_model_that_is_not_reckoned_is_looked_at_all_the_same(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}
    model = write_model(tmp_path, quantised)
    models = [
        f"{role}_model={{model_name_or_path: {model}, vllm: {{max_length: 4096}}}}" for role in ("teacher", "student")
    ]
    found = report(load(TrainRLConfig, "train_rl", models), None)
    assert len(found.refusals) == 2 and any("not reckoned" in line for line in found.lines)


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_the_server_says_so_before_any_engine_starts(role: str, world: Path, tmp_path: Path, monkeypatch) -> None:
    async def start(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("classroom_rl.engines.vllm.engine.VllmEngine.start", start)
    short = Path(shutil.copytree(world / "blank", tmp_path / "model"))
    edit("config.json", max_position_embeddings=512)(short)
    config = load(TrainRLConfig, "train_rl", [])
    for name, seated in (("teacher", config.teacher_model), ("student", config.student_model)):
        seated.model_name_or_path = str(short if name == role else world / "blank")
        seated.vllm.max_length = 1024
    opening = open_roles(config, {}, tmp_path)
    with pytest.raises(ConfigError, match=f"^{role}_model.vllm.max_length is 1024, but {short} .* at most 512 tokens"):
        opening.send(None)
