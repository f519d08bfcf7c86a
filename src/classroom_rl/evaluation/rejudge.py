"""Judges a run again from its files, without a network.

    python -m classroom_rl.evaluation.rejudge RUN_FOLDER [overrides]

Every conversation in the journal gets new verdicts, parsed from the replies that the run paid for (or given by an
embedded judge), and new rewards by the current code and configuration. Example of an override:
`generation.low_score_threshold=0.4`.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_core import to_jsonable_python

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import USER_ERRORS, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import EMBEDDED_JUDGES, GROUP
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.environments.classroom.config import classroom_rules
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.rewards import reward_of
from classroom_rl.errors import ConfigError, DataError, JudgeOutputError
from classroom_rl.judges.model_judge import KeptReplies, ModelJudge
from classroom_rl.judges.verdicts import Verdict, parse_verdict, read_again
from classroom_rl.rollout.engine import EmbeddedJudge, Judge, ask_judge
from classroom_rl.rollout.runner import weighted_sum
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.rollout.trajectory import TOKEN_FIELDS
from classroom_rl.server.open_models import JUDGE_CALLS_NAME, embedded_judge, open_readers
from classroom_rl.system.keys import print_error

RESULT_NAME = "rejudged.jsonl"


@dataclass(frozen=True)
class Rejudged:
    """A conversation's reward in the run (`before`), its new reward (`now`), and the new verdicts."""

    conversation: str
    before: float | None
    now: float | None
    verdicts: list[Verdict]


def rejudge(run_folder: Path, config: TrainRLConfig) -> list[Rejudged]:
    """Judge every finished conversation of a run again, without calling an API. The result is sorted by step and id.

    Raises:
        DataError: if the folder has no journal.
        ConfigError: if the run's judge is an engine, whose replies are not kept.
        StorageError: if a server uses the folder.
    """
    journal = run_folder / JOURNAL_NAME
    if not journal.is_file():
        raise DataError(f"There is no {journal}: name the run folder of a training, its logging.save_dir.")
    events = (event for event in read_journal(journal) if event["event"] == "conversation")
    records = {event["conversation"]: event["record"] for event in events}
    with _open_judge(run_folder, config) as judge:
        ordered = sorted(records.values(), key=lambda record: (record["step"], record["id"]))
        # The records in the journal have no token fields, and no judge needs them.
        conversations = (
            ConversationRecord.model_validate(fields | {name: [] for name in TOKEN_FIELDS}) for fields in ordered
        )
        return [judge_again(judge, record, config) for record in conversations]


def judge_again(judge: Judge | EmbeddedJudge, record: ConversationRecord, config: TrainRLConfig) -> Rejudged:
    """Judge a finished conversation again, and compute its rewards, by the current code and a configuration."""
    generation, weights = config.generation, reward_weights(config)
    rules = classroom_rules(generation, weights, config.teacher_model.vllm.max_length, config.reward_model.grades)
    attempts = [(rule, number) for rule in rules.judge_rules for number in range(generation.number_judge_attempts)]
    conversation = record.conversation(rules)
    refused = {(verdict.rule, verdict.attempt) for verdict in conversation.verdicts if verdict.refused}
    in_groups = config.judge_model.mode == GROUP
    verdicts = [_new_verdict(judge, conversation, *attempt, in_groups) for attempt in attempts]
    verdicts += [
        replace(_ask(judge, conversation, verdict.rule, verdict.attempt), anchor=True)
        for verdict in conversation.verdicts
        if verdict.anchor
    ]
    conversation.verdicts = [
        verdict if verdict.valid else replace(verdict, refused=(verdict.rule, verdict.attempt) in refused)
        for verdict in verdicts
    ]
    reward = weighted_sum({name: reward_of(name)(conversation) for name in weights}, weights)
    return Rejudged(record.id, record.reward, reward, conversation.verdicts)


@contextmanager
def _open_judge(run_folder: Path, config: TrainRLConfig) -> Iterator[Judge | EmbeddedJudge]:
    judge = config.judge_model
    if judge.model_name_or_path in EMBEDDED_JUDGES:
        yield embedded_judge(judge.model_name_or_path, open_readers(config.generation))
        return
    if not judge.is_remote:
        raise ConfigError(f"The judge {judge.model_name_or_path} is an engine of the server; its replies are not kept.")
    rules, max_tokens = config.generation.judges_rules_prompts_paths, config.generation.max_tokens_per_judge_attempt
    with closing(CallLedger(run_folder / JUDGE_CALLS_NAME)) as ledger:
        yield ModelJudge(judge, rules, max_tokens, KeptReplies(judge, ledger, api=None))


def _new_verdict(
    judge: Judge | EmbeddedJudge, conversation: Conversation, rule: str, attempt: int, in_groups: bool
) -> Verdict:
    """A new verdict from the reply that the run got. A group judge's reply covers several conversations: each
    conversation's record holds its own part of it."""
    earlier = [
        verdict
        for verdict in conversation.verdicts
        if (verdict.rule, verdict.attempt) == (rule, attempt) and not verdict.anchor
    ]
    group_verdict = next((verdict for verdict in earlier if in_groups and verdict.rank is not None), None)
    if group_verdict is None:
        return _ask(judge, conversation, rule, attempt)
    try:
        return read_again(group_verdict)
    except JudgeOutputError as error:
        return Verdict(rule, attempt, error=str(error))


def _ask(judge: Judge | EmbeddedJudge, conversation: Conversation, rule: str, attempt: int) -> Verdict:
    try:
        conversation_and_problem = (conversation.transcript(), conversation.problem.text)
        answer = ask_judge(judge, rule, *conversation_and_problem, attempt, conversation.facts)
        return parse_verdict(rule, attempt, asyncio.run(answer), getattr(judge, "rubric", None))
    except JudgeOutputError as error:
        return Verdict(rule, attempt, error=str(error))


def main(arguments: Sequence[str]) -> int:
    """The command line: write all new verdicts and rewards into the run folder, and print how many changed."""
    if not arguments:
        print("usage: python -m classroom_rl.evaluation.rejudge RUN_FOLDER [overrides]", file=sys.stderr)
        return 2
    folder, overrides = Path(arguments[0]), arguments[1:]
    try:
        recorded = ("--config-dir", str(folder / "config"), "--config-name", "vllm_server")
        results = rejudge(folder, load(TrainRLConfig, "train_rl", (*recorded, *overrides), check_train_rl))
    except USER_ERRORS as error:
        print_error(error)
        return 2
    lines = [json.dumps(to_jsonable_python(result)) for result in results]
    (folder / RESULT_NAME).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    changed = sum(result.before != result.now for result in results)
    without = sum(result.now is None for result in results)
    print(f"{len(results)} conversations, {changed} with another reward than before, {without} without a verdict")
    print(folder / RESULT_NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
