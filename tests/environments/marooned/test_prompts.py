"""Prompts follow the rules, and are short."""

from dataclasses import replace
from random import Random

import pytest

from classroom_rl.environments.marooned.actions import ACTIONS, Action, parse_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import fault_of, possible_in
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import cast
from classroom_rl.environments.marooned.presets import PRESETS, TINY
from classroom_rl.environments.marooned.prompts import (
    BRINGS_ON,
    forms_of,
    observation_text,
    possible_text,
    render,
    system_prompt,
)
from classroom_rl.environments.marooned.rules import ANTIDOTE, COLONIST, TABLET, TRAITOR, Place
from classroom_rl.environments.marooned.state import Offer
from tests.environments.marooned.support import do, made, played, put


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("role", [COLONIST, TRAITOR])
def test_a_prompt_names_every_action_of_the_role_and_no_other(rules, role):
    prompt = system_prompt(rules, role)
    actions = next(line for line in prompt.splitlines() if line.startswith("Actions"))
    named = {name for name, form in ACTIONS.items() if form.example in actions}
    assert named == {form.name for form in forms_of(rules, role)}
    assert ("SABOTAGE" in prompt) == (role == TRAITOR)


def test_a_prompt_follows_the_rules():
    changed = replace(TINY, pack=17, gather_limit=9, days=8, builders=3, energy=replace(TINY.energy, fed=13))
    new = set(system_prompt(changed, COLONIST).split()) - set(system_prompt(TINY, COLONIST).split())
    assert {"17;", "9;", "8", "+13"} <= new
    assert "by 3 in the same turn" in system_prompt(changed, COLONIST)


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_a_prompt_says_what_a_vote_does_how_far_one_sees_and_what_is_near(rules):
    changed = replace(rules, least_votes=3, fog_sight=2, reach=2)
    assert "most VOTEs, 2 or more, is removed at night" in system_prompt(rules, COLONIST)
    assert "most VOTEs, 3 or more, is removed at night" in system_prompt(changed, COLONIST)
    sight = {"tiny": "4", "seed": "mountain 5, ground 5, cave 3"}[rules.name]
    assert f"You see {sight} cells far, in fog 2; near is 1 step away." in system_prompt(rules, COLONIST)
    assert "near is 2 steps away." in system_prompt(changed, COLONIST)
    near = {name for name, form in ACTIONS.items() if form.note.startswith("near")}
    assert near == {name for name in ACTIONS if needs_to_be_near(name)}


def needs_to_be_near(name: str) -> bool:
    """Whether an action towards sailor 2 is refused because sailor 2 is too far away."""
    game = made()
    put(game, 2, 0, 4)
    game.state.sailors[5].pack = {"APPLE": 1, TABLET: 1, ANTIDOTE: 1}
    game.state.offers = (Offer(2, 5, "APPLE", False),)
    form = ACTIONS[name]
    if "sailor" not in form.types:
        return False
    fault = fault_of(game, 5, parse_action(form.example))
    return fault is not None and fault.text == "2 is not near you"


def test_prompts_are_short():
    assert len(system_prompt(TINY, COLONIST).split()) <= 250
    assert len(system_prompt(TINY, TRAITOR).split()) <= 265
    longest = 0
    for seed in range(3):
        game = Game(TINY, seed)
        players, rng = cast(game), Random(seed)
        while not game.over:
            view = observe(game, game.seat)
            longest = max(longest, len(observation_text(TINY, view).split()))
            game.step(players[game.seat].act(view, TINY, rng))
    assert longest <= 200, longest


def test_an_observation_ends_with_the_ways_and_what_is_possible():
    game = made()
    put(game, 1, 0, 0)
    game.state.turn = TINY.last_turn("GATHER") - 1
    game.state.sailors[1].pack = {"APPLE": 1, "MUSHROOM": 4}
    game.state.piles = {Place(0, 0, 0): {"WOOD": 6}}

    def end() -> list[str]:
        return observation_text(TINY, observe(game, 1)).splitlines()[-2:]

    assert end() == [
        "Nearest wanted: nothing. Ways: SOUTH, EAST.",
        "Possible here: GATHER WOOD 3, EAT APPLE, EAT MUSHROOM.",
    ]
    game.state.turn = TINY.turns
    assert end() == ["Nearest wanted: nothing. Ways: none.", "Possible here: EAT APPLE, EAT MUSHROOM."]


def test_what_is_named_as_possible_is_all_that_brings_on():
    """Against the list of all possible actions, in games of random and scripted players."""
    named = set()
    for game in (game for seed in range(4) for game, _ in played(TINY, seed, 250) if game.seat is not None):
        view = observe(game, game.seat)
        text = possible_text(view, TINY)
        listed = {parse_action(command) for command in text.split(", ")} if text != "nothing" else set()
        possible = {action for action in possible_in(view, TINY) if action.name in BRINGS_ON}
        assert listed <= possible and len(listed) == len({(action.name, action.args[0]) for action in possible})
        numbered = [(action.name, *action.args) for action in listed if action.args[1:]]
        assert not any(Action(name, (kind, number + 1)) in possible for name, kind, number in numbered)
        named |= {action.name for action in listed}
    assert named == set(BRINGS_ON)


def test_an_observation_says_why_the_last_action_failed():
    game = made()
    do(game, "EAT APPLE")
    assert "Your last action failed: EAT APPLE: your pack holds 0 APPLE." in observation_text(TINY, observe(game, 1))
    do(game, "WAIT")
    assert "failed" not in observation_text(TINY, observe(game, 1))


def test_the_picture_of_one_sailor_hides_what_the_sailor_does_not_see():
    game = made()
    game.state.piles = {Place(0, 0, 0): {TABLET: 1}, Place(0, 3, 4): {"WOOD": 2}}
    game.state.foggy = True
    full, part = render(game), render(game, seat=1)
    assert "x" in full.splitlines()[2] and "traitor" in full
    rows = part.splitlines()[2:10]
    assert rows[0] == "" and rows[4] == "    . W 1 . ." and "traitor" not in part
