"""An engine on transformers, for any device: one process, no server, only torch and transformers.

Requests that arrive at the same time are sampled in one batch. A batch takes as long as its longest message, so vLLM is
much faster for many rollouts; this engine is for notebooks, small models and machines without vLLM.

`generate` of transformers decodes greedily; a logits processor turns its choice into a sample. It applies transformers'
own warpers for temperature, top-k and top-p, records the log-probs, and adds Gumbel noise to them, from a separate
random generator for each sequence. The token with the largest sum is a sample of the distribution (the Gumbel-max
trick; Maddison, Tarlow and Minka 2014, section 2).
"""

import asyncio
import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.errors import ConfigError, ContextOverflow, EngineFailure
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message, ReplyFrame, encode_chat
from classroom_rl.rollout.engine import Completion, EngineHealth, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase


def sample_batch(
    model: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    limits: Sequence[int],
    stop_ids: Sequence[int],
) -> list[tuple[list[int], list[float]]]:
    """Sample one message after each prompt.

    Args:
        prompts: token ids, of any lengths.
        limits: the maximum number of tokens of each message, at least 1.
        stop_ids: the tokens that end a message.

    Returns:
        For each prompt, the sampled ids, including a stop token, and their log-probs.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), stop_ids[0], dtype=torch.long)
    attention_mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padding on the left, as `generate` needs it
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    sampler = _GumbelSampler(samplings, model.device)
    config = GenerationConfig(
        max_new_tokens=max(limits),
        do_sample=False,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
        return_dict_in_generate=False,
    )
    # `generate` fills in unset options from the model's own config, which may change the sampling.
    model_config, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.inference_mode():
            sequences = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=attention_mask.to(model.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([_LengthLimits(limits, width)]),
            )
    finally:
        model.generation_config = model_config
    sampled = sequences[:, width:].tolist()
    logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
    rows = zip(sampled, logprobs, limits, strict=True)
    return [_cut(row_ids, row_logprobs, limit, stop_ids) for row_ids, row_logprobs, limit in rows]


def _cut(ids: list[int], logprobs: list[float], limit: int, stop_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """A sequence up to its end. The rest is padding, up to the end of the longest sequence in the batch."""
    end = next((index + 1 for index, token in enumerate(ids[:limit]) if token in stop_ids), min(limit, len(ids)))
    return ids[:end], logprobs[:end]


class _LengthLimits:
    """A stopping criterion that ends each sequence at its own limit."""

    def __init__(self, limits: Sequence[int], prompt_width: int):
        self._limits, self._width = limits, prompt_width

    def __call__(self, input_ids: "torch.Tensor", scores: object, **_: object) -> "torch.Tensor":
        import torch

        return torch.tensor(self._limits, device=input_ids.device) <= input_ids.shape[1] - self._width


class _GumbelSampler:
    """The logits processor that samples.

    Attributes:
        logprobs: for each position, the log-probs of the sampled tokens, of shape (batch,).
    """

    def __init__(self, samplings: Sequence[Sampling], device: "torch.device"):
        import torch

        self.logprobs: list[torch.Tensor] = []
        self._generators: dict[int, torch.Generator] = {}
        rows: dict[tuple[float, int, float], list[int]] = defaultdict(list)
        for row, sampling in enumerate(samplings):
            if sampling.temperature == 0:  # greedy: neither warpers nor noise
                continue
            rows[sampling.temperature, sampling.top_k, sampling.top_p].append(row)
            self._generators[row] = torch.Generator(device)
            if sampling.seed is None:
                self._generators[row].seed()
            else:
                self._generators[row].manual_seed(sampling.seed)
        self._warpers = [(torch.tensor(group, device=device), _warpers(*options)) for options, group in rows.items()]

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        """Log-probs with noise, of shape (batch, vocabulary); the largest one of each row is the sample."""
        import torch

        scores = scores.float()
        for group, warpers in self._warpers:
            scores[group] = warpers(input_ids[group], scores[group])
        logprobs = scores.log_softmax(dim=-1)
        noisy = logprobs.clone()
        for row, generator in self._generators.items():
            # -log of an Exponential(1) variable is Gumbel noise. Clamped, because the log of 0 would be infinite.
            exponential = torch.empty_like(noisy[row]).exponential_(generator=generator)
            noisy[row] -= exponential.clamp_min(torch.finfo(exponential.dtype).tiny).log()
        self.logprobs.append(logprobs.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0])
        return noisy


def _warpers(temperature: float, top_k: int, top_p: float) -> "LogitsProcessorList":
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


_MODEL_LABEL = "HfEngine's model"
_REQUIRED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub")
_BATCH_WAIT_S = 0.005
"""How long a batch waits for more requests, in seconds."""
_UNLIMITED = 1_000_000
"""The context length of a model whose configuration does not name one."""


@dataclass(frozen=True)
class _Request:
    prompt_ids: list[int]
    sampling: Sampling
    answer: "asyncio.Future[Completion]"


class HfEngine:
    """A model on transformers: a `TokenEngine` and a `ChatEngine`.

    A message depends on its prompt, sampling options and seed; the other messages of its batch influence it only
    through the rounding of floating-point sums. Weights are read from safetensors, and no custom model code is run
    (`trust_remote_code`).

    Args:
        model: a folder, a name on the Hub, or a loaded model.
        tokenizer: the tokenizer of a loaded model; None reads it from the model's folder.
        device: such as cuda, mps or cpu; None takes the first of these that is available. A loaded model stays on its
            device.
        dtype: such as float32 or bfloat16; None takes the checkpoint's, or float32 on a CPU.
        batch_size: the maximum number of messages that are sampled at a time.

    Attributes:
        tokenizer: the model's tokenizer.
        frame: the chat template's tokens around a reply between two assistant messages.
        policy: the version of the weights.
        weights: a name of the weights.
        max_length: the model's context length in tokens.

    Raises:
        ConfigError: if the extra `hf` is not installed, if the model or its tokenizer cannot be loaded, or if its chat
            template does not support conversations.
    """

    def __init__(
        self,
        model: "str | Path | PreTrainedModel",
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int = 32,
    ):
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}; it must be an integer of at least 1.")
        _require_extra()
        from classroom_rl.models.pretrained import context_length, load_tokenizer

        loaded = None if isinstance(model, str | Path) else model
        self.model_name = str(model) if loaded is None else str(loaded.name_or_path)
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(_MODEL_LABEL, self.model_name)
        self.frame = ReplyFrame(self.tokenizer)
        self._model = loaded if loaded is not None else _load(self.model_name, device, dtype)
        self._model.eval()
        self._stop_ids = _stop_ids(self._model, self.frame)
        self._batch_size = batch_size
        self._waiting: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None
        self.max_length = context_length(self._model.config) or _UNLIMITED
        self.policy = PolicyVersion()
        self.weights = f"as in {self.model_name}"

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample the message after `prompt_ids`.

        The log-probs are those of the sampling distribution, after temperature, top-k and top-p. At temperature 0 the
        most probable token is taken, with its log-prob at temperature 1.

        Raises:
            ContextOverflow: if the prompt leaves no room in the model's context.
            EngineFailure: if the model raises an error, such as out of memory, or the engine was shut down.
        """
        self.check_alive()
        room = self.max_length - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"A prompt of {len(prompt_ids)} tokens does not fit into the context of {self.model_name}, which has "
                f"{self.max_length}."
            )
        request = _Request(list(prompt_ids), sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await request.answer

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Sample the assistant message that follows `messages`. Raises the same errors as `generate`."""
        return await self.generate(encode_chat(self.tokenizer, messages), sampling)

    def health(self) -> EngineHealth:
        """The model and the version of transformers."""
        import transformers

        self.check_alive()
        return EngineHealth(
            model=self.model_name, engine="transformers", engine_version=transformers.__version__, pids=[]
        )

    def check_alive(self) -> None:
        """Raise an `EngineFailure` if the engine was shut down."""
        if self._model is None:
            raise EngineFailure(f"The engine of {self.model_name} was shut down.")

    def shutdown(self) -> None:
        """Free the model."""
        self._model = None

    async def _work(self) -> None:
        """Sample batches until no request waits."""
        while self._waiting:
            await asyncio.sleep(_BATCH_WAIT_S)
            self._waiting = [request for request in self._waiting if not request.answer.done()]  # drop cancelled ones
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            if not batch:
                continue
            try:
                completions = await asyncio.to_thread(self._sample, batch)
            except Exception as error:
                reason = error if isinstance(error, EngineFailure) else _failure(self.model_name, error)
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(reason)
                continue
            for request, completion in zip(batch, completions, strict=True):
                if not request.answer.done():
                    request.answer.set_result(completion)

    def _sample(self, batch: Sequence[_Request]) -> list[Completion]:
        self.check_alive()
        limits = [min(request.sampling.max_tokens, self.max_length - len(request.prompt_ids)) for request in batch]
        samples = sample_batch(
            self._model,
            [request.prompt_ids for request in batch],
            [request.sampling for request in batch],
            limits,
            self._stop_ids,
        )
        return [self._completion(ids, logprobs) for ids, logprobs in samples]

    def _completion(self, ids: list[int], logprobs: list[float]) -> Completion:
        ended = ids[-1] in self._stop_ids
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        return Completion(tuple(ids), tuple(logprobs), text, ended, self.policy, weights=self.weights)


def _failure(name: str, error: Exception) -> EngineFailure:
    failure = EngineFailure(f"The engine of {name} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _require_extra() -> None:
    missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"HfEngine needs {', '.join(missing)}, not installed here: in this project's folder, pip install '.[hf]'. "
            "ApiEngine needs none of them."
        )


def _load(name: str, device: str | None, dtype: str | None) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    from classroom_rl.models.pretrained import check_model

    check_model(_MODEL_LABEL, name)
    device = device or _first_device()
    dtype_name = dtype or ("float32" if device == "cpu" else "auto")
    if dtype_name != "auto" and not isinstance(getattr(torch, dtype_name, None), torch.dtype):
        raise ConfigError(f"dtype is {dtype}; torch has no such type. Common ones: float32, bfloat16, float16.")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype_name if dtype_name == "auto" else getattr(torch, dtype_name),
            trust_remote_code=False,
            use_safetensors=True,
        )
        return model.to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_MODEL_LABEL}: {name} cannot be loaded on {device}: {error}") from error


def _first_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _stop_ids(model: "PreTrainedModel", frame: ReplyFrame) -> list[int]:
    """The end-of-turn token of the chat template, and the end tokens in the model's generation config."""
    eos_ids = getattr(model.generation_config, "eos_token_id", None) or []
    return sorted({frame.turn_end_id, *([eos_ids] if isinstance(eos_ids, int) else eos_ids)})
