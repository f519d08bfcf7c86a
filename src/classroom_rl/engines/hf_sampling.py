"""Samples a batch of messages with transformers' `generate`, each with its own sampling, seed and limit.

`generate` decodes greedily; a logits processor turns its choice into a sample. It applies transformers' own warpers for
temperature, top-k and top-p, keeps the log-probs, and adds Gumbel noise to them, from a generator of each row's own.
The largest sum is a sample of the distribution (the Gumbel-max trick; Maddison, Tarlow and Minka 2014, section 2).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from classroom_rl.rollout.engine import Sampling

if TYPE_CHECKING:
    import torch
    from transformers import LogitsProcessorList, PreTrainedModel


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
