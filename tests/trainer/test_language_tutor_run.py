"""The language tutor's shipped configuration through server and trainer, changed by overrides only: tiny models, and a
judge on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.results.rollout_files import read_records
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.rollout.thoughts import visible_text
from tests.config.test_train_rl import BLOCK
from tests.conftest import free_port
from tests.support.judge_endpoint import Behaviour, judge_endpoint, says

VERDICT = {
    "task_final_reasoning": "The first message ends with its task.",
    "task_final_score": 0.5,
    "forward_progression_reasoning": "One error was passed over.",
    "forward_progression_score": 0.25,
    "overall_momentum_reasoning": "It moves.",
    "overall_momentum_score": 6,
}
REWARD = 0.4 * 0.5 + 0.4 * 0.25 + 0.2 * 0.6


def with_long_context(model: Path, target: Path) -> Path:
    """A copy of a tiny model that takes the language tutor's 6,144 tokens: its positions are rotary."""
    target.mkdir()
    for path in model.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((target / name).read_text(encoding="utf-8"))
        (target / name).write_text(json.dumps(settings | {key: 8192}), encoding="utf-8")
    return target


@pytest.mark.full
def test_a_training_step_with_the_block_that_users_know(world: Path, tmp_path: Path) -> None:
    model = with_long_context(world / "blank", tmp_path / "model")
    (tmp_path / "mine.yaml").write_text(BLOCK, encoding="utf-8")
    run_folder = tmp_path / "run"

    def judge(body: dict, nth: int) -> Behaviour:
        return says(json.dumps(VERDICT))

    with judge_endpoint(judge) as endpoint:
        overrides = [
            f"teacher_model.model_name_or_path={model}",
            f"student_model.model_name_or_path={model}",
            f"judge_model.base_url={endpoint.url}",
            f"logging.save_dir={run_folder}",
            f"generation.server_port={free_port()}",
            "logging.wandb=false",
            "train.number_of_problems_per_batch=2",
            "train.num_samples_per_problem=2",
            "train.max_steps=2",
            # what a CPU needs
            "train.optimizer=adamw_torch",
            "train.dtype=float32",
        ]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "classroom_rl.launch.cli",
                "--config-dir",
                str(tmp_path),
                "--config-name",
                "mine",
                *overrides,
            ],
            cwd=ROOT,
            env={**os.environ, "OPENROUTER_API_KEY": "a-key"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = read_records(run_folder / "rollouts" / "step_000000-0.parquet")
    assert len(records) == 4 and len({record.problem_id for record in records}) == 2
    # Two attempts for each conversation; this judge says the same of all, so every group is without variance.
    assert len(endpoint.calls) == 8 and {call.key for call in endpoint.calls} == {"a-key"}
    assert {call.body["model"] for call in endpoint.calls} == {"google/gemini-2.5-flash-preview-09-2025"}
    assert all(record.reward == pytest.approx(REWARD) and record.type == "guided" for record in records)
    assert all(record.rewards == {"pedagogical": pytest.approx(REWARD)} and not record.solutions for record in records)
    prompts = [call.prompt for call in endpoint.calls]
    for record in records:  # what an untrained model says goes over several lines, which the prompt indents
        line = max(visible_text(record.turns[0].text).splitlines(), key=len).strip()
        assert len(line) > 5 and sum(line in prompt for prompt in prompts) >= 2, line
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]  # mu is 2: two passes over the one batch
    assert lines[0]["judge/task_final_score"] == pytest.approx(0.5) and lines[0]["reward"] == pytest.approx(REWARD)
    events = list(read_journal(run_folder / JOURNAL_NAME))
    assert sum(event["event"] == "batch" for event in events) == 1
