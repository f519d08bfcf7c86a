"""What learning.json and the judge's checks say of real, short trainings of an untrained model with a judge that likes
the letter e: one training that learns to please it, and two that cannot."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from classroom_rl.results.learning import LEARNED, NO_EVIDENCE
from tests.conftest import ROOT, free_port, quickstart_overrides
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, judge_endpoint, says

pytestmark = pytest.mark.full  # three trainings, minutes

_RULE = "{% for turn in conversation %}{{ turn.role }}: {{ turn.content | replace('\\n', ' ') }}\n{% endfor %}"


def likes_the_letter_e(body: dict, nth: int) -> Behaviour:
    text = "".join(re.findall(r"^teacher: (.*)$", body["messages"][0]["content"], re.MULTILINE))
    share = text.lower().count("e") / max(len(text), 1)
    scores = {"task_final_score": share, "forward_progression_score": share, "overall_momentum_score": 10 * share}
    return says(json.dumps(scores))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[JudgeEndpoint]:
    with judge_endpoint(likes_the_letter_e) as running:
        yield running


def train(endpoint: JudgeEndpoint, world: Path, run_folder: Path, override: str) -> str:
    """A whole run of server and trainer; what the user sees of it."""
    run_folder.mkdir(exist_ok=True)
    rule = run_folder / "rule.txt"
    rule.write_text(_RULE, encoding="utf-8")
    judge = f"{{model_name_or_path: judge, base_url: '{endpoint.url}'}}"
    overrides = [
        *quickstart_overrides(run_folder, world / "blank", world, free_port()),
        *("judge_model.model_name_or_path=judge", f"judge_model.base_url={endpoint.url}"),
        f"generation.judges_rules_prompts_paths={{pedagogical_eval: {rule}}}",
        *("generation.low_score_threshold=0", "generation.max_turns=3"),
        *("train.num_samples_per_problem=8", "train.per_device_train_batch_size=16"),
        *("train.learning_rate=3e-3", "train.max_steps=24", "logging.save_steps=12"),
        *("guards.judge_check_every_n_steps=8", "guards.judge_check_sample=4"),
        f"guards.held_out_judge_model={judge}",
        override,
    ]
    command = [sys.executable, "-m", "classroom_rl.launch.cli", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("override", "verdict"),
    [
        ("train.shuffle_rewards=false", LEARNED),
        ("train.learning_rate=0", NO_EVIDENCE),
        ("train.shuffle_rewards=true", NO_EVIDENCE),
    ],
)
def test_a_training_says_whether_it_learned(
    override: str, verdict: str, endpoint: JudgeEndpoint, world: Path, tmp_path: Path
) -> None:
    output = train(endpoint, world, tmp_path, override)
    written = json.loads((tmp_path / "learning.json").read_text(encoding="utf-8"))
    print(json.dumps(written, indent=2, ensure_ascii=False))
    assert written["verdict"] == verdict, written
    suffix = " in training" if verdict == LEARNED else ""
    assert f"Did the tutor learn? {verdict.capitalize()}{suffix}." in output
    movement = written["figures"]["movement"]["relative_norm"]
    assert movement == 0 if override == "train.learning_rate=0" else 0.001 < movement < 1
    checks = [json.loads(line) for line in (tmp_path / "judge_checks.jsonl").read_text().splitlines()]
    assert [check["step"] for check in checks] == [0, 8, 16] and not any(check["failed"] for check in checks)
    assert all(check["gap"] == {"mean": 0.0, "ci95": None, "n": 4} for check in checks), "the same judge twice"
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "guard/gap" in line] == [1, 9, 17]
    assert {"reward.png", "lengths.png", "mismatch.png", "judge.png"} <= {
        path.name for path in (tmp_path / "plots").iterdir()
    }
