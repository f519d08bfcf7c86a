"""Groups in which all conversations have the same reward: kept, left out, or replaced by further problems."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError, TooManyFailedJudgements
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.rollout.problem import Problem
from classroom_rl.trainer.corrections import sampled_rows
from classroom_rl.trainer.group_variance import GroupFilter, further_problems, varies
from tests.support.offline_trainer import PROBLEMS, conversation, offline_trainer, save_tiny_model

FLAT = 0.5
MANY = [Problem.of(f"lesson {number}", "") for number in range(20)]


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), world / "blank")


class Player:
    """Plays conversations; those of some problems all have the same reward. `played` are all problems in order."""

    def __init__(self, is_flat: Callable[[str], bool], **changes: Any):
        self.is_flat, self.changes = is_flat, changes
        self.played: list[str] = []

    def __call__(self, index: int, problem: Problem) -> ConversationRecord:
        self.played.append(problem.text)
        seed = len(self.played) // 8 + 1
        flat_fields = {"reward": FLAT, "rewards": {"pedagogical": FLAT}} if self.is_flat(problem.text) else {}
        return conversation(index, problem, seed, **flat_fields, **self.changes)


def batch_of(folder: Path, model: Path, play: Player, *overrides: str, problems: list[Problem] = MANY) -> tuple:
    trainer = offline_trainer(folder, model, ["train.beta=0", *overrides], play, problems)
    return trainer, trainer.batch()


def first_problem(folder: Path, model: Path) -> str:
    """The first problem of the first batch, which is the same in every trainer of this file."""
    play = Player(lambda text: False)
    batch_of(folder, model, play)
    return play.played[0]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_what_is_left_out_teaches_nothing_and_the_rest_as_much_as_in_a_batch_of_its_own(
    loss_type: str, model: Path, tmp_path: Path
) -> None:
    """Two groups, one without variance: the gradient is that of the other one alone, where keeping both halves it."""
    flat = first_problem(tmp_path / "first", model)
    loss = f"train.loss_type={loss_type}"
    one_part = "train.per_device_train_batch_size=8"

    def gradient(name: str, *overrides: str) -> torch.Tensor:
        trainer, batch = batch_of(tmp_path / name, model, Player(flat.__eq__), loss, one_part, *overrides)
        return trainer.loss_and_gradients(batch)[1]["model.layers.0.mlp.up_proj.weight"]

    kept = gradient("kept")
    dropped = gradient("dropped", "train.groups_without_variance=drop")
    ratio = dropped.norm() / kept.norm()
    assert torch.allclose(dropped, kept * ratio, rtol=1e-4, atol=1e-7), "only its length changes"
    if loss_type in ("grpo", "dr_grpo"):
        assert ratio == pytest.approx(2, rel=1e-5), "a mean over rows: half as many rows"
    else:
        assert 1.3 < ratio < 3, "a mean over sampled tokens"


def test_rows_that_are_left_out_have_no_token_and_are_counted(model: Path, tmp_path: Path) -> None:
    flat = first_problem(tmp_path / "first", model)
    trainer, batch = batch_of(tmp_path / "run", model, Player(flat.__eq__), "train.groups_without_variance=drop")
    assert sum(micro_batch.mask_BT.any(dim=1).sum().item() for micro_batch in batch) == 4
    figures = trainer._figures
    assert [figures[f"groups/{name}"] for name in ("without_variance", "left_out", "played")] == [[0.5], [0.5], [2]]
    assert figures["reward"], "their rewards are still in the log"
    assert figures["completions/min_length"][0] > 5, "and their length is no 0"


def test_further_problems_take_the_place_of_groups_without_variance(model: Path, tmp_path: Path) -> None:
    flat = first_problem(tmp_path / "first", model)
    play = Player(flat.__eq__)
    trainer, batch = batch_of(tmp_path / "run", model, play, "train.groups_without_variance=resample")
    assert len(play.played) == 12 and len(set(play.played)) == 3, "one further group, of a problem of its own"
    assert sum(micro_batch.mask_BT.any(dim=1).sum().item() for micro_batch in batch) == 8
    assert trainer._figures["groups/left_out"] == [0]
    files = sorted(path.name for path in (tmp_path / "run" / "rollouts").iterdir())
    assert files == ["step_000000-0-1.parquet", "step_000000-0.parquet"], "nothing that was played is lost"


def test_no_more_is_played_than_allowed_and_a_batch_without_any_signal_is_kept(model: Path, tmp_path: Path) -> None:
    play = Player(lambda text: True)
    overrides = ["train.groups_without_variance=resample", "train.resample_up_to=3"]
    trainer, batch = batch_of(tmp_path, model, play, *overrides)
    assert len(play.played) == 3 * 8
    loss, gradients = trainer.loss_and_gradients(batch)
    assert loss == 0 and all(not gradient.any() for gradient in gradients.values()), "nothing to learn, and no NaN"
    figures = trainer._figures
    assert figures["groups/without_variance"] == [1] and figures["groups/left_out"] == [0]


def test_a_group_whose_messages_differ_teaches_where_turn_credit_counts(model: Path, tmp_path: Path) -> None:
    credit = "train.turn_credit={mode: immediate, weight: 0.3, rewards: {judge: 1.0}}"

    class OfTurns(Player):
        def __call__(self, index: int, problem: Problem) -> ConversationRecord:
            record = super().__call__(index, problem)
            return record.model_copy(update={"turn_rewards": {"judge": [float(index % 2), None, 1.0]}})

    for overrides, trained in (([], 0.0), ([credit], 1.0)):
        trainer, _ = batch_of(
            tmp_path / str(trained), model, OfTurns(lambda text: True), "train.groups_without_variance=drop", *overrides
        )
        assert trainer._figures["groups/without_variance"] == [1 - trained]


def test_rewards_vary_by_their_deviation_and_not_by_their_mean() -> None:
    assert (
        not varies([1.0, 1.0]) and not varies([0.3, None]) and not varies([None, None]) and not varies([0.1 + 0.2, 0.3])
    )
    assert varies([0.0, 1.0]) and varies([0.5, None, 0.6])


@given(st.lists(st.floats(0, 1), min_size=2), st.randoms())
def test_the_order_of_rewards_does_not_matter(rewards: list[float], random: Any) -> None:
    shuffled = random.sample(rewards, len(rewards))
    assert varies(rewards) == varies(shuffled)
    assert varies(rewards) <= (max(rewards) > min(rewards))


@given(st.integers(0, 30), st.integers(0, 50), st.integers(1, 5), st.sets(st.integers(0, 19)))
def test_further_problems_are_new_as_long_as_there_are_any(
    count: int, step: int, attempt: int, tried: set[int]
) -> None:
    ids = [str(number) for number in range(20)]
    played = [str(number) for number in tried]
    key = f"3|{step}|{attempt}"
    drawn = further_problems(key, ids, played, count)
    assert drawn == further_problems(key, ids, played, count), "a restarted trainer asks the same"
    assert len(drawn) == count
    fresh = drawn[: 20 - len(tried)]
    assert not set(fresh) & set(played) and len(set(fresh)) == len(fresh)


def test_an_earlier_version_would_have_drawn_the_same_further_problems() -> None:
    """A training that is resumed with another version goes on with the same problems."""
    ids = [str(number) for number in range(20)]
    assert further_problems("3|5|1", ids, ["0", "1"], 4) == ["2", "9", "14", "6"]


def test_parts_of_groups_are_refused() -> None:
    """Also where no variable said at the start that several processes share the batch."""
    config = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", "train.groups_without_variance=drop"])
    records = [conversation(index, MANY[0], seed=1) for index in range(config.train.num_samples_per_problem + 1)]
    with pytest.raises(ConfigError, match="9 conversations, which are not whole groups of 8"):
        GroupFilter(config, ["0"]).flat_groups(records)


def test_an_environment_of_many_rows_and_ppo_keep_their_groups(tmp_path: Path) -> None:
    for name in ("marooned", "quickstart_ppo"):
        with pytest.raises(ConfigError, match="train.groups_without_variance is drop"):
            load(
                TrainRLConfig, "train_rl", ["--config-name", name, "train.groups_without_variance=drop"], check_train_rl
            )


SUPERVISED = [
    "supervisor_model.model_name_or_path=rules",
    "generation.supervisor.on_invalid=retry",
    "train.turn_credit.mode=immediate",
]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.loss_type=bnpo"], "takes the mean of each micro-batch"),
        (SUPERVISED, "rejected drafts teach even where all rewards are equal"),
    ],
)
def test_where_a_flat_group_counts_or_teaches_it_is_kept(overrides: list[str], said: str) -> None:
    options = ["--config-name", "quickstart", "train.groups_without_variance=resample", *overrides]
    with pytest.raises(ConfigError, match=said):
        load(TrainRLConfig, "train_rl", options, check_train_rl)


def test_lost_verdicts_stop_the_run_before_anything_is_played_again(model: Path, tmp_path: Path) -> None:
    class Failing(Player):
        def __call__(self, index: int, problem: Problem) -> ConversationRecord:
            record = super().__call__(index, problem)
            return record.model_copy(update={"reward": None, "failure": None, "verdicts": []})

    play = Failing(lambda text: False)
    trainer = offline_trainer(tmp_path, model, ["train.groups_without_variance=resample"], play, MANY)
    with pytest.raises(TooManyFailedJudgements):
        trainer.batch()
    assert len(play.played) == 8


def test_rows_to_compare_by_are_found_behind_a_micro_batch_that_was_left_out(model: Path, tmp_path: Path) -> None:
    """A supervised pass measures on them how far it moved the policy."""
    flat = first_problem(tmp_path / "first", model)
    options = ["train.groups_without_variance=drop", "train.per_device_train_batch_size=1"]
    trainer, batch = batch_of(tmp_path / "run", model, Player(flat.__eq__), *options)
    trainer.micro_batches = sorted(batch, key=lambda micro_batch: micro_batch.mask_BT.any().item())
    rows = sampled_rows(trainer)
    assert len(rows.mask_BT) == 1 and rows.mask_BT.any()
    trainer.micro_batches = trainer.micro_batches[:1]
    empty_rows = sampled_rows(trainer)
    assert len(empty_rows.mask_BT) == 1 and not empty_rows.mask_BT.any(), "all processes score together"


def test_a_group_teaches_by_what_is_compared() -> None:
    """Equal sums of unequal criteria teach where criteria are compared; differences below a step do not."""
    scores = [Scores(0.6, 0.4, 5.0), Scores(0.4, 0.6, 5.0)]
    records = [
        conversation(
            index,
            PROBLEMS[0],
            1,
            verdicts=[Verdict("pedagogical_eval", 0, scores=judge_scores)],
            rewards={"pedagogical": 0.5},
            reward=0.5 + index / 1000,
        )
        for index, judge_scores in enumerate(scores)
    ]

    def flat_groups(**options: Any) -> list[int]:
        train = TrainConfig(num_samples_per_problem=2, reward_weights={"pedagogical": 1.0}, **options)
        return GroupFilter(TrainRLConfig(train=train), []).flat_groups(records)

    assert flat_groups() == []
    assert flat_groups(reward_step=0.1) == [0]
    assert flat_groups(reward_step=0.1, normalise_per_criterion=True) == []
    assert flat_groups(reward_step=2.0, normalise_per_criterion=True) == [0]
