"""Models with random weights: in the shape of real models, for benchmarks, and a chat model with 0.2 M parameters that
is created in a second, for notebooks and tests.

    write_shape(SHAPES["Qwen3-4B"], tokenizer, folder)
    python -m classroom_rl.models.random_model FOLDER --device cuda   a separate process, which frees the GPU at its end

The tokenizer is the quickstart's, extended to the shape's vocabulary with artificial tokens. So every sampled token can
be decoded, and every text can be encoded.
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from classroom_rl.models.pretrained import save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM


_CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML. The generation markers enclose the tokens that count in the loss of supervised fine-tuning."""
_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
}
_TURN_START, _TURN_END, _PADDING = "<|im_start|>", "<|im_end|>", "<|pad|>"
CONTEXT = 4096
"""Tokens."""
_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
SHAPES = {
    "Qwen3-0.6B": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": _SIZES | {"vocab_size": 2_048},
}
"""Sizes, as `Qwen3Config` takes them. The first two are taken from config.json on the Hub; the last is for tests."""


def write_tiny_chat_model(
    folder: str | Path,
    texts: Iterable[str] = (),
    *,
    vocabulary: int = 512,
    context: int = 4096,
    seed: int = 0,
    sizes: Mapping[str, int] = _SIZES,
) -> Path:
    """Write a tokenizer and a model into a folder, for both transformers and vLLM.

    Args:
        texts: the texts on which the tokenizer is trained; any other text can also be encoded.
        vocabulary: the maximum number of tokens.
        context: the model's context length in tokens.
        seed: equal seeds give equal weights.
        sizes: widths and numbers of layers and heads, as `Qwen3Config` takes them.

    Returns:
        The folder.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_PADDING, _TURN_START, _TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=_TURN_END,
        pad_token=_PADDING,
        additional_special_tokens=[_TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    untrained_qwen3(tokenizer, sizes, context, seed).save_pretrained(folder)
    save_tokenizer(tokenizer, Path(folder))
    return Path(folder)


def untrained_qwen3(
    tokenizer: "PreTrainedTokenizerBase", sizes: Mapping[str, int], context: int, seed: int
) -> "Qwen3ForCausalLM":
    """A Qwen3 with random weights in float32; equal seeds give equal weights.

    Args:
        sizes: widths and numbers of layers and heads, as `Qwen3Config` takes them.
        context: the context length in tokens.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = qwen3_config({**sizes, "vocab_size": len(tokenizer)}, context, **ends, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def qwen3_config(sizes: Mapping[str, int], context: int = CONTEXT, **options: Any) -> "Qwen3Config":
    """A model's configuration, whose output head is tied to the embeddings.

    Args:
        sizes: the vocabulary, widths and numbers of layers and heads, as `Qwen3Config` takes them.
        context: the context length in tokens.
        options: further options of `Qwen3Config`.
    """
    from transformers import Qwen3Config

    fixed = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "bos_token_id": None}
    return Qwen3Config(**sizes, max_position_embeddings=context, **fixed, **options)


def write_shape(shape: Mapping[str, int], tokenizer: Path, out: Path) -> None:
    """Write config.json and a tokenizer into the new folder `out`, which is enough for a memory budget.

    Args:
        shape: one of `SHAPES`.
        tokenizer: folder with the quickstart's tokenizer.
    """
    special_ids = extend_tokenizer(tokenizer, out, shape["vocab_size"])
    ends = {"eos_token_id": special_ids["eos_token"], "pad_token_id": special_ids["pad_token"]}
    qwen3_config(shape, **ends, dtype="bfloat16").save_pretrained(out)


def draw_weights(folder: Path, device: str) -> None:
    """Add random bfloat16 weights to a folder that `write_shape` wrote.

    Args:
        device: the device on which the weights are drawn; "cuda" is much faster.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(folder)


def extend_tokenizer(source: Path, out: Path, vocabulary: int) -> dict[str, int]:
    """Copy a tokenizer and add artificial tokens of four letters until it has `vocabulary` tokens. Texts are encoded as
    before, because no merge produces an artificial token.

    Returns:
        The ids of `eos_token` and `pad_token`.
    """
    out.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, out / name)
    path = out / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    ids = content["model"]["vocab"]
    for added_token in content["added_tokens"]:
        ids[added_token["content"]] = added_token["id"]  # otherwise they would get new ids after all others
    words = _unused_words(ids)
    for token_id in range(len(ids), vocabulary):
        ids[next(words)] = token_id
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = CONTEXT
    (out / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8")
    return {name: ids[settings[name]] for name in ("eos_token", "pad_token")}


def _unused_words(taken: dict[str, int]) -> Iterator[str]:
    """Words of four letters that are not tokens yet."""
    words = ("".join(letters) for letters in product(ascii_lowercase, repeat=4))
    return (word for word in words if word not in taken)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw the weights of a model whose config.json is written.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="where they are drawn: cpu or cuda")
    arguments = parser.parse_args()
    draw_weights(arguments.folder, arguments.device)
    print(f"{arguments.folder} has weights")


if __name__ == "__main__":
    main()
