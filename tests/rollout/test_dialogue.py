"""An environment in which code answers the policy: the guessing game of the tests, with scripted engines."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.errors import DataError
from classroom_rl.rollout import dialogue
from classroom_rl.rollout.environment import Roles, environment_of
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal
from classroom_rl.rollout.tokens import Turn
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.server.sampling_service import SamplingService
from tests.support.scripted_engine import ScriptedEngine
from tests.support.word_game import Environment

GUESSING = ("--config-dir", str(ROOT / "tests/support/guessing"), "--config-name", "guessing")
REQUEST = SampleRequest(problems=["odd", "even"], answers=["5", "2"], request_id="r", seed=1, step=0)


def halving(prompt: str) -> str:
    """Guesses as binary search does: what it is told is in its prompt."""
    low, high = 0, 7
    for hint in re.findall(r"Higher|Lower", prompt):
        guess = (low + high) // 2
        low, high = (guess + 1, high) if hint == "Higher" else (low, guess - 1)
    return str((low + high) // 2)


class Game:
    def __init__(self, tokenizer, folder: Path, script=halving, *overrides: str):
        self.config = load(TrainRLConfig, "train_rl", [*GUESSING, *overrides])
        self.engine = ScriptedEngine(tokenizer, script)
        self.folder = folder

    def service(self) -> SamplingService:
        journal, roles = Journal(self.folder), Roles({"teacher": self.engine}, {"teacher": self.engine})
        weights = reward_weights(self.config)
        environment = environment_of(self.config).open_with(self.config, roles, journal, weights)
        return SamplingService(Runner(environment, journal, weights), journal)

    def play(self, request: SampleRequest = REQUEST) -> list[Trajectory]:
        return asyncio.run(self.service().sample(request)).conversations


def test_a_game_goes_on_until_the_number_is_found(tokenizer, tmp_path: Path) -> None:
    game = Game(tokenizer, tmp_path)
    odd, even = game.play()
    assert [(turn.role, turn.text) for turn in odd.turns] == [
        ("teacher", "3"),
        ("program", "Higher."),
        ("teacher", "5"),
    ]
    assert [turn.text for turn in even.turns if turn.role == "teacher"] == ["3", "1", "2"]
    assert odd.rewards == {"found": 1.0, "in_range": 1.0} and odd.reward == 1.5 and odd.state == "END"
    assert game.service().reward("found", odd.id) == 1.0, "of an earlier server, from its record"


@pytest.mark.parametrize(("tokens", "said"), [(1, "35"), (2, "3<|im_end|>5<|im_end|>")])
def test_what_is_trained_on_is_what_the_policy_sampled(tokenizer, tmp_path: Path, tokens: int, said: str) -> None:
    record = Game(tokenizer, tmp_path, halving, f"generation.max_tokens_per_turn={tokens}").play()[0]
    sampled = [token for token, bit in zip(record.completion_ids, record.mask, strict=True) if bit]
    assert tokenizer.decode(sampled) == said, "an end that was put in is not trained on"
    assert len(record.completion_ids) == len(record.mask) == len(record.logprobs)
    transcript = tokenizer.decode(record.prompt_ids + record.completion_ids)
    assert "Guess a number from 0 to 7: odd" in transcript and "user\nHigher.<|im_end|>" in transcript


@pytest.mark.parametrize(
    ("overrides", "said", "in_range"),
    [
        ("generation.max_turns=3", ["7", "7"], 1.0),
        ("generation.max_turns=1", ["7"], 1.0),
        ("generation.largest=6", ["7"] * 4, 0.0),
    ],
)
def test_a_game_ends_at_its_limit(tokenizer, tmp_path: Path, overrides: str, said: list[str], in_range: float) -> None:
    record = Game(tokenizer, tmp_path, lambda _: "7", overrides).play()[0]
    assert [turn.text for turn in record.turns if turn.role == "teacher"] == said
    assert record.rewards == {"found": 0.0, "in_range": in_range}


def test_the_context_bounds_a_game(tokenizer, tmp_path: Path) -> None:
    record = Game(tokenizer, tmp_path, lambda _: "7", "generation.max_tokens_in_conversation=60").play()[0]
    assert len(record.prompt_ids) + len(record.completion_ids) <= 60 and len(record.turns) < 15
    assert record.reward is not None


# Tools and turn rewards, in an environment of one file ---------------------------------------------------------------

CALL = '<tool_call>{"name": "secret", "arguments": {"number": 1}}</tool_call>'
WORDS = (
    "environment=tests.support.word_game",
    "teacher_model.vllm.max_length=2000",
    "generation.max_tokens_in_conversation=2000",
    "generation.max_tokens_per_turn=200",
    "train.turn_credit.mode=immediate",
    "train.turn_credit.rewards={calls: 1.0}",
)


def asks_for_the_word(prompt: str) -> str:
    """Guesses at first, and asks the tool once that was wrong."""
    if "pear" in prompt:
        return "It is pear."
    return f"Let me see.{CALL}" if "No." in prompt else "apple"


def test_a_policy_calls_tools_whose_results_are_context(tokenizer, tmp_path: Path) -> None:
    game = Game(tokenizer, tmp_path, asks_for_the_word, *WORDS)
    [record] = game.play(SampleRequest(problems=["Which?"], answers=["pear"], request_id="r", seed=1, step=0))
    assert [turn.text for turn in record.turns] == ["apple", "No.", "Let me see.\n\nIt is pear."]
    [call] = record.turns[2].tool_calls
    assert call.name == "secret" and call.result == "pear" and record.rewards == {"said": 1.0}
    sampled = [token for token, bit in zip(record.completion_ids, record.mask, strict=True) if bit]
    expected = f"apple<|im_end|>Let me see.{CALL}<|im_end|>It is pear.<|im_end|>"
    assert tokenizer.decode(sampled) == expected and "<tool_response>" in tokenizer.decode(record.completion_ids)
    assert sum(record.mask) == sum(turn.tokens for turn in record.turns)
    assert "Tells the secret word" in tokenizer.decode(record.prompt_ids)
    assert record.turn_rewards == {"calls": [0.0, 1.0]}
    assert Environment.batch_metrics([record])["tools/calls_per_conversation"] == 1.0


def test_rewards_may_be_functions_of_ones_own(tokenizer, tmp_path: Path) -> None:
    module, wrong_module = "tests.support.word_game", "tests.support.own_rewards"
    rewards = [f"train.reward_weights={{said: 1, {module}:quickness: 2}}"]
    turns = [f"train.turn_credit.rewards={{{module}:words_of_messages: 1.0}}"]
    request = SampleRequest(problems=["Which?"], answers=["pear"], request_id="r", seed=1, step=0)
    [record] = Game(tokenizer, tmp_path, asks_for_the_word, *WORDS[:-1], *rewards, *turns).play(request)
    assert record.rewards == {"said": 1.0, f"{module}:quickness": 0.5} and record.reward == 2.0
    assert record.turn_rewards == {f"{module}:words_of_messages": [1.0, 6.0]}
    for name, message in (("silent", "returned 'short' for r-0000"), ("broken", "failed on r-0000")):
        with pytest.raises(DataError, match=message):
            override = f"train.reward_weights={{{wrong_module}:{name}: 1}}"
            Game(tokenizer, tmp_path / name, asks_for_the_word, *WORDS, override).play(request)


def test_after_a_kill_the_tools_are_not_called_again(tokenizer, tmp_path: Path) -> None:
    game = Game(tokenizer, tmp_path, asks_for_the_word, *WORDS)
    request = SampleRequest(problems=["Which?"], answers=["pear"], request_id="r", seed=1, step=0)
    expected = game.play(request)
    lines = (tmp_path / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        (tmp_path / JOURNAL_NAME).write_bytes(b"".join(lines[:count]))
        [replayed], [before] = game.play(request), expected
        tokens = {name: getattr(before, name) for name in ("completion_ids", "mask", "logprobs", "turn_rewards")}
        assert {name: getattr(replayed, name) for name in tokens} == tokens
        assert len(replayed.turns[2].tool_calls) == 1
    game.engine.calls.clear()
    game.play(request)
    assert not game.engine.calls


def test_turn_rewards_are_one_for_each_message(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "turn_rewards", lambda *_: [1.0])
    with pytest.raises(DataError, match=r"turn_rewards\('calls'\) returned 1 values for r-0000, which has 2 messages"):
        request = SampleRequest(problems=["Which?"], answers=["pear"], request_id="r", seed=1, step=0)
        Game(tokenizer, tmp_path, asks_for_the_word, *WORDS).play(request)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_an_environment_of_one_file_can_be_trained(algorithm: str) -> None:
    config = load(TrainRLConfig, "train_rl", [*GUESSING, *WORDS, f"train.algorithm={algorithm}"], check_train_rl)
    assert environment_of(config) is Environment and config.train.turn_credit.weights == {"calls": 1.0}


def test_whatever_line_a_kill_leaves_nothing_is_said_twice(tokenizer, tmp_path: Path) -> None:
    game = Game(tokenizer, tmp_path)
    expected, calls = game.play(), len(game.engine.calls)
    lines = (tmp_path / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        (tmp_path / JOURNAL_NAME).write_bytes(b"".join(lines[:count]))
        turns = [event["turn"] for event in map(json.loads, lines[:count]) if event["event"] == "turn"]
        journaled = sum(turn["role"] == "teacher" for turn in turns)
        game.engine.calls.clear()
        assert game.play() == expected
        assert len(game.engine.calls) == calls - journaled
    assert game.play(REQUEST.model_copy(update={"request_id": "another"}))[0].turns == expected[0].turns


def test_a_game_that_is_played_again_has_no_reward_until_it_ends(tokenizer, tmp_path: Path) -> None:
    """After a change of the configuration a request is played anew under the same ids."""
    seen_rewards = []

    def look(prompt: str) -> str:
        seen_rewards.append(dict(runner.rewards))
        return halving(prompt)

    Game(tokenizer, tmp_path).play()
    service = Game(tokenizer, tmp_path, look, "generation.max_turns=3").service()
    runner = service.runner
    runner.rewards |= {f"{REQUEST.request_id}-0000": {"found": 9.0}, "another": {"found": 1.0}}
    odd, _ = asyncio.run(service.sample(REQUEST)).conversations
    assert odd.id == f"{REQUEST.request_id}-0000" and seen_rewards[0] == {"another": {"found": 1.0}}
    assert runner.rewards[odd.id] == odd.rewards


def test_another_configuration_plays_anew(tokenizer, tmp_path: Path) -> None:
    Game(tokenizer, tmp_path).play()
    other = Game(tokenizer, tmp_path, halving, "generation.max_turns=3")
    other.play()
    assert other.engine.calls
    same = Game(tokenizer, tmp_path, halving, "generation.max_turns=3", "generation.server_port=9000")
    same.play()
    assert not same.engine.calls, "where the server listens has no part in a game"


def test_a_problem_that_does_not_fit_is_refused(tokenizer) -> None:
    config = load(TrainRLConfig, "train_rl", GUESSING)
    problem = Problem.of("odd " * 50, "5")
    with pytest.raises(DataError, match=f"Problem {problem.id} .* opens with .* context has 40"):
        environment_of(config).check_problems(config, [problem], tokenizer, 40)
    environment_of(config).check_problems(config, [problem], tokenizer, 400)


@pytest.mark.parametrize("name", ["config.py", "environment.py", "guessing.yaml"])
def test_the_guide_shows_the_game_as_it_is(name: str) -> None:
    guide = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    path = f"tests/support/guessing/{name}"
    kind = {"py": "python", "yaml": "yaml"}[name.rpartition(".")[2]]
    assert f"```{kind}\n{(ROOT / path).read_text(encoding='utf-8')}```" in guide and f"`{path}`" in guide


def test_former_names_forward_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="Dialogue is called DialogueEpisode now"):
        alias = dialogue.Dialogue
    assert alias is dialogue.DialogueEpisode
    with pytest.warns(FutureWarning, match="said is called messages now"):
        assert alias("r", Problem.of("p"), turns=[Turn("teacher", "Hi."), Turn("program", "No.")]).said == ["Hi."]
