"""An engine on transformers, for any device: one process, no server, nothing but torch and transformers.

Requests that come at the same time are sampled in one batch. A batch takes as long as its longest message, so vLLM is
much faster where rollouts are many; this engine is for notebooks, small models and machines without vLLM.

`generate` decodes greedily; a logits processor turns its choice into a sample. It applies transformers' own warpers for
temperature, top-k and top-p, keeps the log-probs, and adds Gumbel noise to them, from a generator of each row's own.
The largest sum is a sample of the distribution (the Gumbel-max trick; Maddison, Tarlow and Minka 2014, section 2).
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
        limits: the most tokens of each message, at least 1.
        stop_ids: the tokens that end a message.

    Returns:
        For each prompt the sampled ids, a stop token included, and their log-probs.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), stop_ids[0], dtype=torch.long)
    attended = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # the padding stands at the left
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attended[row, width - len(prompt) :] = 1
    sampler = _Sampler(samplings, model.device)
    config = GenerationConfig(
        max_new_tokens=max(limits),
        do_sample=False,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
        return_dict_in_generate=False,
    )
    ours, model.generation_config = model.generation_config, GenerationConfig()  # its defaults are not asked for
    try:
        with torch.inference_mode():
            whole = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=attended.to(model.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([_Limits(limits, width)]),
            )
    finally:
        model.generation_config = ours
    sampled = whole[:, width:].tolist()
    logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
    return [_cut(*row, limit, stop_ids) for *row, limit in zip(sampled, logprobs, limits, strict=True)]


def _cut(ids: list[int], logprobs: list[float], limit: int, stop_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """A row up to its end: what follows is padding until the longest row ended."""
    end = next((place + 1 for place, token in enumerate(ids[:limit]) if token in stop_ids), min(limit, len(ids)))
    return ids[:end], logprobs[:end]


class _Limits:
    """Ends each row at its own limit."""

    def __init__(self, limits: Sequence[int], prompt_width: int):
        self._limits, self._width = limits, prompt_width

    def __call__(self, input_ids: "torch.Tensor", scores: object, **_: object) -> "torch.Tensor":
        import torch

        return torch.tensor(self._limits, device=input_ids.device) <= input_ids.shape[1] - self._width


class _Sampler:
    """The logits processor that samples.

    Attributes:
        logprobs: for each position, the log-probs of the sampled tokens, of shape (rows,).
    """

    def __init__(self, samplings: Sequence[Sampling], device: "torch.device"):
        import torch

        self.logprobs: list[torch.Tensor] = []
        self._generators: dict[int, torch.Generator] = {}
        rows: dict[tuple[float, int, float], list[int]] = defaultdict(list)
        for row, each in enumerate(samplings):
            if each.temperature == 0:
                continue
            rows[each.temperature, each.top_k, each.top_p].append(row)
            self._generators[row] = torch.Generator(device)
            if each.seed is None:
                self._generators[row].seed()
            else:
                self._generators[row].manual_seed(each.seed)
        self._warpers = [(torch.tensor(group, device=device), _warpers(*kind)) for kind, group in rows.items()]

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        """Log-probs with noise, of shape (rows, vocabulary); their largest is the sample."""
        import torch

        scores = scores.float()
        for group, warpers in self._warpers:
            scores[group] = warpers(input_ids[group], scores[group])
        logprobs = scores.log_softmax(dim=-1)
        noisy = logprobs.clone()
        for row, generator in self._generators.items():
            waits = torch.empty_like(noisy[row]).exponential_(generator=generator)
            noisy[row] -= waits.clamp_min(torch.finfo(waits.dtype).tiny).log()
        self.logprobs.append(logprobs.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0])
        return noisy


def _warpers(temperature: float, top_k: int, top_p: float) -> "LogitsProcessorList":
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    found = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k > 0:
        found.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        found.append(TopPLogitsWarper(top_p))
    return found


_MODEL = "HfEngine's model"
_EXTRA = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub")
_GATHER_S = 0.005
"""How long a batch waits for further requests."""
_UNLIMITED = 1_000_000


@dataclass(frozen=True)
class _Request:
    prompt_ids: list[int]
    sampling: Sampling
    answer: "asyncio.Future[Completion]"


class HfEngine:
    """A model on transformers: a `TokenEngine` and a `ChatEngine`.

    A message depends on its prompt, sampling and seed; on the other messages of its batch only through the rounding of
    floating-point sums. Weights are read from safetensors, and no code of the model's authors is run.

    Args:
        model: a folder, a name on the Hub, or a loaded model.
        tokenizer: that of a loaded model; read from its folder if None.
        device: such as cuda, mps or cpu; None takes the first of these that is there. A loaded model stays where it is.
        dtype: such as float32 or bfloat16; None takes the checkpoint's, or float32 on a CPU.
        batch_size: the most messages that are sampled at a time.

    Attributes:
        tokenizer: the model's tokenizer.
        frame: how its chat template frames a reply between two assistant messages.
        policy, weights: the version and a name of the weights.
        max_length: the model's context in tokens.

    Raises:
        ConfigError: if the extra `hf` is not installed, or the model or its tokenizer cannot be loaded, or has no chat
            template that holds a conversation.
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
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(_MODEL, self.model_name)
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

        The log-probs are those of the distribution that is sampled from, after temperature, top-k and top-p. At
        temperature 0 the most probable token is taken, with its log-prob at temperature 1.

        Raises:
            ContextOverflow: if the prompt leaves no room in the model's context.
            EngineFailure: if the model raises an error, such as one about memory, or was shut down.
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
        """Model and version of transformers."""
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
        """Sample batches until nobody waits."""
        while self._waiting:
            await asyncio.sleep(_GATHER_S)
            self._waiting = [request for request in self._waiting if not request.answer.done()]
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            if not batch:
                continue
            try:
                found = await asyncio.to_thread(self._sample, batch)
            except Exception as error:
                reason = error if isinstance(error, EngineFailure) else _failure(self.model_name, error)
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(reason)
                continue
            for request, completion in zip(batch, found, strict=True):
                if not request.answer.done():
                    request.answer.set_result(completion)

    def _sample(self, batch: Sequence[_Request]) -> list[Completion]:
        self.check_alive()
        limits = [min(each.sampling.max_tokens, self.max_length - len(each.prompt_ids)) for each in batch]
        found = sample_batch(
            self._model,
            [each.prompt_ids for each in batch],
            [each.sampling for each in batch],
            limits,
            self._stop_ids,
        )
        return [self._completion(ids, logprobs) for ids, logprobs in found]

    def _completion(self, ids: list[int], logprobs: list[float]) -> Completion:
        ended = ids[-1] in self._stop_ids
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        return Completion(tuple(ids), tuple(logprobs), text, ended, self.policy, weights=self.weights)


def _failure(name: str, error: Exception) -> EngineFailure:
    failure = EngineFailure(f"The engine of {name} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _require_extra() -> None:
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"HfEngine needs {', '.join(missing)}, not installed here: in this project's folder, pip install '.[hf]'. "
            "ApiEngine needs none of them."
        )


def _load(name: str, device: str | None, dtype: str | None) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    from classroom_rl.models.pretrained import check_model

    check_model(_MODEL, name)
    device = device or _first_device()
    kind = dtype or ("float32" if device == "cpu" else "auto")
    if kind != "auto" and not isinstance(getattr(torch, kind, None), torch.dtype):
        raise ConfigError(f"dtype is {dtype}; torch has no such type. Common ones: float32, bfloat16, float16.")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=kind if kind == "auto" else getattr(torch, kind),
            trust_remote_code=False,
            use_safetensors=True,
        )
        return model.to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_MODEL}: {name} cannot be loaded on {device}: {error}") from error


def _first_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _stop_ids(model: "PreTrainedModel", frame: ReplyFrame) -> list[int]:
    """The end-of-turn token of the chat template, and the end tokens in the model's generation config."""
    named = getattr(model.generation_config, "eos_token_id", None) or []
    return sorted({frame.turn_end_id, *([named] if isinstance(named, int) else named)})
