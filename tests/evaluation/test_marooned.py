"""Games measured on held-out islands: their figures, and that equal ones are played once."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from classroom_rl.environments.marooned.episode import Decision, GameRecord
from classroom_rl.environments.marooned.messages import INVALID, REPAIRABLE, VALID
from classroom_rl.errors import DataError
from classroom_rl.evaluation.marooned import compared, figures_of, measure, table
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME
from classroom_rl.rollout.requests import SampleRequest

ISLANDS = ["island 1, seat 1", "island 2, seat 3"]


def game(island: str, *grades: str, fault: str = "", **more: object) -> GameRecord:
    decisions = [
        Decision(day=1, turn=turn, action="WAIT", grade=grade, fault=fault) for turn, grade in enumerate(grades)
    ]
    fields = {"id": island, "request_id": "r", "step": 0, "index": 0, "problem_id": island, "problem": island}
    fields |= {"answer": "", "rewards": {}, "reward": 0.5, "turns": [], "state": "END", "decisions": decisions}
    fields |= {"prompt_ids": [], "completion_ids": [], "mask": [], "logprobs": [], "meta": {}}
    return GameRecord(**fields | more)


class PlayingServer:
    """A server's client that plays at once; `asked` keeps the requests."""

    def __init__(self, policy: PolicyVersion):
        self.policy = policy
        self.asked: list[SampleRequest] = []

    def health(self) -> SimpleNamespace:
        return SimpleNamespace(policy=self.policy)

    def sample(self, request: SampleRequest) -> SimpleNamespace:
        self.asked.append(request)
        said = {"request_id": request.request_id}
        played = [game(each, VALID, id=str(number), **said) for number, each in enumerate(request.problems)]
        return SimpleNamespace(conversations=played)


def test_an_action_is_valid_if_it_is_in_the_grammar_and_possible() -> None:
    figures = figures_of(
        [game(ISLANDS[0], VALID, REPAIRABLE, VALID, INVALID), game(ISLANDS[0], VALID, fault="no room")]
    )
    assert figures["valid"] == {ISLANDS[0]: [0.5, 0.0]}
    assert figures["readable"] == {ISLANDS[0]: [0.5, 1.0]}
    assert figures["decisions"] == {ISLANDS[0]: [4.0, 1.0]}


def test_a_game_without_a_reward_or_a_decision_is_in_no_figure() -> None:
    assert figures_of([game(ISLANDS[0], VALID, reward=None), game(ISLANDS[1])])["valid"] == {}


def test_before_and_after_are_compared_on_the_same_islands() -> None:
    before = figures_of([game(ISLANDS[0], INVALID), game(ISLANDS[1], INVALID, VALID)])
    after = figures_of([game(ISLANDS[0], VALID), game(ISLANDS[1], VALID, VALID)])
    found = compared(before, after)
    assert found["valid"]["before"]["mean"] == 0.25 and found["valid"]["after"]["mean"] == 1.0
    assert found["valid"]["change"]["mean"] == pytest.approx(0.75)
    assert found["valid"]["change"]["ci95"] is None, "of two islands"
    (line,) = [line for line in table(found).splitlines() if line.startswith("valid actions")]
    assert line.split()[-6:] == ["0.250", "1.000", "+0.750", "(n", "=", "2)"]


def test_a_policy_is_measured_once_and_the_next_one_again(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "after" / CONVERSATIONS_NAME
    server = PlayingServer(PolicyVersion("run", 3))
    first = measure(server, ISLANDS, 2, path)
    assert len(first) == 4 and measure(server, ISLANDS, 2, path) == first and len(server.asked) == 1
    request = server.asked[0]
    assert request.fixed_seeds and not request.supervised and request.policy_version == 3
    others = ["island 7, seat 1", "island 8, seat 3"]
    for islands, games, name in ((ISLANDS, 3, ""), (ISLANDS[:1], 4, ""), (others, 2, ""), (others, 2, "24-decisions")):
        assert len(measure(server, islands, games, path, name)) == len(islands) * games
    server.policy = PolicyVersion("run", 5)
    measure(server, others, 2, path, "24-decisions")
    assert len(server.asked) == 6 and len({request.request_id for request in server.asked}) == 6


def test_the_untrained_model_s_games_outlive_a_server_that_has_the_trained_one(tmp_path: Path) -> None:
    path = tmp_path / CONVERSATIONS_NAME
    server = PlayingServer(PolicyVersion())
    before = measure(server, ISLANDS, 1, path, untrained=True)
    server.policy = PolicyVersion("run", 24)  # a server that starts again takes up the last policy
    assert measure(server, ISLANDS, 1, path, untrained=True) == before and len(server.asked) == 1
    with pytest.raises(DataError, match="does not hold the games of the untrained model.*another folder"):
        measure(server, ISLANDS, 2, path, untrained=True)
    assert measure(server, ISLANDS, 1, path, untrained=True) == before, "the file is as it was"
