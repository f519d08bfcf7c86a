"""Tests of uploads to the Hub, and of the message of a refusal. The Hub is faked."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import HFValidationError

import classroom_rl.results.hub
from classroom_rl.config.base import HuggingFaceConfig
from classroom_rl.config.load import TEACHER_PROMPT_NAME, record_run
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.launch import cli, sft, train
from classroom_rl.results.hub import check_push, push_to_hub, release, write_card
from classroom_rl.trainer.session import training_session
from classroom_rl.trainer.sft.run import train as fine_tune
from tests.support.configs import loaded, training


def card_of(folder: Path, config: Any, base: str, metrics: dict) -> ModelCard:
    write_card(folder, config, base, "grpo", metrics)
    return ModelCard.load(folder / "README.md")


def test_card_carries_configuration_and_results(tmp_path: Path) -> None:
    config = training("huggingface.name=me/tutor", "seed=77")
    card = card_of(tmp_path, config, "some/base", {"step": 50, "reward": 0.875})
    assert card.data.base_model == "some/base" and card.data.eval_results[0].metric_value == 0.875
    assert "seed: 77" in card.text and '"step": 50' in card.text and "trained from `some/base` on" in card.text
    for nothing in ({}, {"step": 3, "reward": None}, {"step": 3, "reward": float("nan")}):
        assert not card_of(tmp_path, config, "some/base", nothing).data.eval_results


def test_a_tutor_s_prompt_goes_with_its_model_and_its_run(tmp_path: Path) -> None:
    prompt = tmp_path / "mine.txt"
    prompt.write_text("Teach {{ problem }}.\n```\nAsk.\n```\n", encoding="utf-8")
    overrides = [f"generation.teacher_prompt_path={prompt}", f"logging.save_dir={tmp_path / 'run'}"]
    config = training(*overrides)
    card = card_of(tmp_path, config, "some/base", {})
    paths = [tmp_path / TEACHER_PROMPT_NAME, record_run(config, "train_rl") / "config" / TEACHER_PROMPT_NAME]
    assert {path.read_text(encoding="utf-8") for path in paths} == {prompt.read_text(encoding="utf-8")}
    assert "````\nTeach {{ problem }}.\n```\nAsk.\n```\n````" in card.text
    shipped = training("--config-name=quickstart")
    assert "{{ problem }}" in card_of(tmp_path, shipped, "some/base", {}).text.split("## Configuration")[0]


@pytest.mark.parametrize("name, title", [("me/tutor", "tutor"), ("tutor", "tutor"), (None, "algebra run")])
def test_a_cards_title_is_the_repositorys_name_or_the_run_folders(tmp_path: Path, name: str | None, title: str) -> None:
    folder = tmp_path / "algebra run" / "model"
    folder.mkdir(parents=True)
    config = training(*([] if name is None else [f"huggingface.name={name}"]))
    card = card_of(folder, config, "some/base", {"step": 50, "reward": 0.875})
    assert card.text.lstrip().startswith(f"# {title}\n") and card.data.model_name == title
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()


def test_a_base_in_a_local_folder_is_no_base_model_of_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = training()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)  # a relative path that looks like an id of the Hub
    for base in ("models/mine", str(tmp_path / "models" / "mine"), "./models/mine", "runs/a/sft/model"):
        card = card_of(tmp_path, config, base, {})
        assert card.data.base_model is None and str(tmp_path) not in card.text.split("## Configuration")[0]
        assert f"trained from a model in a local folder, `{Path(base).name}`, on the scores" in card.text
    assert card_of(tmp_path, config, "other/mine", {}).data.base_model == "other/mine"


def test_a_player_is_not_called_a_tutor(tmp_path: Path) -> None:
    config = training("--config-name", "marooned")
    text = card_of(tmp_path, config, "some/base", {}).text
    assert "on the rewards of what it played in the environment `marooned`" in text
    assert "tutor" not in text.split("##")[0]


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


FAILURES = (
    OSError("no route to host"),
    httpx2.ConnectError("no route to host"),
    ValueError("Invalid metadata in README.md."),
    HFValidationError("Repo id must use alphanumeric chars"),
    RuntimeError("xet: no route to host"),
    KeyError("url"),
)


@pytest.mark.parametrize("method", ["create_repo", "upload_folder"])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
def test_any_failure_of_a_push_says_where_the_model_is_and_how_to_push_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, failure: Exception
) -> None:
    folder = tmp_path / "my run" / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")

    def refuse(*_, **__):
        raise failure

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, exist_ok: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(HfApi, method, refuse)
    with pytest.raises(ConfigError) as caught:
        push_to_hub(folder, HuggingFaceConfig("me/tutor", push_to_hub=True))
    message = str(caught.value)
    assert f"its model is in {folder}, but the Hub did not take it as me/tutor: {failure}" in message
    assert message.endswith(f"hf upload me/tutor '{folder}'") and "HF_TOKEN" in message
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("folder", ["train_rl", "train_sft"])
def test_pushing_needs_a_name_that_the_hub_takes(folder: str) -> None:
    for name in ("null", "a/b/c", "-tutor", "me/tu--tor", "'me/my tutor'", "me/tutor.git"):
        with pytest.raises(ConfigError, match=r"huggingface\.name.*user/name"):
            loaded(folder, "huggingface.push_to_hub=true", f"huggingface.name={name}")
    loaded(folder, "huggingface.push_to_hub=false", "huggingface.name=a/b/c")
    loaded(folder, "huggingface.push_to_hub=true", "huggingface.name=me/tutor")


def test_a_push_that_could_only_fail_is_refused_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceConfig("me/tutor", push_to_hub=True)
    monkeypatch.setattr(classroom_rl.results.hub, "get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=r"no token for the Hub.*me/tutor: set HF_TOKEN.*push_to_hub=false"):
        check_push(target)
    check_push(HuggingFaceConfig("me/tutor"))
    monkeypatch.setattr(classroom_rl.results.hub, "get_token", lambda: "hf_one")
    check_push(target)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set.*unset it"):
        check_push(target)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides of a training that is to be pushed, where the Hub may not be asked."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return ["huggingface.push_to_hub=true", "huggingface.name=me/tutor", f"logging.save_dir={tmp_path}/run"]


@pytest.mark.parametrize("dry", [[], ["dry_run=true"]], ids=["at a start", "in a dry run"])
def test_the_launcher_says_so_before_it_starts_anything(dry: list[str], offline: list[str], capsys) -> None:
    assert cli.main(["--config-name", "quickstart", *offline, *dry]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err


def begin(config: TrainRLConfig) -> None:
    with training_session(config):
        pytest.fail("it began")


@pytest.mark.parametrize(
    ("folder", "start"),
    [
        ("train_rl", train.more_of_dry_run),
        ("train_sft", sft.more_of_dry_run),
        ("train_rl", begin),
        ("train_sft", fine_tune),
    ],
    ids=["a dry run of a training", "a dry run of a fine-tuning", "a training", "a fine-tuning"],
)
def test_every_training_says_so_first(folder: str, start: Callable, offline: list[str]) -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        start(loaded(folder, *offline))


@pytest.mark.parametrize("push", [True, False])
def test_a_release_has_its_card_and_is_pushed_if_that_is_wanted(tmp_path: Path, monkeypatch, push: bool) -> None:
    config = loaded("train_sft", "huggingface.name=me/tutor", f"huggingface.push_to_hub={push}")
    pushed = []
    monkeypatch.setattr(
        classroom_rl.results.hub, "push_to_hub", lambda folder, target: pushed.append((folder, target.name))
    )
    release(tmp_path, config, "some/base", "sft", {"step": 3, "loss": 1.5, "eval_loss": 2.5})
    card = ModelCard.load(tmp_path / "README.md")
    assert [(result.metric_name, result.metric_value) for result in card.data.eval_results] == [
        ("eval_loss", 2.5),
        ("loss", 1.5),
    ]
    assert "sft" in card.data.tags and "grpo" not in card.data.tags
    assert pushed == ([(tmp_path, "me/tutor")] if push else [])
