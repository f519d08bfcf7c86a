"""How many steps a second the island game makes on one core, with scripted and with random players.

    python -m benchmarks.marooned_speed

A step is one action of one sailor, with the observation that it was chosen from.
"""

import time
from random import Random

from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import cast
from classroom_rl.environments.marooned.presets import PRESETS

PLAYED = (("builder", "traitor"), ("random", "random"))


def steps_per_second(preset: str, colonists: str, traitor: str, seconds: float = 3.0) -> float:
    """Plays games of seeds 0, 1, … for a while. CPU seconds count."""
    rules, steps, seed = PRESETS[preset], 0, 0
    start = time.process_time()
    while time.process_time() - start < seconds:
        game, rng = Game(rules, seed), Random(seed)
        players = cast(game, colonists, traitor)
        while game.seat is not None and time.process_time() - start < seconds:
            game.step(players[game.seat].act(observe(game, game.seat), rules, rng))
        steps, seed = steps + game.steps, seed + 1
    return steps / (time.process_time() - start)


def main() -> None:
    """Prints a table."""
    print(f"{'preset':8}{'players':20}{'steps/s':>8}")
    for preset in PRESETS:
        for colonists, traitor in PLAYED:
            speed = steps_per_second(preset, colonists, traitor)
            print(f"{preset:8}{f'{colonists}, {traitor}':20}{speed:8.0f}")


if __name__ == "__main__":
    main()
