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
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.models import SupervisorModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.environments.marooned.episode import END, GameRecord
from classroom_rl.environments.marooned.islands import islands
from classroom_rl.environments.marooned.messages import parse_message
from classroom_rl.errors import DataError, ProviderFailure
from classroom_rl.judges.model_judge import KeptReplies
from classroom_rl.rollout.environment import Roles, environment_of
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.rows import CORRECTION, DRAFT, POLICY, rows_of
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal
from classroom_rl.server.sampling_service import SamplingService
from classroom_rl.supervision.embedded import embedded_supervisor
from classroom_rl.supervision.model_supervisor import ModelSupervisor
from classroom_rl.trainer.sample_batch import batch_metrics
from tests.support.chat_client import PRICES, timed_api
from tests.support.judge_endpoint import JudgeEndpoint, fails, judge_endpoint, says
from tests.support.scripted_engine import ScriptedEngine
from tests.support.turned_clock import run

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
    key = "".join([*re.findall(r"You are sailor \d|turn \d+/", prompt), str(prompt.count("<|im_start|>"))])
    return LINES[crc32(key.encode()) % len(LINES)]


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
        return [(prompt, list(answer.ids), list(answer.logprobs)) for prompt, _, answer in self.engine.calls]


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
    trained = []
    for row in rows:
        indices = [index for index, bit in enumerate(row.mask) if bit]
        if row.kind == CORRECTION:
            assert not indices and all(row.target)
        elif indices:
            assert indices == list(range(len(indices))), "the message stands right behind its prompt"
            trained.append((row.prompt_ids, row.completion_ids[: len(indices)], row.logprobs[: len(indices)]))
    assert sorted(trained) == sorted(played.sampled)
    kinds = {row.kind for row in rows}
    assert kinds == {"alone": {POLICY}, "observe": {POLICY, CORRECTION}}.get(mode, {POLICY, DRAFT, CORRECTION})


@pytest.mark.parametrize("mode", MODES)
def test_a_game_goes_on_from_any_event_of_its_journal(mode: str, tokenizer, tmp_path: Path) -> None:
    expected = table(tokenizer, tmp_path / "whole", mode).play()
    lines = (tmp_path / "whole" / JOURNAL_NAME).read_text(encoding="utf-8").splitlines(keepends=True)
    for end in range(1, len(lines) + 1):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / JOURNAL_NAME).write_text("".join(lines[:end]), encoding="utf-8")
        resumed = table(tokenizer, folder, mode)
        assert resumed.play() == expected
        drafted = sum(json.loads(line)["event"] == ("turn" if mode == "alone" else "draft") for line in lines[:end])
        sampled = sum(any(row.mask) for record in expected for row in rows_of(record))
        assert len(resumed.engine.calls) == sampled - drafted, "nothing is sampled twice"


def test_corrections_are_done_and_the_draft_pays(tokenizer, tmp_path: Path) -> None:
    for record in table(tokenizer, tmp_path, "replace").play():
        turns = [turn for turn in record.turns if turn.role == "teacher"]
        assert len(turns) == len(record.decisions) == 6 and record.state == END
        for turn, decision in zip(turns, record.decisions, strict=True):
            assert turn.replaced == (turn.review.valid is False) and bool(turn.drafts) == turn.replaced
            message = parse_message(turn.drafts[0].text if turn.replaced else turn.text)
            assert decision.grade == message.grade, "of what the model wrote"
            assert decision.action == str(parse_message(turn.text).action), "what was done"
            assert bool(decision.fault) == (turn.review.category in ("format", "gibberish", "impossible", "energy"))
        penalties = record.turn_rewards["supervisor"]
        assert penalties == [turn.review.penalty for turn in turns] and min(penalties) < 0


def test_without_a_supervisor_what_cannot_be_read_fails_and_costs(tokenizer, tmp_path: Path) -> None:
    records = table(tokenizer, tmp_path, "alone").play()
    decisions = list(itertools.chain(*(record.decisions for record in records)))
    assert {decision.grade for decision in decisions} == {"valid", "repairable", "invalid"}
    for decision in decisions:
        assert (decision.grade == "invalid") == (decision.fault == "the message held no action")
    assert all(
        record.reward == pytest.approx(record.rewards["return"] + 0.5 * record.rewards["ship"]) for record in records
    )


def test_the_log_counts_the_tokens_of_all_decisions(tokenizer, tmp_path: Path) -> None:
    played = table(tokenizer, tmp_path, "alone")
    records = played.play()
    sampled = sum(len(answer.ids) for _, _, answer in played.engine.calls)
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


PROMPT = f"generation.supervisor.prompt_path={ROOT / 'prompt_templates/supervisors/marooned.txt'}"


MODEL = [
    "supervisor_model.model_name_or_path=watcher",
    "generation.supervisor.on_invalid=replace",
    "supervisor_model.base_url=http://127.0.0.1:1/v1",
    PROMPT,
]


SPOKEN = "REASONING: I tell the others.\nACTION: SPEAK I look for wood."


GOOD = json.dumps({"critique": "Fine.", "category": "none", "valid": True, "correction": ""})


def bad(correction: str) -> str:
    return json.dumps(
        {"critique": "It wastes a turn.", "category": "strategy", "valid": False, "correction": correction}
    )


class WatchedTable(Table):
    """A server's environment whose supervisor is behind real HTTP."""

    def __init__(self, tokenizer, folder: Path, endpoint: JudgeEndpoint, deadline_s: float = 600.0):
        super().__init__(tokenizer, folder, *MODEL)
        options = {"model_name_or_path": "watcher", "max_cost_usd": 1.0, "deadline_s": deadline_s} | PRICES
        self.model = SupervisorModelConfig(base_url=endpoint.url, **options)

    def play(self, request=REQUEST) -> list[GameRecord]:
        return run(self._play(request))

    async def _play(self, request) -> list[GameRecord]:
        journal, weights = Journal(self.folder), {"return": 1.0}
        ledger = CallLedger(self.folder / "supervisor_calls.sqlite", self.model.max_cost_usd)
        api = timed_api(self.model, ledger)
        replies = KeptReplies(self.model, ledger, api)
        supervisor = ModelSupervisor(self.model, self.config.generation.supervisor, replies, rules=self.rules)
        seats = Roles({"teacher": self.engine}, {"teacher": self.engine}, {"supervisor": api}, supervisor=supervisor)
        environment = environment_of(self.config).open_with(self.config, seats, journal, weights)
        try:
            service = SamplingService(Runner(environment, journal, weights), journal)
            return (await service.sample(request)).conversations
        finally:
            await api.drain()
            await api._client.close()
            journal.close()
            ledger.close()


def own_turns(records: list[GameRecord]):
    return [turn for record in records for turn in record.turns if turn.role == "teacher"]


def test_it_is_asked_about_what_the_rules_let_pass_and_its_corrections_are_played(tokenizer, tmp_path) -> None:
    with judge_endpoint(lambda body, nth: says(bad(SPOKEN) if "ACTION: WAIT" in asked(body) else GOOD)) as endpoint:
        records = WatchedTable(tokenizer, tmp_path, endpoint).play()
        prompts = [call.prompt for call in endpoint.calls]
    reviews = [turn.review for turn in own_turns(records)]
    assert {review.source for review in reviews} == {"rules", "model"}
    assert all("sailors are stranded" in prompt and "You are sailor" in prompt for prompt in prompts)
    assert not any("glub" in prompt.rpartition("] SAILOR:")[2] for prompt in prompts), "the rules reviewed that"
    waited = [turn for turn in own_turns(records) if turn.review.source == "model" and not turn.review.valid]
    assert waited
    for turn in waited:
        assert (turn.text, turn.replaced, turn.review.penalty) == (SPOKEN, True, -2.5)


def test_a_correction_that_is_not_possible_is_refused(tokenizer, tmp_path) -> None:
    with judge_endpoint(lambda body, nth: says(bad("REASONING: Home.\nACTION: VOTE 77"))) as endpoint:
        records = WatchedTable(tokenizer, tmp_path, endpoint).play()
    by_model = [turn for turn in own_turns(records) if turn.review.source == "model"]
    assert by_model
    for turn in by_model:
        assert not turn.replaced and turn.review.correction is None and turn.review.refused_correction


def test_games_wait_for_a_supervisor_that_is_down_for_a_while(tokenizer, tmp_path) -> None:
    """Each request fails three times before it is answered; the games are those of one that never fails."""
    with judge_endpoint(lambda body, nth: says(GOOD)) as endpoint:
        expected = WatchedTable(tokenizer, fresh(tmp_path, "well"), endpoint).play()
    with judge_endpoint(lambda body, nth: fails(503) if nth < 3 else says(GOOD)) as endpoint:
        records = WatchedTable(tokenizer, fresh(tmp_path, "down"), endpoint).play()
    assert records == expected


def test_one_that_stays_down_stops_the_games_and_loses_nothing(tokenizer, tmp_path) -> None:
    with judge_endpoint(lambda body, nth: says(GOOD)) as endpoint:
        expected = WatchedTable(tokenizer, fresh(tmp_path, "well"), endpoint).play()
    folder = fresh(tmp_path, "down")
    with judge_endpoint(lambda body, nth: fails(503)) as endpoint:
        stopped = WatchedTable(tokenizer, folder, endpoint, deadline_s=20.0)
        with pytest.raises(ProviderFailure):
            stopped.play()
        sampled = len(stopped.engine.calls)
    assert sampled and '"draft"' in (folder / JOURNAL_NAME).read_text(encoding="utf-8")
    with judge_endpoint(lambda body, nth: says(GOOD)) as endpoint:
        restarted = WatchedTable(tokenizer, folder, endpoint)
        assert restarted.play() == expected
    assert len(restarted.engine.calls) + sampled == len(own_turns(expected)), "no decision is sampled twice"


def test_a_wrong_template_is_found_before_a_game_is_played(tmp_path) -> None:
    """In a game it would be no verdict on any message."""
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("Judge {{ the_move }}. {{ conversation }} {{ message }}")
    for path, message in ((wrong, "uses the_move"), (tmp_path / "none.txt", "none.txt")):
        config = config_of((*MODEL[:2], f"generation.supervisor.prompt_path={path}"))
        with pytest.raises(DataError, match=message):
            environment_of(config).check(config, judge_reads_templates=False)
    config = config_of(tuple(MODEL))
    environment_of(config).check(config, judge_reads_templates=False)


def asked(body: dict) -> str:
    """The message under review."""
    return body["messages"][0]["content"].rpartition("] SAILOR:")[2]


def fresh(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
