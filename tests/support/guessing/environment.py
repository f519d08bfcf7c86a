"""The guessing game: the program has a number in mind, and says whether a guess is too low or too high."""

import re

from classroom_rl.rollout.dialogue import DialogueEnvironment, DialogueEpisode
from classroom_rl.rollout.problem import Problem
from tests.support.guessing.config import Generation

_NUMBER = re.compile(r"\s*(\d)\s*")


class Environment(DialogueEnvironment):
    """A problem's answer is the number. A message is a guess if it is one digit and nothing else."""

    @classmethod
    def first_messages(cls, problem: Problem, generation: Generation) -> list[dict[str, str]]:
        return [{"role": "system", "content": f"Guess a number from 0 to {generation.largest}: {problem.text}"}]

    def reply(self, episode: DialogueEpisode) -> str | None:
        guess, number = self._guesses(episode)[-1], int(episode.problem.answer)
        if guess == number:
            return None
        return "One digit." if guess is None else "Higher." if guess < number else "Lower."

    def reward(self, name: str, episode: DialogueEpisode) -> float:
        """`found`: 1 if the last guess is right. `in_range`: the share of messages that are a number in the range."""
        guesses = self._guesses(episode)
        if name == "found":
            return float(guesses[-1] == int(episode.problem.answer))
        return sum(guess is not None for guess in guesses) / len(guesses)

    def _guesses(self, episode: DialogueEpisode) -> list[int | None]:
        matches = [_NUMBER.fullmatch(message) for message in episode.messages]
        numbers = [int(match[1]) if match else None for match in matches]
        return [number if number is not None and number <= self.generation.largest else None for number in numbers]
