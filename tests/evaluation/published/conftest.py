"""Dialogues of MathDial, and an evaluation on them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from classroom_rl.config.evaluation import EvalConfig
from tests.support.configs import loaded
from tests.support.judge_endpoint import JudgeEndpoint, judge_endpoint, says
from tests.support.published_rows import mathdial_flat
from tests.support.tutor_messages import write_rows

DIALOGUES = 4
ASKS = "What could you add here?"


@pytest.fixture
def mathdial(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "mathdial.jsonl", [mathdial_flat(number) for number in range(DIALOGUES)]))


@pytest.fixture
def asking() -> Iterator[JudgeEndpoint]:
    """An API whose tutor always says the same."""
    with judge_endpoint(lambda body, _: says(ASKS)) as endpoint:
        yield endpoint


def on_mathdial(folder: Path, path: str, endpoint: JudgeEndpoint, *overrides: str) -> EvalConfig:
    tutor = ("teacher_model.model_name_or_path=tutor", f"teacher_model.base_url={endpoint.url}")
    arguments = [f"benchmark.path={path}", f"logging.save_dir={folder}", *tutor, *overrides]
    return loaded("eval", "--config-name", "mathdial", *arguments)


def prompt_of(body: dict) -> str:
    (message,) = body["messages"]
    return message["content"]
