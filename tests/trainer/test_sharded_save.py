"""Saving a model shard by shard: which files are written, and how much memory it takes."""

import json
import math
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel, Qwen3Config
from transformers.core_model_loading import Chunk, WeightConverter

from classroom_rl.models.policy_folder import CONTENT_DIGEST
from classroom_rl.trainer.sharded_save import described_weights, gathered_weights, write_shards
from classroom_rl.trainer.weight_files import KeptFiles, SafetensorsWriter

_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_CONFIGS = {
    "untied": LlamaConfig(**_SMALL, num_key_value_heads=4, vocab_size=100),
    "tied": Qwen3Config(**_SMALL, num_key_value_heads=2, vocab_size=100, head_dim=8, tie_word_embeddings=True),
    "fused experts": MixtralConfig(**_SMALL, num_key_value_heads=2, vocab_size=100, num_local_experts=4),
}


def model_from_folder(kind: str, folder: Path) -> PreTrainedModel:
    """A model as a trainer has it: read from a folder, in the Hub's format."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(_CONFIGS[kind]).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


@pytest.mark.parametrize("kind", _CONFIGS)
def test_shards_hold_what_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    model = model_from_folder(kind, tmp_path / "source")
    model.save_pretrained(tmp_path / "shards", state_dict={})
    write_shards(gathered_weights(model, keep=True), tmp_path / "shards", shard_bytes=10_000)
    source, written = weights_in(tmp_path / "source"), weights_in(tmp_path / "shards")
    assert set(written) == set(source) and all(torch.equal(written[name], source[name]) for name in source)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(source)
    assert all(name in load_file(tmp_path / "shards" / file) for name, file in index["weight_map"].items())
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[1] == f"model-00002-of-{len(files):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())


def test_weights_that_belong_together_are_changed_back_together(tmp_path: Path) -> None:
    """As for models whose queries, keys and values are one tensor on the Hub and three in transformers."""
    model = model_from_folder("untied", tmp_path / "source")
    parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    fused = WeightConverter("self_attn.qkv_proj.weight", parts, operations=[Chunk(dim=0)])
    model._weight_conversions = [fused]
    (pieces,) = gathered_weights(model, keep=True)
    expected = torch.cat([model.state_dict()[f"model.layers.1.{part}"] for part in parts])
    assert torch.equal(pieces["model.layers.1.self_attn.qkv_proj.weight"], expected)
    assert not any("q_proj" in name for name in pieces)


def test_only_a_process_that_keeps_them_gets_weights(tmp_path: Path) -> None:
    assert list(gathered_weights(model_from_folder("tied", tmp_path), keep=False)) == []


def test_no_more_than_one_piece_is_held(tmp_path: Path) -> None:
    alive: set[int] = set()
    most = 0

    def pieces() -> Iterator[dict[str, torch.Tensor]]:
        nonlocal most
        for number in range(40):
            tensor = torch.full((25,), number, dtype=torch.float32)
            alive.add(number)
            weakref.finalize(tensor, alive.discard, number)
            most = max(most, len(alive))
            yield {f"w{number}": tensor}

    write_shards(pieces(), tmp_path, shard_bytes=500)
    assert most <= 2  # the one that was written last, and the one on its way
    assert len(list(tmp_path.glob("*.safetensors"))) == 8


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
_TENSORS = st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(_DTYPES), st.booleans())


# The format keeps the name `__metadata__` for itself, and hypothesis tries words that stand in the sources.
_NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")


@given(tensors=st.dictionaries(_NAMES, _TENSORS, min_size=1, max_size=6))
def test_a_written_file_is_read_by_the_library(tensors, tmp_path_factory: pytest.TempPathFactory) -> None:
    written = {}
    for name, (shape, dtype, transposed) in tensors.items():
        tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        written[name.encode("utf-8", "ignore").decode() or "w"] = tensor.T if transposed and len(shape) == 2 else tensor
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    writer = SafetensorsWriter(path)
    for name, tensor in written.items():
        writer.add(name, tensor)
    writer.close()
    loaded = load_file(path)
    assert loaded.keys() == written.keys()
    assert all(
        loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor) for name, tensor in written.items()
    )


def test_a_shard_with_too_many_tensors_for_its_header_is_followed_by_another(tmp_path: Path) -> None:
    names = [f"model.layers.{number}.mlp.experts.{number}.down_proj.weight" for number in range(12_000)]
    write_shards(({name: torch.ones(1)} for name in names), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert set(weights_in(tmp_path)) == set(names)


def test_weights_of_an_earlier_save_go(tmp_path: Path) -> None:
    """transformers would read `model.safetensors` before any index."""
    several = [{f"w{number}": torch.ones(2)} for number in range(3)]
    for pieces, count in ((several[:1], 1), (several, 3), (several[1:2], 1)):
        write_shards(pieces, tmp_path, shard_bytes=8)
        files = {path.name for path in tmp_path.iterdir()}
        expected = {f"model-0000{number + 1}-of-00003.safetensors" for number in range(3)}
        assert files == ({"model.safetensors"} if count == 1 else expected | {"model.safetensors.index.json"})


def test_files_in_memory_are_overwritten_with_fewer_and_with_more_weights(tmp_path: Path) -> None:
    kept_files = KeptFiles()
    for count, shard_bytes in ((3, 100), (1, 100), (4, 1000), (2, 8), (5, 8), (5, 8)):
        weights = {f"w{number}": torch.full((5,), 10.0 * count + number) for number in range(count)}
        write_shards([weights], tmp_path, shard_bytes, kept_files)
        loaded = weights_in(tmp_path)
        assert loaded.keys() == weights.keys() and all(
            torch.equal(loaded[name], weight) for name, weight in weights.items()
        )
        assert not list(tmp_path.glob("*.unfinished"))


def test_a_digest_depends_on_every_part_and_not_on_the_threads(tmp_path: Path, monkeypatch) -> None:
    def digest(weights: dict[str, torch.Tensor], threads: int = 1) -> str:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        writer = SafetensorsWriter(tmp_path / "w.safetensors")
        for name, tensor in weights.items():
            writer.add(name, tensor)
        writer.close()
        assert all(torch.equal(load_file(tmp_path / "w.safetensors")[name], tensor) for name, tensor in weights.items())
        with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
            return file.metadata()[CONTENT_DIGEST]

    large = torch.arange(700_001, dtype=torch.float32)  # several blocks, and a part of one
    base = {"a": large, "b": torch.ones(3)}
    assert len({digest(base, threads) for threads in (1, 2, 3, 8)}) == 1
    variants = []
    for index in (0, 65_535, 65_536, 131_072, 700_000):
        changed = large.clone()
        changed[index] += 1
        variants.append({**base, "a": changed})
    swapped = torch.cat([large[65_536:131_072], large[:65_536], large[131_072:]])
    variants += [{**base, "a": swapped}, {"b": base["b"], "a": large}, {"a": large, "c": base["b"]}]
    variants += [{**base, "b": torch.ones(3, 1)}, {**base, "b": torch.ones(3).view(torch.int32)}]
    assert len({digest(weights) for weights in (base, *variants)}) == 1 + len(variants)


@pytest.mark.parametrize("kind", [*_CONFIGS, "fused attention"])
def test_weights_are_described_without_being_gathered(kind: str, tmp_path: Path) -> None:
    model = model_from_folder("untied" if kind == "fused attention" else kind, tmp_path)
    if kind == "fused attention":
        parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
        model._weight_conversions = [WeightConverter("self_attn.qkv_proj.weight", parts, operations=[Chunk(dim=0)])]
    gathered = [item for piece in gathered_weights(model, keep=True) for item in piece.items()]
    assert [(info.name, f"torch.{info.dtype}", info.shape) for info in described_weights(model)] == [
        (name, str(tensor.dtype), list(tensor.shape)) for name, tensor in gathered
    ]
