"""Episodes of several rows: their tokens in order, and back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.trainer.ppo.advantages import NO_STEP, estimate, token_rewards
from classroom_rl.trainer.ppo.steps import EpisodeTokens


def test_the_tokens_of_an_episode_follow_each_other_across_rows() -> None:
    """Two episodes: rows 0 and 2, and row 1 alone; row 3 is padding."""
    lengths = torch.tensor([2, 3, 1, 1])
    tokens = EpisodeTokens.of([[0, 2], [1]], lengths)
    values = torch.tensor([[1.0, 2, 9], [3, 4, 5], [6, 9, 9], [9, 9, 9]])
    assert tokens.joined(values, -1.0).tolist() == [[1, 2, 6], [3, 4, 5]]
    assert tokens.apart(tokens.joined(values, -1.0), 3, 4).tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0], [0, 0, 0]]


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 1000))
def test_what_is_joined_comes_apart_again(lengths: list[list[int]], seed: int) -> None:
    order = torch.randperm(sum(map(len, lengths)), generator=torch.Generator().manual_seed(seed)).tolist()
    numbers = iter(order)
    episodes = [[next(numbers) for _ in own] for own in lengths]
    by_row = torch.zeros(len(order), dtype=torch.long)
    for own, rows in zip(lengths, episodes, strict=True):
        by_row[rows] = torch.tensor(own)
    tokens = EpisodeTokens.of(episodes, by_row)
    values = torch.rand(len(order), 4, generator=torch.Generator().manual_seed(seed))
    there = torch.arange(4) < by_row.unsqueeze(1)
    assert torch.equal(tokens.apart(tokens.joined(values, 0.0), 4, len(order)), torch.where(there, values, 0.0))


def test_advantages_of_messages_are_the_same_in_one_row_and_in_three() -> None:
    """λ and γ cross the rows: three messages of two tokens, in one row with the environment's tokens between them, and
    each in a row of its own."""
    generator = torch.Generator().manual_seed(3)
    values, outcome = torch.rand(6, generator=generator), torch.tensor([0.8])
    one = torch.full((1, 10), NO_STEP)
    at = [0, 1, 4, 5, 8, 9]
    one[0, at] = torch.tensor([0, 0, 1, 1, 2, 2])
    spread = torch.zeros(1, 10)
    spread[0, at] = values
    own = estimate(token_rewards(one, torch.zeros(1, 10), outcome), spread, one, torch.zeros(1), 0.9, 0.8, "turns")

    tokens = EpisodeTokens.of([[0, 2, 1]], torch.tensor([2, 2, 2]))
    rows = values.reshape(3, 2)[[0, 2, 1]]
    numbers = tokens.joined(torch.tensor([[0, 0], [2, 2], [1, 1]]), NO_STEP)
    rewards = token_rewards(numbers, torch.zeros(1, 6), outcome)
    found = estimate(rewards, tokens.joined(rows, 0.0), numbers, torch.zeros(1), 0.9, 0.8, "turns")
    assert torch.allclose(found.advantages[0], own.advantages[0, at])
    assert torch.equal(tokens.apart(found.advantages, 2, 3)[2], found.advantages[0, 2:4])
