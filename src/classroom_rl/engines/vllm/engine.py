"""A vLLM engine for one role: it takes token ids or messages and returns sampled tokens."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.engines.vllm.engine_base import EngineProcess
from classroom_rl.engines.vllm.engine_start import AdapterSlot, adapter_arguments
from classroom_rl.engines.vllm.role_metrics import own_metrics
from classroom_rl.errors import ConfigError, ContextOverflow, DataError, EngineFailure
from classroom_rl.models.lora import check_published
from classroom_rl.models.policy_folder import check_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.pretrained import check_context, check_model, context_length, load_tokenizer
from classroom_rl.models.weight_transfer import TRANSFER_ENGINE, TensorInfo, TransferGroup
from classroom_rl.rollout.chat_template import Message, ReplyFrame, encode_chat
from classroom_rl.rollout.engine import Completion, EngineHealth, Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


_PLACING = ("data_parallel", "pipeline_parallel", "prefill_context_parallel", "decode_context_parallel")
"""How vLLM's arguments begin that would place an engine on other GPUs than planned."""
_CPU_BLOCK = 32
"""In tokens; vLLM's attention on CPUs needs a multiple of 32."""


class VllmEngine(EngineProcess):
    """A generating model on vLLM's `AsyncLLM`. Build it with `await VllmEngine.start(…)`.

    Attributes:
        tokenizer: the model's tokenizer.
        policy: the version of the loaded weights.
        weights: a fingerprint of the loaded weights; equal weights have equal fingerprints.
        max_length: the model's context length in tokens.
        chat_template_kwargs: the configured variables of the chat template.
        stop_ids: the tokens that end a turn.
    """

    def __init__(
        self, engine: "AsyncLLM", model: ModelConfig, pids: list[int], gpus: list[str], generation: GenerationConfig
    ):
        super().__init__(engine, model, pids, gpus, generation)
        self._adapter = AdapterSlot(engine)
        self.policy = PolicyVersion()
        self.weights = f"as in {model.model_name_or_path}"
        self.max_length = model.vllm.max_length
        self.chat_template_kwargs = model.vllm.chat_template_kwargs
        self.stop_ids = self._find_stop_ids()
        self._group = ""

    @cached_property
    def frame(self) -> ReplyFrame:
        """The chat template's tokens around a reply between two assistant messages; raises as `ReplyFrame` does, which
        a model that only judges may not have."""
        return ReplyFrame(self.tokenizer)

    @staticmethod
    def _load(model: ModelConfig, seed: int, sleep_mode: bool) -> "AsyncLLM":
        return load_engine(model, seed, sleep_mode, runner="generate")

    @property
    def client(self) -> "AsyncLLM":
        """vLLM's engine, for vLLM's own HTTP routes. Sample from it only inside `gate.turn()`."""
        return self._engine

    @property
    def adapter(self) -> "LoRARequest | None":
        """The adapter to sample with; read it inside `gate.turn()`."""
        return self._adapter.current

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one turn after `prompt_ids`.

        The log-probs are those of the sampling distribution, after temperature and truncation.

        Raises:
            ContextOverflow: if the prompt leaves no room in the model's context.
            EngineFailure: if the engine died, or did not answer in time.
        """
        return await self._sample(prompt_ids, sampling, with_logprobs=True)

    async def _sample(self, prompt_ids: Sequence[int], sampling: Sampling, with_logprobs: bool) -> Completion:
        room = self.max_length - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"A prompt of {len(prompt_ids)} tokens does not fit into {self._model.model_name_or_path}'s context: "
                f"vllm.max_length is {self.max_length}. Raise it, or shorten problems and conversations."
            )
        from vllm.inputs.engine import tokens_input

        # vLLM would send an untyped prompt through its tokenizer thread first.
        params, prompt = self._sampling_params(sampling, room), tokens_input(list(prompt_ids))
        params.logprobs = 0 if with_logprobs else None  # 0: only the sampled token's
        async with self.gate.turn():
            policy, weights = self.policy, self.weights  # read here: they may have changed while the turn waited
            request = self._engine.generate(prompt, params, uuid4().hex, lora_request=self.adapter)
            output = (await self._finish(request)).outputs[0]
        ids = tuple(output.token_ids)
        ended = output.finish_reason == "stop"
        by_end_token = ended and not isinstance(output.stop_reason, str)  # a string is the stop text that ended it
        return Completion(
            ids=ids,
            logprobs=_logprobs_of(ids, output.logprobs) if with_logprobs else (),
            text=self.tokenizer.decode(ids[:-1] if by_end_token else ids, skip_special_tokens=False),
            ended=ended,
            policy=policy,
            weights=weights,
        )

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Sample the assistant message that follows `messages`, without log-probs: nothing is trained on it, and
        log-probs cost the engine and the server time for each token. Raises the same errors as `generate`."""
        return await self._sample(encode_chat(self.tokenizer, messages), sampling, with_logprobs=False)

    async def load_policy(self, folder: Path, policy: PolicyVersion, timeout_s: float) -> None:
        """Wait for the turns in flight, then load published weights in place, or replace the adapter with a published
        one. The engine is not restarted. If it was asleep, it is awake afterwards.

        Raises:
            DataError: if the folder does not hold a complete published policy for this model.
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds.
            GpuFull: if the engine was asleep and the GPU has no memory for it.
            EngineFailure: if the engine died, or loaded only some of the weights; it then counts as dead.
        """
        weights = check_policy(folder, policy)
        check_published(folder, self._model.model_name_or_path, self._model.adapter)

        async def load() -> str:
            if self._model.adapter is None:
                await self._engine.collective_rpc("load_policy", args=(str(folder),))
            else:
                await self._adapter.load(folder, policy)
            return weights

        await self._replace_weights(policy, load, timeout_s)

    async def receive_policy(
        self, group: TransferGroup, tensors: Sequence[TensorInfo], policy: PolicyVersion, timeout_s: float
    ) -> None:
        """Wait for the turns in flight, then receive weights from the trainer's memory in place; the trainer sends them
        meanwhile. If the workers are not in the group, they join it first.

        Raises:
            DataError: if the engine serves an adapter.
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds.
            EngineFailure: if not all weights had arrived by then, or the engine died; it then counts as dead.
        """
        if self._model.adapter is not None:
            raise DataError("The engine serves an adapter, which comes through files: set train.publish_through=disk.")
        deadline = asyncio.get_running_loop().time() + timeout_s
        update = {
            "names": [tensor.name for tensor in tensors],
            "dtype_names": [tensor.dtype for tensor in tensors],
            "shapes": [tensor.shape for tensor in tensors],
        }

        async def receive() -> str:
            arguments = (group.id, group.as_init_info(), update)
            try:
                async with asyncio.timeout_at(deadline):
                    fingerprints = await self._engine.collective_rpc("receive_policy", args=arguments)
            except TimeoutError:
                raise EngineFailure(
                    f"not all weights had come from the trainer after {timeout_s:g} s; see "
                    "generation.load_weights_timeout_s"
                ) from None
            self._group = group.id
            return fingerprints[0]

        await self._replace_weights(policy, receive, timeout_s)

    async def _replace_weights(
        self, policy: PolicyVersion, load: Callable[[], Awaitable[str]], timeout_s: float
    ) -> None:
        """Load a policy by `load`, which returns the fingerprint of its weights, while no turn is sampled."""
        async with self._sleep_control.loading(timeout_s):
            with self._weight_change(f"loaded policy {policy}"):
                weights = await load()
                # Cached prefixes hold the KV values of the old weights.
                if not await self._engine.reset_prefix_cache():
                    raise EngineFailure("vLLM kept prefixes of the old weights although no turn was in flight.")
            self.policy, self.weights = policy, weights

    def health(self) -> EngineHealth:
        """What `EngineProcess.health` says, how many workers would receive weights, and in which group they are."""
        receivers = (
            0 if self._model.adapter is not None else self._engine.vllm_config.parallel_config.world_size_across_dp
        )
        return super().health().model_copy(update={"receivers": receivers, "weight_group": self._group})

    def shutdown(self) -> None:
        """End the engine's processes."""
        del self._adapter  # it also holds a reference to the engine
        super().shutdown()

    def _sampling_params(self, sampling: Sampling, room: int) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_tokens, room),
            seed=sampling.seed,
            stop_token_ids=self.stop_ids,
            stop=list(sampling.stop),
            detokenize=bool(sampling.stop),  # vLLM finds stop texts in the text alone
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if sampling.schema is None else StructuredOutputsParams(json=sampling.schema),
        )

    def _find_stop_ids(self) -> list[int]:
        """The end-of-turn token of the chat template, if it frames replies, and the end tokens in the generation
        config."""
        generation_config = self._engine.model_config.try_get_generation_config()
        eos_ids = generation_config.get("eos_token_id") or []
        eos_ids = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
        with suppress(ConfigError):
            eos_ids.append(self.frame.turn_end_id)
        return sorted(set(eos_ids))


def _logprobs_of(ids: Sequence[int], entries: Sequence[Any]) -> tuple[float, ...]:
    """The log-probs of the sampled tokens. vLLM's entries (one dictionary per position) may hold other tokens, too."""
    return tuple(entry[token].logprob for entry, token in zip(entries, ids, strict=True))


def load_engine(model: ModelConfig, seed: int, sleep_mode: bool, runner: str) -> "AsyncLLM":
    """Start vLLM with a model that generates text (`runner` "generate") or computes scores ("pooling")."""
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(engine_arguments(model, seed, sleep_mode, runner), stat_loggers=[own_metrics()])


def engine_arguments(model: ModelConfig, seed: int, sleep_mode: bool, runner: str) -> "AsyncEngineArgs":
    """vLLM's arguments for `load_engine`. Raises a `ConfigError` if `vllm.extra` has an argument that vLLM does not
    know, or that is set here."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    options = model.vllm
    arguments: dict[str, Any] = dict(
        model=model.model_name_or_path,
        runner=runner,
        load_format="safetensors",  # "auto" would fall back to pickle files, which can run code
        trust_remote_code=False,
        dtype=options.dtype,
        seed=seed,
        max_model_len=options.max_length,
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_share,
        tensor_parallel_size=options.number_of_gpus_per_instance,
        data_parallel_size=options.data_parallel_size or 1,
        device_ids=options.gpus,
        enforce_eager=options.enforce_eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # those of the sampling distribution, after temperature and truncation
        generation_config="vllm",  # not the sampling defaults in the model's folder
        worker_extension_cls="classroom_rl.engines.vllm.worker_extension.PolicyWorker",
        weight_transfer_config=WeightTransferConfig(TRANSFER_ENGINE) if runner == "generate" else None,
        enable_log_requests=False,
        enable_sleep_mode=sleep_mode and _sleep_mode_is_available(),
        **_cpu_arguments(options),
        **adapter_arguments(model),
    )
    unknown = sorted(set(options.extra) - {field.name for field in fields(AsyncEngineArgs)})
    if unknown:
        raise ConfigError(f"vllm.extra has {', '.join(unknown)}, which vLLM's AsyncEngineArgs do not have.")
    placement = {name for name in options.extra if name.startswith(_PLACING) or name == "nnodes"}
    reserved = sorted(set(options.extra) & set(arguments) | placement)
    if reserved:
        raise ConfigError(
            f"vllm.extra has {', '.join(reserved)}, which this project sets itself: use the other keys of vllm, or "
            "leave them out."
        )
    return AsyncEngineArgs(**arguments, **options.extra)


def _sleep_mode_is_available() -> bool:
    """Whether vLLM supports sleep mode on this platform. If not, vLLM refuses to start with it."""
    from vllm.platforms import current_platform

    return current_platform.is_sleep_mode_available() and current_platform.is_cumem_allocator_available()


def _cpu_arguments(options: VllmConfig) -> dict[str, Any]:
    """vLLM's arguments for CPUs; empty on other platforms.

    Chunked prefill is off, because with a seeded request it kills vLLM's worker on a CPU: CPU generators cannot be
    rewound ("CPU Generator does not use offset"). The blocks of the prefix cache are small, because only whole blocks
    are reused: with vLLM's default of 128 tokens on CPUs, each turn of a conversation would compute up to 127 old
    tokens again. An engine with its own cores runs in a single process.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    arguments: dict[str, Any] = {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(options.max_length, 8192),
        "block_size": _CPU_BLOCK,
    }
    if options.cpu_cores is not None and options.number_of_gpus_per_instance * (options.data_parallel_size or 1) == 1:
        arguments["distributed_executor_backend"] = (
            "classroom_rl.engines.vllm.single_process_executor.SingleProcessExecutor"
        )
    return arguments


async def open_vllm(model: str, *, max_length: int | None = None, seed: int = 0, **options: Any) -> VllmEngine:
    """Load a model with vLLM; end it with `shutdown()`.

    Args:
        model: a folder or a name on the Hub.
        max_length: the context length in tokens; None takes the default of `VllmConfig`, or the model's if it is
            shorter.
        options: further fields of `config.models.VllmConfig`, such as gpu_memory_utilization or dtype. Sampling
            options belong to `Rollouts`.

    Raises:
        ConfigError: if the model or an option does not exist, or the model's context is shorter than `max_length`.
        EngineFailure: if vLLM cannot load the model; the message is vLLM's.
    """
    name = str(model)
    known_options = {
        field for field in VllmConfig.__dataclass_fields__ if field not in ("temperature", "top_k", "top_p")
    }
    unknown = sorted(set(options) - known_options)
    if unknown:
        raise ConfigError(f"open_vllm has no option {', '.join(unknown)}. It has: {', '.join(sorted(known_options))}.")
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
