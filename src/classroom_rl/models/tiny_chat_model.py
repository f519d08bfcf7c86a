"""A chat model with random weights of 0.2 M parameters, made in a second: for notebooks and tests that need a model's
tokens, but not its sense."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.models.pretrained import save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

_CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML. The generation markers enclose what the loss of a fine-tuning counts."""
_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
}
_TURN_START, _TURN_END, _PADDING = "<|im_start|>", "<|im_end|>", "<|pad|>"


def write_tiny_chat_model(
    folder: str | Path,
    texts: Iterable[str] = (),
    *,
    vocabulary: int = 512,
    context: int = 4096,
    seed: int = 0,
    sizes: Mapping[str, int] = _SIZES,
) -> Path:
    """Write tokenizer and model into a folder, for transformers and vLLM alike.

    Args:
        texts: what the tokenizer's tokens are learned from; any other text can be encoded, too.
        vocabulary: the most tokens.
        context: the length of the model's context in tokens.
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
        context: the length of its context in tokens.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **sizes,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
