"""TRL's GRPO trainer with the classroom as its environment."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

from config.checks import reward_weights
from config.train_rl_model import TrainRLConfig
from src.classroom.record import ConversationRecord
from src.models.lora import peft_config
from src.models.policy_folder import write_whole
from src.models.policy_version import PolicyVersion
from src.models.pretrained import check_model, load_tokenizer
from src.rollout.problem import Problem
from src.rollout.registry import environment_of
from src.server.client import ClassroomClient
from src.training.checkpoints import UNFINISHED, ConfiguredRates, OrderOfEpoch, complete_checkpoint, remove_unfinished
from src.training.collective import on_main_process
from src.training.gpu_sharing import SharedGpus
from src.training.judge_monitor import JudgeGuard
from src.training.model_loading import device_for_weights, models_go_to
from src.training.resume import write_config
from src.training.sample_batch import ClassroomRollout, reward
from src.training.server_assignment import OwnServer
from src.training.sharded_save import save_adapter_together, save_together, weight_bytes
from src.training.weight_publisher import WeightPublisher


class ClassroomGRPOTrainer(ConfiguredRates, GRPOTrainer):
    """Publishes weights, samples conversations over HTTP, which come with their rewards, and trains on exactly the tokens
    that were sampled.

    Args:
        arguments: TRL's, from `src.grpo.config.grpo_config`.
        problems: the training problems.
        client, server: of this process: who plays its conversations, and whether it publishes weights there.
        run_folder: shared with the server.
        run_id: names this run's policies; the same after a resume.
        gpus: whether they are shared with the server.

    Attributes:
        publisher: knows the policy version that the server holds.
        has_adapter: whether an adapter is trained in place of the model's own weights.
    """

    def __init__(
        self,
        config: TrainRLConfig,
        arguments: GRPOConfig,
        problems: Sequence[Problem],
        client: ClassroomClient,
        server: OwnServer,
        run_folder: Path,
        run_id: str,
        gpus: SharedGpus,
        callbacks: Sequence[Any] = (),
    ):
        self._config = config
        self._saving_checkpoint = False
        self.has_adapter = config.teacher_model.adapter is not None
        rollout = ClassroomRollout(
            {problem.id: problem for problem in problems},
            client,
            run_folder,
            run_id,
            config.seed,
            reward_weights(config),
            config.judge_model.max_failed_share,
            JudgeGuard(config, client, run_folder),
            environment_of(config).batch_metrics,
        )
        model = config.teacher_model.model_name_or_path
        check_model("teacher_model.model_name_or_path", model)
        with models_go_to(device_for_weights()):
            super().__init__(
                model=model,
                args=arguments,
                reward_funcs=reward,
                rollout_func=rollout,
                train_dataset=Dataset.from_dict({"prompt": [problem.id for problem in problems]}),
                processing_class=load_tokenizer("teacher_model.model_name_or_path", model, padding_side="left"),
                callbacks=list(callbacks),
                peft_config=peft_config(config.teacher_model.lora) if self.has_adapter else None,
            )
        self._correct_mismatch = config.train.importance_sampling_correction
        self._shuffle_rewards = config.train.shuffle_rewards
        self.gpus = gpus
        self.publisher = WeightPublisher(self, client, server, run_folder, run_id, config.train.keep_published_policies)
        # TRL reads the engine's log-probs only with `use_vllm`, and would start an engine of its own if it were set
        # before; here the engine is the server's, and `vllm_generation` is what publishes weights to it.
        self.use_vllm = True
        self.vllm_generation = self.publisher
        self._last_loaded_step = -1

    @property
    def policy(self) -> PolicyVersion:
        """The version that was published last, and that the next batch has to be sampled from."""
        return self.publisher.policy

    def record_metric(self, name: str, value: float) -> None:
        """Log a number with this step's metrics; it is averaged over processes."""
        self._log_metric(name, value)

    def show_conversations(self, records: Sequence[ConversationRecord]) -> None:
        """Send a batch's conversations to Weights & Biases as a table, if it is on."""
        if "wandb" not in self.args.report_to or not self.accelerator.is_main_process:
            return
        import wandb

        table = wandb.Table(columns=["step", "conversation", "problem", "transcript", "reward"])
        for record in records:
            transcript = "\n".join(f"{turn.role}: {turn.text}" for turn in record.turns)
            table.add_data(record.step, record.id, record.problem, transcript, record.reward)
        wandb.log({"conversations": table}, commit=False)

    def save_whole(self, folder: Path) -> None:
        """Save the model, an adapter merged into it, into a folder that gets its name once it is complete; all ranks
        take part."""
        save_together(self, lambda save: write_whole(folder, save, weight_bytes(self.model)))

    def save_adapter(self, folder: Path) -> None:
        """Save the adapter alone into a folder that gets its name once it is complete; all ranks take part."""
        save_adapter_together(self, lambda save: write_whole(folder, save))

    def save_progress(self) -> None:
        """Leave a checkpoint of the steps made so far, unless there is one already; all ranks take part."""
        checkpoint = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.state.global_step > 0 and not checkpoint.exists():
            self._save_checkpoint(self.model_wrapped, None)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / UNFINISHED) if self._saving_checkpoint else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As TRL does, but under another name until it is complete; what fails leaves nothing behind."""
        folder, keep = Path(self.args.output_dir), self.args.save_total_limit
        on_main_process(self.accelerator, lambda: remove_unfinished(folder))
        self._saving_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            on_main_process(self.accelerator, lambda: self._complete_checkpoint(folder, keep))
        except BaseException:
            if self.accelerator.is_main_process:
                remove_unfinished(folder)
            raise
        finally:
            self._saving_checkpoint = False

    def _complete_checkpoint(self, folder: Path, keep: int) -> None:
        step = self.state.global_step
        write_config(folder / UNFINISHED / f"{PREFIX_CHECKPOINT_DIR}-{step}", self._config)
        complete_checkpoint(folder, step, keep)

    def _get_train_sampler(self, dataset: Any = None) -> OrderOfEpoch:
        sampler = super()._get_train_sampler(dataset)
        steps_in_epoch = len(sampler) // (
            sampler.mini_repeat_count * sampler.batch_size * self.args.steps_per_generation
        )
        return OrderOfEpoch(sampler, lambda: self.state.global_step // max(steps_in_epoch, 1))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and tokenizer, of an adapter that alone; all ranks take part."""
        save_trained = save_adapter_together if self.has_adapter else save_together
        save_trained(self, lambda save: save(Path(output_dir or self.args.output_dir)))

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """As TRL does, but what is only scored is scored without an adapter's dropout: as the engine sampled it."""
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*arguments, **named)
        with _without_dropout(self.model):
            return super()._get_per_token_logps_and_entropies(*arguments, **named)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"] * output["tool_mask"]
        self._measure_mismatch(output["old_per_token_logps"], output["sampling_per_token_logps"], mask)
        if not self._correct_mismatch:
            output["importance_sampling_ratio"] = torch.ones_like(output["importance_sampling_ratio"])
        return output

    def _measure_mismatch(self, trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> None:
        """How far the trainer's log-probs are from the engine's on the sampled tokens: mean |Δ|, and the k3 estimate
        of KL(engine ‖ trainer) (Schulman, "Approximating KL divergence", 2020)."""
        delta = (trained - sampled)[mask.bool()]
        k3 = torch.exp(delta) - 1 - delta
        sums = torch.stack([delta.abs().sum(), k3.sum(), torch.tensor(delta.numel(), device=delta.device)])
        total = self.accelerator.gather(sums.unsqueeze(0)).sum(dim=0)
        self._metrics["train"]["mismatch/mean_abs_logprob_diff"].append((total[0] / total[2]).item())
        self._metrics["train"]["mismatch/k3_kl"].append((total[1] / total[2]).item())

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*arguments, **named)
        if not self._shuffle_rewards:
            return rewards
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        return rewards[torch.randperm(len(rewards), generator=generator)]


@contextmanager
def _without_dropout(model: torch.nn.Module) -> Iterator[None]:
    active = [each for each in model.modules() if isinstance(each, torch.nn.Dropout) and each.training]
    for each in active:
        each.eval()
    try:
        yield
    finally:
        for each in active:
            each.train()
