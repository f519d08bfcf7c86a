"""Did it learn? The guard at the end of real, short trainings: one that learns, and two that cannot."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.evaluation.learning import LEARNED, NO_EVIDENCE
from tests.conftest import ROOT, free_port

pytestmark = pytest.mark.full  # a fine-tuning and three trainings, nine minutes

_STEPS = 12


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder with the quickstart's fine-tuned model and its lessons."""
    folder = tmp_path_factory.mktemp("models")
    run("src.quickstart.run", "--models-only", f"logging.save_dir={folder}")
    yield folder


@pytest.mark.parametrize(
    ("override", "verdict"),
    [
        ("train.shuffle_rewards=false", LEARNED),
        ("train.learning_rate=0", NO_EVIDENCE),
        ("train.shuffle_rewards=true", NO_EVIDENCE),
    ],
)
def test_a_training_says_whether_it_learned(override: str, verdict: str, models: Path, tmp_path: Path) -> None:
    model = models / "sft" / "model"
    shown = run(
        *("src.launcher", "--config-name", "quickstart", f"logging.save_dir={tmp_path}"),
        f"generation.server_port={free_port()}",
        f"teacher_model.model_name_or_path={model}",
        f"student_model.model_name_or_path={model}",
        f"dataset.train_datasets=[{{name_or_path: {models / 'world' / 'lessons_train.jsonl'}}}]",
        f"train.max_steps={_STEPS}",
        override,
    )
    written = json.loads((tmp_path / "learning.json").read_text(encoding="utf-8"))
    print(json.dumps(written, indent=2))
    assert written["verdict"] == verdict, written
    assert f"Did the tutor learn? {verdict.capitalize()}." in shown
    moved = written["figures"]["movement"]["relative_norm"]
    assert moved == 0 if override == "train.learning_rate=0" else 0.001 < moved < 0.5
