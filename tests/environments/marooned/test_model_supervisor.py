"""A model as supervisor of the game: it is asked about what the rules let pass, it is shown the rules and what the
sailor knows, its corrections are played, and games wait while it is down."""

import json
from pathlib import Path

import pytest

from classroom_rl.config.base import SupervisorModelConfig
from classroom_rl.config.load import ROOT
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.environments.marooned.episode import GameRecord
from classroom_rl.errors import DataError, ProviderFailure
from classroom_rl.rollout.environment import Roles, environment_of
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal
from classroom_rl.server.sampling_service import SamplingService
from classroom_rl.supervision.model_supervisor import ApiSupervisor
from tests.environments.marooned.test_environment import REQUEST, Table, config_of
from tests.support.chat_client import PRICES, timed_api
from tests.support.judge_endpoint import JudgeEndpoint, fails, judge_endpoint, says
from tests.support.turned_clock import run

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
        supervisor = ApiSupervisor(self.model, self.config.generation.supervisor, ledger, api, rules=self.rules)
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
        wanted = WatchedTable(tokenizer, fresh(tmp_path, "well"), endpoint).play()
    with judge_endpoint(lambda body, nth: fails(503) if nth < 3 else says(GOOD)) as endpoint:
        found = WatchedTable(tokenizer, fresh(tmp_path, "down"), endpoint).play()
    assert found == wanted


def test_one_that_stays_down_stops_the_games_and_loses_nothing(tokenizer, tmp_path) -> None:
    with judge_endpoint(lambda body, nth: says(GOOD)) as endpoint:
        wanted = WatchedTable(tokenizer, fresh(tmp_path, "well"), endpoint).play()
    folder = fresh(tmp_path, "down")
    with judge_endpoint(lambda body, nth: fails(503)) as endpoint:
        stopped = WatchedTable(tokenizer, folder, endpoint, deadline_s=20.0)
        with pytest.raises(ProviderFailure):
            stopped.play()
        sampled = len(stopped.engine.calls)
    assert sampled and '"draft"' in (folder / JOURNAL_NAME).read_text(encoding="utf-8")
    with judge_endpoint(lambda body, nth: says(GOOD)) as endpoint:
        again = WatchedTable(tokenizer, folder, endpoint)
        assert again.play() == wanted
    assert len(again.engine.calls) + sampled == len(own_turns(wanted)), "no decision is sampled twice"


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
