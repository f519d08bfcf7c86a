"""Test of a complete evaluation of a maths tutor with real engines: its figures are recomputed from its files."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pandas as pd
import pytest
from transformers import AutoTokenizer

from classroom_rl.config.load import ROOT
from classroom_rl.config.values import LEAK_RULE, PEDAGOGY_RULE
from classroom_rl.environments.classroom.conversation import Solution
from classroom_rl.evaluation.metrics.maths import scored_dialogues
from classroom_rl.results.evaluation_files import read_records
from classroom_rl.rollout.chat_template import encode_dialogue
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_text
from tests.support.judge_endpoint import Behaviour, judge_endpoint, says
from tests.support.reward_models import logits_of, save_classifier
from tests.trainer.test_language_tutor_run import with_long_context

DECISIONS = {"leak": "handed over the", "pedagogy": "judge whether a tutor taught one student well"}


def judge_by_problem(problems: list[str]):
    """A judge that rejects the first conversation for leaking, the second for pedagogy, and fails on the third."""

    def judge(body: dict, nth: int) -> Behaviour:
        prompt = body["messages"][0]["content"]
        number = next(i for i, problem in enumerate(problems) if problem in prompt)
        rule = next(name for name, words in DECISIONS.items() if words in " ".join(prompt.split()))
        if number == 2:
            return says("I would rather not say.")
        decision = "REJECT" if (number, rule) in ((0, "leak"), (1, "pedagogy")) else "OK"
        return says(json.dumps({"reasoning": f"{rule} {number}", "decision": decision}))

    return judge


def overrides_for(model: Path, scorer: Path, judge_url: str, folder: Path) -> list[str]:
    """Overrides for short conversations, with `model` as teacher and student and `scorer` as both reward models."""
    engine = "{max_length: 8192, max_num_seqs: 8, dtype: float32, enforce_eager: true, number_of_gpus_per_instance: 1}"
    return [
        *(f"{role}_model.vllm={engine}" for role in ("teacher", "student", "reward")),
        f"pedagogical_reward_vllm={engine}",
        *(f"{role}_model.model_name_or_path={model}" for role in ("teacher", "student")),
        f"reward_model.model_name_or_path={scorer}",
        f"pedagogical_reward_model={scorer}",
        f"judge_model.base_url={judge_url}",
        f"dataset.eval_datasets=[{{name_or_path: {folder / 'problems.jsonl'}}}]",
        f"logging.save_dir={folder / 'eval'}",
        "generation.max_turns=3",
        "generation.max_tokens_in_conversation=8000",
        "generation.max_tokens_per_turn=24",
        "generation.max_tokens_per_student_attempt=24",
        "generation.number_student_attempts=2",
        "generation.number_judge_attempts=1",
    ]


@pytest.mark.full
def test_a_whole_evaluation_with_real_engines(world: Path, tmp_path: Path):
    """Teacher, student and two reward models run on vLLM; run folder and transformers must give the same figures."""
    model = with_long_context(world / "blank", tmp_path / "model")
    scorer = save_classifier(tmp_path / "scorer", model)
    lines = (ROOT / "data/maths/test.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines), encoding="utf-8")
    problems = [json.loads(line)["problem"] for line in lines]
    with judge_endpoint(judge_by_problem(problems)) as endpoint:
        overrides = overrides_for(model, scorer, endpoint.url, tmp_path)
        command = [sys.executable, "eval.py", "--config-name", "TutorRL.yaml", *overrides]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert "Exception ignored" not in process.stderr
    metrics = json.loads((tmp_path / "eval" / "metrics.json").read_text())["sampled"]
    records = read_records(tmp_path / "eval" / "conversations.parquet")["sampled"]
    table = pd.read_parquet(tmp_path / "eval" / "conversations.parquet")
    indices = [problems.index(record.problem) for record in records]
    assert sorted(indices) == [0, 1, 2, 3] and {record.type for record in records} <= {"guided", "attempt"}
    assert {problems.index(record.problem): record.rejected for record in records} == {
        0: True,
        1: True,
        2: False,
        3: False,
    }

    tokenizer = AutoTokenizer.from_pretrained(scorer)
    dialogues, reported = [], []
    for record, row in zip(records, table.itertuples(), strict=True):
        initial = [Solution(**fields) for fields in json.loads(row.initial_solutions)]
        assert len(initial) == 2 and len(record.solutions) == (0 if record.problem == problems[2] else 2)
        for solution in [*initial, *record.solutions]:
            reply = {"role": "assistant", "content": visible_text(solution.text)}
            dialogues.append([{"role": "user", "content": record.problem}, reply])
            reported.append(solution.grade)
        scored = scored_dialogues(record, render("prompt_templates/pedagogical_reward_prompt.txt"))
        assert len(scored) == sum(turn.role == "teacher" for turn in record.turns) >= 1
        dialogues += scored
        reported += list(row.message_scores)
    assert reported == pytest.approx(
        logits_of(scorer, [encode_dialogue(tokenizer, dialogue) for dialogue in dialogues]), abs=1e-3
    )

    judged = [record for record in records if record.problem != problems[2]]
    final = [fmean(solution.grade for solution in record.solutions) for record in judged]
    initial_means = {
        row.problem: fmean(solution["grade"] for solution in json.loads(row.initial_solutions))
        for row in table.itertuples()
    }
    scores = metrics["solution_score"]
    assert (scores["final"]["mean"], scores["final"]["n"]) == (pytest.approx(fmean(final)), 3)
    gains = [grade - initial_means[record.problem] for grade, record in zip(final, judged, strict=True)]
    assert scores["gain"]["mean"] == pytest.approx(fmean(gains))
    assert (
        metrics["rejected_by"][LEAK_RULE]["mean"]
        == metrics["rejected_by"][PEDAGOGY_RULE]["mean"]
        == pytest.approx(1 / 3)
    )
    assert metrics["without_verdict"] == {"share": 0.25, "n": 4}
    by_message = [score for row in table.itertuples() for score in row.message_scores]
    assert metrics["pedagogical_reward"]["micro"]["mean"] == pytest.approx(fmean(by_message))
    assert "Pedagogical reward, mean of messages" in process.stdout
    spending = json.loads((tmp_path / "eval" / "metrics.json").read_text())["paid"]["judge"]
    assert (
        spending["cost_usd"] == pytest.approx(endpoint.billed_usd) and f"${spending['cost_usd']:.4f}" in process.stdout
    )
