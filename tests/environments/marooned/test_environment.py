"""Games through the runner, the journal and the rows, with scripted engines."""

import asyncio
import itertools
import json
import re
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.marooned.episode import END, GameRecord
from classroom_rl.environments.marooned.islands import islands
from classroom_rl.environments.marooned.messages import parse_message
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.rollout.environment import Roles, environment_of
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.rows import CORRECTION, DRAFT, POLICY, rows_of
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal
from classroom_rl.server.sampling_service import SamplingService
from classroom_rl.supervision.embedded import embedded_supervisor
from classroom_rl.trainer.sample_batch import batch_metrics
from tests.support.scripted_engine import ScriptedEngine

NAME = ["--config-name", "marooned", "generation.max_tokens_in_conversation=20000"]
NAME += ["teacher_model.vllm.max_length=20000", "generation.max_tokens_per_turn=400", "generation.max_turns=6"]
LINES = (
    "REASONING: I look around.\nACTION: WAIT",
    "reasoning: north\naction: go north.",
    "REASONING: far away\nACTION: GATHER METAL 9",
    "glub",
    "REASONING: I shout.\nACTION: SPEAK Hello.",
)
PROBLEMS = list(islands("tiny", 1, 2))
REQUEST = SampleRequest(problems=PROBLEMS, answers=["", ""], request_id="r", seed=1, step=0, supervised=True)


@cache
def config_of(overrides: tuple[str, ...]) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", [*NAME, *overrides], check_train_rl)


def line(prompt: str) -> str:
    """One of the lines: it depends on the sailor, the turn and the messages so far, not on the prompt's other words."""
    asked = "".join([*re.findall(r"You are sailor \d|turn \d+/", prompt), str(prompt.count("<|im_start|>"))])
    return LINES[crc32(asked.encode()) % len(LINES)]


class Table:
    """A server's environment on a scripted engine, whose lines depend on who is asked and when."""

    weights = {"return": 1.0, "ship": 0.5}

    def __init__(self, tokenizer, folder: Path, *overrides: str):
        self.config = config_of(overrides)
        self.folder = folder
        self.engine = ScriptedEngine(tokenizer, line)

    def play(self, request: SampleRequest = REQUEST) -> list[GameRecord]:
        journal, weights = Journal(self.folder), self.weights
        supervisor = None if self.config.supervisor_model is None else embedded_supervisor("rules", self.rules)
        seats = Roles({"teacher": self.engine}, {"teacher": self.engine}, supervisor=supervisor)
        environment = environment_of(self.config).open_with(self.config, seats, journal, weights)
        return asyncio.run(
            SamplingService(Runner(environment, journal, weights), journal).sample(request)
        ).conversations

    @property
    def rules(self):
        return environment_of(self.config).review_by_rules

    @property
    def sampled(self) -> list[tuple[list[int], list[int], list[float]]]:
        """What the engine was asked and what it sampled."""
        return [(prompt, list(found.ids), list(found.logprobs)) for prompt, _, found in self.engine.calls]


MODES = ["alone", "observe", "retry", "replace", "self_play"]


def table(tokenizer, folder: Path, mode: str) -> Table:
    if mode == "alone":
        nobody = ["supervisor_model=null", "generation.supervisor.on_invalid=observe", "train.turn_credit.mode=none"]
        return Table(tokenizer, folder, *nobody, "train.corrections.mode=none")
    if mode == "self_play":
        played = ["generation.self_play=true", "generation.max_turns=2", "generation.supervisor.on_invalid=replace"]
        return Table(tokenizer, folder, *played)
    return Table(tokenizer, folder, f"generation.supervisor.on_invalid={mode}")


@pytest.mark.parametrize("mode", MODES)
def test_what_is_trained_on_is_what_the_engine_sampled(mode: str, tokenizer, tmp_path: Path) -> None:
    """Each answer is one row behind the prompt that the engine got, with its own ids and log-probs, and no other row
    has sampled tokens."""
    played = table(tokenizer, tmp_path, mode)
    records = played.play()
    rows = [row for record in records for row in rows_of(record)]
    found = []
    for row in rows:
        kept = [place for place, bit in enumerate(row.mask) if bit]
        if row.kind == CORRECTION:
            assert not kept and all(row.target)
        elif kept:
            assert kept == list(range(len(kept))), "the message stands right behind its prompt"
            found.append((row.prompt_ids, row.completion_ids[: len(kept)], row.logprobs[: len(kept)]))
    assert sorted(found) == sorted(played.sampled)
    kinds = {row.kind for row in rows}
    assert kinds == {"alone": {POLICY}, "observe": {POLICY, CORRECTION}}.get(mode, {POLICY, DRAFT, CORRECTION})


@pytest.mark.parametrize("mode", MODES)
def test_a_game_goes_on_from_any_event_of_its_journal(mode: str, tokenizer, tmp_path: Path) -> None:
    whole = table(tokenizer, tmp_path / "whole", mode).play()
    lines = (tmp_path / "whole" / JOURNAL_NAME).read_text(encoding="utf-8").splitlines(keepends=True)
    for end in range(1, len(lines) + 1):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / JOURNAL_NAME).write_text("".join(lines[:end]), encoding="utf-8")
        again = table(tokenizer, folder, mode)
        assert again.play() == whole
        drafted = sum(json.loads(line)["event"] == ("turn" if mode == "alone" else "draft") for line in lines[:end])
        sampled = sum(any(row.mask) for record in whole for row in rows_of(record))
        assert len(again.engine.calls) == sampled - drafted, "nothing is sampled twice"


def test_corrections_are_done_and_the_draft_pays(tokenizer, tmp_path: Path) -> None:
    for record in table(tokenizer, tmp_path, "replace").play():
        own = [turn for turn in record.turns if turn.role == "teacher"]
        assert len(own) == len(record.decisions) == 6 and record.state == END
        for turn, decision in zip(own, record.decisions, strict=True):
            assert turn.replaced == (turn.review.valid is False) and bool(turn.drafts) == turn.replaced
            written = parse_message(turn.drafts[0].text if turn.replaced else turn.text)
            assert decision.grade == written.grade, "of what the model wrote"
            assert decision.action == str(parse_message(turn.text).action), "what was done"
            assert bool(decision.fault) == (turn.review.category in ("format", "gibberish", "impossible", "energy"))
        penalties = record.turn_rewards["supervisor"]
        assert penalties == [turn.review.penalty for turn in own] and min(penalties) < 0


def test_without_a_supervisor_what_cannot_be_read_fails_and_costs(tokenizer, tmp_path: Path) -> None:
    records = table(tokenizer, tmp_path, "alone").play()
    decisions = list(itertools.chain(*(record.decisions for record in records)))
    assert {each.grade for each in decisions} == {"valid", "repairable", "invalid"}
    for each in decisions:
        assert (each.grade == "invalid") == (each.fault == "the message held no action")
    assert all(
        record.reward == pytest.approx(record.rewards["return"] + 0.5 * record.rewards["ship"]) for record in records
    )


def test_the_log_counts_the_tokens_of_all_decisions(tokenizer, tmp_path: Path) -> None:
    played = table(tokenizer, tmp_path, "alone")
    records = played.play()
    sampled = sum(len(found.ids) for _, _, found in played.engine.calls)
    assert batch_metrics(records)["conversation/teacher_tokens"] == sampled / len(records)


def test_games_of_a_problem_are_equal_but_for_the_model(tokenizer, tmp_path: Path) -> None:
    request = SampleRequest(problems=PROBLEMS[:1] * 2, answers=["", ""], request_id="r", seed=1, step=0)
    one, two = table(tokenizer, tmp_path, "alone").play(request)
    assert one.prompt_ids == two.prompt_ids and (one.role, one.seat) == (two.role, two.seat)


def test_what_is_no_game_is_refused(tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no game of Marooned: write it as 'island 17, seat 3'"):
        table(tokenizer, tmp_path, "alone").play(REQUEST.model_copy(update={"problems": ["island x", PROBLEMS[0]]}))
    with pytest.raises(DataError, match="there is no seat 9; there are 5"):
        request = REQUEST.model_copy(update={"problems": ["island 1, seat 9", PROBLEMS[0]]})
        table(tokenizer, tmp_path / "b", "alone").play(request)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generation.preset=large", "generation.preset"),
        ("generation.colonists=[nobody]", "generation.colonists"),
        ("generation.colonists=[]", "is empty"),
        ("generation.traitor=nobody", "generation.traitor"),
        ("generation.supervisor.show_critique=true", "without the critique"),
        ("+generation.supervisor.penalties.leak=-1", "leak"),
        ("generation.supervisor.penalties.format=1", "at most 0"),
    ],
)
def test_configurations_are_checked(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(TrainRLConfig, "train_rl", [*NAME, override], check_train_rl)
