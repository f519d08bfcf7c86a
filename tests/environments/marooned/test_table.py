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
    game_table = table()
    while game_table.due != PERSON:
        game_table.say(WAIT)
    return game_table


def played(island: int, model: int, person: int, choices: list[int]) -> Table:
    """A game in which both choose among what is possible; it stops when the choices are used up."""
    game_table, messages = Table.of(f"island {island}, seat {model}", person, RULES, []), []
    for choice in choices:
        if game_table.due is None:
            break
        text = (
            WAIT if game_table.due == model else game_table.read(game_table.possible[choice % len(game_table.possible)])
        )
        messages.append(text)
        game_table.say(text)
    again = Table.of(f"island {island}, seat {model}", person, RULES, messages)
    assert again.game.state == game_table.game.state and again.due == game_table.due, "the messages are the whole game"
    return game_table


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 500), st.permutations([1, 2, 3, 4, 5]), st.lists(st.integers(0, 200), max_size=150))
def test_any_game_is_played_again_from_its_messages(island: int, seats: list[int], choices: list[int]) -> None:
    game_table = played(island, *seats[:2], choices)
    assert game_table.due in (seats[0], seats[1], None)
    if game_table.due is None:
        assert game_table.game.over or not any(game_table.game.state.sailors[seat].active for seat in seats[:2])


def test_the_model_is_asked_as_in_training() -> None:
    """With a person who does what the script in that seat would do, the model's prompts are those of the training."""
    episode, game_table = Episode.of("e", Problem.of(PROBLEM), RULES), table()
    for _ in range(20):
        while game_table.due == PERSON:
            game = game_table.game
            rng = Random(f"{game.seed}|{game.steps}|others")
            game_table.say(format_message("I act.", game_table.players[PERSON].act(game_table.view, game.rules, rng)))
        assert game_table.due == 2
        assert game_table.prompt(show_rules=False) == decision_prompt(
            episode.game.rules, episode.view, show_rules=False
        )
        assert game_table.prompt(show_rules=True) == decision_prompt(episode.game.rules, episode.view, show_rules=True)
        episode.act(Turn("teacher", WAIT))
        game_table.say(WAIT)


def test_a_person_sees_what_the_sailor_sees_and_nothing_else() -> None:
    game_table = on_turn()
    assert game_table.view == observe(game_table.game, PERSON) and game_table.view.seat == PERSON
    assert game_table.possible and "WAIT" in game_table.possible


@pytest.mark.parametrize(
    ("text", "action"),
    [("WAIT", "WAIT"), ("i will go west.", "MOVE WEST"), ("REASONING: Home.\nACTION: MOVE WEST", "MOVE WEST")],
)
def test_an_action_is_enough(text: str, action: str) -> None:
    game_table = on_turn()
    if action not in game_table.possible:
        pytest.fail(f"{action} is not possible on this island: choose another one for the test")
    message = parse_message(game_table.read(text))
    assert (message.grade, message.action_text) == (VALID, action)


@pytest.mark.parametrize(
    ("text", "message"), [("hello", "Write one action"), ("BUILD HULL", "is not possible"), ("VOTE 1", "not possible")]
)
def test_what_cannot_be_done_costs_no_turn(text: str, message: str) -> None:
    game_table = on_turn()
    steps = game_table.game.steps
    with pytest.raises(DataError, match=message):
        game_table.read(text)
    assert game_table.game.steps == steps and game_table.due == PERSON


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
        game_table = Table.of(problem, model % 5 + 1, RULES, [])
        assert game_table.game.roles[model] in (COLONIST, "traitor") and game_table.due is not None
