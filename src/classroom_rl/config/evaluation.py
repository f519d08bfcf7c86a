"""Schema of `eval.py`: which tutor is measured, on which problems, and how."""

import copy
import re
from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Annotated

from classroom_rl.config.base import DatasetSource, GenerationConfig, LoggingConfig, default_penalties
from classroom_rl.config.benchmark import BenchmarkConfig, check_benchmark, has_tutor
from classroom_rl.config.checks import (
    check_classroom_rewards,
    check_generation,
    check_logging,
    check_reward_names,
    check_server,
)
from classroom_rl.config.fields import (
    Count,
    CountFromZero,
    Examples,
    FilePath,
    Finite,
    Flag,
    ModelPath,
    Seed,
    Text,
    Whole,
    between,
    config_group,
)
from classroom_rl.config.maths_classroom import MATHS_CLASSROOM, MATHS_DATASET, log_filled_in
from classroom_rl.config.model_checks import check_access, check_further_judges, check_judge, check_model, check_vllm
from classroom_rl.config.models import (
    ApiAccessConfig,
    ApiModelConfig,
    JudgeModelConfig,
    SupervisorModelConfig,
    VllmConfig,
)
from classroom_rl.config.prompt_search import PromptSearchConfig, check_prompt_search
from classroom_rl.config.train_rl import RewardModelConfig
from classroom_rl.config.training_checks import check_supervisor
from classroom_rl.config.values import (
    EMBEDDED_JUDGES,
    GREEDY,
    LARGEST_BATCH,
    SAMPLED,
    SAMPLINGS,
    SUPERVISED,
    TRAINS_TEACHER,
    check_url,
)
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.environment import module_of

BASE, ACKNOWLEDGES, IDEAL = "base", "acknowledges", "ideal"
RESERVED_NAMES = (BASE, ACKNOWLEDGES, IDEAL)
REFERENCE = "reference"
"""The names of the untrained base and of the control arms in every comparison; and of the reference's students beside
other students."""

_TUTOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@config_group
class EvalDatasetConfig:
    """The problems. Every tutor gets the same ones in the same order."""

    eval_datasets: list[DatasetSource] = field(default_factory=list)
    """Where they come from. Without a dataset, and with a judge rule that scores, they are the shipped test plans."""
    max_val_examples: Examples = 500
    """The most problems, of all datasets together."""


@config_group
class TutorConfig(ApiAccessConfig):
    """One of several tutors. Its model and its API are its own; everything else is as in `teacher_model`."""

    name: Text = ""
    """Names the tutor in results and its folder: letters, digits and ._-; each has another one, and none is `base`,
    `acknowledges` or `ideal`."""
    model_name_or_path: ModelPath | None = None
    """A folder, a Hub name or an API's model. Null: `adapter` or `server_url` says which tutor it is."""
    adapter: ModelPath | None = None
    """A folder with a LoRA adapter. It is merged into `model_name_or_path` as its base; if that is null, into the base
    that the adapter names."""
    server_url: Text | None = None
    """The address of a running server, whose tutor this is, with that server's own student and rules."""


@config_group
class StudentConfig(ApiAccessConfig):
    """One of several students that are measured. Its model, its API and its prompts are its own; everything else is as
    in `student_model`."""

    name: Text = ""
    """Names the student in results and its folder: letters, digits and ._-; each has another one, and none is
    `reference`."""
    model_name_or_path: ModelPath | None = None
    """A folder, a Hub name or an API's model. Null: `student_model`."""
    student_personas_prompts_paths: dict[str, FilePath] = field(default_factory=dict)
    """The prompts of its personas. Empty: those of `generation`."""

    def model(self, base: ApiModelConfig) -> ApiModelConfig:
        """The student's model: `base` if it names none, else its own with all other settings from `base`."""
        return base if self.model_name_or_path is None else model_of_tutor(self, base)


def model_of_tutor(tutor: TutorConfig | StudentConfig, base: ApiModelConfig) -> ApiModelConfig:
    """The tutor's model: its name and its API come from `tutor`, all other settings from `base`."""
    access = {item.name: getattr(tutor, item.name) for item in fields(ApiAccessConfig)}
    return replace(base, model_name_or_path=tutor.model_name_or_path, **access)


@config_group
class CounterfactualsConfig:
    """Whether the prices of messages predict what the student does later (docs/trusting_rewards.md). Each of some
    messages is compared with another one in its place: the supervisor's correction, or a message that the tutor samples
    there."""

    forks: CountFromZero = 0
    """How many messages of the tutor are compared; 0: none."""
    playouts: Annotated[Whole, between(8, 4096)] = 8
    """How often the conversation is played on after each of the two, with the same seeds."""
    siblings: Annotated[Whole, between(1, 4096)] = 4
    """How many messages the tutor samples to choose the other one from, where there is no correction."""


@config_group
class EvalConfig:
    """An evaluation of one tutor, or of several side by side (docs/evaluation.md).

    An evaluation that names neither a persona nor a judge rule is one of a maths tutor. It gets the prompts and rules
    in `MATHS_CLASSROOM` where it has none of its own, and without a dataset Big-Math's test problems; a log line lists
    what was filled in.

    From `recompute_initial_attempts` to `pedagogical_reward_vllm`, keys are for tutors that are measured by the
    student's solutions, that is without a judge rule that scores.
    """

    environment: Text = "classroom"
    """The environment of `generation`; only the classroom can be evaluated."""
    server_url: Text | None = None
    """The address of a running server, whose tutor is then measured with that server's own models and classroom rules.
    Null: `teacher_model`, `student_model` and `judge_model` are loaded in this process."""
    tutors: list[TutorConfig] = field(default_factory=list)
    """Tutors that are compared with each other, with `teacher_model`, which is then the untrained base, and with the
    control arms: a tutor that only says "Good!", and on lessons of the quickstart the scripted ideal. They are played
    one after the other, so that one tutor at a time is in memory."""
    students: list[StudentConfig] = field(default_factory=list)
    """Students that are measured side by side, in conversations with `teacher_model`, one after the other: how they
    err, keep to what they know, react to hints, stay in their role, talk like `reference`'s students, learn."""
    reference: FilePath | None = None
    """With `students`, a file of conversations, such as MathDial's as `.jsonl`: the students that they should talk
    like, which are measured, too. Null: there is none."""
    extra_judges: list[JudgeModelConfig] = field(default_factory=list)
    """Models behind an API or embedded judges that judge each compared conversation once more, to compare their view of
    the tutors with that of `judge_model`. They give no reward."""
    benchmark: BenchmarkConfig | None = None
    """A published benchmark in place of conversations with the simulated student. Keys of the student, of rewards and
    of the classroom then have no effect. Null: conversations."""
    prompt_search: PromptSearchConfig | None = None
    """A search for a better prompt of the teacher, before it is measured. Null: none."""
    judges: list[JudgeModelConfig] = field(default_factory=list)
    """With `benchmark`, who labels its replies: models behind an API, or `rules`. Each judge's agreement with people is
    measured."""
    samplings: list[Text] = field(default_factory=lambda: [SAMPLED, GREEDY])
    """How the tutor is sampled, one or more: `sampled` at its configured temperature, `greedy` at temperature 0.
    `supervised` is a diagnostic: `sampled`, with a supervisor that reads each message as in a training."""
    num_samples_per_problem: Count = 1
    """Conversations on each problem, per sampling."""
    teacher_model: ApiModelConfig = field(default_factory=ApiModelConfig)
    student_model: ApiModelConfig = field(default_factory=ApiModelConfig)
    judge_model: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    reward_weights: dict[str, Finite] | None = None
    """The rewards that are summed up to each conversation's reward, as in `train.reward_weights`: give those that the
    tutor was trained on, functions of your own included. Null: those that the judge rules imply. A running server sums
    up by its own; other ones are refused."""
    supervisor_model: SupervisorModelConfig | None = None
    """The supervisor of `supervised`, without `server_url` (a server has its own), and of `counterfactuals`, where it
    prices messages of `sampled`. No other conversation has one. Null: there is none."""
    counterfactuals: CounterfactualsConfig = field(default_factory=CounterfactualsConfig)
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(ignore_rejected_judge=True))
    dataset: EvalDatasetConfig = field(default_factory=EvalDatasetConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    recompute_initial_attempts: Flag = True
    """Whether the student also solves each problem before the dialogue. False: the results that an earlier evaluation
    stored in the same folder are used, if any (`evaluation/metrics/maths.py`). With `server_url` it must be false."""
    score_using_pedagogical_reward: Flag = True
    """Whether each message of the tutor is scored by `pedagogical_reward_model`."""
    pedagogical_reward_model: FilePath = "eth-nlped/Qwen2.5-1.5B-pedagogical-rewardmodel"
    """A model with one logit, as a Hub name or a folder. It is loaded after the others have ended, with
    `pedagogical_reward_vllm`, whose sampling options have no effect."""
    pedagogical_reward_prompt_path: FilePath = "prompt_templates/pedagogical_reward_prompt.txt"
    """The instruction that this model is given before each conversation."""
    pedagogical_reward_vllm: VllmConfig = field(default_factory=lambda: VllmConfig(max_length=12000, dtype="float32"))
    student_errors_prompt_path: FilePath | None = "prompt_templates/judges/student_errors.txt"
    """Asks the judge's model, once per conversation, which messages of a language student hold an error; in the
    quickstart's language rules decide. Null: no model is asked, and a message counts as having an error if its persona
    was to make one."""
    measure_level: Flag = False
    """Whether the difficulty of a language tutor's messages is measured, and how it changes over a conversation:
    `level/…` in the results. Needs the word list that `generation.level` names."""
    seed: Seed = 42
    """Of the error schedules and of every sampling, so that two tutors meet the same students."""
    dry_run: Flag = False
    """Plays nothing: prints the configuration and what it leads to, checks it, and ends (docs/configure.md)."""

    def __post_init__(self) -> None:
        if not isinstance(self.generation, GenerationConfig):  # another environment's: `check_eval` refuses it
            return
        if self.benchmark is not None:  # nothing is played
            return
        if self.generation.student_personas_prompts_paths == self.generation.judges_rules_prompts_paths == {}:
            defaults, filled = GenerationConfig(), {}
            for name, value in MATHS_CLASSROOM.items():
                if getattr(self.generation, name) == getattr(defaults, name):
                    setattr(self.generation, name, copy.deepcopy(value))
                    filled[f"generation.{name}"] = value
            if not self.dataset.eval_datasets:
                self.dataset.eval_datasets = [DatasetSource(MATHS_DATASET, split="test")]
                filled["dataset.eval_datasets"] = MATHS_DATASET
            log_filled_in(filled)
        if not self.dataset.eval_datasets:
            self.dataset.eval_datasets = self.generation.implied_datasets("test")


def reward_weights(config: EvalConfig) -> dict[str, float]:
    """The weights of the rewards that are computed: as configured, otherwise as the judge rules imply. Where solutions
    are measured they are also graded, with weight 0 if the reward leaves them out."""
    implied = module_of(config.environment, "config").default_weights(config.generation)
    if config.reward_weights is None:
        return implied
    return {"end_rm": 0.0} | config.reward_weights if "end_rm" in implied else dict(config.reward_weights)


def without_zeros(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights that count: two sums of rewards are the same if these are."""
    return {name: weight for name, weight in weights.items() if weight}


def is_measured_by_solutions(config: EvalConfig) -> bool:
    """Whether the student's solutions before and after the dialogue are measured: not with a judge rule that scores."""
    return "end_rm" in module_of(config.environment, "config").default_weights(config.generation)


def check_eval(config: EvalConfig) -> None:
    """Check the configuration of an evaluation. Raises a `ConfigError` naming the key, the rule and the fix."""
    if not isinstance(config.generation, GenerationConfig):
        raise ConfigError(
            f"environment is {config.environment}, but eval.py measures the tutors of the classroom. What a training "
            "in another environment reached is on the page, in plots/ and in rollouts/ of its run folder."
        )
    if config.benchmark is not None:
        _check_with_benchmark(config, config.benchmark)
        return
    if config.judges:
        raise ConfigError(
            "judges label a benchmark's replies, and benchmark is null: name one, such as with --config-name mrbench. "
            "For further judges of compared tutors set extra_judges."
        )
    unknown = [name for name in config.samplings if name not in SAMPLINGS]
    if unknown or not config.samplings or len(set(config.samplings)) < len(config.samplings):
        raise ConfigError(
            f"samplings is {config.samplings}; it must name one or more of {', '.join(SAMPLINGS)}, each once."
        )
    if config.num_samples_per_problem > LARGEST_BATCH:
        raise ConfigError(
            f"num_samples_per_problem is {config.num_samples_per_problem}; those on one problem come in one "
            f"request, and a server holds {LARGEST_BATCH} conversations at once: ask for fewer."
        )
    _check_supervision(config)
    check_logging(config.logging)
    if not config.dataset.eval_datasets:
        raise ConfigError(
            "dataset.eval_datasets is empty; name at least one, for example [{name_or_path: test.jsonl}]."
        )
    if config.server_url is not None:
        check_url("server_url", config.server_url)
    if config.server_url is None:
        _check_classroom(config)
    if config.tutors:
        _check_tutors(config)
    if config.students or config.reference is not None:
        _check_students(config)
    _check_extra_judges(config)
    if config.prompt_search is not None:
        check_prompt_search(config)
    if is_measured_by_solutions(config):
        _check_solutions(config)


def _check_with_benchmark(config: EvalConfig, benchmark: BenchmarkConfig) -> None:
    """Check an evaluation on a published benchmark, in which nothing is played."""
    check_logging(config.logging)
    for key in ("tutors", "students", "extra_judges", "prompt_search"):
        if getattr(config, key):
            raise ConfigError(
                f"{key} is set beside benchmark: it belongs to conversations that are played. Leave it out; who labels "
                "a benchmark stands in judges, and who answers it in teacher_model or server_url."
            )
    if config.supervisor_model is not None:
        raise ConfigError("supervisor_model is set beside benchmark, which is no conversation: leave it out.")
    check_benchmark(benchmark, config.judges, config.generation)
    if has_tutor(benchmark) and config.server_url is not None:
        check_url("server_url", config.server_url)
    elif has_tutor(benchmark):
        check_model("teacher_model", config.teacher_model, config.generation)


def _check_supervision(config: EvalConfig) -> None:
    """Check that there is a supervisor if one is measured, and none otherwise."""
    supervisor, supervised = config.supervisor_model, SUPERVISED in config.samplings
    if config.counterfactuals.forks > 0:
        _check_counterfactuals(config)
        supervised = True
    if supervisor is not None and not supervised:
        raise ConfigError(
            f"supervisor_model is {supervisor.model_name_or_path}, but samplings is {config.samplings}: tutors are "
            "measured without a supervisor. Leave supervisor_model out, or add the diagnostic: "
            "samplings=[sampled,supervised]."
        )
    if supervisor is not None and config.server_url is not None:
        raise ConfigError(
            f"supervisor_model is {supervisor.model_name_or_path}, but server_url is set: the server's own supervisor "
            "reads the messages. Leave supervisor_model out, or set server_url=null to hold the conversations here."
        )
    if not supervised or config.server_url is not None:
        return
    if supervisor is None:
        raise ConfigError(
            "samplings names supervised, but there is no supervisor: set supervisor_model.model_name_or_path, to "
            "rules, rubric or a model, or leave supervised out."
        )
    check_supervisor(supervisor, config.generation.supervisor, config.generation, default_penalties())


def _check_counterfactuals(config: EvalConfig) -> None:
    """Check that there are messages to fork at, and somebody who prices them, in this process."""
    setting = f"counterfactuals.forks is {config.counterfactuals.forks}"
    if config.server_url is not None:
        raise ConfigError(
            f"{setting}, but a server cannot continue a conversation from the middle: set server_url=null to hold the "
            "conversations here."
        )
    if config.tutors:
        raise ConfigError(f"{setting}, but tutors names several: measure one at a time, as teacher_model.")
    if SAMPLED not in config.samplings:
        raise ConfigError(
            f"{setting}, but samplings is {config.samplings}: the messages come from the sampling sampled, so name it."
        )
    if config.supervisor_model is None:
        raise ConfigError(
            f"{setting}, but there is no supervisor to price messages: set supervisor_model.model_name_or_path, to "
            "rules, rubric or a model."
        )


def _check_tutors(config: EvalConfig) -> None:
    """Check that several tutors have distinct names, and a classroom in this process."""
    names = [tutor.name for tutor in config.tutors]
    for name in names:
        if not _TUTOR_NAME.fullmatch(name) or name in RESERVED_NAMES or names.count(name) > 1:
            raise ConfigError(
                f"tutors has one whose name is {name!r}; each needs a name of its own, of letters, digits and ._- (it "
                f"names a folder), other than {', '.join(RESERVED_NAMES)}: tutors=[{{name: trained, "
                "model_name_or_path: DIR}]."
            )
    for tutor in config.tutors:
        if tutor.server_url is None and tutor.model_name_or_path is None and tutor.adapter is None:
            raise ConfigError(f"The tutor {tutor.name} names no model_name_or_path, adapter or server_url: give one.")
        if tutor.server_url is not None:
            check_url(f"server_url of the tutor {tutor.name}", tutor.server_url)
        check_access(tutor, after=f" of the tutor {tutor.name}")
    if config.server_url is not None:
        raise ConfigError(
            "server_url is set beside tutors: the base and the control arms are played here, so set server_url=null "
            "and name a server as one of the tutors, {name: served, server_url: http://127.0.0.1:8005}."
        )


def _check_students(config: EvalConfig) -> None:
    """Check that several students have distinct names, and a classroom in this process."""
    names = [student.name for student in config.students]
    if not names:
        raise ConfigError(
            "reference is set, but no students to compare with it: name them in students, or leave it out."
        )
    for student in config.students:
        name = student.name
        if not _TUTOR_NAME.fullmatch(name) or name == REFERENCE or names.count(name) > 1:
            raise ConfigError(
                f"students has one whose name is {name!r}; each needs a name of its own, of letters, digits and ._- "
                f"(it names a folder), other than {REFERENCE}: students=[{{name: small, model_name_or_path: DIR}}]."
            )
        check_access(student, after=f" of the student {name}")
        check_model(f"students: {name}", student.model(config.student_model), config.generation)
    if config.server_url is not None or config.tutors or config.counterfactuals.forks:
        key = "server_url" if config.server_url else "tutors" if config.tutors else "counterfactuals.forks"
        raise ConfigError(
            f"{key} is set beside students, which are played here with teacher_model alone: set server_url=null, "
            "and leave tutors and counterfactuals out."
        )


def _check_extra_judges(config: EvalConfig) -> None:
    if config.extra_judges and not config.tutors:
        raise ConfigError("extra_judges judge what is compared, and there are no tutors to compare: name tutors, too.")
    embedded = f"an embedded judge ({', '.join(EMBEDDED_JUDGES)})"
    allowed = f"behind an API (use_openrouter, use_gemini or base_url), or {embedded}"
    check_further_judges("extra_judges", config.extra_judges, config.generation, allowed)


def _check_classroom(config: EvalConfig) -> None:
    """Check the keys that apply only if this process plays the conversations."""
    generation = config.generation
    check_server(generation)
    check_generation(generation)
    if generation.trained_role != TRAINS_TEACHER:
        raise ConfigError("generation.trained_role is student, but an evaluation trains nobody: leave it out.")
    check_model("teacher_model", config.teacher_model, generation)
    check_model("student_model", config.student_model, generation)
    check_judge(config.judge_model, generation)
    if config.teacher_model.is_remote and generation.force_thinking:
        raise ConfigError(
            "generation.force_thinking is true, but teacher_model is behind an API, whose messages cannot be begun for "
            "it: set generation.force_thinking=false."
        )
    solves = generation.number_student_attempts > 0 and generation.student_final_prompt_path
    if is_measured_by_solutions(config) and not (solves and config.reward_model.grades):
        raise ConfigError(
            "Without a judge rule that scores, tutors are measured by the student's solutions: set "
            "generation.student_final_prompt_path, generation.number_student_attempts above 0 and "
            "reward_model.model_name_or_path to Answer or a model, or name pedagogical_eval in "
            "generation.judges_rules_prompts_paths."
        )
    if config.reward_weights is not None:
        check_reward_names("reward_weights", config.reward_weights, config.environment)
    check_classroom_rewards("reward_weights", reward_weights(config), generation, config.reward_model)


def _check_solutions(config: EvalConfig) -> None:
    """Check what the measurements of a maths tutor need besides the classroom."""
    generation = config.generation
    if config.recompute_initial_attempts and config.server_url is not None:
        raise ConfigError(
            "recompute_initial_attempts is true, but a server lends nobody its student: set server_url=null to hold "
            "the conversations here, or recompute_initial_attempts=false."
        )
    if config.recompute_initial_attempts and generation.student_attempt_prompt_path is None:
        raise ConfigError(
            "recompute_initial_attempts is true; the student is asked with generation.student_attempt_prompt_path: set "
            "it, for example to prompt_templates/student_attempt_prompt.txt, or set recompute_initial_attempts=false."
        )
    if not config.score_using_pedagogical_reward:
        return
    check_vllm("pedagogical_reward_vllm", config.pedagogical_reward_vllm)
    length = config.pedagogical_reward_vllm.max_length
    if length < generation.max_tokens_in_conversation:
        raise ConfigError(
            f"pedagogical_reward_vllm.max_length is {length}; the model reads whole conversations, which may have "
            f"generation.max_tokens_in_conversation = {generation.max_tokens_in_conversation} tokens: raise it."
        )
