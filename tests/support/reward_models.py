"""Tiny reward models: a tokenizer of the quickstart, random weights, a head with as many logits as wanted."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

Messages = Sequence[dict[str, str]]
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def save_classifier(folder: Path, blank: Path, logits: int = 1) -> Path:
    """A Qwen3 with a classification head, as transformers writes it."""
    tokenizer = AutoTokenizer.from_pretrained(blank)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, **ids, head_dim=32, num_labels=logits))
        torch.nn.init.normal_(model.score.weight)  # so that logits differ by several units
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_math_rm(folder: Path, blank: Path) -> Path:
    """A Qwen2 with two linear layers over every token, built and saved as Qwen/Qwen2.5-Math-RM-72B is."""
    from safetensors.torch import save_file

    tokenizer = AutoTokenizer.from_pretrained(blank)
    config = Qwen2Config(**SHAPE, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        model, head = Qwen2Model(config), math_rm_head(config.hidden_size)
    tokenizer.save_pretrained(folder)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    weights |= {f"score.{name}": weight for name, weight in head.state_dict().items()}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    settings = config.to_dict() | {"architectures": ["Qwen2ForRewardModel"]}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def math_rm_head(width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))


def classifier_logit(folder: Path, messages: Messages) -> float:
    """The logit of transformers for a conversation."""
    return logits_of(folder, [rendered_ids(folder, messages)])[0]


def logits_of(folder: Path, dialogues: Sequence[list[int]]) -> list[float]:
    """The logits of transformers for tokenised conversations."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([ids])).logits.item() for ids in dialogues]


def math_rm_logit(folder: Path, messages: Messages) -> float:
    """The value after the last token, computed with transformers and torch alone."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    model = Qwen2Model(Qwen2Config.from_pretrained(folder)).eval()
    head = math_rm_head(model.config.hidden_size)
    for part, prefix in ((model, "model."), (head, "score.")):
        part.load_state_dict({name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)})
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([rendered_ids(folder, messages)])).last_hidden_state
        return head(hidden)[0, -1, 0].item()


def rendered_ids(folder: Path, messages: Messages) -> list[int]:
    """The tokens of the conversation, rendered by transformers with the model's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=False, return_dict=False)
