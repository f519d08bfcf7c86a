"""A person at the table sees what the sailor sees, acts by the rules, and plays beside the model that is trained."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.marooned.config import Generation
from classroom_rl.environments.marooned.episode import Episode
from classroom_rl.environments.marooned.messages import VALID, format_message, parse_message
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.prompts import decision_prompt
from classroom_rl.environments.marooned.rules import COLONIST
from classroom_rl.environments.marooned.table import Table
from classroom_rl.errors import DataError
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.tokens import Turn
from tests.environments.marooned.test_environment import PROBLEMS

RULES = Generation(show_rules=False, colonists=["builder", "gatherer"])
PROBLEM, PERSON = "island 3, seat 2", 4
WAIT = "REASONING: I wait.\nACTION: WAIT"


def table(*said: str, problem: str = PROBLEM, person: int = PERSON) -> Table:
    return Table.of(problem, person, RULES, said)


def on_turn() -> Table:
    """The game when it is the person's turn for the first time."""
    found = table()
    while found.due != PERSON:
        found.say(WAIT)
    return found


def played(island: int, model: int, person: int, choices: list[int]) -> Table:
    """A game in which both choose among what is possible; it stops when the choices are used up."""
    found, said = Table.of(f"island {island}, seat {model}", person, RULES, []), []
    for choice in choices:
        if found.due is None:
            break
        text = WAIT if found.due == model else found.read(found.possible[choice % len(found.possible)])
        said.append(text)
        found.say(text)
    again = Table.of(f"island {island}, seat {model}", person, RULES, said)
    assert again.game.state == found.game.state and again.due == found.due, "the messages are the whole game"
    return found


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 500), st.permutations([1, 2, 3, 4, 5]), st.lists(st.integers(0, 200), max_size=150))
def test_any_game_is_played_again_from_its_messages(island: int, seats: list[int], choices: list[int]) -> None:
    found = played(island, *seats[:2], choices)
    assert found.due in (seats[0], seats[1], None)
    if found.due is None:
        assert found.game.over or not any(found.game.state.sailors[seat].active for seat in seats[:2])


def test_the_model_is_asked_as_in_training() -> None:
    """With a person who does what the script in that seat would do, the model's prompts are those of the training."""
    episode, found = Episode.of("e", Problem.of(PROBLEM), RULES), table()
    for _ in range(20):
        while found.due == PERSON:
            game = found.game
            rng = Random(f"{game.seed}|{game.steps}|others")
            found.say(format_message("I act.", found.players[PERSON].act(found.view, game.rules, rng)))
        assert found.due == 2
        assert found.prompt(show_rules=False) == decision_prompt(episode.game.rules, episode.view, show_rules=False)
        assert found.prompt(show_rules=True) == decision_prompt(episode.game.rules, episode.view, show_rules=True)
        episode.act(Turn("teacher", WAIT))
        found.say(WAIT)


def test_a_person_sees_what_the_sailor_sees_and_nothing_else() -> None:
    found = on_turn()
    assert found.view == observe(found.game, PERSON) and found.view.seat == PERSON
    assert found.possible and "WAIT" in found.possible


@pytest.mark.parametrize(
    ("text", "action"),
    [("WAIT", "WAIT"), ("i will go west.", "MOVE WEST"), ("REASONING: Home.\nACTION: MOVE WEST", "MOVE WEST")],
)
def test_an_action_is_enough(text: str, action: str) -> None:
    found = on_turn()
    if action not in found.possible:
        pytest.fail(f"{action} is not possible on this island: choose another one for the test")
    message = parse_message(found.read(text))
    assert (message.grade, message.action_text) == (VALID, action)


@pytest.mark.parametrize(
    ("text", "message"), [("hello", "Write one action"), ("BUILD HULL", "is not possible"), ("VOTE 1", "not possible")]
)
def test_what_cannot_be_done_costs_no_turn(text: str, message: str) -> None:
    found = on_turn()
    steps = found.game.steps
    with pytest.raises(DataError, match=message):
        found.read(text)
    assert found.game.steps == steps and found.due == PERSON


def test_nobody_acts_out_of_turn_or_after_the_end() -> None:
    model_is_due = table()
    assert model_is_due.due != PERSON
    with pytest.raises(DataError, match="not your turn"):
        model_is_due.read("WAIT")
    over = played(3, 2, PERSON, [0] * 2000)
    assert over.due is None
    with pytest.raises(DataError, match="over"):
        over.say(WAIT)


def test_problems_of_the_training_can_be_joined() -> None:
    for problem in PROBLEMS:
        model = int(problem[-1])
        found = Table.of(problem, model % 5 + 1, RULES, [])
        assert found.game.roles[model] in (COLONIST, "traitor") and found.due is not None
