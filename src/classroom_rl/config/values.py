"""Checks of single config values, and the names that transformers, TRL and vLLM accept.

The names are copied here, because reading them from the libraries would import torch; a test compares them.
"""

import math
import os
import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Literal, get_args
from urllib.parse import urlsplit

from classroom_rl.errors import ConfigError

END_OF_CONVERSATION = "<end_of_conversation>"
"""What a teacher writes to end a dialogue."""

CORRECT_PERSONA, ERROR_PERSONA = "correct_student", "error_student"
"""The persona that makes no error, and the one that is told to make one."""

RUBRIC, RULES = "rubric", "rules"
EMBEDDED_JUDGES = (RUBRIC, RULES)
"""Judges without a model, as `model_name_or_path` names them."""

EMBEDDED_SUPERVISORS = (RUBRIC, RULES)
"""Supervisors without a model, as `model_name_or_path` names them."""

Sampling = Literal["sampled", "greedy", "supervised"]
"""How a tutor is sampled in an evaluation. `supervised` is `sampled` with a supervisor that reads each message."""
SAMPLED, GREEDY, SUPERVISED = SAMPLINGS = get_args(Sampling)

TurnCredit = Literal["none", "immediate", "to_go", "progress"]
NO_CREDIT, IMMEDIATE, TO_GO, PROGRESS = get_args(TurnCredit)

PublishThrough = Literal["disk", "memory", "nccl"]
"""How weights are published: in the run folder, in the shared memory of the machine, or from the trainer's memory into
that of the engines."""
DISK, MEMORY, NCCL = get_args(PublishThrough)

GroupMode = Literal["keep", "drop", "resample"]
"""What becomes of a batch's groups without variance."""
KEEP, DROP, RESAMPLE = get_args(GroupMode)

JudgeMode = Literal["absolute", "group"]
"""Whether a judge scores each conversation by itself, or those of a group in one call."""
ABSOLUTE, GROUP = get_args(JudgeMode)

CorrectionMode = Literal["none", "same_step", "pass"]
NO_CORRECTIONS, SAME_STEP, PASS = get_args(CorrectionMode)
CorrectionTargets = Literal["whole", "changed"]
"""Which tokens of a corrected message are trained on."""
WHOLE, CHANGED = get_args(CorrectionTargets)

SUPERVISOR_REWARD = "supervisor"
"""The turn reward that is the supervisor's penalty."""

LEVEL_REWARD = "level"
"""The classroom's turn reward for messages at the lesson's level."""

PostTestStudent = Literal["ledger", "student"]
"""Who answers a post-test: the student that the program holds by its ledger, and the student's model."""
LEDGER, STUDENT = POST_TEST_STUDENTS = get_args(PostTestStudent)

CefrLevel = Literal["A1", "A2", "B1", "B2", "C1", "C2"]
"""The levels of the Common European Framework of Reference for Languages."""
CEFR_LEVELS = get_args(CefrLevel)
WORDFREQ = "wordfreq"
"""The package that is the word list of messages' levels, unless a file is named."""

TrainedRole = Literal["teacher", "student"]
"""The role of the classroom that is trained."""
TRAINS_TEACHER, TRAINS_STUDENT = get_args(TrainedRole)
STUDENT_REWARD = "student"
"""The reward of a student under training."""

Algorithm = Literal["grpo", "ppo", "online_dpo"]
GRPO, PPO, ONLINE_DPO = get_args(Algorithm)
Divergence = Literal["reverse", "forward", "jsd"]
"""From a model to its strong tutor: KL(model ‖ tutor), KL(tutor ‖ model), and the Jensen-Shannon divergence."""
REVERSE, FORWARD, JSD = get_args(Divergence)
StepKind = Literal["tokens", "turns"]
"""What a step of PPO is: a sampled token, or a message."""
TOKENS, TURNS = get_args(StepKind)
ValueHeadKind = Literal["linear", "mlp"]
"""PPO's critic on the trunk: a linear function, or a network with a layer of its own."""
LINEAR, MLP = get_args(ValueHeadKind)

Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adafactor",
    "sgd",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_32bit",
    "paged_lion_8bit",
]
OPTIMIZERS = get_args(Optimizer)
Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]
SCHEDULERS = get_args(Scheduler)
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
BNPO, CISPO = "bnpo", "cispo"
CISPO_LARGEST_RATIO = 5.0
"""What TRL recommends for `epsilon_high` with this loss, after ScaleRL; TRL's own default is `epsilon`."""
RewardScale = Literal["group", "batch", "none"]
BY_BATCH, BY_GROUP, UNSCALED = "batch", "group", "none"
ImportanceSamplingLevel = Literal["token", "sequence"]
ImportanceSamplingMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
TrainingDtype = Literal["float32", "bfloat16", "float16"]
EngineDtype = Literal["auto", "bfloat16", "float16", "float32"]
Schedule = Literal["concurrent", "phased"]
PHASED = "phased"
SCRIPT = "script:"
"""Prefix of a teacher's name that stands for a script, not a model: environments/toy_language/scripted_teacher.py."""
ResponseFormat = Literal["auto", "json_schema", "text"]
AdapterBias = Literal["none", "all", "lora_only"]
ADAPTER_BIASES = get_args(AdapterBias)
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`; an engine also serves adapters of lower ranks."""
Tracker = Literal[
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "kubeflow",
    "mlflow",
    "neptune",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
]
LONGEST_NAME, LONGEST_PATH = 255, 4096  # bytes; Linux's limits
_OF_PATTERNS = "*?["
_HOST_NAME = re.compile(r"\w([\w.-]*\w)?\.?")


def check_at_least(key: str, value: float, least: float) -> None:
    """Raise a `ConfigError` for a smaller value, and for nan and infinity."""
    if not (value >= least and math.isfinite(value)):
        raise ConfigError(f"{key} is {value}; it must be at least {least}.")


def check_between(key: str, value: float, least: float, most: float) -> None:
    """Raise a `ConfigError` for a value outside of [least, most]."""
    if not least <= value <= most:
        raise ConfigError(f"{key} is {value}; it must be from {least} to {most}.")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise a `ConfigError` for a value that is none of `choices`."""
    if value not in choices:
        raise ConfigError(f"{key} is {value}; it must be one of {', '.join(choices)}.")


def check_path(key: str, path: str) -> str:
    """The path with a leading `~` expanded. Raises a `ConfigError` for the home of an unknown user, and for a path that
    the file system cannot have."""
    if "\0" in path:
        raise ConfigError(f"{key} is {path!r}; no path holds a NUL character.")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path[1:].partition("/")[0]
        raise ConfigError(f"{key} is {path}, but this machine has no user {user}: give the folder itself.")
    longest = max((len(name.encode(errors="replace")) for name in expanded.split("/")), default=0)
    if longest > LONGEST_NAME or len(expanded.encode(errors="replace")) > LONGEST_PATH:
        raise ConfigError(
            f"{key} is {path[:60]}…, with a name of {longest} bytes in a path of {len(expanded)}; a file's or folder's "
            f"name has at most {LONGEST_NAME}, and a path at most {LONGEST_PATH}."
        )
    return expanded


def check_folder_name(key: str, path: str) -> None:
    """Raise a `ConfigError` for a path that libraries would read as a pattern, or no terminal can show."""
    wildcards = sorted(set(_OF_PATTERNS) & set(path))
    if wildcards:
        raise ConfigError(
            f"{key} is {path}, with {' '.join(wildcards)} in it: vLLM and DeepSpeed look for a model's files by a "
            "pattern, and would take that for a part of it. Rename the folder, or name another one."
        )
    if not path.isprintable():
        raise ConfigError(f"{key} is {path!r}, with a character that cannot be shown: rename the folder.")


def check_host(key: str, host: str) -> None:
    """Raise a `ConfigError` if `host` is neither an IP address nor a hostname."""
    if ":" in host or re.fullmatch(r"[0-9.]+", host):
        try:
            ip_address(host)
        except ValueError as error:
            raise ConfigError(f"{key} is {host}, which is no IP address: {error}.") from error
    elif len(host) > LONGEST_NAME or not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"{key} is {host!r}; it is an IP address or the name of a machine, such as localhost.")


def is_loopback(host: str) -> bool:
    """Whether a host is an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_url(key: str, url: str) -> None:
    """Raise a `ConfigError` if `url` is not an http or https address, or has room for a password or a key."""
    if "@" in url or "?" in url or "#" in url:
        raise ConfigError(
            f"{key} has an @, a ? or a #. It is an address alone, such as http://127.0.0.1:8005: no name, password or "
            "key may stand in it, because it is printed, and kept in the run folder."
        )
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise ConfigError(f"{key} is {url!r}, which is no address: {error}.") from error
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{key} is {url!r}; it must begin with http:// or https://.")
    if not host or port == 0 or not url.isprintable() or " " in url:
        raise ConfigError(f"{key} is {url!r}; it must be an address such as http://127.0.0.1:8005.")
    check_host(f"The host of {key}", host)


SCORING_RULES = frozenset({"pedagogical_eval"})
"""Judge rules that answer with scores; every other rule answers with a decision, OK or REJECT."""


LEAK_RULE, PEDAGOGY_RULE = "does_not_leak_answer", "follows_pedagogical_values"
"""The decision rules of the maths tutor, which evaluations report by name. Of these, the judge `rules` decides the
first."""


RULES_VERSION = "8"
"""Recorded with every figure that comes from the rules on messages; increased whenever one of them changes."""


LARGEST_BATCH = 4096
"""The most conversations in one request; a server holds all of them in memory."""


def is_script(name: str) -> bool:
    """Whether a teacher model's name stands for a script."""
    return name.startswith(SCRIPT)
