"""The LoRA adapter with which an engine samples."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from classroom_rl.config.base import ModelConfig
from classroom_rl.config.values import SERVED_RANKS
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.lora import adapter_shape
from classroom_rl.models.policy_version import PolicyVersion

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

SLOTS = 2
"""One more than the adapters in use: if all slots are taken, vLLM applies the last adapter to requests without one.
While a new version replaces the old one, both are loaded, and no request is sampled."""


class AdapterSlot:
    """The current version of the adapter in an engine. Before the first one is loaded, the model samples without.

    Attributes:
        current: the `LoRARequest` for requests; None before the first version.
    """

    def __init__(self, engine: "AsyncLLM"):
        self._engine = engine
        self._loaded = 0
        self.current: LoRARequest | None = None

    async def load(self, folder: Path, policy: PolicyVersion) -> None:
        """Replace the adapter by a published one. Nothing may be sampled meanwhile.

        Raises:
            DataError: if vLLM refuses the new adapter; the old one stays.
        """
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        # vLLM does not reload an id that it knows, and finds cached prefixes by name. So both are new for each load,
        # also if the same version is published again.
        self._loaded += 1
        new = LoRARequest(f"{policy} ({self._loaded})", self._loaded, str(folder))
        try:
            await self._engine.add_lora(new)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM raises errors of its workers without a type of their own
            raise DataError(f"vLLM did not take the adapter in {folder}: {error}") from error
        before, self.current = self.current, new
        if before is not None:
            await self._engine.remove_lora(before.lora_int_id)


def adapter_arguments(model: ModelConfig) -> dict[str, Any]:
    """vLLM's engine arguments for a model's adapter; empty without one.

    The modules are named so that the output head gets no adapter slot. A slot would need memory of rank × vocabulary,
    and the head could not compute log-probs of prompts, which would kill the engine.

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
    """The smallest rank supported by vLLM that is not below `rank`.

    Raises:
        ConfigError: if there is none.
    """
    if rank > SERVED_RANKS[-1]:
        raise ConfigError(
            f"The teacher's adapter has a matrix of rank {rank}, but vLLM serves ranks up to {SERVED_RANKS[-1]}: lower "
            "teacher_model.lora.rank."
        )
    return min(each for each in SERVED_RANKS if each >= rank)
