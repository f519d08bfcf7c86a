"""The strong tutor of on-policy distillation: it reads what the policy wrote, behind the prompt that the policy had or
behind one that tells it more. What its log-probs do to the advantages is in `grpo.py` (`GRPO.distilled`)."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from accelerate import Accelerator

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.rollout.chat_template import set_variables
from classroom_rl.rollout.environment import module_of
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.batch import Batch, Padding, Sample
from classroom_rl.trainer.log_probs import log_probs_of_batch, padding_of
from classroom_rl.trainer.metrics import means_over_processes
from classroom_rl.trainer.model_loading import Policy, prepare_frozen


@dataclass(frozen=True)
class StrongTutor:
    """The model that the policy is distilled from.

    Attributes:
        model: distributed as the policy is.
        padding: how the padding of its micro-batches is computed, or left out.
        pad_id: what prompts are padded with.
        informed_prompt: gives what it reads in place of an episode's prompt, or None if there is nothing for it; itself
            None if it reads what the policy read.
    """

    model: Any
    padding: Padding
    pad_id: int
    informed_prompt: Callable[[Any], list[int] | None] | None

    @classmethod
    def of(cls, config: TrainRLConfig, policy: Policy, accelerator: Accelerator) -> "StrongTutor | None":
        """The strong tutor that was loaded with the policy; None without one."""
        model, informed_prompt = policy.strong_tutor, None
        if model is None:
            return None
        if config.train.distillation.prompt_path is not None:
            tokenizer = deepcopy(policy.tokenizer)  # the policy's own is saved with it
            set_variables(tokenizer, config.teacher_model.vllm.chat_template_kwargs)
            informed_prompt = partial(module_of(config.environment, "config").informed_prompt, config, tokenizer)
        padding = padding_of(model, config.train.padding_free)
        return cls(prepare_frozen(model, accelerator), padding, policy.tokenizer.pad_token_id, informed_prompt)

    def read(
        self,
        batch: Batch,
        samples: Sequence[Sample],
        records: Sequence[Trajectory],
        divisions: Sequence[Sequence[int]],
        accelerator: Accelerator,
    ) -> tuple[Batch, dict[str, float]]:
        """The batch with the strong tutor's log-probs, and figures for the log; all processes call this together.

        Args:
            samples: the rows of the batch.
            records: the episodes that they are from.
            divisions: the rows of each micro-batch.
        """
        read, figures = batch, {}
        if self.informed_prompt is not None:
            informed = _informed(samples, {each.id: (each.prompt_ids, self.informed_prompt(each)) for each in records})
            share = sum(one is not other for one, other in zip(informed, samples, strict=True)) / len(samples)
            figures = means_over_processes({"distillation/informed": share})
            read = Batch.of(informed, self.pad_id, accelerator.device)
        found = log_probs_of_batch(self.model, read, divisions, accelerator, self.padding)
        return replace(batch, strong_logps_BT=found.logps_BT), figures


def _informed(samples: Sequence[Sample], prompts: Mapping[str, tuple[list[int], list[int] | None]]) -> list[Sample]:
    """The samples behind the prompts that tell more, where there are such. A message that the policy wrote behind a
    prompt of its own stays as it is.

    Args:
        prompts: by the id of an episode its own prompt, and the one that tells more.
    """
    found = []
    for sample in samples:
        own, informed = prompts[sample.row.conversation_id]
        tells_more = informed is not None and sample.row.prompt_ids == own
        found.append(replace(sample, row=replace(sample.row, prompt_ids=informed)) if tells_more else sample)
    return found
