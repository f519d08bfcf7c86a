"""The strong tutor of on-policy distillation: it reads what the policy wrote, behind the prompt that the policy had or
behind one that tells it more. What its log-probs do to the advantages is in `grpo.py` (`GRPO.distilled`), and how its
distributions are compared with the policy's in `distributions.py`.

It reads a batch once, whatever number of passes follows. For each wanted token it keeps its last hidden state, from
which its head gives the whole distribution, or its most likely tokens, in the host's memory: the distributions
themselves would be some forty times as large as the hidden states.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from classroom_rl.config.train_rl import DistillationConfig, TrainRLConfig
from classroom_rl.rollout.chat_template import set_variables
from classroom_rl.rollout.environment import module_of
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.batch import Batch, Padding, Sample
from classroom_rl.trainer.collective import on_every_process
from classroom_rl.trainer.distributions import Head, most_likely, over_most_likely, over_vocabulary
from classroom_rl.trainer.log_probs import log_probs, log_probs_of_batch, padding_of
from classroom_rl.trainer.metrics import means_over_processes
from classroom_rl.trainer.model_loading import Policy, prepare_frozen
from classroom_rl.trainer.strong_tutor_api import StrongTutorApi, TokenRequest


@dataclass
class StrongTutor:
    """The model that the policy is distilled from.

    Attributes:
        model: distributed as the policy is; None if a server has it.
        api: the server's client; None if the model is loaded.
        padding: how the padding of its micro-batches is computed, or left out.
        pad_id: what prompts are padded with.
        informed_prompt: gives what it reads in place of an episode's prompt, or None if there is nothing for it; itself
            None if it reads what the policy read.
        options: how the policy is compared with it.
        vocabulary: how many tokens both models have.
    """

    model: Any
    api: StrongTutorApi | None
    padding: Padding
    pad_id: int
    informed_prompt: Callable[[Any], list[int] | None] | None
    options: DistillationConfig
    vocabulary: int
    _head: Any = None  # of the strong tutor
    _kept: Any = ()  # tensors of the wanted tokens of a batch, in the order of its micro-batches

    @classmethod
    def of(cls, config: TrainRLConfig, policy: Policy, accelerator: Accelerator) -> "StrongTutor | None":
        """The strong tutor that was loaded with the policy, or that a server has; None without one."""
        options, informed_prompt = config.train.distillation, None
        if options.model is None:
            return None
        if options.prompt_path is not None:
            tokenizer = deepcopy(policy.tokenizer)  # the policy's own is saved with it
            set_variables(tokenizer, config.teacher_model.vllm.chat_template_kwargs)
            informed_prompt = partial(module_of(config.environment, "config").informed_prompt, config, tokenizer)
        models = [model for model in (policy.model, policy.strong_tutor) if model is not None]
        vocabulary = min(model.config.get_text_config().vocab_size for model in models)
        padding = padding_of(models[-1], config.train.padding_free)
        model, api = None, None
        if options.is_loaded:
            model = prepare_frozen(policy.strong_tutor, accelerator)
        else:
            api = StrongTutorApi(options, vocabulary)
        return cls(model, api, padding, policy.tokenizer.pad_token_id, informed_prompt, options, vocabulary)

    def read(
        self,
        batch: Batch,
        samples: Sequence[Sample],
        records: Sequence[Trajectory],
        divisions: Sequence[Sequence[int]],
        accelerator: Accelerator,
    ) -> tuple[Batch, dict[str, float]]:
        """The batch with the strong tutor's log-probs, or with where it keeps its distributions, and figures for the
        log; all processes call this together.

        Args:
            samples: the rows of the batch.
            records: the episodes that they are from.
            divisions: the rows of each micro-batch.
        """
        strong_batch, figures = batch, {}
        if self.informed_prompt is not None:
            informed = _informed(
                samples, {record.id: (record.prompt_ids, self.informed_prompt(record)) for record in records}
            )
            share = sum(new is not old for new, old in zip(informed, samples, strict=True)) / len(samples)
            figures = means_over_processes({"distillation/informed": share})
            strong_batch = Batch.of(informed, self.pad_id, accelerator.device)
        if self.api is not None:
            scores = on_every_process(accelerator, partial(self._ask, strong_batch))
            return replace(batch, **scores), figures
        if not self.options.compares_distributions:
            scores = log_probs_of_batch(self.model, strong_batch, divisions, accelerator, self.padding)
            return replace(batch, strong_logps_BT=scores.logps_BT), figures
        self._kept = []
        for micro in map(strong_batch.take, divisions):
            with torch.no_grad():
                log_probs(self.model, micro, micro.wanted_BT, accelerator, self.padding, head_hook=self._keep)
        self._kept = [torch.cat(tensors) for tensors in zip(*self._kept, strict=True)]
        order, indices_BT = [row for rows in divisions for row in rows], torch.empty_like(batch.completion_ids_BT)
        indices_BT[order] = batch.wanted_BT[order].flatten().cumsum(0).view_as(indices_BT) - 1
        return replace(batch, strong_indices_BT=indices_BT), figures

    def _ask(self, read: Batch) -> dict[str, Tensor]:
        """What the server says of a batch, as tensors of it."""
        wanted_BT, requests = read.wanted_BT, []
        for row in range(len(wanted_BT)):
            prompt = read.prompt_ids_BP[row][read.prompt_mask_BP[row].bool()].tolist()
            indices = wanted_BT[row].nonzero().flatten().tolist()
            if indices:
                ids = prompt + read.completion_ids_BT[row, : indices[-1] + 1].tolist()
                requests.append(TokenRequest(ids, [len(prompt) + index for index in indices]))
        if not self.options.compares_distributions:
            logps_BT = torch.zeros_like(read.sampling_logps_BT)
            logps_BT[wanted_BT] = self.api.log_probs(requests).to(logps_BT)
            return {"strong_logps_BT": logps_BT}
        self._kept = self.api.most_likely(requests, self.options.top_k)
        indices_BT = wanted_BT.flatten().cumsum(0).view_as(wanted_BT) - 1
        return {"strong_indices_BT": indices_BT}

    def _keep(self, head: Head, hidden_NH: Tensor) -> None:
        self._head, top_k = head, self.options.top_k
        tensors = (hidden_NH,) if top_k is None else most_likely(head, hidden_NH, top_k, self.vocabulary)
        self._kept.append([tensor.cpu() for tensor in tensors])

    def comparison(self, micro: Batch) -> Callable[[Head, Tensor], Tensor] | None:
        """What gives the divergence of the policy from the strong tutor for each wanted token of a micro-batch, inside
        the policy's forward pass; None if no distributions are compared."""
        if micro.strong_indices_BT is None:
            return None
        indices, kl = micro.strong_indices_BT[micro.wanted_BT], self.options.kl
        tensors = [tensor[indices.cpu()].to(indices.device) for tensor in self._kept]
        if self.options.top_k is None:
            return partial(over_vocabulary, strong=self._head, strong_hidden_NH=tensors[0], kl=kl)
        return partial(over_most_likely, ids_NK=tensors[0], strong_logps=tensors[1], vocabulary=self.vocabulary, kl=kl)


def _informed(samples: Sequence[Sample], prompts: Mapping[str, tuple[list[int], list[int] | None]]) -> list[Sample]:
    """The samples behind the prompts that tell more, where there are such. A message that the policy wrote behind a
    prompt of its own stays as it is.

    Args:
        prompts: by the id of an episode its own prompt, and the one that tells more.
    """
    informed_samples = []
    for sample in samples:
        own_prompt, informed = prompts[sample.row.conversation_id]
        tells_more = informed is not None and sample.row.prompt_ids == own_prompt
        informed_samples.append(replace(sample, row=replace(sample.row, prompt_ids=informed)) if tells_more else sample)
    return informed_samples
