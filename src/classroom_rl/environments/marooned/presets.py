"""The two sets of rules that ship with the project: `tiny` for quick games and short prompts, `seed` for full games."""

from classroom_rl.environments.marooned.rules import Level, Part, Phase, Place, Rules, Stairs, Traitor, Vein

_NO_VOTE = frozenset({"VOTE"})
_NO_WORK = frozenset({"VOTE", "GATHER"})
_AT_THE_FIRE = frozenset({"MOVE", "UP", "DOWN", "GATHER"})


def _phases(morning: int, exploration: int, back: int, discussion: int) -> tuple[Phase, ...]:
    """The four phases of a day, from the last turn of each."""
    return (
        Phase("morning", morning, _NO_WORK),
        Phase("exploration", exploration, _NO_VOTE),
        Phase("return", back, _NO_WORK),
        Phase("discussion", discussion, _AT_THE_FIRE),
    )


SEED = Rules(
    name="seed",
    levels=(Level("mountain", 10, 10, 5), Level("ground", 30, 30, 5), Level("cave", 15, 15, 3)),
    base=Place(1, 15, 15),
    stairs=(Stairs(Place(0, 5, 8), Place(1, 20, 10)), Stairs(Place(1, 9, 20), Place(2, 7, 2))),
    veins=(
        *(Vein("WOOD", 1, 30, 5), Vein("FIBRE", 1, 14, 5), Vein("METAL", 0, 8, 4), Vein("METAL", 2, 8, 4)),
        *(Vein("APPLE", 1, 30, 5), Vein("BERRY", 1, 24, 5), Vein("BERRY", 0, 6, 5)),
        *(Vein("MUSHROOM", 2, 14, 5), Vein("MUSHROOM", 1, 14, 5)),
        *(Vein("ANTIDOTE", 0, 2, 1), Vein("ANTIDOTE", 1, 2, 1), Vein("ANTIDOTE", 2, 2, 1)),
        *(Vein("TABLET", 0, 4, 1), Vein("TABLET", 1, 10, 1), Vein("TABLET", 2, 4, 1)),
    ),
    phases=_phases(15, 75, 85, 100),
    days=100,
    parts=(
        Part("HULL", 30, {"WOOD": 50}),
        Part("MAST", 20, {"WOOD": 30, "METAL": 20}, after="HULL"),
        Part("SAIL", 25, {"FIBRE": 40}, after="MAST"),
        Part("RUDDER", 15, {"METAL": 15, "WOOD": 10}, after="HULL"),
        Part("SUPPLIES", 10, {"APPLE": 10, "BERRY": 10}),
    ),
)

TINY = Rules(
    name="tiny",
    levels=(Level("island", 8, 8, 4),),
    base=Place(0, 4, 4),
    veins=(
        *(Vein("WOOD", 0, 8, 3), Vein("METAL", 0, 4, 4), Vein("FIBRE", 0, 4, 4)),
        *(Vein("APPLE", 0, 5, 3), Vein("BERRY", 0, 5, 3), Vein("MUSHROOM", 0, 4, 3)),
        *(Vein("ANTIDOTE", 0, 1, 1), Vein("TABLET", 0, 3, 1)),
    ),
    phases=_phases(2, 9, 10, 12),
    days=6,
    parts=(
        Part("HULL", 30, {"WOOD": 6}),
        Part("MAST", 20, {"WOOD": 3, "METAL": 2}, after="HULL"),
        Part("SAIL", 25, {"FIBRE": 4}, after="MAST"),
        Part("RUDDER", 15, {"METAL": 2, "WOOD": 1}, after="HULL"),
        Part("SUPPLIES", 10, {"APPLE": 2, "BERRY": 2}),
    ),
    pack=8,
    gather_limit=4,
    build_turns=2,
    messages_kept=4,
    evidence_kept=3,
    traitor=Traitor(sabotage_turns=1),
)

PRESETS: dict[str, Rules] = {"tiny": TINY, "seed": SEED}
