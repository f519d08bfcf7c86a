"""A vLLM engine in this process: a seat that is given token ids or messages and answers with sampled tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from config.base import GenerationConfig, ModelConfig
from src.errors import ContextOverflow, EngineFailure
from src.models.lora import check_published
from src.models.policy_folder import check_policy
from src.models.policy_version import PolicyVersion
from src.rollout.chat_template import Message, ReplyFrame, encode_chat
from src.rollout.engines import Completion, Sampling
from src.vllm.adapter_slot import AdapterSlot, adapter_arguments
from src.vllm.engine_base import EngineProcess
from src.vllm.weights_gate import WeightsGate

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import SamplingParams


class VllmEngine(EngineProcess):
    """A model that writes, on vLLM's `AsyncLLM`. Build it with `await VllmEngine.start(…)`.

    Attributes:
        tokenizer: the model's tokenizer.
        frame: how its chat template frames a reply between two assistant messages.
        policy: the version of the loaded weights.
        weights: stands for their content: equal weights, equal string.
    """

    def __init__(
        self, engine: "AsyncLLM", model: ModelConfig, pids: list[int], gpus: list[str], generation: GenerationConfig
    ):
        super().__init__(engine, model, pids, gpus, generation)
        self._adapter = AdapterSlot(engine)
        self.frame = ReplyFrame(self.tokenizer)
        self.policy = PolicyVersion()
        self.weights = f"as in {model.model_name_or_path}"
        self._stop_ids = self._find_stop_ids()

    @staticmethod
    def _load(model: ModelConfig, seed: int, sleep_mode: bool) -> "AsyncLLM":
        return load_engine(model, seed, sleep_mode, runner="generate")

    @property
    def client(self) -> "AsyncLLM":
        """The engine itself, for vLLM's own routes; whoever samples from it passes `gate`."""
        return self._engine

    @property
    def gate(self) -> WeightsGate:
        """Inside it the weights are those of `policy`."""
        return self._gate

    @property
    def adapter(self) -> "LoRARequest | None":
        """The adapter that answers are sampled with; read it inside `gate`."""
        return self._adapter.current

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that end a turn."""
        return self._stop_ids

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one turn after `prompt_ids`.

        Log-probs are those of the distribution that was sampled from, after temperature and truncation.

        Raises:
            ContextOverflow: if the prompt leaves no room in the model's context.
            EngineFailure: if the engine died, or did not answer in time.
        """
        room = self._model.vllm.max_length - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"A prompt of {len(prompt_ids)} tokens does not fit into {self._model.model_name_or_path}'s context: "
                f"vllm.max_length is {self._model.vllm.max_length}. Raise it, or shorten problems and conversations."
            )
        params = self._sampling_params(sampling, room)
        async with self._gate.turn():
            policy, weights = self.policy, self.weights
            prompt = {"prompt_token_ids": list(prompt_ids)}
            request = self._engine.generate(prompt, params, uuid4().hex, lora_request=self.adapter)
            output = (await self._finish(request)).outputs[0]
        ids = tuple(output.token_ids)
        ended = output.finish_reason == "stop"
        return Completion(
            ids=ids,
            logprobs=tuple(entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True)),
            text=self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False),
            ended=ended,
            policy=policy,
            weights=weights,
        )

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Sample the assistant message that follows `messages`; raises as `generate` does."""
        return await self.generate(encode_chat(self.tokenizer, messages), sampling)

    async def load_policy(self, folder: Path, policy: PolicyVersion, timeout_s: float) -> None:
        """Load published weights in place, or put a published adapter in the place of the one before, once all turns
        in flight have ended. The engine is not restarted; one that sleeps is awake afterwards.

        Raises:
            DataError: if the folder does not hold a complete published policy for this model.
            DeadlineExceeded: if turns are still in flight after `timeout_s` seconds.
            EngineFailure: if the engine died, or loaded only some of the weights: it counts as dead then.
        """
        weights = check_policy(folder, policy)
        check_published(folder, self._model.model_name_or_path, self._model.adapter)
        async with self._rest.loading(timeout_s):
            with self._whole_change(f"loaded policy {policy}"):
                if self._model.adapter is None:
                    await self._engine.collective_rpc("load_policy", args=(str(folder),))
                else:
                    await self._adapter.load(folder, policy)
                if not await self._engine.reset_prefix_cache():
                    raise EngineFailure("vLLM kept prefixes of the old weights although no turn was in flight.")
            self.policy, self.weights = policy, weights

    def shutdown(self) -> None:
        """End the engine's processes."""
        del self._adapter  # it knows the engine, too
        super().shutdown()

    def _sampling_params(self, sampling: Sampling, room: int) -> "SamplingParams":
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_tokens, room),
            seed=sampling.seed,
            stop_token_ids=self._stop_ids,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _find_stop_ids(self) -> list[int]:
        """The end-of-turn token of the chat template and every end token that the model itself names."""
        generation_config = self._engine.model_config.try_get_generation_config()
        named = generation_config.get("eos_token_id") or []
        named = [named] if isinstance(named, int) else list(named)
        return sorted({self.frame.turn_end_id, *named})


def load_engine(model: ModelConfig, seed: int, sleep_mode: bool, runner: str) -> "AsyncLLM":
    """Start vLLM with a model, to write (`runner` "generate") or to be read from ("pooling")."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = model.vllm
    arguments = AsyncEngineArgs(
        model=model.model_name_or_path,
        runner=runner,
        load_format="safetensors",  # "auto" would fall back to pickles
        trust_remote_code=False,
        dtype=options.dtype,
        seed=seed,
        max_model_len=options.max_length,
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        tensor_parallel_size=options.number_of_gpus_per_instance,
        enforce_eager=options.enforce_eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        worker_extension_cls="src.vllm.worker_extension.PolicyWorker",
        enable_log_requests=False,
        enable_sleep_mode=sleep_mode and _gpu_memory_can_be_given_back(),
        **_whole_prefills(options.max_length),
        **adapter_arguments(model),
    )
    return AsyncLLM.from_engine_args(arguments)


def _gpu_memory_can_be_given_back() -> bool:
    """Whether vLLM has its sleep mode here; it refuses to start with it where it has not."""
    from vllm.platforms import current_platform

    return current_platform.is_sleep_mode_available() and current_platform.is_cumem_allocator_available()


def _whole_prefills(max_length: int) -> dict[str, Any]:
    """On CPUs, prompts are prefilled whole: with a seeded request, a prefill in chunks kills vLLM's CPU worker, whose
    generators cannot be set back ("CPU Generator does not use offset")."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_length, 8192)}
