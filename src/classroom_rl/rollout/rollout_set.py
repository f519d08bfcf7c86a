"""A set of recorded rollouts: a sequence that can be summarised, rescored, plotted, saved, and trained on."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self, overload

from classroom_rl.errors import ConfigError, DataError
from classroom_rl.rollout.player import Reward
from classroom_rl.rollout.rows import TrainingRow, rows_of_rollout
from classroom_rl.rollout.set_summary import RolloutSummary, sum_up
from classroom_rl.rollout.step import Rollout
from classroom_rl.rollout.store.set_files import read, write


class RolloutSet(Sequence[Rollout]):
    """Recorded rollouts, in order. Two sets are equal if all fields of their rollouts are. Raises a `DataError` if an
    entry is no rollout."""

    def __init__(self, rollouts: Iterable[Rollout] = ()):
        self._rollouts = tuple(rollouts)
        for index, rollout in enumerate(self._rollouts):
            if not isinstance(rollout, Rollout):
                raise DataError(f"A RolloutSet holds rollouts; entry {index} is {rollout!r:.100}.")

    def __len__(self) -> int:
        return len(self._rollouts)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> "RolloutSet": ...

    def __getitem__(self, index: int | slice) -> "Rollout | RolloutSet":
        return RolloutSet(self._rollouts[index]) if isinstance(index, slice) else self._rollouts[index]

    def __eq__(self, other: object) -> bool:
        return self._rollouts == other._rollouts if isinstance(other, RolloutSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # `object` has one: no type says that a subclass has none

    def __add__(self, other: "RolloutSet") -> "RolloutSet":
        return RolloutSet((*self, *other))

    def __repr__(self) -> str:
        steps = sum(len(rollout.steps) for rollout in self)
        return f"<RolloutSet of {len(self)} rollouts with {steps} steps>"

    def where(self, holds: Callable[[Rollout], bool]) -> "RolloutSet":
        """The rollouts for which a function returns True."""
        return RolloutSet(rollout for rollout in self if holds(rollout))

    def summary(self) -> RolloutSummary:
        """Counts, ends, steps, rewards and tokens, with intervals; `print` shows it as text."""
        return sum_up(self._rollouts)

    def rescore(self, reward: Reward) -> Self:
        """The set with the rewards of another function; no model is called.

        Raises:
            ConfigError: if the function is async; `rescore_async` takes it.
            DataError: if it raises an error or gives no reward; the message names the rollout.
        """
        if inspect.iscoroutinefunction(reward):
            raise ConfigError("The reward function is async: use await rescore_async(reward).")
        return type(self)(_scored(rollout, reward) for rollout in self)

    async def rescore_async(self, reward: Reward) -> Self:
        """As `rescore`, for async functions; they are awaited one after the other."""
        rescored = []
        for rollout in self:
            try:
                value = reward(rollout)
                value = await value if inspect.isawaitable(value) else value
                rescored.append(rollout.scored(value))
            except Exception as error:
                raise _reward_error(rollout, error) from error
        return type(self)(rescored)

    def rows(self) -> list[TrainingRow]:
        """The training samples of all rollouts, including those that failed or were not scored: one per rollout with
        the history `with_thinking`, one per step with `without_thinking`. Raises a `DataError` if the engine gave no
        tokens."""
        return [row for rollout in self for row in rows_of_rollout(rollout)]

    def plot(self, folder: str | Path) -> list[Path]:
        """Plot the set into PNG files in a folder; returns their paths. Raises as `set_summary.draw` does."""
        from classroom_rl.rollout.set_summary import draw

        return draw(self._rollouts, Path(folder))

    def save(self, path: str | Path) -> Path:
        """Write a .jsonl or .parquet file; an existing one is replaced atomically. Raises as `set_files.write` does."""
        write(Path(path), self._rollouts)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a file that `save` wrote; the set is equal to the saved one. Raises as `set_files.read` does."""
        return cls(read(Path(path)))


def _scored(rollout: Rollout, reward: Reward) -> Rollout:
    try:
        return rollout.scored(reward(rollout))
    except Exception as error:
        raise _reward_error(rollout, error) from error


def _reward_error(rollout: Rollout, error: Exception) -> DataError:
    return DataError(f"The reward of rollout {rollout.id} cannot be computed: {type(error).__name__}: {error}")
