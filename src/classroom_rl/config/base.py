"""Groups of configuration keys that several programs share. A test checks that the code reads every key."""

from dataclasses import asdict, field, fields
from typing import Annotated, Any

from classroom_rl.config.fields import (
    ContextLength,
    Count,
    FilePath,
    Finite,
    Flag,
    Merges,
    ModelPath,
    Number,
    Range,
    Seconds,
    Share,
    SomeShare,
    Steps,
    Text,
    Tokens,
    Weight,
    Whole,
    at_least,
    between,
    config_group,
)
from classroom_rl.config.values import (
    ABSOLUTE,
    LEDGER,
    SCORING_RULES,
    AdapterBias,
    EngineDtype,
    JudgeMode,
    PostTestStudent,
    ResponseFormat,
    Schedule,
    Tracker,
)
from classroom_rl.rollout.supervision import OBSERVE, OnInvalid

Attempts = Annotated[Whole, at_least(0, 10_000)]


@config_group
class VllmConfig:
    """How one vLLM engine is loaded, and how it samples.

    `top_k` −1 and `top_p` 1 sample from the full softmax, the distribution that GRPO trains. `max_length` is the
    context in tokens. `number_of_gpus_per_instance` is vLLM's tensor-parallel size. `dtype` is `auto`, `bfloat16`,
    `float16` or `float32`. `cpu_kvcache_gib` and `cpu_cores` (a core list such as "0" or "0-3") have an effect on CPUs
    only; with `cpu_cores`, an engine has one process there instead of two that wait for each other in a busy loop.
    """

    temperature: Annotated[Number, at_least(0, 100)] = 0.9
    top_k: Annotated[Whole, at_least(1, 10**6, "it is at least 1, or -1 for no limit", also=-1)] = -1
    top_p: Annotated[Number, Range(0, 1, "it is above 0 and at most 1", open_below=True)] = 1.0
    max_length: ContextLength = 8192
    max_num_seqs: Count = 256
    gpu_memory_utilization: Annotated[
        Number,
        Range(
            0, 1, "it is the share of the GPU's memory that the engine may take, above 0 and at most 1", open_below=True
        ),
    ] = 0.5
    number_of_gpus_per_instance: Annotated[Whole, at_least(1, 1024)] = 1
    enforce_eager: Flag = False
    dtype: EngineDtype = "auto"
    cpu_kvcache_gib: Count = 1
    cpu_cores: Text | None = None


@config_group
class LoraConfig:
    """A LoRA adapter that is trained instead of the model's own weights (Hu et al., "LoRA", 2021).

    A weight W becomes W + `alpha` / `rank` × B·A, where only A (`rank` rows) and B (`rank` columns) are trained.
    `target_modules`: `all-linear` (all linear layers except the output head), or a list of module names such as
    [q_proj, v_proj]. `dropout` is the share of A's inputs that a training step drops. `bias`: which biases of the model
    are trained, too: `none`, `all`, or `lora_only` (those of the target modules).
    """

    enable: Flag = False
    rank: Count = 16
    alpha: Count = 32
    target_modules: Any = "all-linear"
    dropout: Annotated[Number, Range(0, 1, "it is a share of at least 0 and below 1", open_above=True)] = 0.01
    bias: AdapterBias = "none"


@config_group
class ModelConfig:
    """A model that vLLM serves: a Hub name or a local folder."""

    model_name_or_path: ModelPath = "Qwen/Qwen2.5-7B-Instruct"
    vllm: VllmConfig = field(default_factory=VllmConfig)

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter that the model is served with; None if it has none."""
        return None

    @property
    def is_remote(self) -> bool:
        """Whether the model is behind an API."""
        return False


@config_group
class ApiModelConfig(ModelConfig):
    """A model on a vLLM engine or behind an OpenAI-compatible API.

    `base_url` is the API's address. `use_openrouter` and `use_gemini` stand for the addresses of OpenRouter and of
    Gemini's compatible endpoint, and for their key variables, OPENROUTER_API_KEY and GEMINI_API_KEY. `api_key_env`
    names another variable; with `base_url` alone, requests carry no key. With none of these the model is a vLLM engine.

    `fallback_models` are models of the same API, in order: when one does not answer, or the API does not know it, the
    next one is asked. `response_format`: `json_schema` asks for answers by schema, `text` leaves their shape to the
    prompt, `auto` tries the schema and falls back to text for a model that refuses it. An engine of the server samples
    a judge's and a supervisor's answers under the schema, unless it is `text`.

    Limits: `max_concurrent_requests` at a time; null in `requests_per_minute` or `tokens_per_minute` (prompt and
    answer) means no limit. A request may take `request_timeout_s`. If a model does not answer for `deadline_s`, the run
    stops.

    Costs, in US dollars: as the provider reports them, otherwise tokens × `usd_per_million_prompt_tokens` and
    `usd_per_million_completion_tokens` (of the most expensive model that may be asked). `max_cost_usd` caps the
    spending of the run, across restarts. It needs the prices, because each request's worst case is reserved before it
    is sent.
    """

    use_openrouter: Flag = False
    use_gemini: Flag = False
    base_url: Text | None = None
    api_key_env: Text | None = None
    fallback_models: list[Text] = field(default_factory=list)
    response_format: ResponseFormat = "auto"
    max_concurrent_requests: Count = 64
    requests_per_minute: Count | None = None
    tokens_per_minute: Annotated[Whole, at_least(1, 10**9)] | None = None
    request_timeout_s: Seconds = 120.0
    deadline_s: Seconds = 1800.0
    usd_per_million_prompt_tokens: Weight = 0.0
    usd_per_million_completion_tokens: Weight = 0.0
    max_cost_usd: Annotated[Number, at_least(0, 10**9)] | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the model is behind an API."""
        return self.use_openrouter or self.use_gemini or self.base_url is not None


@config_group
class JudgeModelConfig(ApiModelConfig):
    """The judge. `model_name_or_path: rubric` is the embedded rubric of the quickstart's closed-grammar lessons,
    `rules` the embedded judge of lesson plans in any language.

    `replies_per_attempt`: how many replies one judge attempt may use until one holds a verdict. `max_failed_share`: the
    step stops if more than this share of a batch's conversations have no verdict, or content that the judge refused.

    `mode`: `absolute` judges each conversation by itself; `group` has one call rank and score all conversations of a
    group by a rule that scores, which costs less (docs/classroom.md). `group_prompts_paths` are its templates, by
    rule. `anchor_share` of the conversations are also judged by themselves, to compare the two; these verdicts change
    no reward.
    """

    replies_per_attempt: Annotated[Whole, at_least(1, 1000)] = 3
    max_failed_share: Share = 0.2
    mode: JudgeMode = ABSOLUTE
    anchor_share: Share = 0.03
    group_prompts_paths: dict[str, FilePath] = field(
        default_factory=lambda: {"pedagogical_eval": "prompt_templates/judges/language_tutor_group.txt"}
    )


@config_group
class ServerConfig:
    """Where the servers of a run listen, their deadlines, and how engines share GPUs. The content of the episodes does
    not depend on these keys.

    Deadlines: `server_start_timeout_s` for a server to load its models, or to return after it ended; `sample_timeout_s`
    for a batch of episodes; `turn_timeout_s` for an engine to finish each message it works on, after which the engine
    counts as hung and the server ends (an engine gets `vllm.max_num_seqs` messages at a time; waiting ones do not
    count); `load_weights_timeout_s` for turns in flight to end before new weights are loaded.

    `server_urls`: one server per machine; null means the one at `server_host` and `server_port`. The trainer's
    processes are assigned to them in order: with 2 servers and 8 processes the first four use the first server. Each
    process resolves the address itself, so http://127.0.0.1:8005 twice means each machine's own server. `server_index`,
    from 0, is the server's own position in the list.

    `allowed_hosts`: hostnames besides localhost under which a server without a token (`CLASSROOM_TOKEN`) answers, such
    as host.docker.internal, without a port. IP addresses need not be listed.

    `schedule`: `concurrent` lets every episode go on by itself; `phased` has all episodes finish one phase (in the
    classroom the dialogue, the judging, and so on) before any begins the next, and has the engines sleep that a phase
    does not need (rollout/scheduler.py), for models that do not fit side by side.

    `colocate`: whether the engines sleep while the trainer steps and give it their GPU's memory. Null: they do if
    server and trainer use the same GPU.
    """

    server_host: Text = "127.0.0.1"
    server_port: Annotated[Whole, between(1, 65535)] = 8005
    allowed_hosts: list[Text] = field(default_factory=list)
    server_urls: list[Text] | None = None
    server_index: Annotated[Whole, at_least(0, 10**6)] = 0
    server_start_timeout_s: Seconds = 1800.0
    sample_timeout_s: Seconds = 3600.0
    load_weights_timeout_s: Seconds = 600.0
    turn_timeout_s: Seconds = 900.0
    schedule: Schedule = "concurrent"
    colocate: Flag | None = None


@config_group
class LimitsConfig:
    """Limits of an episode. `max_turns` counts messages. `max_tokens_in_conversation` bounds the context of the policy
    (in the classroom the teacher); its model's own `vllm.max_length` bounds it, too. `max_tokens_per_turn` bounds one
    sampled message."""

    max_turns: Annotated[Whole, at_least(1, 10_000, "it counts messages and must be at least 1")] = 15
    max_tokens_in_conversation: Tokens = 8192
    max_tokens_per_turn: Tokens = 1024


@config_group
class EnvironmentConfig(LimitsConfig, ServerConfig):
    """The `generation` block that all environments share; each environment adds keys of its own.

    Attributes:
        judge_rules: the rules that episodes are judged by, and their templates.
    """

    @property
    def judge_rules(self) -> dict[str, str]:
        return {}

    def implied_datasets(self, split: str) -> list["DatasetSource"]:
        """The datasets of a configuration that names none; `split` is `train` or `test`."""
        return []

    def identity(self) -> dict[str, Any]:
        """The values that an episode depends on: all keys except those of `ServerConfig`."""
        own = {item.name for item in fields(ServerConfig)}
        return {name: value for name, value in asdict(self).items() if name not in own}


@config_group
class PromptsConfig:
    """The prompts of the classroom's models, and what the program draws for a conversation.

    `student_error_rate` is the probability that a student turn gets the persona `error_student`, or a mapping from
    every persona to its weight; with a single persona every turn gets that one. A null in `student_names` is a student
    without a name. `forced_conversation_type`, in upper or lower case: `guided` (the teacher opens), `attempt` (the
    student's attempt opens), null (drawn per problem; `guided` if a judge rule scores).

    `use_thinking` tells the teacher to think in `<think>` before each message (its prompt template says how), and
    rewards thoughts; `force_thinking` begins each of its messages with that tag, which is not trained on.

    `student_attempt_prompt_path` is used by evaluations only: with it the student solves the problem before, and
    outside of, the dialogue.
    """

    teacher_prompt_path: FilePath = "prompt_templates/quickstart/teacher.txt"
    student_personas_prompts_paths: dict[str, FilePath] = field(default_factory=dict)
    student_error_rate: Any = 0.2
    student_initial_attempt_prompt_path: FilePath | None = None
    initial_attempt_wrapper_prompt_path: FilePath | None = None
    student_final_prompt_path: FilePath | None = None
    student_attempt_prompt_path: FilePath | None = None
    judges_rules_prompts_paths: dict[str, FilePath] = field(default_factory=dict)
    student_names: list[Any] = field(
        default_factory=lambda: ["Alex", "Jamie", "Taylor", "Jordan", "Sam", "Casey", "Morgan", "Riley", None]
    )
    forced_conversation_type: Text | None = None
    use_thinking: Flag = False
    force_thinking: Flag = False


@config_group
class JudgingConfig:
    """After the dialogue: the student's solutions, the judge's attempts, and what a rejection costs. A boxed answer
    whose comparison with the reference takes longer than `answer_timeout_s` counts as wrong."""

    max_tokens_per_student_attempt: Tokens = 3900
    max_tokens_per_judge_attempt: Tokens = 2048
    number_student_attempts: Attempts = 8
    number_judge_attempts: Attempts = 2
    ignore_rejected_judge: Flag = False
    extra_penalty_for_rejected_judges: Weight = 0.25
    low_score_threshold: Share = 0.3
    answer_timeout_s: Seconds = 5.0


@config_group
class SupervisorModelConfig(ApiModelConfig):
    """The supervisor. `model_name_or_path: rubric` is the rubric of the quickstart's closed-grammar lessons, `rules`
    the rules for lesson plans in any language and for maths problems. `replies_per_review`: how many replies one review
    may use until one can be read."""

    replies_per_review: Annotated[Whole, at_least(1, 1000)] = 2


def default_penalties() -> dict[str, float]:
    """The price of each category of an invalid message."""
    return {
        "format": -0.5,
        "task": -0.5,
        "length": -0.5,
        "repetition": -0.5,
        "ignores_error": -1.0,
        "false_correction": -1.0,
        "wrong_maths": -1.0,
        "language": -1.0,
        "leak": -2.0,
        "ends_early": -2.0,
        "off_topic": -3.0,
    }


@config_group
class SupervisionConfig:
    """What a supervisor does with each message of the teacher, in training only (docs/supervision.md).

    `prompt_path`: the prompt template of a supervisor that is a model. `on_invalid`: `observe` lets the student hear
    every message; `retry` has the teacher write it again, up to `max_retries` times, with the critique in its context
    if `show_critique`; `replace` puts the supervisor's correction in its place. `share` is the share of the problems
    whose conversations are supervised; over `anneal_steps` steps it falls to 0 (0: it stays). `penalties` is the price
    of each category, at most 0; keys that are left out keep their default. `max_tokens` bounds a model's review.
    """

    prompt_path: FilePath | None = None
    on_invalid: OnInvalid = OBSERVE
    max_retries: Annotated[Whole, at_least(1, 100)] = 1
    show_critique: Flag = False
    share: Share = 1.0
    anneal_steps: Steps = 0
    max_tokens: Tokens = 512
    penalties: Annotated[dict[str, Finite], Merges] = field(default_factory=default_penalties)


@config_group
class ToolLimitsConfig:
    """Limits of the tools that the teacher calls: how many calls a message may have, how many seconds each may take,
    and how many characters of a result the teacher is shown."""

    calls: Annotated[Whole, between(1, 100)] = 4
    seconds: Seconds = 5.0
    characters: Annotated[Whole, between(1, 10**6)] = 1000


@config_group
class PostTestConfig:
    """A delayed post-test after the dialogue: what the student still knows without the transcript
    (docs/trusting_rewards.md).

    A ledger says what the student may know: what it produced in the lesson before the teacher said it. With `enable`, a
    student that the program holds by this ledger answers the test; with `ask_student` the student's model does, too,
    with `prompt_path` as its prompt, which shows the ledger and not the dialogue, and at most `max_tokens_per_answer`
    tokens for each answer. Both are recorded. `scored_by` says whose answers the reward `post_test` counts: `ledger` or
    `student`. Of a maths problem, at most `siblings` sibling problems are asked.
    """

    enable: Flag = False
    ask_student: Flag = False
    scored_by: PostTestStudent = LEDGER
    prompt_path: FilePath | None = None
    siblings: Annotated[Whole, between(1, 100)] = 3
    max_tokens_per_answer: Tokens = 1024


@config_group
class GenerationConfig(JudgingConfig, EnvironmentConfig, PromptsConfig):
    """The `generation` block of the classroom: prompts, lengths, judging, supervision, post-test, and the server. A
    dialogue ends at the latest with the teacher's first message that is number `max_turns` or later. `teacher_tools`
    names the tools that the teacher may call while it writes a message, such as `calculator` (docs/environments.md).

    `readers_path` is a folder with readers that were trained on messages of real tutors (docs/classroom.md). The judge
    `rules` and the rules of a supervisor then use them where a label means the same, and an evaluation measures what
    they read. Null: rules alone, as everywhere by default.
    """

    supervisor: SupervisionConfig = field(default_factory=SupervisionConfig)
    teacher_tools: list[Text] = field(default_factory=list)
    tool_limits: ToolLimitsConfig = field(default_factory=ToolLimitsConfig)
    readers_path: FilePath | None = None
    post_test: PostTestConfig = field(default_factory=PostTestConfig)

    @property
    def judge_rules(self) -> dict[str, str]:
        """The rules that conversations are judged by, and their templates; none with `number_judge_attempts` 0."""
        return self.judges_rules_prompts_paths if self.number_judge_attempts > 0 else {}

    def implied_datasets(self, split: str) -> list["DatasetSource"]:
        """The shipped lesson plans, for a judge rule that scores."""
        return [lesson_plans(split)] if SCORING_RULES & set(self.judges_rules_prompts_paths) else []

    def identity(self) -> dict[str, Any]:
        """As for every environment, without keys that no conversation depends on: the prompt of an evaluation's
        question before the dialogue, and the timeout of an answer's comparison. Supervision is a part of the
        classroom's identity if there is a supervisor. The limits of tools count only if there are tools, readers only
        if some are named, and the post-test only if there is one."""
        apart = ["student_attempt_prompt_path", "answer_timeout_s", "supervisor"]
        apart += [] if self.teacher_tools else ["teacher_tools", "tool_limits"]
        apart += [] if self.readers_path else ["readers_path"]
        apart += [] if self.post_test.enable else ["post_test"]
        return {name: value for name, value in super().identity().items() if name not in apart}

    def __post_init__(self) -> None:
        if self.forced_conversation_type is None and SCORING_RULES & set(self.judges_rules_prompts_paths):
            self.forced_conversation_type = "guided"


@config_group
class DataSource:
    """One dataset: a Hub name or a local .jsonl/.json/.csv/.parquet file, and the share of it to take, in (0, 1].
    `split` applies to Hub names only; a file is one split."""

    name_or_path: FilePath = ""
    split: Text = "train"
    ratio: SomeShare = 1.0


@config_group
class DatasetSource(DataSource):
    """A dataset of problems: where their texts and reference answers come from.

    The text is the cell in `problem_column`, or the Jinja template at `problem_template` rendered with the row's
    columns as variables; lesson plans have `prompt_templates/lesson_plan.txt`. `columns` maps template variables to
    columns of another name. `answer_column` null: the problems have no answer. Maths problems may have
    `sibling_problems_column`, problems of the same structure with other numbers, and `steps_column`, the quantities on
    the way to the answer: a post-test asks them (docs/trusting_rewards.md).
    """

    problem_column: Text = "problem"
    answer_column: Text | None = "answer"
    problem_template: FilePath | None = None
    columns: dict[str, Text] = field(default_factory=dict)
    sibling_problems_column: Text | None = None
    steps_column: Text | None = None


@config_group
class HuggingFaceConfig:
    """The Hub repository, `user/name`, that the trained model is pushed to if `push_to_hub` is true. Needs HF_TOKEN."""

    name: Text | None = None
    push_to_hub: Flag = False


def lesson_plans(split: str) -> DatasetSource:
    """The lesson plans that come with this project, `train` or `test`."""
    return DatasetSource(
        f"data/lesson_plans/{split}.jsonl", answer_column=None, problem_template="prompt_templates/lesson_plan.txt"
    )


@config_group
class LoggingConfig:
    """Where a run is reported. `save_dir` is the run folder, which holds everything that server and trainer write.
    `save_steps` is the number of optimizer steps between two checkpoints, rounded up to whole batches."""

    wandb: Flag = False
    wandb_project: Text = "train_rl"
    wandb_run_name: Text | None = None
    wandb_entity: Text | None = None
    run_group: Text | None = None
    wandb_tags: list[Text] = field(default_factory=list)
    report_to: list[Tracker] = field(default_factory=list)
    save_dir: FilePath = "checkpoints"
    save_steps: Steps = 10
