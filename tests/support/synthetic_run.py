"""Conversations and run folders made without a model, for the tests of evaluation and reports."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import yaml

from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation, State
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.rewards import pedagogical
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.environments.toy_language.scripts import Teacher, play
from classroom_rl.judges.findings import verdict
from classroom_rl.judges.toy_judge import analyse
from classroom_rl.judges.verdicts import Scores, Verdict, parse_verdict
from classroom_rl.results.evaluation_files import write_records
from classroom_rl.results.statistics import summarise
from classroom_rl.rollout.environment import Play
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.tokens import Turn

RULE = "pedagogical_eval"
RULES = ClassroomRules(max_turns=9, judge_rules=(RULE,), ignore_rejected_judge=True)


def record_of(
    problem: str,
    turns: Sequence[Turn],
    verdicts: Sequence[Verdict] = (),
    index: int = 0,
    reward: Optional[float] = None,
    rejected: bool = False,
) -> ConversationRecord:
    """A record with the given parts and three placeholder tokens."""
    return ConversationRecord(
        id=f"c-{index:04d}",
        request_id="r",
        step=0,
        index=index,
        problem_id=Problem.of(problem).id,
        problem=problem,
        answer="",
        type="guided",
        student_name="Sam",
        state="END",
        turns=list(turns),
        verdicts=list(verdicts),
        solutions=[],
        rewards={"pedagogical": reward},
        reward=reward,
        rejected=rejected,
        prompt_ids=[1, 2],
        completion_ids=[3],
        mask=[1],
        logprobs=[-0.5],
        meta={},
    )


def scored(task: float, forward: float, momentum: float, attempt: int = 0) -> Verdict:
    """A verdict with scores."""
    return Verdict(RULE, attempt, scores=Scores(task, forward, momentum), reasons={"task_final_score": "because"})


FAILED = Verdict(RULE, 0, error="JudgeOutputError: no JSON", raw="I would rather not say.")


def played(teacher: Teacher, lesson: Lesson, personas: Sequence[str], index: int, judged: bool = True):
    """The record of a scripted conversation, judged by the rubric with the real state machine and reward."""
    problem = Problem.of(render_problem(lesson))
    messages = play(teacher, lesson, personas, random.Random(f"{index}|{problem.id}"))
    setup = Setup(ConversationType.GUIDED, "Sam", tuple(personas))
    conversation = Conversation(f"eval-{index:04d}", problem, setup, RULES)
    remaining = iter(personas)
    for message in messages:
        persona = next(remaining) if message["role"] == "student" else None
        conversation.turns.append(Turn(message["role"], message["content"], persona, tokens=12))
    conversation.state = State.JUDGE_TURN
    answer = json.dumps(verdict(analyse(conversation.transcript(), problem.text)))
    conversation.add_verdicts([parse_verdict(RULE, 0, answer) if judged else FAILED])
    reward = pedagogical(conversation)
    conversation.add_rewards({"pedagogical": reward})
    request = SampleRequest(problems=[problem.text], answers=[""], request_id="r", seed=1, step=0)
    return ConversationRecord.of(Play(conversation, request, 0, 0, "", None), reward, {})


def write_evaluation(folder: Path, records: dict[str, list[ConversationRecord]], seconds: float = 20.0) -> dict:
    """Write the run folder of an evaluation as eval.py does; returns the metrics."""
    folder.mkdir(parents=True)
    metrics: dict[str, Any] = {
        "tutor": "runs/quickstart/sft/model",
        "policy": {"run_id": "abc", "version": 70},
        "engine": {"name": "vllm", "version": "0.32.0"},
        "server_url": "http://127.0.0.1:8005",
        "seed": 42,
        "problems": 2,
        "num_samples_per_problem": 2,
        "seconds": seconds,
    }
    metrics |= {sampling: summarise(group) for sampling, group in records.items()}
    write_records(
        folder / "conversations.parquet", [(name, record) for name, group in records.items() for record in group]
    )
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    return metrics


def write_training(folder: Path, steps: Sequence[dict[str, Any]], config: Optional[dict] = None) -> None:
    """Write a training's metrics and configuration as train_rl.py does."""
    (folder / "config").mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    (folder / "config" / "train_rl.yaml").write_text(yaml.safe_dump(config or {}), encoding="utf-8")


def step_line(step: int, reward: float, **more: float) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "time": 1.7e9 + step,
        "reward": reward,
        "reward_std": 0.1,
        "judge/task_final_score": reward,
        "judge/forward_progression_score": reward,
        "judge/overall_momentum_score": 10 * reward,
        "sampling/sampling_logp_difference/mean": 1e-6,
        "seconds/rollout": 2.0,
        "seconds/publish": 0.25,
        "seconds/train": 1.0,
        **more,
    }
