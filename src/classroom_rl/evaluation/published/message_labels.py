"""What rules, or trained readers in their place, say of single messages: a judge without a model."""

from collections.abc import Sequence
from typing import Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.errors import ConfigError
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.moves.stored import TrainedReaders
from classroom_rl.judges.readings import Exchange
from classroom_rl.server.open_models import open_readers


class MessageLabels:
    """Reads labels of `classroom_rl.judges.readings` in messages: with trained readers where there are some, else by
    rules.

    Args:
        generation: names the readers, if any.
        benchmark: the benchmark's file or name on the Hub.

    Raises:
        ConfigError: if the readers were trained on this very benchmark: they would agree with what they have seen.
        DataError: if the readers are missing or damaged.
    """

    def __init__(self, generation: GenerationConfig, benchmark: str):
        self._readers = open_readers(generation)
        if isinstance(self._readers, TrainedReaders) and self._readers.was_trained_on(benchmark):
            raise ConfigError(
                f"The readers in generation.readers_path ({generation.readers_path}) were trained on {benchmark}: "
                "their agreement with people there measures memory. Train them on other dialogues, or leave "
                "generation.readers_path out."
            )

    def about(self, labels: Sequence[str]) -> dict[str, Any]:
        """Which readers read which labels, for the results."""
        trained = [] if self._readers is None else [label for label in labels if label in self._readers.trust]
        version = None if self._readers is None else self._readers.version
        return {"readers": version, "by_readers": trained, "by_rules": [each for each in labels if each not in trained]}

    def reads(self, label: str, about: Exchange) -> bool:
        """Whether the label holds for the message."""
        if self._readers is not None and label in self._readers.trust:
            return self._readers.reads(label, about)
        return RULES[label](about)
