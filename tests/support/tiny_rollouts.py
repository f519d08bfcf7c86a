"""A tiny chat model with random weights, and an engine on it."""

from pathlib import Path

import pytest

from classroom_rl import HfEngine
from classroom_rl.models.random_model import write_tiny_chat_model

TEXTS = [
    "Say a number from 1 to 50. Higher. Lower. What is it? Again, please.",
    *(f"{number}." for number in range(60)),
]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("tiny") / "model", TEXTS, context=400)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def hf_engine(tiny_model: Path) -> HfEngine:
    return HfEngine(tiny_model, device="cpu")
