"""Tests of uploads to the Hub, and of the message of a refusal. The Hub is faked."""

from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard

import src.results.hub
from config.base import HuggingFaceConfig
from config.checks import check_train_rl
from config.load import load
from config.train_rl_model import TrainRLConfig
from config.train_sft_model import TrainSFTConfig, check_train_sft
from src.errors import ConfigError
from src.results.hub import push_to_hub, release, write_card


def test_card_carries_configuration_and_results(tmp_path: Path) -> None:
    config = load(TrainRLConfig, "train_rl", ["huggingface.name=me/tutor", "seed=77"])
    write_card(tmp_path, config, "some/base", "grpo", {"step": 50, "reward": 0.875})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "some/base" and card.data.eval_results[0].metric_value == 0.875
    assert "seed: 77" in card.text and '"step": 50' in card.text and "# me/tutor" in card.text
    for nothing in ({}, {"step": 3, "reward": None}, {"step": 3, "reward": float("nan")}):
        write_card(tmp_path, config, "some/base", "sft", nothing)
        assert not ModelCard.load(tmp_path / "README.md").data.eval_results


def test_folder_goes_to_the_named_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list = []

    class Repository:
        repo_id = "me/tutor"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, exist_ok: calls.append((name, exist_ok)) or Repository)
    monkeypatch.setattr(
        HfApi, "upload_folder", lambda self, **named: calls.append((named["repo_id"], named["folder_path"]))
    )
    push_to_hub(tmp_path, HuggingFaceConfig("me/tutor", push_to_hub=True))
    assert calls == [("me/tutor", True), ("me/tutor", tmp_path)]


def test_refusal_says_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(ConfigError, match=rf"{tmp_path} as me/tutor: no route to host.*HF_TOKEN"):
        push_to_hub(tmp_path, HuggingFaceConfig("me/tutor", push_to_hub=True))


def test_pushing_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="huggingface.name"):
        load(TrainRLConfig, "train_rl", ["huggingface.push_to_hub=true"], check_train_rl)
    with pytest.raises(ConfigError, match="huggingface.name"):
        load(TrainSFTConfig, "train_sft", ["huggingface.push_to_hub=true"], check_train_sft)


@pytest.mark.parametrize("push", [True, False])
def test_a_release_has_its_card_and_is_pushed_if_that_is_wanted(tmp_path: Path, monkeypatch, push: bool) -> None:
    config = load(TrainSFTConfig, "train_sft", ["huggingface.name=me/tutor", f"huggingface.push_to_hub={push}"])
    pushed = []
    monkeypatch.setattr(src.results.hub, "push_to_hub", lambda folder, target: pushed.append((folder, target.name)))
    release(tmp_path, config, "some/base", "sft", {"step": 3, "loss": 1.5, "eval_loss": 2.5})
    card = ModelCard.load(tmp_path / "README.md")
    assert [(each.metric_name, each.metric_value) for each in card.data.eval_results] == [
        ("eval_loss", 2.5),
        ("loss", 1.5),
    ]
    assert "sft" in card.data.tags and "grpo" not in card.data.tags
    assert pushed == ([(tmp_path, "me/tutor")] if push else [])
