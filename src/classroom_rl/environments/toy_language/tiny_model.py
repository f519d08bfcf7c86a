"""A tokenizer and an untrained model, small enough to be trained on a laptop's CPU in two minutes."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.models.pretrained import save_tokenizer
from classroom_rl.models.tiny_chat_model import untrained_qwen3

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

VOCABULARY = 1024
CONTEXT = 1024
_SIZES = {
    **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
TURN_START, TURN_END, PADDING = "<|im_start|>", "<|im_end|>", "<|pad|>"

_ENDINGS = "(?<=[a-z]{3})(?:ed|s)(?![a-z])"
"""Word endings that are split off before BPE, so that "cook", "cooks" and "cooked" share a token."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' and message.get('weight') != 0 %}
{%- generation %}
{{- message['content'] + '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""ChatML. The generation markers enclose what the loss counts: assistant messages, except those of weight 0."""


def train_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer of at most `VOCABULARY` tokens. Any text can be encoded, and decodes to itself."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    endings = pre_tokenizers.Split(Regex(_ENDINGS), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([endings, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        special_tokens=[PADDING, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(END_OF_CONVERSATION, special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PADDING,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def untrained_model(tokenizer: "PreTrainedTokenizerFast", seed: int) -> "Qwen3ForCausalLM":
    """A Qwen3 of 0.9 M parameters in float32. Its weights are random; equal seeds give equal weights."""
    return untrained_qwen3(tokenizer, _SIZES, CONTEXT, seed)


def save_blank(folder: Path, texts: Iterable[str], seed: int) -> None:
    """Write the tokenizer trained on `texts` and the untrained model into `folder`."""
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, folder)
    untrained_model(tokenizer, seed).save_pretrained(folder)
