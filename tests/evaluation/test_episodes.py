"""Episodes measured on held-out problems: their figures, how two policies are compared, and that equal ones are played
once. With games of Marooned, and with episodes of an environment without figures of its own."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from classroom_rl.environments.marooned.episode import Decision, GameRecord
from classroom_rl.environments.marooned.messages import INVALID, REPAIRABLE, VALID
from classroom_rl.errors import DataError
from classroom_rl.evaluation import episodes
from classroom_rl.evaluation.episodes import compared, figures_of, held_out, main, measure, table, write_comparison
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.trajectory import Trajectory

ISLANDS = ["island 1, seat 1", "island 2, seat 3"]


def problems(*texts: str) -> list[Problem]:
    return [Problem.of(text) for text in texts]


def game(island: str, *grades: str, fault: str = "", **more: object) -> GameRecord:
    decisions = [
        Decision(day=1, turn=turn, action="WAIT", grade=grade, fault=fault) for turn, grade in enumerate(grades)
    ]
    fields = {"id": island, "request_id": "r", "step": 0, "index": 0, "problem_id": island, "problem": island}
    fields |= {"answer": "", "rewards": {}, "reward": 0.5, "turns": [], "state": "END", "decisions": decisions}
    fields |= {"prompt_ids": [], "completion_ids": [], "mask": [], "logprobs": [], "meta": {}}
    return GameRecord(**fields | more)


def test_turn_rewards_are_measured_by_the_mean_of_an_episode_that_counts() -> None:
    scored = {"judge": [1.0, None, 0.5], "unseen": [None]}
    figures = figures_of(
        [
            game(ISLANDS[0], VALID, turn_rewards=scored),
            game(ISLANDS[1], VALID, reward=None, turn_rewards=scored),
        ]
    )
    assert figures["turn_rewards/judge/mean"] == {ISLANDS[0]: [0.75]}
    assert not any("unseen" in name for name in figures)


class PlayingServer:
    """A server's client that plays at once; `asked` keeps the requests."""

    def __init__(self, policy: PolicyVersion):
        self.policy = policy
        self.asked: list[SampleRequest] = []

    def health(self) -> SimpleNamespace:
        return SimpleNamespace(policy=self.policy)

    def sample(self, request: SampleRequest) -> SimpleNamespace:
        self.asked.append(request)
        fields = {"request_id": request.request_id}
        played = [game(problem, VALID, id=str(number), **fields) for number, problem in enumerate(request.problems)]
        return SimpleNamespace(conversations=played)


def test_a_server_that_is_still_starting_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class StartingServer(PlayingServer):
        def __init__(self, url: str, record: type) -> None:
            super().__init__(PolicyVersion())

        def wait_until_up(self, timeout_s: float) -> None:
            assert not self.asked
            waited.append(timeout_s)

    monkeypatch.setattr(episodes, "ClassroomClient", StartingServer)
    (tmp_path / "islands.jsonl").write_text('{"problem": "island 1, seat 1"}\n')
    files = [str(tmp_path / "islands.jsonl"), str(tmp_path / "played.parquet")]
    monkeypatch.setattr("sys.argv", ["episodes", "--environment", "marooned", "http://127.0.0.1:1", *files])
    assert episodes.main() == 0 and waited == [1800.0]
    assert (tmp_path / "played.parquet").is_file()


def test_an_action_is_valid_if_it_is_in_the_grammar_and_possible() -> None:
    figures = figures_of(
        [game(ISLANDS[0], VALID, REPAIRABLE, VALID, INVALID), game(ISLANDS[0], VALID, fault="no room")]
    )
    assert figures["valid"] == {ISLANDS[0]: [0.5, 0.0]}
    assert figures["readable"] == {ISLANDS[0]: [0.5, 1.0]}
    assert figures["decisions"] == {ISLANDS[0]: [4.0, 1.0]}


def test_a_game_without_a_reward_or_a_decision_is_in_no_figure() -> None:
    assert figures_of([game(ISLANDS[0], VALID, reward=None), game(ISLANDS[1])]) == {}


def test_before_and_after_are_compared_on_the_same_islands() -> None:
    before = figures_of([game(ISLANDS[0], INVALID), game(ISLANDS[1], INVALID, VALID)])
    after = figures_of([game(ISLANDS[0], VALID), game(ISLANDS[1], VALID, VALID)])
    comparison = compared(before, after)
    assert comparison["valid"]["before"]["mean"] == 0.25 and comparison["valid"]["after"]["mean"] == 1.0
    assert comparison["valid"]["change"]["mean"] == pytest.approx(0.75)
    assert comparison["valid"]["change"]["ci95"] is None, "of two islands"
    (line,) = [
        line for line in table(comparison, GameRecord.figure_labels).splitlines() if line.startswith("valid actions")
    ]
    assert line.split()[-6:] == ["0.250", "1.000", "+0.750", "(n", "=", "2)"]


def test_a_policy_is_measured_once_and_the_next_one_again(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "after" / CONVERSATIONS_NAME
    server = PlayingServer(PolicyVersion("run", 3))
    first = measure(server, problems(*ISLANDS), 2, path, GameRecord)
    assert len(first) == 4 and measure(server, problems(*ISLANDS), 2, path, GameRecord) == first
    assert len(server.asked) == 1
    request = server.asked[0]
    assert request.fixed_seeds and not request.supervised and request.policy_version == 3
    other_islands = ["island 7, seat 1", "island 8, seat 3"]
    for islands, games, name in (
        (ISLANDS, 3, ""),
        (ISLANDS[:1], 4, ""),
        (other_islands, 2, ""),
        (other_islands, 2, "24-decisions"),
    ):
        assert len(measure(server, problems(*islands), games, path, GameRecord, name)) == len(islands) * games
    server.policy = PolicyVersion("run", 5)
    measure(server, problems(*other_islands), 2, path, GameRecord, "24-decisions")
    assert len(server.asked) == 6 and len({request.request_id for request in server.asked}) == 6


def test_the_untrained_model_s_games_outlive_a_server_that_has_the_trained_one(tmp_path: Path) -> None:
    path = tmp_path / CONVERSATIONS_NAME
    server = PlayingServer(PolicyVersion())

    def untrained(games: int) -> list[GameRecord]:
        return measure(server, problems(*ISLANDS), games, path, GameRecord, untrained=True)

    before = untrained(1)
    server.policy = PolicyVersion("run", 24)  # a server that starts again takes up the last policy
    assert untrained(1) == before and len(server.asked) == 1
    with pytest.raises(DataError, match="does not hold the episodes of the untrained model.*another folder"):
        untrained(2)
    assert untrained(1) == before, "the file is as it was"


def episode(problem: str, reward: float | None, **rewards: float) -> Trajectory:
    fields = {"id": problem, "request_id": "r", "step": 0, "index": 0, "problem_id": problem, "problem": problem}
    fields |= {"answer": "", "rewards": rewards, "reward": reward, "meta": {}}
    return Trajectory(**fields, prompt_ids=[], completion_ids=[], mask=[], logprobs=[])


def test_an_environment_without_figures_of_its_own_is_measured_by_its_rewards(tmp_path: Path) -> None:
    """And their change decides whether the policy learned."""
    names = [f"game {number}" for number in range(8)]
    before = [episode(name, 0.25 + 0.01 * index, found=0.0, polite=0.5) for index, name in enumerate(names)]
    after = [episode(name, 0.75, found=1.0, polite=0.5) for name in names]
    assert figures_of([*before, episode("game 9", None, found=0.0)])["found"] == {name: [0.0] for name in names}
    assert "learn" not in write_comparison(before, after, 12, Trajectory.figure_labels, tmp_path), "nothing was trained"
    (tmp_path / "metrics.jsonl").write_text('{"step": 12, "reward": 0.75}\n')
    text = write_comparison(before, after, 12, Trajectory.figure_labels, tmp_path)
    line = next(line for line in text.splitlines() if line.startswith("found"))
    assert line.split()[1:4] == ["0.000", "1.000", "+1.000"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["version"] == 12 and summary["polite"]["change"]["mean"] == 0
    assert json.loads((tmp_path / "learning.json").read_text())["figures"]["held_out"] is not None


@pytest.mark.parametrize("answer", ["5", None])
def test_problems_may_have_answers(answer: str | None, tmp_path: Path) -> None:
    path = tmp_path / "heldout.jsonl"
    row = {"problem": "game 5"} | ({} if answer is None else {"answer": answer})
    path.write_text(json.dumps(row) + "\n")
    assert [(problem.text, problem.answer) for problem in held_out(path)] == [("game 5", answer or "")]


def test_a_missing_file_to_compare_with_is_named_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "problems.jsonl").write_text('{"problem": "island 1"}\n')
    arguments = ["--environment", "marooned", "http://127.0.0.1:9", str(tmp_path / "problems.jsonl")]
    arguments += [str(tmp_path / "after.parquet"), "--before", str(tmp_path / "befor.parquet")]
    monkeypatch.setattr(sys, "argv", ["episodes", *arguments])
    assert main() == 2
    assert "befor.parquet, which is no file: play it first, without --before" in capsys.readouterr().err
