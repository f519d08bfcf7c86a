"""Schema of `vllm_server.py` and `train_rl.py`: one file configures both programs."""

from dataclasses import dataclass, field

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
)


@dataclass
class TurnCreditConfig:
    """A reward for each message, beside that of the whole conversation (docs/supervision.md).

    `mode`: `none`; `immediate` (a message's own reward), `to_go` (the mean of its own and the following ones, each
    discounted by `gamma` per message), `progress` (how much it moved the mean of the rewards so far). `weight` is its
    share in a token's advantage. `rewards`: the turn rewards of the environment and their weights; empty means the
    supervisor's penalties alone. `shuffle` permutes the turn rewards over a batch: a control that must teach nothing.
    """

    mode: str = NO_CREDIT
    weight: float = 0.3
    gamma: float = 0.9
    rewards: dict[str, float] = field(default_factory=dict)
    shuffle: bool = False


@dataclass
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

    mode: str = NO_CORRECTIONS
    weight: float = 0.05
    interval: int = 25
    min_examples: int = 10
    epochs: int = 1
    learning_rate: float | None = None
    max_kl: float = 0.05
    capacity: int = 4096
    replay: float = 0.0
    rows_per_batch: int | None = None
    pass_batch_size: int | None = None
    targets: str = WHOLE


@dataclass
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

    gamma: float = 1.0
    lam: float = 0.95
    value_lam: float = 1.0
    gae_over: str = TOKENS
    whiten_advantages: bool = True
    bootstrap_truncated: bool = True
    value_learning_rate: float = 1e-4
    value_weight: float = 0.5
    center_values: bool = True
    value_clip: float | None = 0.2
    train_trunk: bool = True
    value_warmup_steps: int = 0
    entropy_weight: float = 0.0
    target_kl: float | None = None


@dataclass
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

    algorithm: str = GRPO
    number_of_problems_per_batch: int = 16
    num_samples_per_problem: int = 8
    per_device_train_batch_size: int = 2
    max_tokens_per_micro_batch: int | None = None
    learning_rate: float = 5e-7
    lr_scheduler_type: str = "constant"
    optimizer: str = "adamw_bnb_8bit"
    epochs: int = 1
    max_steps: int = -1
    beta: float = 0.001
    mu: int = 2
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = True
    dtype: str = "bfloat16"
    reward_weights: dict[str, float] | None = None
    shuffle_rewards: bool = False
    groups_without_variance: str = KEEP
    resample_up_to: float = 2.0
    importance_sampling_correction: bool = True
    importance_sampling_mode: str = "token_truncate"
    importance_sampling_clip_max: float = 2.0
    keep_published_policies: int = 2
    max_staleness: int = 0
    publish_through: str = DISK
    publish_to_disk_every: int = 25
    gpu_memory_gib: float | None = None
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


@dataclass
class TeacherModelConfig(ApiModelConfig):
    """The trained model. With `lora.enable` its own weights stay fixed and an adapter is trained: only the adapter is
    published, and the reference for `train.beta` is the model without it."""

    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def adapter(self) -> LoraConfig | None:
        return self.lora if self.lora.enable else None


@dataclass
class RewardModelConfig(ModelConfig):
    """How solutions are graded: `Answer` compares the boxed answer, `None` grades nothing. Any other name is a model
    with one logit, which reads problem and solution; the raw logit is the grade. The sampling options of its `vllm`
    block have no effect."""

    model_name_or_path: str = "Answer"

    @property
    def is_model(self) -> bool:
        """Whether a model grades the solutions."""
        return self.model_name_or_path not in ("Answer", "None")

    @property
    def grades(self) -> bool:
        """Whether the solutions that a student writes after the dialogue get a grade."""
        return self.model_name_or_path != "None"


@dataclass
class TrainDatasetConfig:
    """The training problems. Without a dataset, and with a judge rule that scores, they are the shipped lesson plans.
    `max_train_examples` −1 takes all. `curriculum` draws the problems of each batch by how far the rewards of their
    last group were apart, and by how long ago that was, in place of the order of the shuffled data."""

    train_datasets: list[DatasetSource] = field(default_factory=list)
    max_train_examples: int = -1
    curriculum: bool = False


@dataclass
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
    judge_check_every_n_steps: int = 0
    judge_check_sample: int = 16
    canaries: bool = True
    largest_gap_growth: float = 0.15
    largest_canary_score: float = 0.5
    judge_check_timeout_s: float = 300.0


@dataclass
class TrainRLConfig:
    """The configuration of server and trainer. `environment` is a name in `rollout.registry.ENVIRONMENTS`, or the
    dotted name of your own package. `skip_first_samples` is the number of problems to skip at the beginning of the
    shuffled data. The teacher is trained, so it must be an engine of the server, not a model behind an API.
    `supervisor_model` null means no supervisor.
    """

    environment: str = "classroom"
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
    skip_first_samples: int = 0
    seed: int = 42
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not self.dataset.train_datasets:
            self.dataset.train_datasets = self.generation.implied_datasets("train")


def pass_batch_size(train: TrainConfig) -> int:
    """The corrections in one step of a supervised pass, on each rank."""
    return train.corrections.pass_batch_size or train.per_device_train_batch_size
