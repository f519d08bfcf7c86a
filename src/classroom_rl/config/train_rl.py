"""Schema of `vllm_server.py` and `train_rl.py`: one file configures both programs."""

from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Literal, get_args

from classroom_rl.config.base import (
    DatasetSource,
    GenerationConfig,
    HuggingFaceConfig,
    TrainLoggingConfig,
)
from classroom_rl.config.fields import (
    Count,
    CountFromZero,
    Examples,
    FilePath,
    Finite,
    Flag,
    Interval,
    LearningRate,
    MaxSteps,
    ModelPath,
    NameOrFunction,
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
from classroom_rl.config.models import (
    ApiModelConfig,
    JudgeModelConfig,
    ModelConfig,
    SupervisorModelConfig,
    TeacherModelConfig,
)
from classroom_rl.config.values import (
    CISPO,
    CISPO_LARGEST_RATIO,
    DISK,
    GREEDY,
    GRPO,
    KEEP,
    NO_CORRECTIONS,
    NO_CREDIT,
    ONLINE_DPO,
    REVERSE,
    SAMPLED,
    SUPERVISOR_REWARD,
    TOKENS,
    TRAINS_STUDENT,
    TRAINS_TEACHER,
    WHOLE,
    Algorithm,
    CorrectionMode,
    CorrectionTargets,
    Divergence,
    GroupMode,
    ImportanceSamplingLevel,
    ImportanceSamplingMode,
    LossType,
    Optimizer,
    PublishThrough,
    RewardScale,
    Scheduler,
    StepKind,
    TrainingDtype,
    TurnCredit,
    ValueHeadKind,
)
from classroom_rl.models.lora import four_bit_base


@config_group
class TurnCreditConfig:
    """A reward for each message, beside that of the whole conversation (docs/supervision.md)."""

    mode: TurnCredit = NO_CREDIT
    """What a message is credited with: `none`; `immediate`, its own reward; `to_go`, the mean of its own and the
    following ones; `progress`, how much it moved the mean of the rewards so far. PPO takes `none` and `immediate`
    only."""
    weight: Weight = 0.3
    """Weight of a message's credit in the advantage of its tokens, to which it is added."""
    gamma: Share = 0.9
    """With `to_go`, the discount per message."""
    rewards: dict[str, Finite] = field(default_factory=dict)
    """The environment's turn rewards, or functions of your own (`package.module:function`), and their weights. Empty
    means the supervisor's penalties alone."""
    shuffle: Flag = False
    """Permutes the turn rewards over a batch: a control that must teach nothing."""

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the turn rewards; if none is named, the supervisor's penalties; empty without turn credit."""
        return {} if self.mode == NO_CREDIT else dict(self.rewards) or {SUPERVISOR_REWARD: 1.0}


@config_group
class CorrectionsConfig:
    """How the teacher is trained on the supervisor's corrections, by cross-entropy (docs/supervision.md). A pass uses
    the training's optimizer."""

    mode: CorrectionMode = NO_CORRECTIONS
    """How: `none`, not at all; `same_step` adds the corrections of a batch to its step; `pass` trains on them between
    steps, on all that came since the last pass."""
    weight: Weight = 0.05
    """With `same_step`, the factor κ of the cross-entropy in the loss."""
    interval: Interval = 25
    """Steps from one pass to the next, rounded up to whole batches."""
    min_examples: Count = 10
    """With fewer corrections, a pass is left out, and they wait for the next one."""
    epochs: Count = 1
    """How often a pass goes over its corrections."""
    learning_rate: LearningRate | None = None
    """Of a pass; null: the training's own at that step."""
    max_kl: Positive = 0.05
    """A pass ends when the policy has moved by so much on its own tokens, in nats per token."""
    capacity: Count = 4096
    """The most corrections that wait for a pass; the oldest go first."""
    replay: Weight = 0.0
    """For each correction that came since the last pass, so many earlier ones are in it again, drawn from the last 2 ×
    `capacity`."""
    rows_per_batch: Count | None = None
    """With `same_step`, the most corrections in one step, over all ranks; null: as many as conversations."""
    pass_batch_size: Count | None = None
    """The corrections in one step of a pass, on each rank; null: `train.per_device_train_batch_size`."""
    targets: CorrectionTargets = WHOLE
    """`whole` trains on every token of a corrected message; `changed` on those from the first that it did not write."""


@config_group
class PPOConfig:
    """PPO's critic, advantages and limits (docs/algorithms.md). Only `algorithm: ppo` reads them. The critic is a
    head on the trained model."""

    gamma: Share = 1.0
    """γ of GAE, the discount per step."""
    lam: Share = 0.95
    """λ of GAE, for the policy's advantages."""
    value_lam: Share = 1.0
    """λ of what the critic learns: with 1 the returns themselves, without its own earlier values."""
    gae_over: StepKind = TOKENS
    """What a step of GAE is: a sampled token, or a message."""
    whiten_advantages: Flag = True
    """Gives the advantages mean 0 and standard deviation 1 over the batch."""
    bootstrap_truncated: Flag = True
    """A conversation that a full context cut has the critic's value before its last step in place of its reward."""
    head: ValueHeadKind = "linear"
    """The critic: linear on the model's last hidden state, or an MLP with one layer of twice the model's width."""
    value_learning_rate: LearningRate = 1e-4
    """Of the critic's head. It follows `lr_scheduler_type`."""
    value_weight: Weight = 0.5
    """Weight of the critic's loss."""
    center_values: Flag = True
    """The critic begins at the mean return of the first batch, and learns the difference from it."""
    value_clip: Positive | None = 0.2
    """How far a value may move in one batch; null: no limit."""
    train_trunk: Flag = True
    """Whether the critic's gradient reaches the model. False: it ends at the head."""
    value_warmup_steps: Steps = 0
    """In so many optimizer steps at the beginning, only the head learns."""
    entropy_weight: Weight = 0.0
    """Weight of a reward for entropy, per nat."""
    target_kl: Positive | None = None
    """Stops the updates on a batch once the policy has moved by so many nats per token; null: never. Needs `mu` ≥ 2."""


@config_group
class OnlineDPOConfig:
    """What only `algorithm: online_dpo` reads (docs/algorithms.md)."""

    beta: Positive = 0.1
    """How strongly the model is held to the initial policy: the larger, the closer it stays."""


@config_group
class DistillationConfig:
    """On-policy distillation (docs/algorithms.md): the model learns from a strong tutor, which reads the model's own
    messages and says how likely it would have written each token; beside the rewards, or in place of them if all
    `reward_weights` are 0."""

    model: ModelPath | None = None
    """The strong tutor, which has the trained model's tokenizer and chat template. It is loaded beside the trained
    model, in `dtype`, unless it has a `base_url`. Null: there is none."""
    base_url: Text | None = None
    """The address of a vLLM server (`vllm serve`) with the strong tutor, such as http://gpu2:8000/v1: the trainer sends
    it token ids and loads no weights of it, but reads its tokenizer. It needs a sampling temperature of 1, and with
    `forward` and `jsd` a `top_k`, which the server's `--max-logprobs` must allow."""
    api_key_env: Text | None = None
    """The environment variable that holds the server's key. Null: it has none."""
    weight: Positive = 1.0
    """Weight of ln(strong tutor / model) of a token in its advantage, whose mean is minus the reverse KL; with another
    `kl`, or with `top_k`, of the divergence in the loss of a token."""
    kl: Divergence = REVERSE
    """What is made small. `reverse`: KL(model ‖ strong tutor), by the tokens that were sampled, unless `top_k` is set.
    `forward`: KL(strong tutor ‖ model). `jsd`: the mean of both's KL to their mixture. The latter two compare the
    distributions of each token of the model, over the whole vocabulary or `top_k`."""
    top_k: Count | None = None
    """Compares the probabilities of so many tokens, the strong tutor's most likely ones, and that of all others
    together. Null, with `forward` and `jsd`: the probabilities of all tokens; both models must have the same
    `vocab_size`, and the strong tutor's last hidden state of each sampled token is kept in host memory."""
    prompt_path: FilePath | None = None
    """The strong tutor's own system message, a template as the teacher's, which may also use `answer` and `personas`
    (those of the student's messages, in order): it knows more, so a copy of the model itself can teach it. Null: it
    reads what the model read. In the classroom only."""

    @property
    def is_loaded(self) -> bool:
        """Whether the strong tutor's weights are loaded beside the trained model."""
        return self.model is not None and self.base_url is None

    @property
    def compares_distributions(self) -> bool:
        """Whether the loss has the divergence itself; otherwise the advantages have what was sampled of it."""
        return self.model is not None and (self.kl != REVERSE or self.top_k is not None)


@config_group
class TrainConfig:
    """Options of the training (docs/algorithms.md); those that only PPO has are in `ppo`. A batch is
    `number_of_problems_per_batch` × `num_samples_per_problem` conversations over all ranks; each of the `mu` passes
    over it is one optimizer step."""

    algorithm: Algorithm = GRPO
    """PPO trains a critic, too, and has no use for `loss_type`, `importance_sampling_level`, `scale_rewards`,
    `normalise_per_criterion`, `reward_step` and `groups_without_variance`. `online_dpo` trains on the best and the
    worst conversation of each group, by DPO's loss; it needs `mu: 1`."""
    number_of_problems_per_batch: Count = 16
    """Each is played by a group of conversations."""
    num_samples_per_problem: Annotated[
        Whole, at_least(2, 10**6, "GRPO compares the conversations of a group and needs at least 2")
    ] = 8
    """The conversations of a group."""
    per_device_train_batch_size: Count = 2
    """Rows (conversations) of a micro-batch, on each rank; on a GPU as many as fit into the tokens of that many rows
    of full length (the same memory), because few short rows leave it idle."""
    max_tokens_per_micro_batch: Count | None = None
    """A micro-batch takes as many rows of like length as fit into so many tokens, padding included; a longer row is
    alone. Null: see `per_device_train_batch_size`."""
    learning_rate: LearningRate = 5e-7
    """Of the optimizer; `lr_scheduler_type` says how it changes over the steps."""
    lr_scheduler_type: Scheduler = "constant"
    """The schedule of the learning rate, by transformers' name. There is no warm-up."""
    optimizer: Optimizer = "adamw_bnb_8bit"
    """By transformers' name. `adamw_bnb_8bit` has states of 8 bits, and resumes from a checkpoint exactly."""
    epochs: CountFromZero = 1
    """Passes over the problems."""
    max_steps: MaxSteps = -1
    """Optimizer steps. Above 0, it overrides `epochs`."""
    beta: Weight = 0.001
    """Weight of the KL to the initial policy; 0: no reference model is loaded. `online_dpo` has no such term, and
    always loads one."""
    mu: Count = 2
    """Passes over a batch, each of one optimizer step."""
    epsilon: Positive = 0.2
    """The policy ratio is clipped at 1 − `epsilon` below. `cispo` and `sapo` do not use it."""
    epsilon_high: Positive | None = None
    """The policy ratio is clipped at 1 + `epsilon_high` above; null: as `epsilon`. With `loss_type: cispo` it is the
    largest ratio itself, at least 1; null: 5. `sapo` clips nothing."""
    loss_type: Annotated[Text, NameOrFunction(get_args(LossType))] = "dapo"
    """By TRL's name: how the ratio is clipped, and what the mean is taken over. docs/algorithms.md has the formulas,
    and what a function of your own gets and gives."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """By TRL's name: the ratio π/π_old is that of each token, or of the whole sample (GSPO)."""
    scale_rewards: RewardScale = "group"
    """The advantages are divided by the standard deviation of the group's or of the batch's rewards, or not at all."""
    normalise_per_criterion: Flag = False
    """Compares a group's conversations by each reward alone, in the classroom by each criterion of the judge's scores,
    and adds up these advantages by the rewards' weights, scaled over the batch (GDPO): a criterion whose scores lie
    close together then weighs as much as one whose scores are far apart. A player of several has only its outcome.
    `scale_rewards` has no effect."""
    reward_step: Positive | None = None
    """Rewards, and with `normalise_per_criterion` each criterion, are rounded to multiples of this before they are
    compared: most small differences, such as a judge's noise, then teach nothing, and two rewards on either side of an
    edge come apart by a whole step. Null: they are not."""
    max_grad_norm: Annotated[Number, at_least(0, 1e30)] = 1.0
    """The gradient is clipped to this norm; 0: never."""
    gradient_checkpointing: Flag = True
    """Computes activations again in the backward pass: less memory, more time."""
    dtype: TrainingDtype = "bfloat16"
    """Of the trained weights and arithmetic."""
    attn_implementation: Text | None = None
    """How attention is computed, by transformers' name, such as `sdpa` or `flash_attention_2`; null: its own choice."""
    padding_free: Flag = False
    """By TRL's name: the rows of a micro-batch stand in one row without padding, and each attends to itself alone. The
    result is the same; uneven rows take less time and memory. Needs `sdpa` or flash attention, and layers that attend
    to all that came before (with flash attention also sliding windows)."""
    use_liger_kernel: Flag = False
    """By transformers' name: norms, rotary positions and MLPs are computed by Liger's fused kernels, which store less
    for the backward pass. Needs a GPU and the package liger-kernel. Its cross-entropy is not used: the head already
    gives log-probs in tiles."""
    activation_offloading: Flag = False
    """By TRL's name: what the forward pass stores for the backward pass waits in the host's memory. Needs a GPU;
    `dry_run=true` does not count what it saves."""
    grad_accum_fp32: Flag = False
    """Adds up the gradients of micro-batches in float32 also under DeepSpeed and FSDP2, which add them up in `dtype`
    otherwise. DeepSpeed then takes 4 bytes per gradient; FSDP2 reduces every micro-batch's gradients, which takes time
    and saves memory. Without both, and with float32, they always are."""
    reward_weights: dict[str, Finite] | None = None
    """The environment's rewards and their weights; in the classroom and in a `DialogueEnvironment` also functions of
    your own, as `package.module:function`. Null: those that the judge rules imply: a scoring rule means the
    pedagogical reward alone, OK/REJECT rules mean the maths rewards."""
    shuffle_rewards: Flag = False
    """Permutes the rewards over a batch: a control that must teach nothing."""
    groups_without_variance: GroupMode = KEEP
    """What becomes of groups whose conversations all have the same reward, by its standard deviation (with turn credit:
    and whose messages have the same turn rewards). They teach nothing. `keep` trains on them. `drop` leaves them out,
    so that the others weigh more. `resample` plays further problems in their place until the batch is full, and leaves
    the rest out."""
    resample_up_to: Annotated[Number, at_least(1, 10**6)] = 2.0
    """`resample` ends before more than so many times the groups of a batch would have been played."""
    importance_sampling_correction: Flag = True
    """Weighs tokens by π_old / π_engine, to correct for the difference between the engine's log-probs and the
    trainer's."""
    importance_sampling_mode: ImportanceSamplingMode = "token_truncate"
    """By TRL's name: that ratio is of a token or of a whole sequence; one that is too large is cut (`truncate`) or
    becomes 0 (`mask`)."""
    importance_sampling_clip_max: Positive = 2.0
    """The largest such ratio."""
    keep_published_policies: Count = 2
    """How many published versions of the weights stay. In memory there is one more, which the next one overwrites."""
    max_staleness: Annotated[Whole, between(0, 1)] = 0
    """How many versions older than the trained weights those may be that a batch is played with. 0 plays each batch
    with the current weights. 1 plays the next batch while this one is judged and trained on, and corrects for the
    difference as for the engine's."""
    publish_through: PublishThrough = DISK
    """`disk` writes published weights into the run folder. `memory` writes them into the shared memory of the machine
    (/dev/shm), where server and trainer both are. `nccl` sends them from the trainer's GPU into those of the engines of
    all servers, which must be other GPUs (between CPUs: over gloo)."""
    publish_to_disk_every: Interval = 25
    """With `memory` and `nccl`, weights are also written to disk every so many steps, and at the end."""
    gpu_memory_gib: Positive | None = None
    """The GPU memory that `dry_run=true` computes its budget for, to plan for another machine; null: this machine's."""
    turn_credit: TurnCreditConfig = field(default_factory=TurnCreditConfig)
    corrections: CorrectionsConfig = field(default_factory=CorrectionsConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    online_dpo: OnlineDPOConfig = field(default_factory=OnlineDPOConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with the initial one."""
        return self.beta > 0 or self.algorithm == ONLINE_DPO

    @property
    def upper_clip(self) -> float:
        """TRL's `epsilon_high`: for CISPO the largest ratio, by default ScaleRL's ε_max (arXiv 2510.13786); for the
        other losses how far the ratio may exceed 1."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_LARGEST_RATIO if self.loss_type == CISPO else self.epsilon


@config_group
class RewardModelConfig(ModelConfig):
    """How solutions are graded. The sampling options of the `vllm` block have no effect."""

    model_name_or_path: ModelPath = "Answer"
    """`Answer` compares the boxed answer, `None` grades nothing. Any other name is a model with one logit, which reads
    problem and solution; the raw logit is the grade."""

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
    """The training problems."""

    train_datasets: list[DatasetSource] = field(default_factory=list)
    """Where they come from. Without a dataset they are the shipped lesson plans if a judge rule scores, and Big-Math's
    problems if the configuration names no prompt, persona and judge rule either."""
    max_train_examples: Examples = -1
    """The most problems, of all datasets together."""
    curriculum: Flag = False
    """Draws the problems of each batch by how far the rewards of their last group were apart, and by how long ago that
    was, in place of the order of the shuffled data."""


@config_group
class GuardsConfig:
    """Checks during training of whether the teacher fools the judge (docs/trusting_rewards.md). They change no reward.
    One more check needs no key: in every batch, whether verdicts depend on the conversation at all
    (trainer/judge_monitor.py)."""

    held_out_judge_model: JudgeModelConfig | None = None
    """A second judge, behind an API or embedded, that judges a sample of the conversations again. Null: only
    canaries."""
    judge_check_every_n_steps: Steps = 0
    """Optimizer steps from one check to the next, beginning with the first batch; 0: never."""
    judge_check_sample: Count = 16
    """How many conversations of the batch the held-out judge reads."""
    canaries: Flag = True
    """Whether the training's judge also judges planted conversations whose teacher says nothing, only praises, hands
    everything over, ends early, speaks to the judge, or writes its own verdict."""
    largest_gap_growth: Share = 0.15
    """A warning is logged if the gap between the two judges' mean scores, in [0, 1], has grown by more than this since
    the run began."""
    largest_canary_score: Share = 0.5
    """A warning is logged if the score of a canary, in [0, 1], is above this."""
    judge_check_timeout_s: Seconds = 300.0
    """A judgement that takes longer, in seconds, counts as failed."""


@config_group
class EvaluationConfig:
    """Measures the teacher on held-out lessons while it is trained: before the first step, every `every` steps and
    after the last, always on the same lessons with the same students (docs/evaluation.md)."""

    every: Steps = 0
    """Optimizer steps from one evaluation to the next, rounded up to whole batches; 0: no evaluations."""
    eval_datasets: list[DatasetSource] = field(default_factory=list)
    """Where the lessons come from; none may be trained on. Without a dataset, and with a judge rule that scores, they
    are the shipped test plans."""
    max_val_examples: Examples = 64
    """The most lessons, of all datasets together."""
    num_samples_per_problem: Count = 1
    """Conversations on each lesson, for each of `samplings`."""
    samplings: list[Literal["sampled", "greedy"]] = field(default_factory=lambda: [SAMPLED, GREEDY])
    """`sampled`, at the configured temperature, and `greedy`, at temperature 0. `sampled` decides what is best and what
    is a collapse, so it must be there."""
    keep_best: Flag = False
    """Saves a checkpoint at each evaluation with a higher reward than all before it, and keeps the best one beyond the
    last two. `best.json` in the run folder names it; what is released stays the last policy."""
    stop_on_collapse: Flag = True
    """Ends the training if the reward on the lessons is at least 0.02 below its start with p < 0.01, if trainer and
    engine differ much more than at first, or if conversations become much longer or messages all alike without a higher
    reward. False: it only warns."""


@config_group
class TrainRLConfig:
    """The configuration of server and trainer."""

    environment: Text = "classroom"
    """What is played: `classroom`, `marooned`, `agent` (a program of yours plays the policy), or the dotted name of
    your own package (docs/environments.md)."""
    train: TrainConfig = field(default_factory=TrainConfig)
    teacher_model: TeacherModelConfig = field(default_factory=TeacherModelConfig)
    student_model: ApiModelConfig = field(default_factory=ApiModelConfig)
    judge_model: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    supervisor_model: SupervisorModelConfig | None = None
    """Who reviews each message of the teacher (docs/supervision.md). Null: there is no supervisor."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    dataset: TrainDatasetConfig = field(default_factory=TrainDatasetConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    huggingface: HuggingFaceConfig = field(default_factory=HuggingFaceConfig)
    logging: TrainLoggingConfig = field(default_factory=TrainLoggingConfig)
    skip_first_samples: Steps = 0
    """How many problems at the beginning of the shuffled data are skipped."""
    seed: Seed = 42
    """Of everything that is drawn, such as the order of the problems, and of the engines' sampling."""
    dry_run: Flag = False
    """Starts nothing: prints the configuration and what it leads to, checks it, and ends (docs/configure.md)."""

    @property
    def policy_model(self) -> TeacherModelConfig:
        """The model under training: the teacher's, or with `generation.trained_role: student` the student's."""
        if getattr(self.generation, "trained_role", TRAINS_TEACHER) != TRAINS_STUDENT:
            return self.teacher_model
        model = self.student_model
        return TeacherModelConfig(**{item.name: getattr(model, item.name) for item in fields(model)})

    @property
    def served_teacher(self) -> str:
        """The model that the policy's engine loads, and an adapter belongs to."""
        name = self.policy_model.model_name_or_path
        if not self.policy_model.load_in_4bit:
            return name
        return str(four_bit_base(Path(self.logging.save_dir), name, self.train.dtype))

    def __post_init__(self) -> None:
        if not self.dataset.train_datasets:
            self.dataset.train_datasets = self.generation.implied_datasets("train")
        if self.evaluation.every and not self.evaluation.eval_datasets:
            self.evaluation.eval_datasets = self.generation.implied_datasets("test")


def pass_batch_size(train: TrainConfig) -> int:
    """The corrections in one step of a supervised pass, on each rank."""
    return train.corrections.pass_batch_size or train.per_device_train_batch_size
