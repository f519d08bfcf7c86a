"""Schema of `vllm_server.py` and `train_rl.py`: one file configures both programs."""

from dataclasses import field
from typing import Annotated

from classroom_rl.config.base import (
    ApiModelConfig,
    DatasetSource,
    GenerationConfig,
    HuggingFaceConfig,
    JudgeModelConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    SupervisorModelConfig,
)
from classroom_rl.config.fields import (
    Count,
    Examples,
    Finite,
    Flag,
    Interval,
    LearningRate,
    MaxSteps,
    ModelPath,
    Number,
    Positive,
    Seconds,
    Seed,
    Share,
    Steps,
    Text,
    Weight,
    Whole,
    at_least,
    between,
    config_group,
)
from classroom_rl.config.values import (
    CISPO,
    CISPO_LARGEST_RATIO,
    DISK,
    GRPO,
    KEEP,
    NO_CORRECTIONS,
    NO_CREDIT,
    TOKENS,
    WHOLE,
    Algorithm,
    CorrectionMode,
    CorrectionTargets,
    GroupMode,
    ImportanceSamplingMode,
    LossType,
    Optimizer,
    PublishThrough,
    RewardScale,
    Scheduler,
    StepKind,
    TrainingDtype,
    TurnCredit,
)


@config_group
class TurnCreditConfig:
    """A reward for each message, beside that of the whole conversation (docs/supervision.md).

    `mode`: `none`; `immediate` (a message's own reward), `to_go` (the mean of its own and the following ones, each
    discounted by `gamma` per message), `progress` (how much it moved the mean of the rewards so far). `weight` is its
    share in a token's advantage. `rewards`: the turn rewards of the environment and their weights; empty means the
    supervisor's penalties alone. `shuffle` permutes the turn rewards over a batch: a control that must teach nothing.
    """

    mode: TurnCredit = NO_CREDIT
    weight: Weight = 0.3
    gamma: Share = 0.9
    rewards: dict[str, Finite] = field(default_factory=dict)
    shuffle: Flag = False


@config_group
class CorrectionsConfig:
    """How the teacher is trained on the supervisor's corrections, by cross-entropy (docs/supervision.md).

    `mode`: `none`; `same_step` adds the corrections of a batch to its step, with `weight` μ; `pass` trains on those
    that came since the last pass, every `interval` steps if there are `min_examples`, for `epochs` epochs at
    `learning_rate` (null: the training's own), with the training's optimizer, until the policy has moved by `max_kl` on
    its own tokens.
    `rows_per_batch`: the most corrections in one step, over all ranks (null: as many as conversations).
    `pass_batch_size`: the corrections in one step of a pass, on each rank (null: `per_device_train_batch_size`).
    `capacity`: the most corrections that wait for a pass; the oldest go first. `replay`: for each correction that came
    since the last pass, so many earlier ones are in it again, drawn from the last 2 × `capacity`. `targets`: `whole`
    trains on every token of a corrected message; `changed` begins at its first token that the policy did not write
    itself.
    """

    mode: CorrectionMode = NO_CORRECTIONS
    weight: Weight = 0.05
    interval: Interval = 25
    min_examples: Count = 10
    epochs: Count = 1
    learning_rate: LearningRate | None = None
    max_kl: Positive = 0.05
    capacity: Count = 4096
    replay: Weight = 0.0
    rows_per_batch: Count | None = None
    pass_batch_size: Count | None = None
    targets: CorrectionTargets = WHOLE


@config_group
class PPOConfig:
    """PPO's critic, advantages and limits (docs/algorithms.md). Only `algorithm: ppo` reads them.

    `gamma` and `lam` are γ and λ of GAE; a step is a sampled token, or a message (`gae_over`: `tokens`, `turns`).
    `value_lam` is the λ of what the critic learns: with 1 the returns themselves, without its own earlier values.
    `whiten_advantages` gives them mean 0 and standard deviation 1 over the batch. With `bootstrap_truncated`, a
    conversation that was cut because a context was full has the critic's value before its last step in place of its
    reward.

    The critic is a linear head with its own `value_learning_rate`. `value_weight` is its share in the loss;
    with `center_values` it begins at the mean return of the first batch, and learns the difference from it;
    `value_clip` limits how far a value moves in one batch (null: no limit); with `train_trunk: false` its gradient
    ends at the head. In the first `value_warmup_steps` optimizer steps only the head learns. `entropy_weight` rewards
    entropy. `target_kl` stops the updates on a batch once the policy has moved by so much, in nats per token.
    """

    gamma: Share = 1.0
    lam: Share = 0.95
    value_lam: Share = 1.0
    gae_over: StepKind = TOKENS
    whiten_advantages: Flag = True
    bootstrap_truncated: Flag = True
    value_learning_rate: LearningRate = 1e-4
    value_weight: Weight = 0.5
    center_values: Flag = True
    value_clip: Positive | None = 0.2
    train_trunk: Flag = True
    value_warmup_steps: Steps = 0
    entropy_weight: Weight = 0.0
    target_kl: Positive | None = None


@config_group
class TrainConfig:
    """Options of the training. `algorithm` is `grpo` or `ppo`; the options that only PPO has are in `ppo`. A batch is
    `number_of_problems_per_batch` × `num_samples_per_problem` conversations over all ranks; each of the `mu` passes
    over it is one optimizer step.

    `beta` weighs the KL to the initial policy (0: no reference model is loaded). The policy ratio is clipped at 1 −
    `epsilon` and 1 + `epsilon_high`; null means `epsilon`. With `loss_type: cispo`, `epsilon_high` is the largest ratio
    itself, at least 1; null means 5, and `epsilon` has no effect. `sapo` clips nothing. `loss_type`, `scale_rewards`
    and `optimizer` take TRL's and transformers' values; the default optimizer has 8-bit states, and resumes from a
    checkpoint exactly. `dtype` is that of the trained weights and arithmetic. `reward_weights` null follows from the
    judge rules: a scoring rule means the pedagogical reward alone, OK/REJECT rules mean the maths rewards.
    `importance_sampling_correction` corrects for the difference between the engine's log-probs and the trainer's, in
    TRL's `importance_sampling_mode`, truncated at `importance_sampling_clip_max`.

    A micro-batch has `per_device_train_batch_size` rows, or with `max_tokens_per_micro_batch` as many rows of like
    length as fit into so many tokens, padding included; a longer row is alone.

    `groups_without_variance`: what becomes of groups whose conversations all have the same reward, by its standard
    deviation (with turn credit: and whose messages have the same turn rewards). They teach nothing. `keep` trains on
    them, `drop` leaves them out, so that the others weigh more; `resample` plays further problems in their place, until
    the batch is full or `resample_up_to` times as many groups would have been played, and leaves the rest out.

    `max_staleness`: how many versions older than the trained weights those may be that a batch is played with. 0 plays
    each batch with the current weights; 1 plays the next batch while this one is judged and trained on, and corrects
    for the difference as for the engine's.

    `publish_through`: `disk` writes published weights into the run folder; `memory` into the shared memory of the
    machine (/dev/shm), where server and trainer both are, and to disk every `publish_to_disk_every` steps and at the
    end. Of either, the last `keep_published_policies` versions stay; in memory one more, which the next one overwrites.

    `gpu_memory_gib`: the GPU memory that `dry_run=true` computes its budget for, to plan for another machine; null
    takes this machine's.
    """

    algorithm: Algorithm = GRPO
    number_of_problems_per_batch: Count = 16
    num_samples_per_problem: Annotated[
        Whole, at_least(2, 10**6, "GRPO compares the conversations of a group and needs at least 2")
    ] = 8
    per_device_train_batch_size: Count = 2
    max_tokens_per_micro_batch: Count | None = None
    learning_rate: LearningRate = 5e-7
    lr_scheduler_type: Scheduler = "constant"
    optimizer: Optimizer = "adamw_bnb_8bit"
    epochs: Annotated[Whole, at_least(0, 10**6)] = 1
    max_steps: MaxSteps = -1
    beta: Weight = 0.001
    mu: Count = 2
    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    loss_type: LossType = "dapo"
    scale_rewards: RewardScale = "group"
    max_grad_norm: Annotated[Number, at_least(0, 1e30)] = 1.0
    gradient_checkpointing: Flag = True
    dtype: TrainingDtype = "bfloat16"
    reward_weights: dict[str, Finite] | None = None
    shuffle_rewards: Flag = False
    groups_without_variance: GroupMode = KEEP
    resample_up_to: Annotated[Number, at_least(1, 10**6)] = 2.0
    importance_sampling_correction: Flag = True
    importance_sampling_mode: ImportanceSamplingMode = "token_truncate"
    importance_sampling_clip_max: Positive = 2.0
    keep_published_policies: Count = 2
    max_staleness: Annotated[Whole, between(0, 1)] = 0
    publish_through: PublishThrough = DISK
    publish_to_disk_every: Interval = 25
    gpu_memory_gib: Positive | None = None
    turn_credit: TurnCreditConfig = field(default_factory=TurnCreditConfig)
    corrections: CorrectionsConfig = field(default_factory=CorrectionsConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    @property
    def upper_clip(self) -> float:
        """TRL's `epsilon_high`: for CISPO the largest ratio, by default ScaleRL's ε_max (arXiv 2510.13786); for the
        other losses how far the ratio may exceed 1."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_LARGEST_RATIO if self.loss_type == CISPO else self.epsilon


@config_group
class TeacherModelConfig(ApiModelConfig):
    """The trained model. With `lora.enable` its own weights stay fixed and an adapter is trained: only the adapter is
    published, and the reference for `train.beta` is the model without it."""

    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def adapter(self) -> LoraConfig | None:
        return self.lora if self.lora.enable else None


@config_group
class RewardModelConfig(ModelConfig):
    """How solutions are graded: `Answer` compares the boxed answer, `None` grades nothing. Any other name is a model
    with one logit, which reads problem and solution; the raw logit is the grade. The sampling options of its `vllm`
    block have no effect."""

    model_name_or_path: ModelPath = "Answer"

    @property
    def is_model(self) -> bool:
        """Whether a model grades the solutions."""
        return self.model_name_or_path not in ("Answer", "None")

    @property
    def grades(self) -> bool:
        """Whether the solutions that a student writes after the dialogue get a grade."""
        return self.model_name_or_path != "None"


@config_group
class TrainDatasetConfig:
    """The training problems. Without a dataset, and with a judge rule that scores, they are the shipped lesson plans.
    `max_train_examples` −1 takes all. `curriculum` draws the problems of each batch by how far the rewards of their
    last group were apart, and by how long ago that was, in place of the order of the shuffled data."""

    train_datasets: list[DatasetSource] = field(default_factory=list)
    max_train_examples: Examples = -1
    curriculum: Flag = False


@config_group
class GuardsConfig:
    """Checks during training of whether the teacher fools the judge. They change no reward. One more check needs no
    key: in every batch, whether verdicts depend on the conversation at all (trainer/judge_monitor.py).

    Every `judge_check_every_n_steps` optimizer steps, beginning with the first batch (0: never), `held_out_judge_model`
    judges `judge_check_sample` conversations of the batch again: a model behind an API, `rubric` or `rules`; null skips
    this. With `canaries`, the training's judge also judges planted conversations whose teacher says nothing, only
    praises, hands everything over, ends early, speaks to the judge, or writes its own verdict. A warning is logged if
    the gap between the two judges' mean scores has grown by more than `largest_gap_growth` since the run began, and if
    a canary scores above `largest_canary_score`; both are in [0, 1]. A judgement that takes longer than
    `judge_check_timeout_s` counts as failed.
    """

    held_out_judge_model: JudgeModelConfig | None = None
    judge_check_every_n_steps: Steps = 0
    judge_check_sample: Count = 16
    canaries: Flag = True
    largest_gap_growth: Share = 0.15
    largest_canary_score: Share = 0.5
    judge_check_timeout_s: Seconds = 300.0


@config_group
class TrainRLConfig:
    """The configuration of server and trainer. `environment` is a name in `rollout.registry.ENVIRONMENTS`, or the
    dotted name of your own package. `skip_first_samples` is the number of problems to skip at the beginning of the
    shuffled data. The teacher is trained, so it must be an engine of the server, not a model behind an API.
    `supervisor_model` null means no supervisor.
    """

    environment: Text = "classroom"
    train: TrainConfig = field(default_factory=TrainConfig)
    teacher_model: TeacherModelConfig = field(default_factory=TeacherModelConfig)
    student_model: ApiModelConfig = field(default_factory=ApiModelConfig)
    judge_model: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    supervisor_model: SupervisorModelConfig | None = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    dataset: TrainDatasetConfig = field(default_factory=TrainDatasetConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    huggingface: HuggingFaceConfig = field(default_factory=HuggingFaceConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    skip_first_samples: Steps = 0
    seed: Seed = 42
    dry_run: Flag = False

    def __post_init__(self) -> None:
        if not self.dataset.train_datasets:
            self.dataset.train_datasets = self.generation.implied_datasets("train")


def pass_batch_size(train: TrainConfig) -> int:
    """The corrections in one step of a supervised pass, on each rank."""
    return train.corrections.pass_batch_size or train.per_device_train_batch_size
