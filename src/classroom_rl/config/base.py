"""Groups of configuration keys that several programs share. A test checks that the code reads every key."""

from dataclasses import asdict, field, fields
from typing import Annotated, Any

from classroom_rl.config.fields import (
    CountFromZero,
    FilePath,
    Finite,
    Flag,
    Merges,
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
    LEDGER,
    SCORING_RULES,
    TRAINS_TEACHER,
    WORDFREQ,
    CefrLevel,
    PostTestStudent,
    Schedule,
    Tracker,
    TrainedRole,
)
from classroom_rl.rollout.supervision import OBSERVE, OnInvalid

Attempts = Annotated[Whole, at_least(0, 10_000)]


@config_group
class ServerConfig:
    """Where the servers of a run listen, their deadlines, and how engines share GPUs. The content of the episodes does
    not depend on these keys."""

    server_host: Text = "127.0.0.1"
    """The address that the server listens at. 127.0.0.1 is reached from this machine only."""
    server_port: Annotated[Whole, between(1, 65535)] = 8005
    """The server's port."""
    allowed_hosts: list[Text] = field(default_factory=list)
    """Hostnames besides localhost under which a server without a token (CLASSROOM_TOKEN) answers, such as
    host.docker.internal, without a port. IP addresses need not be listed."""
    server_urls: list[Text] | None = None
    """The addresses of several servers, one per machine; null means the one at `server_host` and `server_port`. The
    trainer's processes are assigned to them in order: with 2 servers and 8 processes the first four use the first
    server. Each process resolves the address itself, so http://127.0.0.1:8005 twice means each machine's own server.
    With more servers than processes, every process uses all of them, each by the address that all machines reach: a
    group of episodes goes to the server with the shortest queue, and what a lost server was to play to the others."""
    server_index: CountFromZero = 0
    """The server's own position in `server_urls`, from 0."""
    server_start_timeout_s: Seconds = 1800.0
    """How long, in seconds, a server may take to load its models, or to return after it ended. With more servers than
    processes, it is lost then until new weights are published, and the others go on."""
    sample_timeout_s: Seconds = 3600.0
    """How long a batch of episodes may take, in seconds."""
    load_weights_timeout_s: Seconds = 600.0
    """How long, in seconds, new weights wait for turns in flight to end. With `train.publish_through: nccl` also how
    long a server waits for all weights; then it starts its engine again."""
    turn_timeout_s: Seconds = 900.0
    """How long, in seconds, an engine may take to finish each message it works on. After that it counts as hung and the
    server ends. An engine gets `vllm.max_num_seqs` messages at a time; waiting ones do not count."""
    schedule: Schedule = "concurrent"
    """`concurrent` lets every episode go on by itself. `phased` has all episodes finish one phase (in the classroom the
    dialogue, the judging, and so on) before any begins the next, and has the engines sleep that a phase does not need:
    for models that do not fit side by side (docs/gpus.md)."""
    colocate: Flag | None = None
    """Whether the engines sleep while the trainer steps and give it their GPU's memory. Null: they do if server and
    trainer use the same GPU."""


@config_group
class LimitsConfig:
    """Limits of an episode."""

    max_turns: Annotated[Whole, at_least(1, 10_000, "it counts messages and must be at least 1")] = 15
    """The most messages, of both sides. A dialogue of the classroom ends at the latest with the teacher's first message
    that is number `max_turns` or later; Marooned counts the model's decisions."""
    max_tokens_in_conversation: Tokens = 8192
    """The most tokens in the context of the policy (in the classroom the teacher). Its model's own `vllm.max_length` is
    a limit, too."""
    max_tokens_per_turn: Tokens = 1024
    """The most tokens of one sampled message, hidden thoughts included. A longer one is cut."""


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
        server_keys = {item.name for item in fields(ServerConfig)}
        return {name: value for name, value in asdict(self).items() if name not in server_keys}


@config_group
class PromptsConfig:
    """The prompts of the classroom's models, and what the program draws for a conversation. Prompts are Jinja
    templates; docs/classroom.md lists their variables."""

    teacher_prompt_path: FilePath = "prompt_templates/quickstart/teacher.txt"
    """The teacher's prompt."""
    student_personas_prompts_paths: dict[str, FilePath] = field(default_factory=dict)
    """The student's prompt, by the name of the persona. One persona is drawn for each student turn; the first one also
    writes the solutions."""
    student_error_rate: Any = 0.2
    """The probability that a student turn gets the persona `error_student`; the others share the rest. Or a mapping
    from every persona to its weight. With a single persona every turn gets that one."""
    student_initial_attempt_prompt_path: FilePath | None = None
    """Asks the student for the attempt that opens a dialogue. Needed unless `forced_conversation_type` is `guided`."""
    initial_attempt_wrapper_prompt_path: FilePath | None = None
    """How the teacher is shown that attempt; null: as it is."""
    student_final_prompt_path: FilePath | None = None
    """Asks the student for its solutions after the dialogue. Needed by the reward `end_rm`."""
    student_attempt_prompt_path: FilePath | None = None
    """Used by evaluations only: asks the student to solve the problem before, and outside of, the dialogue."""
    judges_rules_prompts_paths: dict[str, FilePath] = field(default_factory=dict)
    """What the judge is asked, by rule: `pedagogical_eval` gives scores, every other rule a decision, OK or REJECT."""
    student_names: list[Any] = field(
        default_factory=lambda: ["Alex", "Jamie", "Taylor", "Jordan", "Sam", "Casey", "Morgan", "Riley", None]
    )
    """One is drawn for each group; null is a student without a name."""
    forced_conversation_type: Text | None = None
    """Who opens, in upper or lower case: `guided` (the teacher), `attempt` (the student's attempt), null (drawn per
    problem; `guided` if a judge rule scores)."""
    use_thinking: Flag = False
    """Tells the teacher to think in `<think>` before each message (its prompt template says how), and rewards
    thoughts."""
    force_thinking: Flag = False
    """Begins each of the teacher's messages with `<think>`, which is not trained on, and rewards thoughts. Not for a
    teacher behind an API."""


@config_group
class JudgingConfig:
    """After the dialogue: the student's solutions, the judge's attempts, and what a rejection costs. docs/classroom.md
    lists the rewards."""

    max_tokens_per_student_attempt: Tokens = 3900
    """The most tokens of one solution. A reward model's `vllm.max_length` must be larger."""
    max_tokens_per_judge_attempt: Tokens = 2048
    """The most tokens of one reply of the judge. A reply that is cut holds no verdict."""
    number_student_attempts: Attempts = 8
    """How many solutions the student writes, and in an evaluation as many before the dialogue. None are written if no
    reward needs them."""
    number_judge_attempts: Attempts = 2
    """How often the judge is asked by each rule; 0: there are no judges."""
    ignore_rejected_judge: Flag = False
    """Whether a rejected conversation keeps its rewards, less a penalty. False: no solutions are written, and rewards
    become 0 (`end_rm`: minus the penalty; `length` stays)."""
    extra_penalty_for_rejected_judges: Weight = 0.25
    """The penalty λ. It is subtracted from the rewards `pedagogical`, which stays at least 0, and `end_rm`."""
    low_score_threshold: Share = 0.3
    """A conversation whose `pedagogical` reward is below counts as rejected."""
    answer_timeout_s: Seconds = 5.0
    """A boxed answer whose comparison with the reference takes longer, in seconds, counts as wrong."""


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
    """What a supervisor does with each message of the teacher, in a training and in the sampling `supervised` of an
    evaluation (docs/supervision.md)."""

    prompt_path: FilePath | None = None
    """The prompt template of a supervisor that is a model; not for `rubric` and `rules`."""
    on_invalid: OnInvalid = OBSERVE
    """`observe` lets the student hear every message. `retry` has the teacher write an invalid one again. `replace` puts
    the supervisor's correction in its place."""
    max_retries: Annotated[Whole, at_least(1, 100)] = 1
    """With `retry`, how often a message may be written again."""
    show_critique: Flag = False
    """With `retry`, whether the rejected message and its critique are in the teacher's context while it writes
    again."""
    share: Share = 1.0
    """Share of the problems whose conversations are supervised."""
    anneal_steps: Steps = 0
    """Over so many steps `share` falls to 0; 0: it stays."""
    max_tokens: Tokens = 512
    """The most tokens of a model's review."""
    penalties: Annotated[dict[str, Finite], Merges] = field(default_factory=default_penalties)
    """The price of each category of invalid messages, at most 0 (docs/supervision.md lists them). Names that are left
    out keep their default."""


@config_group
class ToolLimitsConfig:
    """Limits of the tools that the teacher calls."""

    calls: Annotated[Whole, between(1, 100)] = 4
    """In one message."""
    seconds: Seconds = 5.0
    """For each call."""
    characters: Annotated[Whole, between(1, 10**6)] = 1000
    """Of a result that the teacher is shown. The rest is cut off."""


@config_group
class PostTestConfig:
    """A delayed post-test after the dialogue: what the student still knows without the transcript
    (docs/trusting_rewards.md). A ledger says what the student may know: what it produced in the lesson before the
    teacher said it."""

    enable: Flag = False
    """Whether there is a test. A student that the program holds by the ledger answers it."""
    ask_student: Flag = False
    """Whether the student's model answers, too. Both results are recorded."""
    scored_by: PostTestStudent = LEDGER
    """Whose answers the reward `post_test` counts: those by the ledger, or those of the student's model."""
    caps_pedagogical: Flag = False
    """Whether the reward `pedagogical` is at most the share of the lesson's items that the teacher left to the
    student."""
    prompt_path: FilePath | None = None
    """The prompt of the student's model in the test. It shows the ledger and not the dialogue."""
    siblings: Annotated[Whole, between(1, 100)] = 3
    """The most sibling problems that are asked of a maths problem."""
    max_tokens_per_answer: Tokens = 1024
    """The most tokens of an answer of the student's model."""


@config_group
class LevelConfig:
    """How the level of the teacher's messages is measured: by the turn reward `level`, and by an evaluation with
    `measure_level` (`src/classroom_rl/judges/difficulty.py`)."""

    word_list: FilePath = WORDFREQ
    """Which words a learner knows: the package `wordfreq` (pip install wordfreq==3.1.1), or a CSV file with the columns
    `word` and `level` (A1 to C2), or `word` and `frequency`."""
    of_lessons: CefrLevel | None = None
    """The level of lessons whose text has no line such as `Level: A2`; null: every lesson must have one."""
    language: Text | None = None
    """The language that is learnt in lessons whose text has no line such as `Language: German`; null: every lesson must
    have one."""


@config_group
class GenerationConfig(JudgingConfig, EnvironmentConfig, PromptsConfig):
    """The `generation` block of the classroom: prompts, lengths, judging, supervision, post-test, and the server."""

    supervisor: SupervisionConfig = field(default_factory=SupervisionConfig)
    teacher_tools: list[Text] = field(default_factory=list)
    """Names of the tools that the teacher may call while it writes a message, such as `calculator`
    (docs/environments.md)."""
    tool_limits: ToolLimitsConfig = field(default_factory=ToolLimitsConfig)
    readers_path: FilePath | None = None
    """A folder with readers that were trained on messages of real tutors (docs/classroom.md). The judge `rules` and the
    rules of a supervisor then use them where a label means the same, and an evaluation measures what they read. Null:
    rules alone."""
    post_test: PostTestConfig = field(default_factory=PostTestConfig)
    level: LevelConfig = field(default_factory=LevelConfig)
    quote_teacher: Flag = False
    """Whether the student's model reads each message of the teacher as a quotation: between marks, below a line that
    says that it is no order to the model. Against tutors that write "whatever your card says, be right now"."""
    trained_role: TrainedRole = TRAINS_TEACHER
    """Whose messages are trained on, and whose engine gets the weights: `teacher`, or `student`, by the reward
    `student` (docs/algorithms.md). The other one stays as it is."""

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
        if some are named, the post-test only if there is one, quotations only if they are made, levels only if
        something is said of them, and the trained role only if it is the student."""
        excluded = ["student_attempt_prompt_path", "answer_timeout_s", "supervisor"]
        excluded += [] if self.teacher_tools else ["teacher_tools", "tool_limits"]
        excluded += [] if self.readers_path else ["readers_path"]
        excluded += [] if self.post_test.enable else ["post_test"]
        excluded += [] if self.quote_teacher else ["quote_teacher"]
        excluded += [] if self.level != LevelConfig() else ["level"]
        excluded += ["trained_role"] if self.trained_role == TRAINS_TEACHER else []
        return {name: value for name, value in super().identity().items() if name not in excluded}

    def __post_init__(self) -> None:
        if self.forced_conversation_type is None and SCORING_RULES & set(self.judges_rules_prompts_paths):
            self.forced_conversation_type = "guided"


@config_group
class DataSource:
    """Where a dataset is."""

    name_or_path: FilePath = ""
    """A Hub name, or a local .jsonl, .json, .csv or .parquet file."""
    split: Text = "train"
    """Of a Hub name; a file is one split."""
    ratio: SomeShare = 1.0
    """The share of it to take. Which rows is drawn with `seed`."""


@config_group
class DatasetSource(DataSource):
    """A dataset of problems: where their texts and reference answers come from."""

    problem_column: Text = "problem"
    """The column with the problem's text, if there is no `problem_template`."""
    answer_column: Text | None = "answer"
    """The column with the reference answer; null: the problems have none."""
    problem_template: FilePath | None = None
    """A Jinja template that makes the problem's text, with the row's columns as variables; lesson plans have
    `prompt_templates/lesson_plan.txt`. Null: the text is that in `problem_column`."""
    columns: dict[str, Text] = field(default_factory=dict)
    """Maps the template's variables to columns of another name."""
    sibling_problems_column: Text | None = None
    """The column with problems of the same structure and other numbers, which a maths problem's post-test asks
    (docs/trusting_rewards.md); null: there are none."""
    steps_column: Text | None = None
    """The column with the quantities on the way to the answer, for the same; null: there are none."""


@config_group
class HuggingFaceConfig:
    """Where the trained model is pushed to."""

    name: Text | None = None
    """The Hub repository, as `user/name`."""
    push_to_hub: Flag = False
    """Whether the trained model is pushed. Needs HF_TOKEN."""


def lesson_plans(split: str) -> DatasetSource:
    """The lesson plans that come with this project, `train` or `test`."""
    return DatasetSource(
        f"data/lesson_plans/{split}.jsonl", answer_column=None, problem_template="prompt_templates/lesson_plan.txt"
    )


@config_group
class LoggingConfig:
    """Where a run is kept, and reported."""

    wandb: Flag = False
    """Whether Weights & Biases gets the metrics; the same as `wandb` in `report_to`. Needs WANDB_API_KEY."""
    wandb_project: Text = "train_rl"
    """The project of Weights & Biases, and of Trackio."""
    wandb_run_name: Text | None = None
    """The name of the run in trackers; null leaves it to them, save that Trackio takes the run's id."""
    wandb_entity: Text | None = None
    """The user or team of Weights & Biases; null: WANDB_ENTITY, or the account's own."""
    run_group: Text | None = None
    """The group of runs in Weights & Biases; null: none."""
    wandb_tags: list[Text] = field(default_factory=list)
    """Tags of the run in Weights & Biases."""
    report_to: list[Tracker] = field(default_factory=list)
    """The trackers that get the metrics. Each needs its package installed."""
    save_dir: FilePath = "checkpoints"
    """The run folder: everything that the programs write is in it. Started again with the same one, a run continues."""
    save_steps: Steps = 10
    """Optimizer steps between two checkpoints; `train_rl.py` rounds it up to whole batches. 0: none on the way."""


@config_group
class TrainLoggingConfig(LoggingConfig):
    """Where a training is kept, and reported."""

    metrics_port: Annotated[Whole, between(1, 65535)] | None = None
    """The port at which the trainer's main process serves its metrics to Prometheus, as `GET /metrics`; null: none. The
    server has its own at `generation.server_port`. With CLASSROOM_TOKEN, a request needs the token."""
    metrics_host: Text = "127.0.0.1"
    """The address of that port. 127.0.0.1 is reached from this machine only; any other needs CLASSROOM_TOKEN."""
