"""vLLM in one line, for rollouts outside of the server: `engine = await open_vllm("Qwen/Qwen3-4B")`."""

from typing import Any

from classroom_rl.config.base import GenerationConfig, ModelConfig, VllmConfig
from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.errors import ConfigError
from classroom_rl.models.pretrained import check_context, check_model, context_length, load_tokenizer


async def open_vllm(model: str, *, max_length: int | None = None, seed: int = 0, **options: Any) -> VllmEngine:
    """Load a model with vLLM; end it with `shutdown()`.

    Args:
        model: a folder or a name on the Hub.
        max_length: the context in tokens; None takes `VllmConfig`'s, or the model's if that is shorter.
        options: further fields of `config.base.VllmConfig`, such as gpu_memory_utilization, number_of_gpus_per_instance
            or dtype. Those of sampling belong to `Rollouts`.

    Raises:
        ConfigError: if there is no such model or option, or the model's context is shorter than `max_length`.
        EngineFailure: if vLLM cannot load the model; the message is vLLM's.
    """
    name = str(model)
    known = {field for field in VllmConfig.__dataclass_fields__ if field not in ("temperature", "top_k", "top_p")}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"open_vllm has no option {', '.join(unknown)}. It has: {', '.join(sorted(known))}.")
    check_model("open_vllm's model", name)
    load_tokenizer("open_vllm's model", name)
    if max_length is None:
        max_length = min(VllmConfig.max_length, _context_of(name))
    check_context("open_vllm's max_length", name, max_length)
    config = ModelConfig(model_name_or_path=name, vllm=VllmConfig(max_length=max_length, **options))
    return await VllmEngine.start(config, seed, GenerationConfig(colocate=False))


def _context_of(name: str) -> int:
    from transformers import AutoConfig

    return context_length(AutoConfig.from_pretrained(name, trust_remote_code=False)) or VllmConfig.max_length
