"""Makes the island of a seed: what lies where, and on which days there is fog."""

from random import Random

from classroom_rl.environments.marooned.rules import Rules
from classroom_rl.environments.marooned.things import Place


def make_piles(rules: Rules, seed: int) -> dict[Place, dict[str, int]]:
    """What lies about, by place and kind. No two piles share a cell; base and stairs are free."""
    rng = Random(f"{seed}:island")
    taken = {rules.base, *(end for each in rules.stairs for end in (each.upper, each.lower))}
    piles: dict[Place, dict[str, int]] = {}
    for level, size in enumerate(rules.levels):
        cells = [Place(level, x, y) for y in range(size.height) for x in range(size.width)]
        cells = [cell for cell in cells if cell not in taken]
        rng.shuffle(cells)
        for vein in rules.veins:
            if vein.level == level:
                piles |= {cells.pop(): {vein.kind: vein.pieces} for _ in range(vein.piles)}
    return piles


def is_foggy(rules: Rules, seed: int, day: int) -> bool:
    """Whether fog lies over the island on a day of this seed."""
    return Random(f"{seed}:fog:{day}").random() < rules.fog_chance
