"""Damaged and incomplete model folders: the fault is reported before anything heavy starts."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

import classroom_rl.engines.vllm.engine
from classroom_rl.config.load import load
from classroom_rl.config.models import ModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError, EngineFailure
from classroom_rl.memory.report import report
from classroom_rl.models.pretrained import (
    check_model,
    context_length,
    load_tokenizer,
    save_tokenizer,
    too_long_for,
    why_unfit,
)
from classroom_rl.rollout.chat_template import encode_chat, encode_text
from classroom_rl.server.open_models import open_roles
from tests.rollout.test_chat_template import NO_SYSTEM

KEY = "teacher_model.model_name_or_path"


@pytest.fixture
def model(world: Path, tmp_path: Path) -> Path:
    """A whole model, to be damaged."""
    return Path(shutil.copytree(world / "blank", tmp_path / "model"))


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(content)


def cut_weights(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def pickle_weights(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")


def lose_a_shard(model: Path) -> None:
    path = model / "model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(path), "model-00002-of-00002.safetensors")}
    path.rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def only_adapter(model: Path) -> None:
    for path in model.iterdir():
        path.unlink()
    save_file({"lora_A": torch.zeros(2, 2)}, model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B", "r": 8}))


def test_a_whole_model_passes(model: Path) -> None:
    check_model(KEY, str(model))
    assert load_tokenizer(KEY, str(model)).chat_template


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"but there is no such folder \(seen from .*\), and it is no name on the Hub"),
        (lambda model: (shutil.rmtree(model), model.write_text("x")), "which is a file. A model is a folder"),
        (lambda model: (shutil.rmtree(model), model.mkdir()), "holds no config.json, so it is no model. It is empty"),
        (
            lambda model: (model / "config.json").unlink(),
            "holds no config.json, so it is no model. It holds: chat",
        ),
        (write("config.json", '{"model_type": '), r"config\.json is damaged, it is not JSON: .*line 1 column"),
        (write("config.json", "[]"), r"config\.json is damaged, it holds no JSON object"),
        (edit("config.json", model_type="zork"), "cannot be loaded: .*model type `zork`"),
        (edit("config.json", model_type="zork", auto_map={"AutoConfig": "mine.Config"}), "contains custom code"),
        (edit("config.json", hidden_size="wide"), "cannot be loaded: .*'hidden_size'"),
        (cut_weights, r"model\.safetensors is missing or damaged .*incomplete"),
        (write("model.safetensors", ""), r"model\.safetensors is missing or damaged .*header too small"),
        (pickle_weights, r"holds its weights as pytorch_model\.bin only. Such files can run code"),
        (lambda model: (model / "model.safetensors").unlink(), r"holds no \.safetensors file. It holds: "),
        (lose_a_shard, r"model-00002-of-00002\.safetensors is missing or damaged"),
        (write("model.safetensors.index.json", "{"), r"model\.safetensors\.index\.json is damaged, it is not JSON"),
        (
            only_adapter,
            r"holds a PEFT adapter for Qwen/Qwen3-8B and no model of its own. Name the base model",
        ),
    ],
)
def test_a_damaged_model_is_refused_with_what_is_wrong(model: Path, damage, message: str) -> None:
    damage(model)
    with pytest.raises(ConfigError, match=message) as caught:
        check_model(KEY, str(model))
    assert str(model) in str(caught.value)


def test_a_models_own_code_is_not_run(model: Path) -> None:
    edit("config.json", model_type="zork", auto_map={"AutoConfig": "mine.Config"})(model)
    (model / "mine.py").write_text(f"open({str(model / 'ran')!r}, 'w')\n")
    edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.Tokenizer", None]}, tokenizer_class="Zork")(model)
    with pytest.raises(ConfigError):
        check_model(KEY, str(model))
    with pytest.raises(ConfigError):
        load_tokenizer(KEY, str(model))
    assert not (model / "ran").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: [path.unlink() for path in model.glob("tokenizer*")], "holds no tokenizer"),
        (write("tokenizer.json", "{"), "the tokenizer of .* cannot be loaded"),
        (lambda model: (model / "chat_template.jinja").unlink(), "has no chat template"),
    ],
)
def test_a_damaged_tokenizer_is_refused_with_what_is_wrong(model: Path, damage, message: str) -> None:
    damage(model)
    with pytest.raises(ConfigError, match=f"^{KEY}: .*{message}"):
        load_tokenizer(KEY, str(model))


def add_tokens(*tokens: str | AddedToken) -> Callable[[Path], None]:
    def add(model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.add_tokens(list(tokens))
        tokenizer.save_pretrained(model)

    return add


def markup(token: str) -> Callable[[Path], object]:
    def write_it(model: Path) -> None:
        add_tokens(AddedToken(token, special=True))(model)
        path = model / "chat_template.jinja"
        path.write_text(path.read_text() + f"{{{{- '{token}' if false }}}}")

    return write_it


UNFIT = {
    "one more": (add_tokens("<more>"), r"has 713 tokens, but the model has embeddings for 712 .*'<more>' has none"),
    "in the template": (markup("<more>"), "'<more>' has none. Take the tokenizer that belongs to the model"),
    "fewer rows": (edit("config.json", vocab_size=700), "has 712 tokens, but the model has embeddings for 700"),
    "eos of text": (
        edit("config.json", eos_token_id=500),
        "eos_token_id is 500 in the config.json of .* as '.*'",
    ),
    "eos beyond": (edit("config.json", eos_token_id=151645), "eos_token_id is 151645 in the config.json.* no token"),
    "pad of text": (edit("config.json", pad_token_id=500), "pad_token_id is 500 in the config.json"),
    "pad beyond": (edit("config.json", pad_token_id=712), "pad_token_id is 712 in the config.json.* no token"),
    "generation": (
        write("generation_config.json", '{"eos_token_id": [2, 700]}'),
        "eos_token_id is 700 in the generation_config.json",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_tokenizer_that_contradicts_its_model_is_refused_in_a_dry_run_and_before_any_engine_starts(
    model: Path, world: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    damage, message = UNFIT[case]
    damage(model)
    with pytest.raises(ConfigError, match=f"^{KEY}: .*{message}") as caught:
        load_tokenizer(KEY, str(model))
    config = configured(model, world / "blank")
    assert report(config, None).refusals == [str(caught.value)]
    monkeypatch.setattr(classroom_rl.engines.vllm.engine.VllmEngine, "start", None)
    with pytest.raises(ConfigError, match=message):
        open_roles(config, {}, model).send(None)


def test_a_special_token_that_no_text_becomes_needs_no_embedding(model: Path) -> None:
    """As Gemma 3 has one, for images, in its models that read only text."""
    add_tokens(AddedToken("<image>", special=True))(model)
    tokenizer = load_tokenizer(KEY, str(model))
    assert max(encode_text(tokenizer, "<image>")) < 712 == tokenizer.convert_tokens_to_ids("<image>")


@pytest.mark.parametrize("error", [ImportError("needs sentencepiece"), AttributeError("added_tokens_decoder")])
def test_a_tokenizer_that_cannot_be_read_here_ends_no_memory_budget(model: Path, monkeypatch, error) -> None:
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    assert why_unfit(KEY, str(model)) is None


def test_what_a_class_of_models_has_by_default_is_not_what_the_model_says(model: Path) -> None:
    """GPT-2's class ends with token 50256, whatever the vocabulary; a configuration without an end token names none."""
    (model / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 712}')
    (model / "generation_config.json").unlink(missing_ok=True)
    load_tokenizer(KEY, str(model))


_IN_VERSION_4 = """
import json, sys
from transformers import AutoTokenizer, __version__
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
messages = [{"role": "user", "content": "Where is Ann?"}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
print(json.dumps([__version__, ids, tokenizer.eos_token_id, tokenizer.pad_token_id, sorted(tokenizer.all_special_ids)]))
"""


def saved_by(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """The tokenizer as a trained model has it: loaded from one that was saved here, and saved again."""
    save_tokenizer(tokenizer, folder / "base")
    save_tokenizer(AutoTokenizer.from_pretrained(folder / "base", padding_side="left"), folder / "trained")
    return folder / "trained"


@pytest.fixture
def trained_tokenizer(world: Path, tmp_path: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(world / "blank")
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(1)]})
    return saved_by(tokenizer, tmp_path)


def test_a_trained_model_s_tokenizer_is_written_in_the_words_of_version_4(trained_tokenizer: Path) -> None:
    tokenizer_config = json.loads((trained_tokenizer / "tokenizer_config.json").read_text())
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (
        tokenizer_config["additional_special_tokens"]
        and not {"extra_special_tokens", "backend"} & tokenizer_config.keys()
    )
    reloaded = AutoTokenizer.from_pretrained(trained_tokenizer)
    original = AutoTokenizer.from_pretrained(trained_tokenizer.parent / "base")
    assert reloaded.get_vocab() == original.get_vocab() and reloaded.all_special_ids == original.all_special_ids


@pytest.mark.full
def test_a_trained_model_s_tokenizer_loads_in_transformers_4(trained_tokenizer: Path, tmp_path: Path) -> None:
    """It installs that version into an environment of its own."""
    python = tmp_path / "venv/bin/python"
    for command in (
        [sys.executable, "-m", "venv", tmp_path / "venv"],
        [python, "-m", "pip", "install", "--quiet", "transformers==4.57.*", "jinja2"],
    ):
        subprocess.run(command, check=True, timeout=500)
    command = [python, "-c", _IN_VERSION_4, trained_tokenizer]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    tokenizer = AutoTokenizer.from_pretrained(trained_tokenizer)
    version, ids, *special = json.loads(result.stdout)
    assert version.startswith("4.57") and ids == encode_chat(tokenizer, [{"role": "user", "content": "Where is Ann?"}])
    assert special == [tokenizer.eos_token_id, tokenizer.pad_token_id, sorted(tokenizer.all_special_ids)]


def test_a_name_that_is_not_on_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"{KEY}: the model nobody/nothing cannot be loaded"):
        check_model(KEY, "nobody/nothing")


def configured(teacher: Path, student: Path, max_length: int = 1024) -> TrainRLConfig:
    config = load(TrainRLConfig, "train_rl", [])
    for model, folder in ((config.teacher_model, teacher), (config.student_model, student)):
        model.model_name_or_path, model.vllm.max_length = str(folder), max_length
    return config


@pytest.mark.parametrize("role", ["teacher", "student"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, "missing or damaged"),
        (
            write("chat_template.jinja", "{{ raise_exception('Only tools may speak') }}"),
            "{role}_model.model_name_or_path: {model}: .*Only tools may speak",
        ),
        (
            edit("config.json", max_position_embeddings=512),
            "^{role}_model.vllm.max_length is 1024, but {model} .* at most 512 tokens",
        ),
    ],
    ids=["weights", "template", "context"],
)
def test_the_server_refuses_a_model_before_any_engine_starts(model, world, monkeypatch, role, damage, message) -> None:
    async def start(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(classroom_rl.engines.vllm.engine.VllmEngine, "start", start)
    damage(model)
    config = configured(*((model, world / "blank") if role == "teacher" else (world / "blank", model)))
    with pytest.raises(ConfigError, match=message.format(role=role, model=model)):
        open_roles(config, {}, model).send(None)


def test_a_prompt_that_goes_as_the_user_s_is_told_about(model: Path, monkeypatch, caplog):
    async def no_engines(*_: object) -> None:
        raise EngineFailure("none here")

    monkeypatch.setattr("classroom_rl.server.open_models._start_engines", no_engines)
    config = configured(model, model)
    own_template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    for template, is_logged in ((own_template, False), (NO_SYSTEM, True)):
        caplog.clear()
        write("chat_template.jinja", template)(model)
        with caplog.at_level("INFO"), pytest.raises(EngineFailure):
            open_roles(config, {}, model).send(None)
        assert ("the prompt goes as the user's" in caplog.text) == is_logged


def test_vllm_reads_safetensors_only_and_runs_no_code_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_arguments = {}

    def from_engine_args(arguments: object, **_: object) -> None:
        engine_arguments.update(vars(arguments))

    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", from_engine_args)
    classroom_rl.engines.vllm.engine.load_engine(ModelConfig("some/model"), seed=1, sleep_mode=False, runner="generate")
    assert (engine_arguments["load_format"], engine_arguments["trust_remote_code"]) == ("safetensors", False)


# The longest context ------------------------------------------------------------------------------------------------

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

    config = get_config(str(model), trust_remote_code=False)
    shape = SimpleNamespace(
        derived_max_model_len_and_key=ModelArchConfigConvertorBase(config, config).derive_max_model_len_and_key()
    )
    return _get_and_verify_max_len(config, shape, None, length, disable_sliding_window=False, sliding_window=None)


@pytest.mark.parametrize("case", CASES)
def test_a_context_is_as_long_as_vllm_takes_it(case: str, tmp_path: Path) -> None:
    changes, length = CASES[case]
    model = write_model(tmp_path, changes)
    assert context_length(AutoConfig.from_pretrained(model)) == length
    assert by_vllm(model, length) == length
    with pytest.raises(ValueError, match="is greater than the derived max_model_len"):
        by_vllm(model, length + 1)


def test_a_length_beyond_the_context_is_refused_unless_vllm_was_told_to_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


QUANTISED = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}


@pytest.mark.parametrize("changes", [{}, QUANTISED], ids=["known size", "size not reckoned"])
def test_a_dry_run_refuses_every_role_whose_context_is_too_long(changes: dict, tmp_path: Path) -> None:
    config = configured(write_model(tmp_path, changes), tmp_path, max_length=2048)
    assert report(config, None).refusals == []
    config.teacher_model.vllm.max_length = 6144
    (refusal,) = report(config, None).refusals
    message = f"teacher_model.vllm.max_length is 6144, but {tmp_path} was made for at most 2048 tokens"
    assert refusal.startswith(message) and "set teacher_model.vllm.max_length=2048 or less" in refusal
