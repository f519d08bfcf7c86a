"""Group-relative advantages on numbers worked out by hand: of outcomes, of single messages, and of players."""

import random
from pathlib import Path
from statistics import stdev

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig, TurnCreditConfig
from classroom_rl.config.training_checks import criterion_weights
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.rubric_scores import RubricScores
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.tokens import AuxSample, Turn
from classroom_rl.rollout.trajectory import PlayerOutcome
from classroom_rl.trainer.advantages import (
    Credits,
    PlayerRewards,
    ProcessRewards,
    advantages_per_criterion,
    by_player,
    credits_of,
    group_credits,
    merged,
    outcome_advantages,
    process_rewards,
    shuffled,
    to_step,
)
from classroom_rl.trainer.grpo import GRPO, reward_figures
from tests.support.configs import training
from tests.support.offline_trainer import PROBLEMS, conversation
from tests.support.rubrics import RUBRIC, write_rubric

MODES = ("immediate", "to_go", "progress")
COLONIST, TRAITOR = "colonist", "traitor"


def of(*values: float | None) -> ProcessRewards:
    return ProcessRewards(list(values), [])


def test_each_mode_by_hand() -> None:
    """r = 0, −1, 0.5. To go with γ = 0.5: (0 − 0.5 + 0.125) / 1.75, (−1 + 0.25) / 1.5, 0.5. Means so far: 0, −0.5,
    −1/6."""
    values = [0.0, -1.0, 0.5]
    assert credits_of(values, "immediate", 0.5) == values
    assert credits_of(values, "to_go", 0.5) == pytest.approx([-0.375 / 1.75, -0.75 / 1.5, 0.5])
    assert credits_of(values, "progress", 0.5) == pytest.approx([0.0, -0.5, 1 / 3])
    with pytest.raises(ValueError, match="no turn credit 'both'"):
        credits_of(values, "both", 0.5)


def test_a_message_without_a_verdict_gets_nothing_and_gives_nothing() -> None:
    values = [0.0, None, -1.0]
    assert credits_of(values, "to_go", 0.5) == pytest.approx([-0.25 / 1.25, None, -1.0])
    assert credits_of(values, "progress", 0.5) == pytest.approx([0.0, None, -0.5])
    one, other = group_credits([of(0.0, None), of(-1.0, -1.0)], [0, 0], "immediate", 1.0, 0.3)
    assert one.messages == pytest.approx([0.15, 0.0]) and other.messages == pytest.approx([-0.15, 0.0])


def test_a_good_and_a_bad_turn_of_one_conversation_get_opposite_signs() -> None:
    """At the first message, the group's mean is −0.5; at the second it is −0.25."""
    group = [of(0.0, -1.0), of(-1.0, 0.0), of(-1.0, 0.0), of(0.0, 0.0)]
    first, second, *_ = group_credits(group, [0] * 4, "immediate", 0.9, 0.5)
    assert first.messages == pytest.approx([0.25, -0.375])
    assert second.messages == pytest.approx([-0.25, 0.125])


def test_groups_do_not_see_each_other() -> None:
    credits = group_credits([of(0.0), of(-1.0), of(-3.0), of(-3.0)], [0, 0, 1, 1], "immediate", 0.9, 1.0)
    assert [credit.messages[0] for credit in credits] == pytest.approx([0.5, -0.5, 0.0, 0.0])


def test_a_rejected_draft_counts_in_the_mean_and_a_replaced_message_does_not() -> None:
    """The first conversation's second message was written twice: −2, then 0. The second's was replaced after −1. The
    mean at the second message: (0 − 2 − 1) / 3."""
    one = ProcessRewards([0.0, 0.0], [(1, -2.0)])
    other = ProcessRewards([0.0, -1.0], [(1, -1.0)], frozenset({1}))
    first, second = group_credits([one, other], [0, 0], "immediate", 0.9, 1.0)
    assert first.messages == pytest.approx([0.0, 1.0]) and first.drafts == pytest.approx([-1.0])
    assert second.messages == pytest.approx([0.0, 0.0]) and second.drafts == pytest.approx([0.0])


def test_turn_rewards_are_weighed_and_summed() -> None:
    turns = {"supervisor": [0.0, -1.0, None], "judge": [1.0, 0.5, None]}
    record = conversation(0, PROBLEMS[0], seed=3, turn_rewards=turns)
    rewards = process_rewards(record, rows_of(record), {"supervisor": 2.0, "judge": 1.0})
    assert rewards.messages == [1.0, -1.5, None] and rewards.mean == -0.25
    assert process_rewards(record, rows_of(record), {"judge": 1.0}).mean == 0.75


def test_a_draft_has_its_own_penalty() -> None:
    branch = AuxSample("draft", 2, 9, (7, 8), (-1.0, -1.0), reward=-2.0, draft=0)
    record = conversation(0, PROBLEMS[0], seed=3, branches=[branch], turn_rewards={"supervisor": [0.0, 0.0, 0.0]})
    assert process_rewards(record, rows_of(record), {"supervisor": 0.5}).drafts == [(1, -1.0)]
    row = rows_of(record)[1]
    assert (row.kind, row.message, row.prompt_ids) == ("draft", 1, record.prompt_ids)
    assert row.completion_ids == [*record.completion_ids[:9], 7, 8]
    assert (row.mask, row.messages) == ([0] * 9 + [1, 1], [-1] * 9 + [1, 1])


def test_a_message_written_with_its_critique_counts_once() -> None:
    """Its sample has the advantage of the message, and no reward of its own in the mean: A's draft −2 and message 0,
    B's message −1, mean −1. A's outcome is 0.5 above the mean, which its draft has no share in."""
    branches = [
        AuxSample("draft", 0, 0, (7,), (-1.0,), reward=-2.0, draft=0),
        AuxSample("policy", 0, 0, (8,), (-1.0,), (9,), 0.0),
    ]
    a = {"reward": 1.0, "branches": branches, "turn_rewards": {"supervisor": [0.0, None, None]}}
    b = {"reward": 0.0, "turn_rewards": {"supervisor": [-1.0, None, None]}}
    records = [conversation(0, PROBLEMS[0], seed=3, **fields) for fields in (a, b)]
    credit = TurnCreditConfig(mode="immediate", weight=1.0)
    train = TrainConfig(num_samples_per_problem=2, scale_rewards="none", turn_credit=credit)
    samples, _ = GRPO(TrainRLConfig(train=train)).samples(records, set(), 0, Accelerator(cpu=True))
    advantages = [(sample.row.kind, sample.advantages[sample.row.messages.index(0)]) for sample in samples]
    assert advantages == [("policy", 1.5), ("draft", -1.0), ("policy", 1.5), ("policy", -0.5)]


def test_a_replaced_message_has_no_tokens_of_the_policy() -> None:
    record = conversation(0, PROBLEMS[0], seed=3, turn_rewards={"supervisor": [0.0, -1.0, 0.0]})
    turns = list(record.turns)
    start, end = turns[2].span
    turns[2] = Turn("teacher", "right", policy=turns[2].policy, review=Review(False, "leak", -1.0), replaced=True)
    mask = [0 if start <= position < end else value for position, value in enumerate(record.mask)]
    record = record.model_copy(update={"turns": turns, "mask": mask})
    assert set(rows_of(record)[0].messages[start:end]) == {-1}
    assert process_rewards(record, rows_of(record), {"supervisor": 1.0}).replaced == {1}


values = st.lists(st.none() | st.floats(-3, 1), min_size=1, max_size=8)


@given(values)
def test_progress_adds_up_to_the_process_reward(known: list[float | None]) -> None:
    paid = [value for value in credits_of(known, "progress", 0.9) if value is not None]
    mean = of(*known).mean
    assert mean is None and not paid or sum(paid) == pytest.approx(mean, abs=1e-9)


@given(st.lists(values, min_size=4, max_size=4), st.sampled_from(MODES))
def test_credits_of_a_group_cancel_out_at_each_message(group: list[list[float | None]], mode: str) -> None:
    credits = group_credits([of(*rewards) for rewards in group], [0] * 4, mode, 0.9, 0.3)
    for number in range(max(map(len, group))):
        at = [credit.messages[number] for credit in credits if number < len(credit.messages)]
        assert sum(at) == pytest.approx(0.0, abs=1e-9)


@given(values, st.sampled_from(MODES))
def test_equal_messages_earn_a_group_nothing(known: list[float | None], mode: str) -> None:
    for credit in group_credits([of(*known)] * 3, [0] * 3, mode, 0.9, 0.3):
        assert credit.messages == pytest.approx([0.0] * len(known), abs=1e-9)


@given(st.lists(values, min_size=2, max_size=6), st.integers(0, 99))
def test_shuffling_keeps_the_values_and_the_gaps(batch: list[list[float | None]], seed: int) -> None:
    before = [ProcessRewards(list(rewards), [(0, -7.0)]) for rewards in batch]
    after = shuffled(before, seed)
    flat = [value for rewards in after for value in [*rewards.messages, *(reward for _, reward in rewards.drafts)]]
    assert [value is None for value in flat[: len(batch[0])]] == [value is None for value in batch[0]]
    shuffled_values = sorted(value for value in flat if value is not None)
    original_values = [
        value
        for rewards in before
        for value in [*rewards.messages, *(reward for _, reward in rewards.drafts)]
        if value is not None
    ]
    assert shuffled_values == sorted(original_values)


# The outcome ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([None, 0.1, 0.7, 1.0]), min_size=8, max_size=8),
    st.sampled_from(["group", "batch", "none"]),
)
def test_the_outcome_of_the_only_player_has_the_advantage_that_trl_gives_it(
    rewards: list[float | None], scale: str
) -> None:
    """Two groups of four, by the formula in `GRPOTrainer`: rewards may be missing, and groups without variance."""
    grouped = torch.tensor(
        [float("nan") if reward is None else reward for reward in rewards], dtype=torch.float64
    ).view(2, 4)
    spread = nanstd(grouped) if scale == "batch" else nanstd(grouped, dim=1, keepdim=True)
    scaled = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (1.0 if scale == "none" else spread + 1e-4)
    expected = scaled.nan_to_num(nan=0.0).flatten().tolist()
    episodes = [by_player(of(None, None), [], reward) for reward in rewards]
    groups = [(index // 4, "") for index in range(8)]
    outcomes = outcome_advantages([player for (player,) in episodes], groups, scale)
    assert outcomes == pytest.approx(expected, rel=1e-6, abs=1e-9)
    credits = merged(episodes, [Credits([0.0, 0.0], [])] * 8, outcomes)
    assert [(*credit.messages, credit.outcome) for credit in credits] == [
        (outcome, outcome, outcome) for outcome in outcomes
    ]


# Criteria, each compared by itself --------------------------------------------------------------------------------

SCORES = st.lists(st.sampled_from([None, 0.0, 0.1, 0.7, 1.0]), min_size=8, max_size=8)


@given(SCORES, SCORES, st.lists(st.sampled_from([True, True, False]), min_size=8, max_size=8))
def test_criteria_have_the_advantage_that_trl_gives_them(one: list, other: list, scored: list[bool]) -> None:
    """Two groups of four, by the formula of `normalize_then_sum` in `GRPOTrainer`."""
    weights = {"one": 0.25, "other": 2.0}
    criteria = [
        {name: value for name, value in zip(weights, pair, strict=True) if value is not None and is_scored}
        for *pair, is_scored in zip(one, other, scored, strict=True)
    ]
    nan = float("nan")
    rewards = torch.tensor([[scores.get(name, nan) for name in weights] for scores in criteria], dtype=torch.float64)
    grouped = rewards.view(2, 4, 2)
    scaled = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    total = (scaled.view(8, 2) * torch.tensor([*weights.values()])).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = nan
    expected = ((total - total.nanmean()) / (nanstd(total) + 1e-4)).nan_to_num(nan=0.0).tolist()
    players = [by_player(of(None), [], 0.5 if scores else None, scores)[0] for scores in criteria]
    advantages = advantages_per_criterion(players, [(index // 4, "") for index in range(8)], weights)
    assert advantages == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_players_with_outcomes_of_their_own_have_one_criterion() -> None:
    players = [player for rewards in ([0.0], [2.0], [10.0], [14.0]) for player in apart(game(rewards, 1.0))]
    groups = [(number // 4, player.role) for number, player in enumerate(players)]
    advantages = outcome_advantages(players, groups, "group")
    scale = stdev(advantages[::2]) + 1e-4
    assert advantages_per_criterion(players, groups, {"reward": 1.0})[::2] == pytest.approx(
        [advantage / scale for advantage in advantages[::2]]
    )


def by_rubric(folder: Path, rubric: list = RUBRIC) -> list[str]:
    """A judge model that scores by a rubric."""
    judge = {
        "rubric": write_rubric(folder, rubric),
        "model_name_or_path": "own/judge",
        "base_url": "http://127.0.0.1:1",
    }
    return [f"judge_model.{key}={value}" for key, value in judge.items()]


@pytest.mark.parametrize("with_rubric", [False, True])
def test_weighted_criteria_add_up_to_the_reward(with_rubric: bool, tmp_path: Path) -> None:
    """Also what a rejection or a cap has left of it, unless there are penalties, which are lowered towards 1."""
    overrides = by_rubric(tmp_path) if with_rubric else []
    weights = criterion_weights(
        training(PER_CRITERION, "train.reward_weights={pedagogical: 2.0, length: 0.5}", *overrides)
    )
    assert "pedagogical" not in weights
    draw = random.Random(1)
    for _ in range(200):
        if with_rubric:
            shares = {f"{criterion['name']}_score": draw.random() for criterion in RUBRIC}
            scores = RubricScores(
                shares, sum(shares[f"{criterion['name']}_score"] * criterion["weight"] / 40 for criterion in RUBRIC)
            )
        else:
            scores = Scores(draw.random(), draw.random(), 10 * draw.random())
        reward = scores.final_reward * (1.0 if with_rubric else draw.random())
        record = judged(scores, reward, rewards={"pedagogical": reward, "length": -0.5})
        assert (criteria := record.criteria(weights)).keys() == weights.keys()
        total = sum(weight * criteria[name] for name, weight in weights.items())
        assert total == pytest.approx(2 * reward - 0.25, abs=2e-3)  # the score is rounded


def judged(scores: Scores | RubricScores | None, reward: float | None, **changes) -> ConversationRecord:
    """A conversation with these scores; refused by the judge if there are none."""
    verdict = Verdict("pedagogical_eval", 0, scores=scores, refused=scores is None, error=None if scores else "refused")
    fields = {"verdicts": [verdict], "rewards": {"pedagogical": reward}, "reward": reward} | changes
    return conversation(0, PROBLEMS[0], 1, **fields)


def advantages_of(records: list[ConversationRecord], *overrides: str) -> list[float]:
    """GRPO's for one group."""
    size = [f"train.num_samples_per_problem={len(records)}", "train.reward_weights={pedagogical: 1.0}"]
    samples, figures = GRPO(training(*size, *overrides)).samples(records, set(), 0, Accelerator(cpu=True))
    advantages = [sample.advantages[0] for sample in samples]
    assert figures["frac_reward_zero_std"] == float(not any(advantages))
    return advantages


PER_CRITERION = "train.normalise_per_criterion=true"


def by_scores(*scores: tuple[float, float]) -> list[ConversationRecord]:
    """Conversations with these scores of task and of progression, and the same momentum."""
    all_scores = [Scores(task, forward, 5.0) for task, forward in scores]
    return [judged(scores, scores.final_reward) for scores in all_scores]


def test_a_criterion_whose_scores_lie_close_together_weighs_as_much_as_another() -> None:
    """The first two differ much in the task, the others a little in progression."""
    records = by_scores((0.0, 0.5), (1.0, 0.5), (0.5, 0.49), (0.5, 0.51))
    together, each_alone = advantages_of(records), advantages_of(records, PER_CRITERION)
    assert together[1] > 0.5 and abs(together[3]) < 0.05 and each_alone[3] > 0.5
    permuted = advantages_of(records, PER_CRITERION, "train.shuffle_rewards=true", "seed=3")
    assert permuted != each_alone and sorted(permuted) == pytest.approx(sorted(each_alone))


TWO_PENALTIES = [
    {"name": "hints", "question": "Are there hints?", "weight": 3.0},
    {"name": "rude", "question": "Is the tutor rude?", "weight": -2.0},
    {"name": "tells", "question": "Does the tutor tell the answer?", "weight": -2.0},
]


@pytest.mark.parametrize(
    ("worst", "changes"),
    [
        (None, {}),
        ((0.9, 0.0, 0.0), {"rejected": True}),
        ((0.1, 1.0, 1.0), {}),  # a sum below 0, which is cut
    ],
)
def test_the_worst_conversation_has_the_lowest_advantage(worst: tuple | None, changes: dict, tmp_path: Path) -> None:
    """Refused, rejected, or with more penalties than rewards: the penalties that it was not given do not pay."""

    def scored(shares: tuple[float, ...]) -> RubricScores:
        values = {f"{criterion['name']}_score": share for criterion, share in zip(TWO_PENALTIES, shares, strict=True)}
        total = sum(criterion["weight"] * share for criterion, share in zip(TWO_PENALTIES, shares, strict=True)) / 3
        return RubricScores(values, max(0.0, total))

    good = [scored(shares) for shares in ((0.5, 0.2, 0.1), (1.0, 0.3, 0.3), (1.0, 0.3, 0.2))]
    records = [judged(scores, scores.final_reward) for scores in good]
    records.append(judged(None if worst is None else scored(worst), 0.0, **changes))
    advantages = advantages_of(records, PER_CRITERION, *by_rubric(tmp_path, TWO_PENALTIES))
    assert min(advantages) == advantages[-1] < min(advantages[:-1])


def test_a_conversation_that_could_not_be_scored_has_no_criteria() -> None:
    weights = criterion_weights(
        training(PER_CRITERION, "train.reward_weights={pedagogical: 1.0, length: 1.0, thinking: 0.0}")
    )
    assert "thinking" not in weights
    scores = Scores(0.5, 0.5, 5.0)
    assert judged(scores, None, rewards={"pedagogical": 0.5, "length": None}).criteria(weights) == {}
    assert judged(scores, 0.5).criteria(weights).keys() == weights.keys() - {"length"}


def test_rewards_are_rounded_to_steps_before_they_are_compared() -> None:
    assert to_step(0.74, 0.5) == 0.5 and to_step(0.76, 0.5) == 1.0 and to_step(None, 0.5) is None
    halves = [to_step(0.05 + 0.1 * tenths, 0.1) for tenths in range(10)]
    assert halves == pytest.approx([0.1 * tenths for tenths in range(1, 11)])
    records = by_scores((0.5, 0.5), (0.52, 0.5), (0.5, 0.5), (0.5, 0.52))
    for overrides in ([], [PER_CRITERION]):
        assert any(advantages_of(records, *overrides))
        assert not any(advantages_of(records, *overrides, "train.reward_step=0.25"))


def test_rewards_are_logged_with_the_share_of_groups_that_teach_nothing() -> None:
    """Three groups of two. As TRL has it, a single reward is not one of all the same."""
    rewards = [0.5, 0.5, 0.0, 1.0, 0.25, None]
    of_all = {"reward": pytest.approx(0.45), "reward_std": pytest.approx(stdev([0.5, 0.5, 0.0, 1.0, 0.25]))}
    for scale in ("group", "none"):
        assert reward_figures(rewards, 2, scale) == of_all | {"frac_reward_zero_std": pytest.approx(1 / 3)}
    assert reward_figures(rewards, 2, "batch") == of_all | {"frac_reward_zero_std": 0.0}
    assert reward_figures([0.5] * 4, 2, "batch")["frac_reward_zero_std"] == 1.0
    assert reward_figures([None, 0.5], 2, "group") == {"reward": 0.5, "reward_std": 0.0, "frac_reward_zero_std": 0.0}
    assert reward_figures([None, None], 2, "group") == {}


def test_drafts_of_the_only_player_have_no_share_in_its_outcome() -> None:
    process = ProcessRewards([0.0, -1.0], [(1, -2.0)], frozenset({1}))
    episode = by_player(process, [], 0.7)
    assert episode == [PlayerRewards("", 0.7, (0, 1), (0,), process)]
    assert merged([episode], [Credits([0.25, -0.5], [-1.0])], [2.0]) == [Credits([2.25, 1.5], [-1.0], 2.0)]


# Players: those of one role share a baseline, and roles do not -------------------------------------------------------


def game(colonists: list[float], traitor: float) -> list[PlayerOutcome]:
    """Each sailor has two messages: in the first round and in the second."""
    rewards = [*((COLONIST, reward) for reward in colonists), (TRAITOR, traitor)]
    count = len(rewards)
    return [PlayerOutcome(role, reward, (seat, seat + count)) for seat, (role, reward) in enumerate(rewards)]


def apart(players: list[PlayerOutcome], values: list[float | None] | None = None) -> list[PlayerRewards]:
    messages = values or [None] * sum(len(player.messages) for player in players)
    return by_player(ProcessRewards(messages, []), players, None)


def test_each_role_has_its_own_mean() -> None:
    """Two games: colonists earn 1, 2 and 3, 4 (mean 2.5), the traitors −8 and −4 (mean −6)."""
    episodes = [apart(game([1.0, 2.0], -8.0)), apart(game([3.0, 4.0], -4.0))]
    players = [player for episode in episodes for player in episode]
    groups = [(0, player.role) for player in players]
    assert outcome_advantages(players, groups, "none") == [-1.5, -0.5, -2.0, 0.5, 1.5, 2.0]
    scaled = outcome_advantages(players, groups, "group")
    assert scaled[0] == pytest.approx(-1.5 / (stdev([1, 2, 3, 4]) + 1e-4))
    assert scaled[2] == pytest.approx(-2.0 / (stdev([-8, -4]) + 1e-4))
    messages = [
        credit.messages for credit in merged(episodes, [Credits([0.0, 0.0], [])] * 6, [-1.5, -0.5, -2, 0.5, 1.5, 2])
    ]
    assert messages == [[-1.5, -0.5, -2.0] * 2, [0.5, 1.5, 2.0] * 2]


def test_groups_and_batches_are_apart() -> None:
    """With `batch` the mean is the group's and the deviation the role's over both groups."""
    players = [player for rewards in ([0.0], [2.0], [10.0], [14.0]) for player in apart(game(rewards, 1.0))]
    groups = [(number // 4, player.role) for number, player in enumerate(players)]
    advantages = outcome_advantages(players, groups, "batch")
    spread = stdev([0.0, 2.0, 10.0, 14.0]) + 1e-4
    assert advantages[::2] == pytest.approx([-1 / spread, 1 / spread, -2 / spread, 2 / spread])
    assert advantages[1::2] == [0.0] * 4


def test_a_player_without_a_reward_has_no_advantage_and_no_share_in_the_mean() -> None:
    players = apart([PlayerOutcome(COLONIST, None, (0,)), PlayerOutcome(COLONIST, 3.0, (1,)), *game([5.0], 0.0)[:1]])
    assert outcome_advantages(players, [0, 0, 0], "none") == [0.0, -1.0, 1.0]


def test_process_rewards_are_compared_within_a_role() -> None:
    """A colonist's and the traitor's first messages cost −1 and −3; nobody of another role moves their means."""
    one, other = apart(game([0.0], 0.0), [-1.0, -3.0, 0.0, 0.0]), apart(game([0.0], 0.0), [0.0, -3.0, 0.0, -2.0])
    groups = [(0, player.role) for player in [*one, *other]]
    credits = group_credits([player.process for player in [*one, *other]], groups, "immediate", 0.9, 1.0)
    merged_credits = merged([one, other], credits, [0.0] * 4)
    assert [credit.messages for credit in merged_credits] == [[-0.5, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, -1.0]]


def test_drafts_keep_their_places_and_have_no_outcome() -> None:
    """Drafts at messages 2 (the traitor's first), 0 and 2 again; outcomes go to messages alone."""
    players = [PlayerOutcome(COLONIST, 1.0, (0, 1)), PlayerOutcome(TRAITOR, 2.0, (2,))]
    process = ProcessRewards([0.0, 0.0, 0.0], [(2, -1.0), (0, -2.0), (2, -3.0)], frozenset({2}))
    colonist, traitor = by_player(process, players, None)
    assert colonist.process.drafts == [(0, -2.0)] and traitor.process.drafts == [(0, -1.0), (0, -3.0)]
    assert traitor.process.replaced == {0} and not colonist.process.replaced
    credits = [Credits([10.0, 11.0], [12.0]), Credits([20.0], [21.0, 22.0])]
    (credit,) = merged([[colonist, traitor]], credits, [100.0, 200.0])
    assert credit == Credits([110.0, 111.0, 220.0], [21.0, 12.0, 22.0])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4), st.randoms())
def test_nothing_gets_lost_between_splitting_and_merging(games: list[list[int]], chance) -> None:
    """Each message's own number comes back to it, whoever wrote it."""
    episodes, credits = [], []
    for seats in games:
        players = [
            PlayerOutcome(str(seat), 0.0, tuple(index for index, writer in enumerate(seats) if writer == seat))
            for seat in sorted(set(seats))
        ]
        drafts = [(chance.randrange(len(seats)), float(index)) for index in range(chance.randrange(4))]
        process = ProcessRewards([float(index) for index in range(len(seats))], drafts)
        episode = by_player(process, players, None)
        episodes.append(episode)
        credits += [
            Credits(player.process.messages, [value for _, value in player.process.drafts]) for player in episode
        ]
    merged_credits = merged(episodes, credits, [0.0] * len(credits))
    for credit, seats, players in zip(merged_credits, games, episodes, strict=True):
        assert credit.messages == list(range(len(seats)))
        assert credit.drafts == [float(index) for index in range(sum(len(player.draft_indices) for player in players))]
