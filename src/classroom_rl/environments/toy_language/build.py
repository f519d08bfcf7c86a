"""Makes the quickstart's world: a folder with its lessons, corpus, tokenizer and untrained model.

python -m classroom_rl.environments.toy_language.build --out runs/quickstart/world --seed 42
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.toy_language.corpus import PROMPTS, Row, make_corpus
from classroom_rl.environments.toy_language.lessons import Lesson, make_lessons, render_problem
from classroom_rl.models.pretrained import save_tokenizer
from classroom_rl.models.random_model import untrained_qwen3
from classroom_rl.system.storage import cached_folder

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
"""ChatML. The generation markers enclose the tokens that the loss counts: assistant messages, except those with weight
0."""


def train_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer of at most `VOCABULARY` tokens. Any text survives encoding and decoding unchanged."""
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
    """A Qwen3 model of 0.9 M parameters in float32 with random weights; equal seeds give equal weights."""
    return untrained_qwen3(tokenizer, _SIZES, CONTEXT, seed)


def save_blank(folder: Path, texts: Iterable[str], seed: int) -> None:
    """Write the tokenizer trained on `texts` and the untrained model into `folder`."""
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, folder)
    untrained_model(tokenizer, seed).save_pretrained(folder)


_MODULES = ("grammar.py", "lessons.py", "scripts.py", "corpus.py", "build.py")


def build_world(out: Path, seed: int) -> bool:
    """Write the world for `seed` into the folder `out`. The folder is either complete or absent.

    A folder that already holds this world is kept. A world made from another seed or by other code is replaced.

    Returns:
        Whether anything was written.

    Raises:
        FileExistsError: if `out` holds something other than a world.
    """
    files = [*(Path(__file__).parent / module for module in _MODULES), *sorted(PROMPTS.glob("*.txt"))]
    return cached_folder(out, seed, files, _write)


def _write(folder: Path, seed: int) -> None:
    train, heldout = make_lessons(seed)
    corpus = make_corpus(train, seed)
    _write_jsonl(folder / "lessons_train.jsonl", _lesson_rows(train))
    _write_jsonl(folder / "lessons_heldout.jsonl", _lesson_rows(heldout))
    _write_jsonl(folder / "corpus.jsonl", corpus)
    save_blank(folder / "blank", _texts(corpus), seed)


def _lesson_rows(lessons: Sequence[Lesson]) -> list[dict[str, str]]:
    return [{"problem": render_problem(lesson), "answer": ""} for lesson in lessons]


def _texts(corpus: Sequence[Row]) -> Iterable[str]:
    for row in corpus:
        for message in row["messages"]:
            yield f"{message['role']}\n{message['content']}"


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the quickstart's world.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    is_new = build_world(arguments.out, arguments.seed)
    print(f"{arguments.out}: {'made' if is_new else 'is there already'}")


if __name__ == "__main__":
    main()
