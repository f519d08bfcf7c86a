"""A real fine-tuning of a few steps on a tiny model: which tokens are trained on, which files it leaves, what it
refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from classroom_rl.config.base import DataSource
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_sft import ConversationSource, TrainSFTConfig, check_train_sft
from classroom_rl.errors import ClassroomError, ConfigError, DataError
from classroom_rl.trainer.sft import muon
from classroom_rl.trainer.sft import run as sft
from classroom_rl.trainer.sft.muon import MuonWithAdamW, orthogonalised, split_parameters
from tests.rollout.test_chat_template import CHATML, make_tokenizer

LEARNING = CHATML.replace(
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and message.get('weight') != 0 -%}"
    "{%- generation -%}{{ message.content + '<|im_end|>' }}{%- endgeneration -%}"
    "{%- else -%}{{ message.content + '<|im_end|>' }}{%- endif -%}{{ '\\n' }}",
)
PAIRS = [("sister", "She cooked eggs."), ("user", "Hello."), ("think", "assistant"), ("eggs", "Two eggs.")]
ROWS = [
    {
        "messages": [
            {"role": "system", "content": "You are an assistant."},
            {"role": "user", "content": f"{question} {i}"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "<|im_start|>assistant\nand?"},
            {"role": "assistant", "content": "No more."},
        ]
    }
    for i in range(6)
    for question, reply in PAIRS
]


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def blank_model(folder: Path, template: str = LEARNING, context: int = 128) -> Path:
    tokenizer = make_tokenizer(template)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small are slower on two threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    return blank_model(tmp_path_factory.mktemp("blank"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", ROWS)


def make_config(run_folder: Path, blank: Path, corpus: Path, *overrides: str) -> TrainSFTConfig:
    arguments = [
        f"logging.save_dir={run_folder}",
        f"model.model_name_or_path={blank}",
        "model.max_length=128",
        f"dataset.train_datasets=[{{name_or_path: {corpus}}}]",
        "train.max_steps=12",
        "train.per_device_train_batch_size=8",
        "train.learning_rate=1e-2",
        *overrides,
    ]
    return load(TrainSFTConfig, "train_sft", arguments, check_train_sft)


def trainer_of(config: TrainSFTConfig):
    run_folder = Path(config.logging.save_dir)
    return sft.make_trainer(config, sft.sft_arguments(config, run_folder), run_folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, blank, corpus):
    """The run folder of a short fine-tuning, with a measured part."""
    run_folder = tmp_path_factory.mktemp("sft")
    validation = f"dataset.val_datasets=[{{name_or_path: {corpus}}}]"
    learning = (
        "train.optimizer=muon",
        "train.learning_rate=2e-2",
        "train.max_steps=30",
        "train.lr_scheduler_type=linear",
    )
    sft.train(make_config(run_folder, blank, corpus, validation, "dataset.max_val_examples=8", *learning))
    return run_folder


# What is learned from -----------------------------------------------------------------------------------------------


def learned_text(trainer, tokenizer, row: int) -> list[str]:
    """The stretches of a conversation that carry labels, as text."""
    example = trainer.train_dataset[row]
    stretches, before = [], False
    for token, label in zip(example["input_ids"], example["labels"], strict=True):
        assert label in (-100, token), "a label is its own token or nothing"
        if label != -100:
            stretches[-1:] = [stretches[-1] + [token]] if before else [*stretches[-1:], [token]]
        before = label != -100
    return [tokenizer.decode(stretch) for stretch in stretches]


def test_only_what_the_assistant_says_and_its_end_carry_labels(tmp_path, blank, corpus):
    trainer = trainer_of(make_config(tmp_path, blank, corpus))
    tokenizer = AutoTokenizer.from_pretrained(blank)
    assert len(trainer.train_dataset) == len(ROWS)
    replies = dict(PAIRS)
    for row in range(len(ROWS)):
        question = tokenizer.decode(trainer.train_dataset[row]["input_ids"]).split("user\n")[1].split()[0]
        assert learned_text(trainer, tokenizer, row) == [f"{replies[question]}<|im_end|>", "No more.<|im_end|>"]


def test_without_assistant_only_loss_whole_conversations_carry_labels(tmp_path, blank, corpus):
    trainer = trainer_of(make_config(tmp_path, blank, corpus, "train.assistant_only_loss=false"))
    tokenizer = AutoTokenizer.from_pretrained(blank)
    for row in range(len(ROWS)):
        (text,) = learned_text(trainer, tokenizer, row)
        assert text.startswith("<|im_start|>system\nYou are an assistant.") and "No more.<|im_end|>" in text


def test_a_template_without_marks_will_do_for_whole_conversations(tmp_path, blank, corpus):
    make_tokenizer(CHATML).save_pretrained(tmp_path / "unmarked")
    overrides = (f"model.tokenizer_name_or_path={tmp_path / 'unmarked'}", "train.assistant_only_loss=false")
    assert trainer_of(make_config(tmp_path / "run", blank, corpus, *overrides)).args.assistant_only_loss is False


def test_the_batch_that_reaches_the_model_carries_the_same_labels(tmp_path, blank, corpus):
    trainer = trainer_of(make_config(tmp_path, blank, corpus))
    tokenizer = AutoTokenizer.from_pretrained(blank)
    batch = next(iter(trainer.get_train_dataloader()))
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    assert len(lengths) == 8 and batch["input_ids"].shape == (1, sum(lengths))
    for ids, labels in zip(batch["input_ids"][0].split(lengths), batch["labels"][0].split(lengths), strict=True):
        assert tokenizer.decode(ids[labels != -100]).endswith("<|im_end|>No more.<|im_end|>")
        assert bool((labels == tokenizer.pad_token_id).any()) is False
        assert bool((ids == tokenizer.pad_token_id).any()) is False


def test_messages_of_weight_0_are_context_where_the_template_knows_weights(tmp_path, blank):
    rows = [{"conversation": [dict(m, weight=0) if m["content"] == "No more." else m for m in ROWS[0]["messages"]]}]
    corpus = write_rows(tmp_path / "weighted.jsonl", rows)
    trainer = trainer_of(make_config(tmp_path, blank, corpus))
    assert learned_text(trainer, AutoTokenizer.from_pretrained(blank), 0) == ["She cooked eggs.<|im_end|>"]


def test_conversations_that_are_too_long_are_told_about(tmp_path, blank, caplog):
    late = [{"role": "user", "content": "eggs " * 100}, *ROWS[0]["messages"][1:]]
    cut = [*ROWS[0]["messages"][:-1], {"role": "assistant", "content": "eggs " * 100}]
    corpus = write_rows(tmp_path / "long.jsonl", [ROWS[0], {"messages": late}, {"messages": cut}, ROWS[1]])
    config = make_config(tmp_path, blank, corpus, "model.max_length=100")
    trainer = trainer_of(config)
    assert len(trainer.train_dataset) == 3
    assert (
        "1 of 4 conversations reach model.max_length (100 tokens) and may be cut there; 1 more are left" in caplog.text
    )
    config.model.max_length = 5
    with pytest.raises(DataError, match=r"in its first 5 tokens \(model.max_length\)"):
        trainer_of(config)


def test_options_reach_trl(tmp_path, blank, corpus):
    overrides = (
        "train.gradient_accumulation_steps=3",
        "train.gradient_checkpointing=false",
        "train.per_device_train_batch_size=5",
        "train.learning_rate=3e-4",
        "train.lr_scheduler_type=cosine",
        "train.warmup=7",
        "train.optimizer=adafactor",
        "train.epochs=4",
        "train.max_steps=11",
        "logging.save_steps=6",
        "seed=13",
    )
    arguments = sft.sft_arguments(make_config(tmp_path, blank, corpus, *overrides), tmp_path)
    assert (arguments.gradient_accumulation_steps, arguments.per_device_train_batch_size) == (3, 5)
    assert (arguments.learning_rate, arguments.lr_scheduler_type, arguments.warmup_steps) == (3e-4, "cosine", 7)
    assert (arguments.num_train_epochs, arguments.max_steps, arguments.save_steps, arguments.seed) == (4, 11, 6, 13)
    assert arguments.optim == "adafactor" and not arguments.gradient_checkpointing and arguments.max_length == 128


# What is left behind ------------------------------------------------------------------------------------------------


def test_the_model_loads_with_tokenizer_and_chat_template_and_has_learned(trained, blank):
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(blank).chat_template
    assert model.dtype == torch.float32
    prompt = tokenizer.apply_chat_template(ROWS[0]["messages"][:4], add_generation_prompt=True, return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(generated) == "No more.<|im_end|>"


def test_each_step_is_a_line_of_metrics_and_the_loss_falls(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses) == list(range(1, 31))
    assert losses[1] > 5 > 0.5 > losses[30]
    assert all(line["time"] > 1.7e9 for line in lines)
    assert [line["step"] for line in lines if "eval_loss" in line] == list(range(3, 31, 3)), "measured after each epoch"


def test_the_run_folder_holds_config_and_environment_and_no_checkpoints(trained):
    assert sorted(path.name for path in trained.iterdir()) == ["config", "metrics.jsonl", "model", "run_id"]
    assert sorted(path.name for path in (trained / "config").iterdir()) == [
        "train_sft.environment.json",
        "train_sft.yaml",
    ]


def test_the_model_is_whole_or_not_there(tmp_path, blank, corpus, monkeypatch):
    config = make_config(tmp_path, blank, corpus, "train.max_steps=1", "train.warmup=0")

    def break_off(self, folder, **_):
        (Path(folder) / "config.json").write_text("{}")
        raise OSError("no space left on device")

    def content() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def break_a_run() -> None:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
            patch.setattr(Qwen3ForCausalLM, "save_pretrained", break_off)
            sft.train(config)

    break_a_run()
    assert not (tmp_path / "model").exists()
    sft.train(config)
    first = content()
    config.train.learning_rate = 0.5
    break_a_run()
    assert (content() == first) is True
    sft.train(config)
    assert content().keys() == first.keys()
    assert (content()["model.safetensors"] != first["model.safetensors"]) is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "metrics.jsonl", "model", "run_id"]


@pytest.mark.parametrize("optimizer", ["muon", "adamw_torch"])
def test_an_interrupted_run_goes_on_from_its_checkpoint_to_the_same_weights(
    tmp_path, blank, corpus, monkeypatch, optimizer
):
    overrides = (f"train.optimizer={optimizer}", "train.max_steps=6", "logging.save_steps=3")
    sft.train(make_config(tmp_path / "whole", blank, corpus, *overrides))
    config = make_config(tmp_path / "broken", blank, corpus, *overrides)
    on_log, steps, stop_after = sft.MetricsCallback.on_log, [], 4

    def counted(self, args, state, control, logs=None, **_):
        on_log(self, args, state, control, logs)
        steps.append(state.global_step)
        if state.global_step == stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(sft.MetricsCallback, "on_log", counted)
    with pytest.raises(KeyboardInterrupt):
        sft.train(config)
    assert not (tmp_path / "broken" / "model").exists()
    content = Path(corpus).read_bytes()
    Path(corpus).write_bytes(content + b"\n")
    with pytest.raises(ConfigError, match=r"checkpoint-3: .* is not what it was .dataset.train_datasets.\. Set back"):
        sft.train(config)
    Path(corpus).write_bytes(content)
    stop_after = None
    sft.train(config)
    assert steps[:7] == [1, 2, 3, 4, 4, 5, 6]
    lines = (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "broken" / "checkpoints").exists()
    whole, resumed = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "broken"))
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_bfloat16_is_the_dtype_of_the_saved_model(tmp_path, blank, corpus):
    overrides = ("train.dtype=bfloat16", "train.max_steps=1", "train.gradient_checkpointing=true")
    sft.train(make_config(tmp_path, blank, corpus, *overrides))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_plain_python_runs_the_program_and_it_says_what_it_does(tmp_path, blank, corpus):
    arguments = [
        f"logging.save_dir={tmp_path / 'run'}",
        f"model.model_name_or_path={blank}",
        "model.max_length=128",
        f"dataset.train_datasets=[{{name_or_path: {corpus}}}]",
        "train.max_steps=2",
    ]
    result = subprocess.run(
        [sys.executable, str(ROOT / "train_sft.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "tokenising 24 conversations" in result.stderr
    assert f"the trained model is in {tmp_path / 'run' / 'model'}" in result.stderr
    assert result.stdout.splitlines()[-1].startswith("step 2/2  loss ")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.vocab_size


def test_a_diverged_training_ends(tmp_path, blank, corpus):
    model = AutoModelForCausalLM.from_pretrained(blank)
    model.get_output_embeddings().weight.data.fill_(3e38)  # its logits overflow: the loss is no number
    model.save_pretrained(tmp_path / "overflowing")
    AutoTokenizer.from_pretrained(blank).save_pretrained(tmp_path / "overflowing")
    with pytest.raises(ClassroomError, match=r"at step \d+: the training has diverged"):
        sft.train(make_config(tmp_path, tmp_path / "overflowing", corpus))
    assert not (tmp_path / "model").exists()


# Muon ---------------------------------------------------------------------------------------------------------------


def test_muon_takes_the_matrices_of_the_layers_and_adamw_all_else(blank):
    model = AutoModelForCausalLM.from_pretrained(blank)
    matrices, others = split_parameters(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(matrix)].split(".")[-2] for matrix in matrices} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert "model.embed_tokens.weight" in {names[id(parameter)] for parameter in others}
    assert len(matrices) + len(others) == len(names)


def test_muon_leaves_an_untied_output_layer_to_adamw():
    config = Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1, head_dim=8, tie_word_embeddings=False)  # fmt: skip
    model = Qwen3ForCausalLM(config)
    matrices, others = split_parameters(model)
    assert any(parameter is model.lm_head.weight for parameter in others)
    assert len(matrices) == 7


def test_a_muon_step_moves_all_directions_of_a_matrix_alike():
    """By hand: the update of a matrix is its gradient with all singular values near 1, times 0.2 √(longer side)."""
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=1, num_key_value_heads=1, head_dim=8))  # fmt: skip
    optimizer = MuonWithAdamW(model, learning_rate=0.01)
    weight = model.model.layers[0].mlp.gate_proj.weight  # 32 × 8
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    before = weight.detach().clone()
    weight.grad = gradient.clone()
    optimizer.step()
    update = (before - weight.detach()) / (0.01 * 0.2 * 32**0.5)
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.5
    assert singular.max() < 1.5
    assert torch.sum(update * gradient) > 0


@pytest.mark.parametrize("shape", [(32, 8), (8, 32)])
def test_on_a_cpu_muon_computes_in_float32(shape):
    """What Newton–Schulz makes of a matrix, it makes of its singular values one by one."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    a, b, c = coefficients = (3.4445, -4.7750, 2.0315)
    left, values, right = torch.linalg.svd(gradient.double() / gradient.double().norm(), full_matrices=False)
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag(values) @ right
    assert torch.allclose(orthogonalised(gradient, coefficients, 5, 1e-7).double(), expected, atol=1e-4)
    assert not torch.allclose(muon._IN_BFLOAT16(gradient, coefficients, 5, 1e-7).double(), expected, atol=1e-3)
    assert torch.optim._muon._zeropower_via_newtonschulz is muon._IN_BFLOAT16  # other users of torch keep theirs


def test_a_step_of_muon_orthogonalises_that_way(blank, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(blank)
    optimizer = MuonWithAdamW(model, learning_rate=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    shapes = []
    monkeypatch.setattr(muon, "orthogonalised", lambda gradient, *_: shapes.append(gradient.shape) or gradient)
    optimizer.step()
    assert len(shapes) == len(split_parameters(model)[0])


def test_a_scheduler_sets_the_rate_of_both_halves(blank):
    optimizer = MuonWithAdamW(AutoModelForCausalLM.from_pretrained(blank), learning_rate=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert [group["lr"] for inner in optimizer._inner for group in inner.param_groups] == [0.05, 0.05]


# What is refused ----------------------------------------------------------------------------------------------------


GOOD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("a text", "is not a list of messages"),
        ([], "is not a list of messages"),
        ([{"from": "human", "value": "a"}], "holds a message without role and content"),
        ([{"role": "teacher", "content": "a"}], "holds the role 'teacher'; there are system, user, assistant"),
        ([{"role": "user", "content": None}, GOOD[1]], "holds a message of the user whose content is no text"),
        ([GOOD[0]], "holds nothing that the assistant says"),
        ([GOOD[0], {"role": "assistant", "content": " \n"}], "holds nothing that the assistant says"),
    ],
)
def test_a_conversation_that_cannot_be_learned_from_is_named_by_its_row(tmp_path, cell, message):
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": cell}] * 2)
    with pytest.raises(DataError, match=f"chats.jsonl: the conversation in row 1 {message}"):
        sft.read_conversations([ConversationSource(name_or_path=str(path))])


def test_the_conversation_column_is_found_or_named(tmp_path):
    for column in ("messages", "conversation"):
        path = write_rows(tmp_path / f"{column}.jsonl", [{"id": 1, column: GOOD}])
        assert sft.read_conversations([ConversationSource(name_or_path=str(path))]) == [GOOD]
    path = write_rows(tmp_path / "dialogs.jsonl", [{"id": 1, "dialog": GOOD}])
    with pytest.raises(DataError, match="has no column conversation or messages. It has: id, dialog. Name yours with"):
        sft.read_conversations([ConversationSource(name_or_path=str(path))])
    named = ConversationSource(name_or_path=str(path), conversation_column="dialog")
    assert isinstance(named, DataSource)
    assert sft.read_conversations([named]) == [GOOD]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.model_name_or_path={folder}/nothing",),
            "model_name_or_path is .*nothing, but there is no such",
        ),
        (("model.model_name_or_path={folder}/tokenizer",), r"model_name_or_path: .*tokenizer holds no config\.json"),
        (("model.max_length=129",), r"model.max_length is 129, but the context of .* is 128 tokens"),
        (("model.tokenizer_name_or_path={folder}/plain",), "has no chat template"),
        (
            ("model.tokenizer_name_or_path={folder}/unmarked",),
            r"does not mark what the assistant says.*train\.assistant_only_loss=false",
        ),
        (("model.tokenizer_name_or_path={folder}/large",), r"The tokenizer has \d+ tokens, but the model .* only \d+"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tmp_path, blank, corpus, overrides, message):
    for name, template in (("tokenizer", LEARNING), ("plain", None), ("unmarked", CHATML)):
        make_tokenizer(template).save_pretrained(tmp_path / name)
    large = make_tokenizer(LEARNING)
    large.add_tokens([f"word{i}" for i in range(50)])
    large.save_pretrained(tmp_path / "large")
    filled = [override.format(folder=tmp_path) for override in overrides]
    with pytest.raises(ConfigError, match=message):
        trainer_of(make_config(tmp_path / "run", blank, corpus, *filled))


def test_several_gpus_for_one_process_are_refused(tmp_path, blank, corpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="2 GPUs are visible to one process. .*accelerate launch train_sft.py"):
        sft.train(make_config(tmp_path, blank, corpus))


def test_muon_is_refused_under_deepspeed(tmp_path, blank, corpus, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="train.optimizer=muon needs whole matrices"):
        trainer_of(make_config(tmp_path, blank, corpus))
