"""Whole maths training steps through server and trainer: a real teacher on vLLM, a scripted student and judge behind
HTTP, and every reward recomputed from the transcript."""

import json
import re
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.rollout_files import read_records
from tests.conftest import free_port
from tests.support.judge_endpoint import Behaviour, fails, judge_endpoint, says
from tests.trainer.test_language_tutor_run import with_long_context

pytestmark = pytest.mark.full  # a server and a trainer for each case, about a minute

SOLUTIONS = 4
LAMBDA = 0.75
ANSWERS = {
    row["problem"]: row["answer"]
    for row in map(json.loads, (ROOT / "data/maths/train.jsonl").read_text(encoding="utf-8").splitlines())
}
WRONG = r"I give up: \boxed{123456789}"
OUTCOMES = ("accepted", "leaks", "no verdict", "bad pedagogy")
TOO_LONG = fails(400, "This model's maximum context length is 8192 tokens.")
PLAIN_WORDS = "Please go on."
"""What stands in the tutor's place where it is found out whether its words are to blame for a missing verdict."""


def text_of(body: dict) -> str:
    return "\n".join(message["content"] for message in body["messages"])


def share_of(text: str) -> int:
    """How many of the solutions after this dialogue are right."""
    return zlib.crc32(text.encode()) % (SOLUTIONS + 1)


def student(body: dict, nth: int) -> Behaviour:
    if len(body["messages"]) == 1:
        return says(r"On my own I get \boxed{123456789}.")
    if not body["messages"][-1]["content"].startswith("The conversation with your tutor is over"):
        return says("I do not know yet.")
    answer = next(answer for problem, answer in ANSWERS.items() if problem in body["messages"][-1]["content"])
    dialogue = text_of({"messages": body["messages"][:-1]})
    return says(rf"So it is \boxed{{{answer}}}." if nth < share_of(dialogue) else WRONG)


class Judge:
    """Gives every conversation the next of the `OUTCOMES`, whichever of its rules is asked about first."""

    def __init__(self):
        self.numbers: dict[str, int] = {}

    def __call__(self, body: dict, nth: int) -> Behaviour:
        text = text_of(body)
        conversation = text.partition("# The problem")[2].partition("# Your verdict")[0]
        if PLAIN_WORDS in conversation:  # of a lesson that has no verdict: it has none with other words, either
            return TOO_LONG
        outcome = OUTCOMES[self.numbers.setdefault(conversation, len(self.numbers)) % len(OUTCOMES)]
        about_leaks = text.startswith((ROOT / "prompt_templates/judges/does_not_leak_answer.txt").read_text()[:60])
        if outcome == "no verdict" and not about_leaks:
            return TOO_LONG
        rejected = outcome == ("leaks" if about_leaks else "bad pedagogy")
        return says(json.dumps({"reasoning": outcome, "decision": "REJECT" if rejected else "OK"}))


def command(folder: Path, model: Path, student_url: str, judge_url: str, *overrides: str) -> list[str]:
    engine = "dtype: float32, enforce_eager: true, max_length: 8192, max_num_seqs: 16, cpu_kvcache_gib: 1"
    return [
        *(sys.executable, "-m", "classroom_rl.launch.cli", "--config-name", "maths_small"),
        f"teacher_model={{model_name_or_path: {model}, vllm: {{temperature: 1.0, {engine}}}}}",
        f"student_model={{model_name_or_path: a-student, base_url: {student_url}}}",
        f"judge_model={{model_name_or_path: a-judge, base_url: {judge_url}, max_failed_share: 1.0}}",
        f"logging.save_dir={folder}",
        f"generation.server_port={free_port()}",
        f"generation.number_student_attempts={SOLUTIONS}",
        f"generation.extra_penalty_for_rejected_judges={LAMBDA}",
        *("generation.max_turns=5", "generation.max_tokens_per_turn=24", "generation.number_judge_attempts=2"),
        *("train.number_of_problems_per_batch=4", "train.num_samples_per_problem=4"),
        *("train.per_device_train_batch_size=4", "train.max_steps=2", "train.mu=1", "train.learning_rate=1e-3"),
        *("train.optimizer=adamw_torch", "train.dtype=float32"),
        *overrides,
    ]


def outcome_of(record: ConversationRecord, judged: bool) -> str:
    """What became of it, from the verdicts' own words."""
    if not judged:
        return "accepted"
    valid = [verdict for verdict in record.verdicts if verdict.error is None]
    if len({verdict.rule for verdict in valid}) < 2:
        return "no verdict"
    rejections = {verdict.rule for verdict in valid if json.loads(verdict.raw)["decision"] == "REJECT"}
    names = {"does_not_leak_answer": "leaks", "follows_pedagogical_values": "bad pedagogy"}
    return names[rejections.pop()] if rejections else "accepted"


def says_a_thought(text: str) -> bool:
    return re.search(r"<think>(?:(?!</think>).)*?[^\W_](?:(?!</think>).)*</think>", text, re.DOTALL) is not None


def by_hand(record: ConversationRecord, outcome: str, hard: bool, thinks: bool) -> dict[str, float | None]:
    """docs/classroom.md, worked out once more from what was said."""
    if outcome == "no verdict":
        return dict.fromkeys(("end_rm", "thinking", "end_of_conversation", "length"))
    turns = [turn for turn in record.turns if turn.role == "teacher"]
    length = -0.5 if any(turn.tokens >= 23 for turn in turns) else 0.0
    if outcome != "accepted" and hard:
        return {"end_rm": -LAMBDA, "thinking": 0.0, "end_of_conversation": 0.0, "length": length}
    correct = [solution.text != WRONG for solution in record.solutions]
    unbalanced = sum(turn.text.count("<think>") != turn.text.count("</think>") for turn in turns)
    closed = sum(
        turn.text.count("<think>") == turn.text.count("</think>") and says_a_thought(turn.text) for turn in turns
    )
    goodbye = any("<end_of_conversation>" in turn.text and "<think>" not in turn.text for turn in turns)
    return {
        "end_rm": fmean(correct) - (LAMBDA if outcome != "accepted" else 0.0),
        "thinking": 0.5 * closed / len(turns) * thinks - 0.5 * unbalanced,
        "end_of_conversation": 0.1 if goodbye else 0.0,
        "length": length,
    }


CASES = {
    "soft": ["generation.ignore_rejected_judge=true"],
    "hard and thinking": ["generation.ignore_rejected_judge=false", "generation.use_thinking=true"],
    "λ = 0 and forced thinking": [
        "generation.number_judge_attempts=0",
        "generation.use_thinking=true",
        "generation.force_thinking=true",
    ],
    "LoRA, phased": [
        "generation.ignore_rejected_judge=true",
        "teacher_model.lora.enable=true",
        "generation.schedule=phased",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_a_training_step(world: Path, tmp_path: Path, case: str) -> None:
    model = with_long_context(world / "blank", tmp_path / "model")
    judge = Judge()
    with judge_endpoint(student) as of_student, judge_endpoint(judge) as of_judge:
        command_line = command(tmp_path / "run", model, of_student.url, of_judge.url, *CASES[case])
        done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    judged, hard, forced, thinks = "λ" not in case, "hard" in case, "forced" in case, "thinking" in case
    steps = [read_records(tmp_path / "run" / "rollouts" / f"step_{step:06d}-0.parquet") for step in range(2)]
    for records, line in zip(steps, lines, strict=True):
        check_step(records, line, judged, hard, forced, thinks)
    assert {record.type for records in steps for record in records} == {"guided", "attempt"}
    calls = len(of_judge.calls)
    assert (calls > 0) == judged


def check_step(
    records: list[ConversationRecord], line: dict, judged: bool, hard: bool, forced: bool, thinks: bool
) -> None:
    assert len(records) == 16
    outcomes = [outcome_of(record, judged) for record in records]
    assert set(outcomes) == (set(OUTCOMES) if judged else {"accepted"}), Counter(outcomes)
    expected = []
    for record, outcome in zip(records, outcomes, strict=True):
        rewards = by_hand(record, outcome, hard, thinks)
        assert record.rewards == pytest.approx(rewards), (record.id, outcome)
        refused = outcome == "no verdict" or hard and outcome != "accepted"
        assert len(record.solutions) == (0 if refused else SOLUTIONS)
        for solution in record.solutions:
            assert solution.grade == (0.0 if solution.text == WRONG else 1.0)
        assert (record.turns[0].role, record.turns[-1].role) == (
            "teacher" if record.type == "guided" else "student",
            "teacher",
        )
        texts = [turn.text for turn in record.turns if turn.role == "teacher"]
        assert all(text.startswith("<think>\n") for text in texts) == forced
        assert sum(record.mask) == sum(turn.tokens for turn in record.turns if turn.role == "teacher")
        expected.append(None if outcome == "no verdict" else sum(rewards.values()))
    assert [record.reward for record in records] == pytest.approx(expected)
    counted = [reward for reward in expected if reward is not None]
    assert line["reward"] == pytest.approx(fmean(counted), abs=1e-5)
    grades = {solution.grade for record in records for solution in record.solutions}
    assert grades == {0.0, 1.0}, "right and wrong solutions"
    assert line["mismatch/mean_abs_logprob_diff"] < 0.002
