"""Files of problems."""

import pytest

from classroom_rl.environments.marooned.episode import island_of
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.islands import islands
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR
from classroom_rl.rollout.problem import Problem


def test_problems_name_islands_and_seats_of_a_role() -> None:
    for role in (COLONIST, TRAITOR):
        for text in islands("tiny", 5, 20, role):
            seed, seat = island_of(Problem.of(text))
            assert Game(PRESETS["tiny"], seed).roles[seat] == role
    assert len({island_of(Problem.of(text))[1] for text in islands("tiny", 0, 40)}) == 5
    with pytest.raises(ValueError, match="has no traitor"):
        list(islands("tiny", 0, 1, TRAITOR, traitor=False))
