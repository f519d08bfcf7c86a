"""The guessing game: the program has a number in mind, and says whether a guess is too low or too high."""

import re

from classroom_rl.rollout.dialogue import Dialogue, DialogueEnvironment
from classroom_rl.rollout.problem import Problem
from tests.support.guessing.config import Generation

_NUMBER = re.compile(r"\s*(\d)\s*")


class Environment(DialogueEnvironment):
    """A problem's answer is the number. A message is a guess if it is one digit and nothing else."""

    @classmethod
    def first_messages(cls, problem: Problem, generation: Generation) -> list[dict[str, str]]:
        return [{"role": "system", "content": f"Guess a number from 0 to {generation.largest}: {problem.text}"}]

    def reply(self, dialogue: Dialogue) -> str | None:
        guess, number = self._guesses(dialogue)[-1], int(dialogue.problem.answer)
        if guess == number:
            return None
        return "One digit." if guess is None else "Higher." if guess < number else "Lower."

    def reward(self, name: str, dialogue: Dialogue) -> float:
        """`found`: 1 if the last guess is right. `in_range`: the share of messages that are a number in the range."""
        guesses = self._guesses(dialogue)
        if name == "found":
            return float(guesses[-1] == int(dialogue.problem.answer))
        return sum(guess is not None for guess in guesses) / len(guesses)

    def _guesses(self, dialogue: Dialogue) -> list[int | None]:
        read = [_NUMBER.fullmatch(said) for said in dialogue.said]
        numbers = [int(found[1]) if found else None for found in read]
        return [each if each is not None and each <= self.generation.largest else None for each in numbers]
