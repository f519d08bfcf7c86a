"""The model plays all seats: who decides, what each seat earns, and what its messages are trained with."""

from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from accelerate import Accelerator

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.marooned.config import Generation
from classroom_rl.environments.marooned.episode import Episode, GameRecord
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.tokens import Turn
from classroom_rl.trainer.grpo import GRPO
from tests.environments.marooned.test_environment import PROBLEMS, Table
from tests.support.scripted_engine import ScriptedEngine

SELF_PLAY = ("generation.self_play=true", "generation.max_turns=3", "train.turn_credit.mode=none")
SELF_PLAY += ("generation.supervisor.on_invalid=observe",)
TEXTS = ("REASONING: I look.\nACTION: WAIT", "REASONING: I go.\nACTION: MOVE NORTH", "glub")


def played(self_play: bool, most: int = 40) -> Episode:
    """A game of messages that are drawn by their number."""
    generation = Generation(max_turns=most, self_play=self_play, show_rules=False)
    episode = Episode.of("e", Problem.of("island 5, seat 3"), generation)
    while not episode.finished:
        episode.act(Turn("teacher", TEXTS[len(episode.decisions) * 7 % 3]))
    return episode


def group_of_games(tokenizer, folder: Path) -> tuple[TrainRLConfig, list[GameRecord]]:
    """Four games of one island; the model's lines are drawn."""
    table = Table(tokenizer, folder, *SELF_PLAY)
    rng = Random(1)
    table.weights = {"return": 1.0, "readable": 1.0}
    table.engine = ScriptedEngine(tokenizer, lambda prompt: rng.choice(TEXTS))
    request = SampleRequest(problems=PROBLEMS[:1] * 4, answers=[""] * 4, request_id="r", seed=1, step=0)
    return table.config, table.play(request.model_copy(update={"supervised": True}))


def test_the_seats_decide_in_turn_and_each_earns_its_own() -> None:
    episode = played(self_play=True)
    rules = PRESETS["tiny"]
    seats = [decision.seat for decision in episode.decisions]
    assert seats[:5] == list(rules.seats) and set(seats) == set(rules.seats)
    observations = [turn.text for turn in episode.turns if turn.role == "game"]
    assert all(f"You are sailor {seat}," in text for seat, text in zip(seats, observations, strict=True))
    for seat in rules.seats:
        earned = sum(decision.reward for decision in episode.decisions if decision.seat == seat)
        assert earned == pytest.approx(episode.game.returns[seat] * rules.reward_scale), "nothing lost, nothing twice"


def test_one_seat_earns_what_it_earned_before_there_was_self_play() -> None:
    """All of the seat's return but what came before its first decision, each decision until the next one."""
    episode = played(self_play=False)
    earned = sum(decision.reward for decision in episode.decisions)
    assert {decision.seat for decision in episode.decisions} == {3} and len(episode.own) == 1
    assert earned == pytest.approx(episode.game.returns[3] * PRESETS["tiny"].reward_scale)


def test_a_record_tells_the_reward_of_each_seat(tokenizer, tmp_path: Path) -> None:
    _, records = group_of_games(tokenizer, tmp_path)
    for record in records:
        assert [seat.seat for seat in record.seats] == [1, 2, 3, 4, 5]
        assert [seat.role for seat in record.seats].count("traitor") == 1
        assert record.reward == next(seat.reward for seat in record.seats if seat.seat == record.seat)
        numbers = sorted(number for player in record.players for number in player.messages)
        assert numbers == list(range(len(record.decisions))), "each message is one player's"


def test_what_a_message_is_trained_with_is_its_own_seat_s_outcome_among_its_role(tokenizer, tmp_path: Path) -> None:
    """The advantage of every sampled token of a batch, against numbers worked out from the records."""
    config, records = group_of_games(tokenizer, tmp_path)
    config.train.num_samples_per_problem, config.train.number_of_problems_per_batch = 4, 1
    config.train.scale_rewards = "none"
    samples, _ = GRPO(config).samples(records, frozenset(), 1, Accelerator(cpu=True))
    means = {
        role: fmean(seat.reward for record in records for seat in record.seats if seat.role == role)
        for role in ("colonist", "traitor")
    }
    advantages = []
    for sample in samples:
        record = next(record for record in records if record.id == sample.row.conversation_id)
        for number, advantage in zip(sample.row.messages, sample.advantages, strict=True):
            if number >= 0 and sample.row.kind == "policy":
                seat = next(seat for seat in record.seats if seat.seat == record.decisions[number].seat)
                assert advantage == pytest.approx(seat.reward - means[seat.role], abs=1e-5)
                advantages.append(round(advantage, 2))
    assert len(advantages) > 100 and len(set(advantages)) > 4


def test_a_game_is_cut_after_so_many_decisions_of_each_seat() -> None:
    episode = played(self_play=True, most=2)
    assert len(episode.decisions) == 10 and episode.finished
