"""Where the tokens of each episode stand in a batch. An episode is one row, or, if every message has a prompt of its
own, a row for each message: its steps follow each other across rows.

In all shapes, R is the number of a rank's rows, T the longest completion in tokens, E the number of its episodes, and L
the most tokens of an episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class EpisodeTokens:
    """The tokens of all episodes, one after the other.

    Attributes:
        rows, places: the row of each token and its place in it, of shape (E, L).
        there: false for padding, of shape (E, L).
    """

    rows: Tensor
    places: Tensor
    there: Tensor

    @classmethod
    def of(cls, episodes: Sequence[Sequence[int]], lengths: Tensor) -> "EpisodeTokens":
        """The tokens of episodes, each given by its rows in order.

        Args:
            lengths: the number of completion tokens of each row, of shape (R,).
        """
        known, device = lengths.tolist(), lengths.device
        rows = [torch.tensor([row for row in own for _ in range(known[row])], device=device) for own in episodes]
        places = [torch.cat([torch.arange(known[row], device=device) for row in own]) for own in episodes]
        there = pad_sequence([torch.ones_like(each, dtype=torch.bool) for each in places], batch_first=True)
        return cls(pad_sequence(rows, batch_first=True).long(), pad_sequence(places, batch_first=True), there)

    def joined(self, tokens: Tensor, empty: float) -> Tensor:
        """Values of shape (R, T) as episodes, of shape (E, L), with `empty` as padding."""
        found = tokens[self.rows, self.places]
        return torch.where(self.there, found, torch.full_like(found, empty))

    def apart(self, joined: Tensor, length: int, rows: int) -> Tensor:
        """Values of episodes as rows, of shape (rows, length); 0 where no episode has a token."""
        found = joined.new_zeros(rows, length)
        found[self.rows[self.there], self.places[self.there]] = joined[self.there]
        return found
