"""The adapter that an engine answers with."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.base import ModelConfig
from config.values import SERVED_RANKS
from src.errors import ConfigError, DataError
from src.models.lora import adapter_shape
from src.models.policy_version import PolicyVersion

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

SLOTS = 2
"""One more than are in use: with all slots taken, vLLM answers requests without an adapter with the last one. While a
new version takes the old one's place no request is answered, and both are loaded."""


class AdapterSlot:
    """Holds the current version of an adapter in an engine; until the first one comes, the model answers alone.

    Attributes:
        current: what requests name; None before the first.
    """

    def __init__(self, engine: "AsyncLLM"):
        self._engine = engine
        self._loaded = 0
        self.current: LoRARequest | None = None

    async def load(self, folder: Path, policy: PolicyVersion) -> None:
        """Put a published adapter in the place of the one before. Nothing may be sampled meanwhile.

        Raises:
            DataError: if vLLM does not take it; the one before stays.
        """
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        # vLLM takes no second look at an id that it has, and knows cached prefixes by the name: both are new each time,
        # of a version that is published again, too.
        self._loaded += 1
        new = LoRARequest(f"{policy} ({self._loaded})", self._loaded, str(folder))
        try:
            await self._engine.add_lora(new)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM gives what failed inside a worker no type of its own
            raise DataError(f"vLLM did not take the adapter in {folder}: {error}") from error
        before, self.current = self.current, new
        if before is not None:
            await self._engine.remove_lora(before.lora_int_id)


def adapter_arguments(model: ModelConfig) -> dict[str, Any]:
    """What vLLM is told about the adapters of a model; nothing if it is served as it is.

    Naming the modules leaves the output head as it is. With room for an adapter in it, the head would cost memory of
    rank × vocabulary, and could not compute the log-probs of prompts, of which the engine would die.

    Raises:
        ConfigError: if `lora.target_modules` does not fit the model.
    """
    if model.adapter is None:
        return {}
    shape = adapter_shape("teacher_model.lora", model.model_name_or_path, model.adapter)
    return {
        "enable_lora": True,
        "max_loras": SLOTS,
        "max_lora_rank": served_rank(shape.rank),
        "lora_target_modules": list(shape.modules),
    }


def served_rank(rank: int) -> int:
    """The least of the ranks that vLLM can be started with that has room for this one.

    Raises:
        ConfigError: if there is none.
    """
    if rank > SERVED_RANKS[-1]:
        raise ConfigError(
            f"The teacher's adapter has a matrix of rank {rank}, but vLLM serves ranks up to {SERVED_RANKS[-1]}: lower "
            "teacher_model.lora.rank."
        )
    return min(each for each in SERVED_RANKS if each >= rank)
