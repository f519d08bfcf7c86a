"""What one process of the trainer trains: the model, its adapter, and the largest micro-batch."""

from classroom_rl.config.models import ModelConfig
from classroom_rl.config.train_rl import TrainRLConfig, pass_batch_size
from classroom_rl.config.values import MLP, PASS, PPO, SAME_STEP
from classroom_rl.memory.budget import AdapterJob, Launch, TrainerJob, critic_parameters, state_bytes
from classroom_rl.memory.placement import ENGINE_BYTES
from classroom_rl.memory.sources import read_shape
from classroom_rl.models.lora import adapter_shape
from classroom_rl.rollout.environment import most_rows


def trainer_job(config: TrainRLConfig, launch: Launch) -> TrainerJob:
    """What one process of the trainer trains. Raises a `NotEstimated` if the model's configuration cannot be loaded, or
    is of an unknown kind, and a `ConfigError` if the adapter does not fit the model."""
    train, model = config.train, config.policy_model
    shape, adapter = read_shape(model.model_name_or_path), _adapter(model)
    length = longest_row(config)
    return TrainerJob(
        shape=shape,
        launch=launch,
        number_bytes=ENGINE_BYTES[train.dtype],
        state_bytes=state_bytes(train.optimizer, launch.zero_stage),
        reference=train.has_reference and adapter is None,  # an adapter's reference is the model without it
        checkpointing=train.gradient_checkpointing,
        tokens=max(length, train.max_tokens_per_micro_batch or rows_of_micro_batch(config, launch.processes) * length),
        adapter=adapter,
        critic=critic_parameters(shape.hidden) if train.algorithm == PPO and train.ppo.head == MLP else 0,
        float32_gradients=train.grad_accum_fp32,
        in_4bit=model.load_in_4bit,
        strong_tutor=read_shape(train.distillation.model) if train.distillation.is_loaded else None,
        distributions=train.distillation.compares_distributions,
    )


def longest_row(config: TrainRLConfig) -> int:
    """The most tokens of a training sample. Each message of a student under training is one, behind its own prompt."""
    length = config.policy_model.vllm.max_length
    if config.policy_model is not config.teacher_model:
        return length
    return min(config.generation.max_tokens_in_conversation, length)


def mixes_corrections(config: TrainRLConfig) -> bool:
    """Whether corrections are training samples in the same steps as the conversations."""
    corrections = config.train.corrections
    return config.supervisor_model is not None and corrections.mode == SAME_STEP and corrections.weight > 0


def rows_of_micro_batch(config: TrainRLConfig, processes: int) -> int:
    """The maximum number of rows (training samples) in a micro-batch: its conversations, and its part of the
    corrections that are mixed into a step. Drafts are left out, because their number depends on the tutor. In an
    environment in which every message is a row, an episode counts as the maximum number of messages."""
    train = config.train
    batch, rows = train.number_of_problems_per_batch * train.num_samples_per_problem, train.per_device_train_batch_size
    rows *= most_rows(config) or 1
    batch *= most_rows(config) or 1
    if not mixes_corrections(config):
        return max(rows, rows_of_pass(config))
    conversations = max(1, batch // processes)
    corrections = max(1, (train.corrections.rows_per_batch or batch) // processes)
    parts = max(1, conversations // rows)
    return -(-(conversations + corrections) // parts)


def rows_of_pass(config: TrainRLConfig) -> int:
    """The number of rows in one step of a supervised pass; 0 without passes."""
    has_passes = config.supervisor_model is not None and config.train.corrections.mode == PASS
    return pass_batch_size(config.train) if has_passes else 0


def _adapter(model: ModelConfig) -> AdapterJob | None:
    if model.adapter is None:
        return None
    shape = adapter_shape("teacher_model.lora", model.model_name_or_path, model.adapter)
    return AdapterJob(shape.parameters, shape.inputs, model.adapter.dropout > 0)
