"""Checks and reports before a program loads anything: the rules, personas and rewards in use, missing keys and unusable
folders, and an estimate of the requests to APIs."""

import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from classroom_rl.config.base import DatasetSource, GenerationConfig
from classroom_rl.config.checks import reward_weights as weights_of_training
from classroom_rl.config.evaluation import EvalConfig, model_of_tutor
from classroom_rl.config.evaluation import reward_weights as weights_of_evaluation
from classroom_rl.config.models import ApiModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import check_strong_tutor
from classroom_rl.config.values import GROUP, RESAMPLE
from classroom_rl.engines.api.chat_api import key_variable
from classroom_rl.environments.classroom.setup import persona_weights
from classroom_rl.errors import ConfigError
from classroom_rl.memory.sources import gpu_is_there
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.rollout.chat_template import set_variables
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.environment import environment_of, models_on_engines
from classroom_rl.rollout.supervision import RETRY
from classroom_rl.server.auth import token_for
from classroom_rl.system.startup import has_fast_bfloat16
from classroom_rl.trainer.run_length import load_training_problems, run_length

logger = logging.getLogger(__name__)

_MODES_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")


def in_force(config: TrainRLConfig | EvalConfig) -> list[str]:
    """The judge rules, personas and rewards of a configuration, with their probabilities and weights."""
    generation, lines = config.generation, []
    is_training = isinstance(config, TrainRLConfig)
    if isinstance(generation, GenerationConfig):
        attempts = generation.number_judge_attempts
        rules = ", ".join(generation.judge_rules) + f" ({attempts} × each)" if generation.judge_rules else "none"
        lines.append(f"judge rules in force: {rules}")
        personas = persona_weights(list(generation.student_personas_prompts_paths), generation.student_error_rate)
        lines.append(f"personas in force: {_join({name: f'{100 * share:.3g} %' for name, share in personas.items()})}")
    rewards = _rewards(config)
    lines.append(f"rewards in force: {_join({name: f'× {weight:g}' for name, weight in rewards.items()})}")
    if is_training and (turns := config.train.turn_credit.weights):
        lines.append(f"turn rewards in force: {_join({name: f'× {weight:g}' for name, weight in turns.items()})}")
    return lines


def _rewards(config: TrainRLConfig | EvalConfig) -> dict[str, float]:
    return weights_of_training(config) if isinstance(config, TrainRLConfig) else weights_of_evaluation(config)


def show_in_force(config: TrainRLConfig | EvalConfig) -> None:
    """Print `in_force` as comments, so that the output of a dry run is valid YAML."""
    for line in in_force(config):
        print(f"# {line}")


def _join(weights: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {weight}" for name, weight in weights.items())


# What is missing ------------------------------------------------------------------------------------------------------


def check_start(config: TrainRLConfig | EvalConfig, loads_models: bool, reports: bool) -> None:
    """Refuse to start if something is missing that the program will need later. Logs slow settings and the expected
    requests to APIs.

    Args:
        loads_models: whether this program, or one that it starts, loads the roles' models.
        reports: whether this program, or one that it starts, reports to experiment trackers.

    Raises:
        ConfigError: lists everything that is missing.
    """
    missing = list(what_is_missing(config, loads_models, reports))
    if missing:
        raise ConfigError("\n".join(missing))
    for line in (*slow_numbers(config), *(requests_of(config) if loads_models else [])):
        logger.info("%s", line)


def show_before_start(config: TrainRLConfig | EvalConfig) -> None:
    """Print as comments: the rules and rewards in use, the expected requests to APIs, and what a start would lack."""
    show_in_force(config)
    missing = (f"a start would be refused: {line}" for line in what_is_missing(config))
    for line in (*requests_of(config), *slow_numbers(config), *missing):
        print(f"# {line}")


def what_is_missing(
    config: TrainRLConfig | EvalConfig, loads_models: bool = True, reports: bool = True
) -> Iterator[str]:
    """One message for each thing that a start needs and that is missing: API keys, the server's token, a login, and
    writable folders."""
    if loads_models:
        for role, model in _remote_models(config).items():
            variable = key_variable(model)
            if variable is not None and not os.environ.get(variable):
                yield (
                    f"{role} is {model.model_name_or_path}, behind an API that needs a key: set the environment "
                    f"variable {variable} (any text will do for a local server)."
                )
        yield from _unfit_temporary_folder(config)
    if isinstance(config, TrainRLConfig):
        try:
            token_for(config.generation.server_host)
        except ConfigError as error:
            yield str(error)
    if reports and (config.logging.wandb or "wandb" in config.logging.report_to):
        yield from _missing_login()
    yield from _unfit_cache(config, loads_models)


def _remote_models(config: TrainRLConfig | EvalConfig) -> dict[str, ApiModelConfig]:
    """The models behind an API, by config key."""
    if getattr(config, "server_url", None) is not None:
        return {}
    roles = environment_of(config).models(config, _rewards(config))
    models = {f"{role}_model": model for role, model in roles.items() if model.is_remote}
    guards = getattr(config, "guards", None)
    if guards is not None and guards.judge_check_every_n_steps and guards.held_out_judge_model is not None:
        models["guards.held_out_judge_model"] = guards.held_out_judge_model
    if isinstance(config, EvalConfig):
        for index, tutor in enumerate(config.tutors):
            if tutor.is_remote:
                models[f"tutors[{index}]"] = model_of_tutor(tutor, config.teacher_model)
        models |= {
            f"students[{index}]": student.model(config.student_model) for index, student in enumerate(config.students)
        }
        models |= {f"extra_judges[{index}]": judge for index, judge in enumerate(config.extra_judges)}
        if config.prompt_search is not None and config.prompt_search.reflection_model is not None:
            models["prompt_search.reflection_model"] = config.prompt_search.reflection_model
    return {key: model for key, model in models.items() if model.is_remote}


def _unfit_temporary_folder(config: TrainRLConfig | EvalConfig) -> Iterator[str]:
    folder = tempfile.gettempdir()
    starts_engines = getattr(config, "server_url", None) is None and models_on_engines(config, _rewards(config))
    if starts_engines and any(character.isspace() for character in os.environ.get("TORCHINDUCTOR_CACHE_DIR", folder)):
        yield (
            f"TMPDIR is {folder!r}, with a space in it: torch's compiler, which every engine uses, splits its commands "
            "there. Name a folder without one: export TMPDIR=/tmp."
        )


def _missing_login() -> Iterator[str]:
    """A message if Weights & Biases would need a login. It asks for one late during the start, and ends the program if
    nobody can answer. Mode, address and key may be in the environment, or in the settings files that `wandb login` and
    `wandb offline` write."""
    if sys.stdin.isatty() or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in _MODES_WITHOUT_LOGIN:
        return
    try:
        import wandb
        from wandb.sdk.lib.wbauth.wbnetrc import read_netrc_auth  # it knows the aliases of the default address
    except ImportError:  # transformers reports later what to install
        return
    settings = wandb.Settings()  # wandb.setup() would fix the environment's values for the rest of the process
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    settings.settings_system = str(folder / "settings")
    settings.update_from_system_settings()
    settings.update_from_env_vars(dict(os.environ))
    if settings.mode in _MODES_WITHOUT_LOGIN or settings.api_key or settings.identity_token_file:
        return
    try:
        has_login = read_netrc_auth(host=settings.base_url) is not None
    except wandb.errors.AuthenticationError:
        has_login = False
    if not has_login:
        host = urlsplit(settings.base_url).hostname
        yield (
            f"logging reports to Weights & Biases, and there is no login for {host}: run `wandb login`, set "
            "WANDB_API_KEY, or WANDB_MODE=offline to keep the records in the run folder."
        )


def _unfit_cache(config: TrainRLConfig | EvalConfig, loads_models: bool) -> Iterator[str]:
    """A message for each cache folder that cannot be written to, if datasets or models must be downloaded into it."""
    from huggingface_hub import constants, try_to_load_from_cache

    data = config.dataset.train_datasets if isinstance(config, TrainRLConfig) else config.dataset.eval_datasets
    folders = {}
    if any(source.name_or_path.count("/") == 1 and not Path(source.name_or_path).is_file() for source in data):
        default = Path(constants.HF_HOME) / "datasets"
        folders[os.environ.get("HF_DATASETS_CACHE") or str(default)] = "HF_DATASETS_CACHE"
    engines = models_on_engines(config, _rewards(config)) if getattr(config, "server_url", None) is None else {}
    for model in engines.values() if loads_models else [config.teacher_model]:
        name = model.model_name_or_path
        on_hub = not os.path.exists(name) and name.count("/") == 1 and not name.startswith((".", "runs/"))
        if on_hub and not isinstance(try_to_load_from_cache(name, "config.json"), str):
            folders[constants.HF_HUB_CACHE] = "HF_HUB_CACHE"
    for folder, variable in folders.items():
        if (reason := _why_not_writable(Path(folder))) is not None:
            yield (
                f"What is fetched from the Hub goes into {folder}, which cannot be written to ({reason}): set "
                f"{variable} or HF_HOME to a folder of your own."
            )


def _why_not_writable(folder: Path) -> str | None:
    existing = next((candidate for candidate in (folder, *folder.parents) if candidate.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)


def slow_numbers(config: TrainRLConfig | EvalConfig) -> list[str]:
    """A warning if bfloat16 is configured on a CPU that computes it slower than float32."""
    if gpu_is_there() or has_fast_bfloat16():
        return []
    keys = ["train.dtype"] if isinstance(config, TrainRLConfig) and config.train.dtype == "bfloat16" else []
    if getattr(config, "server_url", None) is None:
        engines = models_on_engines(config, _rewards(config))
        keys += [f"{role}_model.vllm.dtype" for role, model in engines.items() if model.vllm.dtype == "bfloat16"]
    if not keys:
        return []
    return [
        f"warning: {', '.join(keys)} is bfloat16, which this CPU computes slower than float32: unless "
        "memory is short, set it to float32"
    ]


def check_prompts_fit(config: TrainRLConfig) -> None:
    """Refuse problems whose teacher prompt leaves no room for a message, and a strong tutor with another tokenizer, if
    these are on this machine.

    Raises:
        DataError: for the first such problem.
        ConfigError: if there are too few problems, a tokenizer is damaged, or the strong tutor has another one.
    """
    name, strong_name = config.teacher_model.model_name_or_path, config.train.distillation.model
    if strong_name is not None and Path(name).is_dir() and Path(strong_name).is_dir():
        check_strong_tutor(config, strong_name)
    if not Path(name).is_dir() or not _is_here(config.dataset.train_datasets):
        return
    tokenizer = load_tokenizer("teacher_model.model_name_or_path", name)
    set_variables(tokenizer, config.teacher_model.vllm.chat_template_kwargs)
    limit = min(config.generation.max_tokens_in_conversation, config.teacher_model.vllm.max_length)
    environment_of(config).check_problems(config, load_training_problems(config), tokenizer, limit)


def _is_here(sources: Sequence[DatasetSource]) -> bool:
    """Whether all datasets are local files."""
    return all(Path(source.name_or_path).is_file() for source in sources)


# What APIs are asked --------------------------------------------------------------------------------------------------


_LONGEST_TEMPLATE = 2000
"""The approximate number of tokens of a judge's or a supervisor's template around a conversation; the longest shipped
template has fewer."""

_MAX_BASELINES = 3
"""The maximum number of conditions that are compared in addition to `tutors`: the untrained base model and two
controls."""


@dataclass(frozen=True)
class _RequestEstimate:
    """The usual and the maximum number of requests to a role behind an API, and the most tokens of a prompt and of an
    answer."""

    usual: int
    maximum: int
    prompt_tokens: int
    answer_tokens: int


def requests_of(config: TrainRLConfig | EvalConfig) -> list[str]:
    """One line for each role behind an API: the number of requests, and what they cost at the configured prices."""
    models = _remote_models(config)
    if not models or not isinstance(config.generation, GenerationConfig):
        return []
    conversations, scope = _conversations(config)
    lines = []
    for key, model in models.items():
        estimate = _estimate_requests(config, key.removesuffix("_model"), conversations)
        if estimate is None:
            continue
        usd = 1e-6 * (
            estimate.prompt_tokens * model.usd_per_million_prompt_tokens
            + estimate.answer_tokens * model.usd_per_million_completion_tokens
        )
        costs = f"about ${estimate.usual * usd:,.2f}, and ${estimate.maximum * usd:,.2f} at most"
        costs = costs if usd else f"what they cost is known with {key}.usd_per_million_… set"
        cap = f"; {key}.max_cost_usd stops the run at ${model.max_cost_usd:g}" if model.max_cost_usd else ""
        lines.append(
            f"requests to {key} ({model.model_name_or_path}), {scope}: {estimate.usual:,}, and {estimate.maximum:,} at "
            f"most, if every answer is asked for again; each has up to about {estimate.prompt_tokens:,} tokens and "
            f"{estimate.answer_tokens:,} of an answer; {costs}{cap}"
        )
    return lines


def _conversations(config: TrainRLConfig | EvalConfig) -> tuple[int, str]:
    """A number of conversations, and what it refers to: the whole run if its length is known, otherwise one batch or
    one problem."""
    if isinstance(config, EvalConfig):
        size = config.num_samples_per_problem * len(config.samplings)
        problems, sources = config.dataset.max_val_examples, config.dataset.eval_datasets
        if _is_here(sources):
            problems = len(load_problems(sources, problems, config.seed))
        if (search := config.prompt_search) is not None:
            held_out = 2 * size * max(problems, 0)
            return search.conversations + held_out, f"for the search and {held_out} conversations on held-out lessons"
        return (size, "for each problem") if problems < 0 else (size * problems, f"for {problems} problems")
    train = config.train
    size = train.number_of_problems_per_batch * train.num_samples_per_problem
    resampling = train.resample_up_to if train.groups_without_variance == RESAMPLE else 1
    length = run_length(train, len(load_training_problems(config)) if _is_here(config.dataset.train_datasets) else None)
    if length is None:
        return math.ceil(size * resampling), "for each batch"
    total, scope, options = length.conversations * resampling, f"for {length.batches} batches", config.evaluation
    if options.every and _is_here(options.eval_datasets):
        lessons = len(load_problems(options.eval_datasets, options.max_val_examples, config.seed))
        evaluations = length.steps // options.every + 2  # at the beginning and at the end, too
        total += evaluations * lessons * options.num_samples_per_problem * len(options.samplings)
        scope += f" and {evaluations} evaluations"
    return math.ceil(total), scope


def _estimate_requests(config: TrainRLConfig | EvalConfig, role: str, conversations: int) -> _RequestEstimate | None:
    generation = config.generation
    context = generation.max_tokens_in_conversation + _LONGEST_TEMPLATE
    messages_per_role = generation.max_turns // 2 + 1  # including an opening attempt
    if role == "teacher" or role.startswith("tutors["):
        return _RequestEstimate(
            conversations * messages_per_role,
            conversations * messages_per_role,
            context,
            generation.max_tokens_per_turn,
        )
    if role == "prompt_search.reflection":
        search = config.prompt_search
        usual, prompt_tokens = search.max_rounds, context * (search.minibatch_lessons + 1)
        return _RequestEstimate(usual, usual * search.replies_per_proposal, prompt_tokens, search.max_tokens)
    tutors = getattr(config, "tutors", [])
    if role.startswith("extra_judges["):  # one judgement per conversation, including those of tutors on servers
        judge = config.extra_judges[int(role[len("extra_judges[") : -1])]
        usual = conversations * (_MAX_BASELINES + len(tutors)) * len(generation.judges_rules_prompts_paths)
        return _RequestEstimate(
            usual, usual * judge.replies_per_attempt, context, generation.max_tokens_per_judge_attempt
        )
    if tutors:
        conversations *= _MAX_BASELINES + sum(tutor.server_url is None for tutor in tutors)
    if role == "judge":
        attempts = conversations * len(generation.judge_rules) * generation.number_judge_attempts
        judge, answer = config.judge_model, generation.max_tokens_per_judge_attempt
        if judge.mode == GROUP:
            size = config.train.num_samples_per_problem
            individual = math.ceil(attempts * judge.anchor_share)
            usual = math.ceil(attempts / size) + individual
            return _RequestEstimate(
                usual, usual * judge.replies_per_attempt + individual, context * size, answer * size
            )
        # One more request for each attempt without a verdict, to find out whether the tutor's text is the reason.
        return _RequestEstimate(attempts, attempts * (judge.replies_per_attempt + 1), context, answer)
    if role == "student":
        solutions = generation.number_student_attempts if "end_rm" in _rewards(config) else 0
        requests = conversations * (messages_per_role + solutions)
        max_answer = max(generation.max_tokens_per_turn, generation.max_tokens_per_student_attempt if solutions else 0)
        return _RequestEstimate(requests, requests, context, max_answer)
    if role == "supervisor" and config.supervisor_model is not None:
        supervision = generation.supervisor
        reviews = (
            conversations
            * messages_per_role
            * (1 + (supervision.max_retries if supervision.on_invalid == RETRY else 0))
        )
        maximum = reviews * config.supervisor_model.replies_per_review
        usual = math.ceil(conversations * messages_per_role * supervision.share)
        return _RequestEstimate(usual, maximum, context, supervision.max_tokens)
    return None
