"""The game as text for people: the island, the ship, the packs, and who did what."""

from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.prompts import observation_text
from classroom_rl.environments.marooned.things import ANTIDOTE, TABLET, Place, in_sight

GLYPHS = {"WOOD": "W", "METAL": "M", "FIBRE": "F", "APPLE": "a", "BERRY": "b", "MUSHROOM": "m"}
GLYPHS |= {ANTIDOTE: "+", TABLET: "x"}
LEGEND = "W wood  M metal  F fibre  a apple  b berry  m mushroom  + antidote  x poison  # base  < > stairs  1-9 sailors"
SHOWN_EVENTS = 10


def render(game: Game, seat: int | None = None) -> str:
    """The whole game, or what the sailor of one seat sees of it. What that sailor does not see is blank on the map."""
    view = None if seat is None else observe(game, seat)
    state = game.state
    lines = [f"Day {state.day}, turn {state.turn}, {state.outcome or 'playing'}{', fog' if state.foggy else ''}"]
    for level, size in enumerate(game.rules.levels):
        if view is None or view.place.level == level:
            lines += [f"{size.name}:", *_map_lines(game, level, view)]
    lines.append(LEGEND)
    if view is not None:
        return "\n".join([*lines, observation_text(game.rules, view)])
    return "\n".join([*lines, *_ship_lines(game), *_sailor_lines(game), *_event_lines(game)])


def _map_lines(game: Game, level: int, view: Observation | None) -> list[str]:
    piles = game.state.piles if view is None else view.piles
    if view is None:
        sailors = {sailor.place: str(sailor.seat) for sailor in game.state.active}
    else:
        sailors = {other.place: str(other.seat) for other in view.others.values() if other.place is not None}
        sailors[view.place] = str(view.seat)
    marks = {game.rules.base: "#"}
    marks |= {s.upper: ">" for s in game.rules.stairs} | {s.lower: "<" for s in game.rules.stairs}
    marks |= {place: GLYPHS[next(iter(pile))] for place, pile in piles.items()} | sailors
    size = game.rules.levels[level]
    lines = []
    for y in range(size.height):
        places = [Place(level, x, y) for x in range(size.width)]
        seen = [view is None or in_sight(view.place, place, view.sight) for place in places]
        cells = (marks.get(place, ".") if shown else " " for place, shown in zip(places, seen, strict=True))
        lines.append(" ".join(cells).rstrip())
    return lines


def _ship_lines(game: Game) -> list[str]:
    state, needed = game.state, game.rules.build_turns
    parts = (f"{name} {state.turns_built.get(name, 0)}/{needed}" for name in game.rules.part)
    store = ", ".join(f"{number} {kind}" for kind, number in sorted(state.store.items()))
    return [f"Ship {state.ship_percent():g}%: {', '.join(parts)}", f"Store: {store or 'nothing'}"]


def _sailor_lines(game: Game) -> list[str]:
    lines = []
    for sailor in game.state.sailors.values():
        pack = ", ".join(f"{number} {kind}" for kind, number in sorted(sailor.pack.items())) or "nothing"
        status = "dead" if not sailor.alive else "removed" if sailor.removed else f"energy {sailor.energy:g}"
        poison = "" if sailor.poison_nights is None else ", poisoned"
        lines.append(
            f"{sailor.seat} {sailor.role}: {status}{poison}, return {game.returns[sailor.seat]:g}, pack: {pack}"
        )
    return lines


def _event_lines(game: Game) -> list[str]:
    lines = []
    for day, turn, event in game.state.log[-SHOWN_EVENTS:]:
        others = f" {', '.join(map(str, event.others))}" if event.others else ""
        amount = f" {event.amount:g}" if event.amount else ""
        lines.append(f"  day {day}, turn {turn}: {event.seat} {event.kind} {event.what}{amount}{others}".rstrip())
    return lines
