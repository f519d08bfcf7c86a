"""A whole classroom with a supervisor over real HTTP that costs money and misbehaves: what is paid, and what is kept.

The clock of the supervisor's pauses and deadlines is turned (tests/support/turned_clock.py).
"""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from classroom_rl.config.base import GenerationConfig, SupervisorModelConfig
from classroom_rl.config.load import ROOT
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import EngineFailure, SpendingCapReached
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import JOURNAL_NAME
from classroom_rl.rollout.supervision import OBSERVE, REPLACE, RETRY
from classroom_rl.supervision.model_supervisor import ApiSupervisor
from tests.support.chat_client import PRICES, timed_api
from tests.support.judge_endpoint import JudgeEndpoint, cut_off, fails, hangs, judge_endpoint, says
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room
from tests.support.supervised_room import CORRECTION, supervising
from tests.support.turned_clock import run

PROBLEMS = [f"lesson number {number}" for number in range(10)]
GOOD = json.dumps({"critique": "Fine.", "category": "none", "valid": True, "correction": ""})
BAD = json.dumps({"critique": "It tells.", "category": "leak", "valid": False, "correction": CORRECTION})
PROMPT = str(ROOT / "prompt_templates/supervisors/maths_tutor.txt")
CAP_USD = 1.0


def number_in(body: dict) -> int:
    return int(re.search(r"lesson number (\d+)", body["messages"][0]["content"])[1])


def is_unlucky(number: int) -> bool:
    return number % 10 in (1, 4, 7)


def answer_to(body: dict) -> str:
    return BAD if "Blimey" in body["messages"][0]["content"] else GOOD


class Killed(ApiSupervisor):
    """A supervisor whose server dies after the reply to some reviews was paid for, and before it is used."""

    dies_at = -1

    async def review(self, about):
        found = await super().review(about)
        self.dies_at -= 1
        if self.dies_at == 0:
            raise EngineFailure("killed")
        return found


class Server:
    """What a server is, but for the engines: opened on a run folder, asked, closed."""

    def __init__(self, room: Room, endpoint: JudgeEndpoint, timeout_s: float | None = None, **options):
        options = {"model_name_or_path": "supervisor", "request_timeout_s": 60.0, "max_cost_usd": CAP_USD} | options
        self.config = SupervisorModelConfig(base_url=endpoint.url, **PRICES, **options)
        self.room, self.timeout_s = room, timeout_s
        room.teacher = ScriptedEngine(
            room.tokenizer, lambda prompt: "Blimey." if "number 9" in prompt or "number 3" in prompt else "Say hello."
        )
        room.turn_rewards = ("supervisor",)

    def sample(self, generation: GenerationConfig, dies_at: int = -1) -> list[ConversationRecord]:
        return run(self._sample(generation, dies_at))

    async def _sample(self, generation: GenerationConfig, dies_at: int) -> list[ConversationRecord]:
        ledger = CallLedger(self.room.folder / "supervisor_calls.sqlite", self.config.max_cost_usd)
        api = timed_api(self.config, ledger)
        self.room.supervisor = Killed(self.config, generation.supervisor, ledger, api, self.timeout_s)
        self.room.supervisor.dies_at = dies_at
        service = self.room.open(generation)
        service.environment.roles.apis["supervisor"] = api
        answers = [""] * len(PROBLEMS)
        request = SampleRequest(problems=PROBLEMS, answers=answers, request_id="r", seed=1, step=0, supervised=True)
        try:
            response = await service.sample(request)
            self.usage = response.usage["supervisor"]
            return response.conversations
        finally:
            await api.drain()
            await api._client.close()
            service._journal.close()
            self.spent_usd, self.held_usd = ledger.spent_usd, ledger.reserved_usd
            ledger.close()


@pytest.fixture
def rules(generation: GenerationConfig) -> GenerationConfig:
    """Three messages, two of the teacher."""
    return replace(generation, max_turns=3)


def lines_of(room: Room) -> list[bytes]:
    return (room.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("mode", [OBSERVE, RETRY, REPLACE])
def test_a_server_that_died_before_a_review_was_written_asks_the_ledger(tokenizer, tmp_path, rules, mode) -> None:
    """The journal is cut at every twelfth line, the ledger stays: the API is never asked again."""
    rules = supervising(rules, prompt_path=PROMPT, on_invalid=mode)
    room = Room(tokenizer, tmp_path)
    with judge_endpoint(lambda body, nth: says(answer_to(body))) as endpoint:
        server = Server(room, endpoint)
        wanted = server.sample(rules)
        lines, asked, spent = lines_of(room), len(endpoint.calls), server.spent_usd
        for count in [*range(1, len(lines), 12), len(lines)]:
            (room.folder / JOURNAL_NAME).write_bytes(b"".join(lines[:count]))
            server = Server(room, endpoint)
            assert server.sample(rules) == wanted, f"cut after {count} lines"
            assert len(endpoint.calls) == asked
            assert server.spent_usd == pytest.approx(spent) == pytest.approx(endpoint.billed_usd)
    assert {turn.review.valid for record in wanted for turn in record.turns[::2]} >= {True}
    assert any(record.branches for record in wanted)


@pytest.mark.parametrize("mode", [RETRY, REPLACE])
def test_no_review_is_paid_twice_however_often_a_server_dies(tokenizer, tmp_path, rules, mode) -> None:
    rules = supervising(rules, prompt_path=PROMPT, on_invalid=mode)
    room = Room(tokenizer, tmp_path / "run")
    with judge_endpoint(lambda body, nth: says(answer_to(body))) as endpoint:
        for _ in range(3):
            with pytest.raises(EngineFailure, match="killed"):
                Server(room, endpoint).sample(rules, dies_at=1)
        server = Server(room, endpoint)
        found = server.sample(rules)
        undisturbed = Server(Room(tokenizer, tmp_path / "whole"), endpoint)
        before = Counter(call.prompt for call in endpoint.calls)
        wanted = undisturbed.sample(rules)
    assert set(before.values()) == {1}
    assert found == wanted
    assert server.spent_usd == pytest.approx(undisturbed.spent_usd) and server.spent_usd + server.held_usd <= CAP_USD
    assert server.usage.calls == undisturbed.usage.calls == len(before)


WAYS = {
    "500": (fails(500), 8.0),
    "nonsense": (says("It is fine, I think."), None),
    "cut off": (cut_off(BAD), None),
    "hang": (hangs(), 8.0),
    "400": (fails(400), None),
}


@pytest.mark.parametrize("way", WAYS)
def test_failures_are_no_verdicts_there_and_nothing_elsewhere(tokenizer, tmp_path, rules, way) -> None:
    """Three conversations in ten get no review, however often it is asked for."""
    behaviour, timeout_s = WAYS[way]
    rules = replace(supervising(rules, prompt_path=PROMPT, on_invalid=REPLACE), max_turns=1)
    room = Room(tokenizer, tmp_path)

    def script(body, nth):
        return behaviour if is_unlucky(number_in(body)) else says(BAD)

    with judge_endpoint(script) as endpoint:
        server = Server(room, endpoint, timeout_s, request_timeout_s=0.5 if way == "hang" else 60.0)
        found = server.sample(rules)
        again = Server(room, endpoint, timeout_s).sample(rules)
    assert endpoint.billed_usd <= server.spent_usd + server.held_usd + 1e-12 <= CAP_USD
    assert again == found, "what is in the journal stays"
    for number, record in enumerate(found):
        (turn,) = record.turns
        assert record.reward == 0.7 and record.state == "END"
        if is_unlucky(number):
            assert (turn.review.valid, turn.review.penalty, turn.review.correction) == (None, None, None)
            assert turn.review.error and not turn.replaced and turn.span is not None and record.branches == []
            assert record.turn_rewards == {"supervisor": [None]}
        else:
            assert turn.replaced and turn.text == CORRECTION and record.turn_rewards == {"supervisor": [-2.0]}
            assert sorted(branch.kind for branch in record.branches) == ["correction", "draft"]


def test_the_cap_stops_a_batch_and_a_higher_one_goes_on(tokenizer, tmp_path, rules) -> None:
    rules, room = supervising(rules, prompt_path=PROMPT), Room(tokenizer, tmp_path)
    with judge_endpoint(lambda body, nth: says(answer_to(body))) as endpoint:
        with pytest.raises(SpendingCapReached, match="max_cost_usd = 0.006 is reached"):
            Server(room, endpoint, max_cost_usd=0.006).sample(rules)
        assert 0 < endpoint.billed_usd <= 0.006
        found = Server(room, endpoint).sample(rules)
    assert all(turn.review.valid is not None for record in found for turn in record.turns[::2])
    assert set(Counter(call.prompt for call in endpoint.calls).values()) == {1}
