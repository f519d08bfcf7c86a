"""A game in which a person plays one seat and the model another. It is replayed from its messages, in order of play.

The person sees only what the sailor of that seat sees, until the game is over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from classroom_rl.environments.marooned.actions import format_action
from classroom_rl.environments.marooned.config import Generation
from classroom_rl.environments.marooned.episode import cast_around, island_of
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import fault_in, possible_in
from classroom_rl.environments.marooned.messages import format_message, parse_message, read_action
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.players import Player, play_others
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.prompts import decision_prompt
from classroom_rl.errors import DataError
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.thoughts import visible_text


@dataclass
class Table:
    """The game and its players.

    Attributes:
        model, person: the seats of the model and of the person.
        players: the scripted players of the other seats.
    """

    game: Game
    model: int
    person: int
    players: Mapping[int, Player]

    @classmethod
    def of(cls, problem: str, person: int, generation: Generation, messages: Sequence[str]) -> "Table":
        """The game of a problem after these messages.

        Args:
            problem: names the island and the model's seat.
            person: the person's seat.
            messages: those of model and person so far, in order of play.

        Raises:
            DataError: if the problem is not a game, if the person's seat does not exist or is the model's, or if there
                are messages after the end of the game.
        """
        seed, model = island_of(Problem.of(problem))
        rules = PRESETS[generation.preset]
        for seat in (model, person):
            if seat not in rules.seats:
                raise DataError(f"There is no seat {seat}: the sailors are 1 to {rules.sailors}.")
        if person == model:
            raise DataError(f"Seat {person} is the model's: take another one.")
        game = Game(rules, seed, traitor=generation.has_traitor)
        table = cls(game, model, person, cast_around(game, (model,), generation))
        table._play_others()
        for text in messages:
            table.say(text)
        return table

    @property
    def due(self) -> int | None:
        """The seat that has to decide now, the model's or the person's; None when neither plays on."""
        return self.game.seat if self.game.seat in (self.model, self.person) and not self.game.over else None

    @property
    def view(self) -> Observation:
        """What the person's sailor knows now."""
        return observe(self.game, self.person)

    @property
    def possible(self) -> list[str]:
        """The actions that are possible for the person now, in the grammar; empty if it is not the person's turn."""
        actions = possible_in(self.view, self.game.rules) if self.due == self.person else []
        return [format_action(action) for action in actions]

    def prompt(self, show_rules: bool) -> list[dict[str, str]]:
        """The model's prompt, as in training."""
        return decision_prompt(self.game.rules, observe(self.game, self.model), show_rules)

    def read(self, text: str) -> str:
        """The person's text as a message in the exact grammar. The text may be just an action.

        Raises:
            DataError: if it is not the person's turn, or if the text has no action or one that is not possible now.
        """
        if self.due != self.person:
            raise DataError("It is not your turn.")
        action = read_action(text)
        if action is None:
            raise DataError("Write one action, such as MOVE NORTH or SPEAK Hello.")
        fault = fault_in(self.view, self.game.rules, action)
        if fault is not None:
            raise DataError(f"{format_action(action)} is not possible: {fault.text}.")
        return format_message(parse_message(text).reasoning or "-", action)

    def say(self, text: str) -> None:
        """Play the message of the seat that is due, in the grammar or not. Then the other seats play.

        Raises:
            DataError: if neither seat is due.
        """
        if self.due is None:
            raise DataError("The game is over.")
        self.game.step(parse_message(visible_text(text)).action)
        self._play_others()

    def _play_others(self) -> None:
        play_others(self.game, self.players, self.model, self.person)
