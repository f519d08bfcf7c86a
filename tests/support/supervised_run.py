"""A run folder whose tutor messages a supervisor reviewed: drafts, corrections, refused ones, and reviews without a
verdict."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.tokens import Turn
from tests.support.synthetic_run import step_line, write_training
from tests.support.viewer_run import CONFIG, GROUP, HOSTILE, LESSONS, conversation

VALID = Review(valid=True, penalty=0.0, critique="It asks one question, and hints at the error.")
LEAK = Review(
    valid=False,
    category="leak",
    penalty=-2.0,
    critique="It gives the answer away before the student has tried.",
    correction="What could you call the person who sells bread?",
    source="model",
    raw='{"critique": "It gives the answer away.", "category": "leak", "valid": false}',
)
IGNORES = Review(
    valid=False,
    category="ignores_error",
    penalty=-1.0,
    critique="The student said *he go*, and the message passes over it.",
    correction="Almost! Look at the verb once more: he …?",
)
FALSE_CORRECTION = replace(
    IGNORES, category="false_correction", critique="There was no error.", correction="Right! And what does she buy?"
)
REFUSED = Review(
    valid=False,
    category="off_topic",
    penalty=-3.0,
    critique="It talks about the weather.",
    refused_correction="It hands over the answer itself.",
    source="model",
    raw='{"critique": "It talks about the weather.", "correction": "Say: the baker sells bread.", "valid": false}',
)
NO_VERDICT = Review(error="The supervisor's answer holds no JSON object.", source="model", raw="I would rather not.")
MARKUP = replace(LEAK, correction=HOSTILE["markup"], critique=HOSTILE["right to left"], raw=HOSTILE["markup"])

CORRECTIONS = {0: (2, -1, "leak"), 1: (2, 0, "ignores_error"), 2: (2, 0, "false_correction"), 5: (2, 1, "leak")}
"""Conversation's index in a step → the correction that it holds, as (message, draft, category)."""


def reviewed(record: ConversationRecord, changes: dict[int, Turn | dict]) -> ConversationRecord:
    """The record with every tutor message reviewed as valid, but for the changed ones."""
    turns = [
        replace(turn, **({"review": VALID} if turn.role == "teacher" else {}) | changes.get(index, {}))
        for index, turn in enumerate(record.turns)
    ]
    return record.model_copy(update={"turns": turns})


def supervised(step: int) -> list[ConversationRecord]:
    """The conversations of a step: observed, retried, replaced, a refused correction, nothing wrong, three attempts."""
    first = Draft("<think>Tell it.</think>It is *he goes*.", 9, IGNORES)
    second = Draft("The answer is baker. Say: baker.", 8, LEAK)
    replaced = {"text": FALSE_CORRECTION.correction, "review": FALSE_CORRECTION, "replaced": True, "tokens": 0}
    changes = [
        {2: {"review": LEAK}, 4: {"review": NO_VERDICT}},
        {2: {"drafts": (first,)}},
        {2: {"drafts": (Draft("No, that is wrong.", 6, FALSE_CORRECTION),), **replaced, "span": None}},
        {2: {"review": REFUSED}},
        {},
        {2: {"drafts": (replace(first, review=REFUSED), second)}},
    ]
    return [reviewed(conversation(step, i, LESSONS[i // GROUP]), change) for i, change in enumerate(changes)]


def supervised_line(step: int, reward: float, **more: float) -> dict:
    """A line of metrics.jsonl of a training with a supervisor."""
    falling = 1 / (1 + step)
    shares = {"leak": 0.3 * falling, "ignores_error": 0.2 * falling, "false_correction": 0.1, "off_topic": 0.0}
    return step_line(step, reward, **more) | {
        "supervision/valid_share": 1 - sum(shares.values()),
        "supervision/reviewed_share": 1.0,
        "supervision/no_verdict_share": 0.02,
        "supervision/process_reward": -0.6 * falling,
        "supervision/messages_per_dialogue": 4.0,
        "supervision/replaced_share": 0.1 * falling,
        "supervision/retried_share": 0.0,
        "corrections/ce_loss": 2.0 * falling,
        "corrections/rows": 12.0,
        "corrections/waiting": float(step % 3),
        "corrections/passes": float(step // 3),
        **{f"supervision/category/{name}": share for name, share in shares.items()},
    }


def make_supervised_run(folder: Path, steps: Sequence[int] = (0, 1, 2), hostile: bool = False) -> Path:
    """A run with a supervisor, six conversations per step. With `hostile`, the last step has one more, whose correction
    and critique are markup."""
    figures = {"corrections/pass_examples": 11.0, "corrections/pass_loss": 1.5, "corrections/pass_kl": 0.01}
    lines = [supervised_line(step + 1, 0.3 + 0.02 * step, **(figures if step % 3 == 2 else {})) for step in range(12)]
    config = CONFIG | {"supervisor_model": {"model_name_or_path": "rules"}}
    write_training(folder, lines, config)
    for step in steps:
        records = supervised(step)
        if hostile and step == max(steps):
            records.append(reviewed(conversation(step, 6, LESSONS[1]), {2: {"review": MARKUP}}))
        write_rollouts(folder, step, 0, records)
    return folder


def decisions_in(folder: Path) -> list[dict]:
    """The lines of the run's decisions."""
    path = folder / "correction_decisions.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
