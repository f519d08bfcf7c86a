"""TRL's GRPO trainer with an environment on a server. The loss: `_compute_loss` in `trl_hooks.py`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig

from classroom_rl.config.checks import reward_weights
from classroom_rl.config.train_rl import TrainRLConfig, pass_batch_size
from classroom_rl.config.values import PASS
from classroom_rl.models.lora import peft_config
from classroom_rl.models.policy_folder import write_whole
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.pretrained import check_model, load_tokenizer
from classroom_rl.results.corrections import tokenizer_fingerprint
from classroom_rl.results.supervision_summary import REVIEW_COLUMNS, review_rows
from classroom_rl.rollout.chat_template import encode_reply
from classroom_rl.rollout.environment import environment_of
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.batch_builder import RowPlanner
from classroom_rl.trainer.checkpoints import step_of
from classroom_rl.trainer.corrections import CorrectionPasses, CorrectionSet
from classroom_rl.trainer.curriculum import Curriculum
from classroom_rl.trainer.group_variance import GroupFilter
from classroom_rl.trainer.grpo.trl_hooks import TrlHooks
from classroom_rl.trainer.judge_monitor import JudgeMonitor
from classroom_rl.trainer.model_loading import device_for_weights, models_go_to
from classroom_rl.trainer.sample_batch import ClassroomRollout, Planner, reward_column
from classroom_rl.trainer.session import TrainingSession
from classroom_rl.trainer.sharded_save import save_adapter_together, save_together, weight_bytes
from classroom_rl.trainer.trainer_hooks import AtomicCheckpoints, ResumedTrainer
from classroom_rl.trainer.weight_publisher import WeightPublisher


class ClassroomGRPOTrainer(AtomicCheckpoints, ResumedTrainer, TrlHooks):
    """Publishes weights, has a server sample and score episodes, and trains on exactly the tokens that were sampled.

    Args:
        session: configuration, problems, server and run folder.
        arguments: TRL's arguments, from `classroom_rl.trainer.grpo.config.grpo_config`.

    Attributes:
        gpus: puts the server's engines to sleep and wakes them, if trainer and server share GPUs.
        publisher: publishes the weights, and knows their policy version.
        has_adapter: whether an adapter is trained instead of the model's own weights.
        corrections: what the supervisor corrected; None without one.
    """

    corrections: CorrectionSet | None = None

    def __init__(self, session: TrainingSession, arguments: GRPOConfig):
        config = self.run_config = session.config
        self.contents = session.contents
        self.gpus = session.gpus
        self.has_adapter = config.teacher_model.adapter is not None
        self.correct_mismatch = config.train.importance_sampling_correction
        self.shuffle_rewards = config.train.shuffle_rewards
        self.correction_weight = config.train.corrections.weight
        groups = GroupFilter.of(config, [problem.id for problem in session.problems])
        self.tokens_per_micro_batch = config.train.max_tokens_per_micro_batch
        planner = self.planner_of(config)
        rollout = ClassroomRollout(
            {problem.id: problem for problem in session.problems},
            session.client,
            session.run_folder,
            session.run_id,
            config.seed,
            reward_weights(config),
            config.judge_model.max_failed_share,
            JudgeMonitor(config, session.client, session.run_folder),
            environment_of(config).batch_metrics,
            planner,
            config.supervisor_model is not None,
            self._keep_corrections,
            groups,
            self._curriculum_of(session),
            config.train.max_staleness > 0,
        )
        model = config.teacher_model.model_name_or_path
        check_model("teacher_model.model_name_or_path", model)
        with models_go_to(device_for_weights()):
            super().__init__(
                model=model,
                args=arguments,
                reward_funcs=reward_column,
                rollout_func=rollout,
                train_dataset=Dataset.from_dict({"prompt": [problem.id for problem in session.problems]}),
                processing_class=load_tokenizer("teacher_model.model_name_or_path", model, padding_side="left"),
                peft_config=peft_config(config.teacher_model.lora) if self.has_adapter else None,
            )
        own = (session.client, session.server, session.run_folder, session.run_id)
        self.publisher = WeightPublisher(self, *own, config.train)
        self.use_engine_of_server(self.publisher)
        self.corrections = self._open_corrections(session)
        if config.train.corrections.mode == PASS:
            self.add_callback(self._passes())

    def planner_of(self, config: TrainRLConfig) -> Planner | None:
        """What adds a column to each batch; None if there is nothing to add."""
        planner = RowPlanner(config)
        return planner if planner.is_needed else None

    def _curriculum_of(self, session: TrainingSession) -> Curriculum | None:
        config, ids = session.config, [problem.id for problem in session.problems]
        if not config.dataset.curriculum:
            return None
        train = config.train
        return Curriculum(ids, train.num_samples_per_problem, config.seed, session.run_folder, train.mu)

    def _open_corrections(self, session: TrainingSession) -> CorrectionSet | None:
        config, checkpoint = self.run_config, session.checkpoint
        if config.supervisor_model is None:
            return None
        tokenizer = self.processing_class
        return CorrectionSet(
            session.run_folder,
            config.train.corrections.capacity,
            tokenizer_fingerprint(tokenizer),
            partial(encode_reply, tokenizer),
            None if checkpoint is None else Path(checkpoint),
            step_of(checkpoint),
        )

    def _passes(self) -> CorrectionPasses:
        train = self.run_config.train
        batch, seed = pass_batch_size(train), self.run_config.seed
        return CorrectionPasses(self, self.corrections, train.corrections, batch, train.mu, seed)

    def _keep_corrections(self, step: int, records: Sequence[Trajectory]) -> None:
        """Add a batch's corrections to the set, and log its size."""
        if self.corrections is None:
            return
        self.corrections.add(self.accelerator, step, records)
        if self.run_config.train.corrections.mode == PASS:
            self.record_metric("corrections/waiting", self.corrections.count)
            self.record_metric("corrections/passes", self.corrections.cursor.passes)

    def write_checkpoint_files(self, folder: Path) -> None:
        """Add to a checkpoint what the training needs besides TRL's files."""
        super().write_checkpoint_files(folder)
        if self.corrections is not None:
            self.corrections.save_cursor(folder)

    @property
    def policy(self) -> PolicyVersion:
        """The version that was published last; the next batch is sampled from it."""
        return self.publisher.policy

    def show_conversations(self, records: Sequence[Trajectory]) -> None:
        """Send a batch's conversations, and the supervisor's reviews, to Weights & Biases as tables, if it is
        configured."""
        if "wandb" not in self.args.report_to or not self.accelerator.is_main_process:
            return
        import wandb

        table = wandb.Table(columns=["step", "conversation", "problem", "transcript", "reward"])
        for record in records:
            transcript = "\n".join(f"{turn.role}: {turn.text}" for turn in record.turns)
            table.add_data(record.step, record.id, record.problem, transcript, record.reward)
        tables = {"conversations": table}
        if reviews := review_rows(records):
            tables["reviews"] = wandb.Table(columns=list(REVIEW_COLUMNS), data=[list(row) for row in reviews])
        wandb.log(tables, commit=False)

    def save_whole(self, folder: Path) -> None:
        """Save the model, with an adapter merged in, into a folder that gets its name once it is complete; all ranks
        call this together."""
        save_together(self, lambda save: write_whole(folder, save, weight_bytes(self.model)))

    def save_adapter(self, folder: Path) -> None:
        """Save only the adapter into a folder that gets its name once it is complete; all ranks call this together."""
        save_adapter_together(self, lambda save: write_whole(folder, save))
