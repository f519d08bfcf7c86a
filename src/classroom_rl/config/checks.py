"""Rules of a configuration that a type or a range cannot express, and values that follow from several keys. The ranges
of numbers and the choices of names are on the fields of the schema."""

import math
from collections.abc import Mapping
from typing import Any, get_args
from urllib.parse import urlsplit

from classroom_rl.config.base import (
    EnvironmentConfig,
    GenerationConfig,
    HuggingFaceConfig,
    LoggingConfig,
    PostTestConfig,
    ServerConfig,
    SupervisionConfig,
)
from classroom_rl.config.model_checks import check_judge, check_lora, check_model, check_served_lora, check_vllm
from classroom_rl.config.train_rl import GuardsConfig, RewardModelConfig, TrainConfig, TrainRLConfig
from classroom_rl.config.training_checks import (
    check_algorithm,
    check_evaluation,
    check_readers,
    check_supervision,
    reward_weights,
    takes_own_rewards,
)
from classroom_rl.config.values import (
    BNPO,
    CISPO,
    CISPO_LARGEST_RATIO,
    EMBEDDED_JUDGES,
    GROUP,
    KEEP,
    LARGEST_BATCH,
    MEMORY,
    NCCL,
    NO_CREDIT,
    PPO,
    SCORING_RULES,
    SCRIPT,
    STUDENT,
    LossType,
    check_at_least,
    check_between,
    check_host,
    check_url,
    is_loopback,
)
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.environment import environment_of, module_of, most_rows
from classroom_rl.rollout.supervision import OBSERVE
from classroom_rl.rollout.tools.calculator import BUILT_IN_TOOLS
from classroom_rl.system.functions import function_of

CONVERSATION_TYPES = ("guided", "attempt")


def check_environment(config: Any) -> None:
    """Check what the environment of a training or an evaluation needs besides models, such as prompt templates. Raises
    a `DataError` if a template is missing or wrong."""
    judge_reads_templates = config.judge_model.model_name_or_path not in EMBEDDED_JUDGES
    environment_of(config).check(config, judge_reads_templates)


def check_hub(target: HuggingFaceConfig) -> None:
    """Raise a `ConfigError` if `push_to_hub` is true and no repository is named, or one that the Hub would refuse."""
    if not target.push_to_hub:
        return
    if not target.name:
        raise ConfigError(
            "huggingface.push_to_hub is true, but huggingface.name is null: name the repository, user/name."
        )
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(target.name)
    except HFValidationError as error:
        raise ConfigError(
            f"huggingface.push_to_hub is true, but huggingface.name={target.name} is no name of a repository on the "
            f"Hub: {error} Take user/name."
        ) from error


def check_train_rl(config: TrainRLConfig) -> None:
    """Check the configuration of server and trainer. Raises a `ConfigError` with the values, the rule and the fix."""
    check_server(config.generation)
    check_keys = getattr(module_of(config.environment, "config"), "check", None)
    if check_keys is not None:
        check_keys(config)
    check_model("teacher_model", config.teacher_model, config.generation)
    check_model("student_model", config.student_model, config.generation)
    check_lora("teacher_model.lora", config.teacher_model.lora)
    check_served_lora(config.teacher_model, config.generation)
    check_judge(config.judge_model, config.generation, of_training=True)
    if config.judge_model.mode == GROUP and config.train.algorithm == PPO:
        raise ConfigError(
            f"judge_model.mode is {GROUP}, whose scores compare the samples of a group, but train.algorithm={PPO} "
            "compares rewards of all conversations: set judge_model.mode=absolute."
        )
    if config.teacher_model.is_remote:
        raise ConfigError(
            "teacher_model is behind an API, which gives neither token ids nor log-probs and takes no weights: GRPO "
            "trains a model on an engine of its server. Leave out its base_url, use_openrouter and use_gemini. eval.py "
            "can measure a teacher behind an API."
        )
    if config.teacher_model.model_name_or_path.startswith(SCRIPT):
        raise ConfigError(
            f"teacher_model.model_name_or_path is {config.teacher_model.model_name_or_path}: a script can be measured "
            "by eval.py and not be trained. Name a model."
        )
    _check_guards(config.guards, config.generation)
    check_supervision(config)
    check_readers(config)
    check_algorithm(config)
    check_evaluation(config)
    check_logging(config.logging)
    _check_metrics_port(config)
    check_at_least("logging.save_steps", config.logging.save_steps, 1)
    _check_batch(config)
    _check_micro_batches(config.train)
    check_hub(config.huggingface)
    _check_training(config.train)
    _check_groups(config)
    _check_publishing(config)
    check_reward_names("train.reward_weights", reward_weights(config), config.environment)
    if not config.dataset.train_datasets:
        raise ConfigError(
            "dataset.train_datasets is empty; name at least one, for example [{name_or_path: lessons.jsonl}]."
        )
    if config.teacher_model.vllm.temperature <= 0:
        raise ConfigError(
            "teacher_model.vllm.temperature is 0: every conversation of a group would be the same and GRPO would learn "
            "nothing. Set it above 0, usually to 1.0."
        )


def check_server(generation: ServerConfig) -> None:
    """Check where servers listen, and their schedule."""
    _check_servers(generation)
    if not generation.server_host:
        raise ConfigError("generation.server_host is empty; name an address of this machine, usually 127.0.0.1.")
    check_host("generation.server_host", generation.server_host)


def check_generation(generation: GenerationConfig) -> None:
    """Check the classroom's own keys."""
    _check_error_rate(generation)
    if not generation.student_personas_prompts_paths:
        raise ConfigError(
            "generation.student_personas_prompts_paths names no persona: give at least one, for example "
            "{simple_student: prompt_templates/personas/simple_student.txt}."
        )
    _check_opening(generation)
    _check_tools(generation)
    _check_post_test(generation.post_test)
    invalid_names = [name for name in generation.student_names if not (name is None or isinstance(name, str))]
    if invalid_names:
        raise ConfigError(
            f"generation.student_names holds {invalid_names[0]!r}; each is a text, or null for a nameless student."
        )


def _check_tools(generation: GenerationConfig) -> None:
    tools = generation.teacher_tools
    for name in tools:
        if name not in BUILT_IN_TOOLS:
            raise ConfigError(
                f"generation.teacher_tools names {name!r}, and there is no such tool; there are: "
                f"{', '.join(BUILT_IN_TOOLS)}."
            )
    if len(set(tools)) < len(tools):
        raise ConfigError(f"generation.teacher_tools is {tools}: name each tool once.")


def _check_post_test(test: PostTestConfig) -> None:
    if test.ask_student and not test.enable:
        raise ConfigError(
            "generation.post_test.ask_student is true, but there is no post-test: set generation.post_test.enable=true."
        )
    if test.ask_student and test.prompt_path is None:
        raise ConfigError(
            "generation.post_test.ask_student is true, but generation.post_test.prompt_path is null: name the template "
            "that tells the student's model what it knows, such as prompt_templates/post_test/language.txt."
        )
    if test.scored_by == STUDENT and not test.ask_student:
        raise ConfigError(
            "generation.post_test.scored_by is student, but nobody asks the student's model: set "
            "generation.post_test.ask_student=true, or scored_by=ledger."
        )


def _check_servers(generation: ServerConfig) -> None:
    for name in generation.allowed_hosts:
        try:
            check_host("A name in generation.allowed_hosts", name)
        except ConfigError as error:
            raise ConfigError(
                f"generation.allowed_hosts holds {name!r}; each is a host's name alone, such as host.docker.internal."
            ) from error
    urls = generation.server_urls
    if urls is not None and not urls:
        raise ConfigError(
            "generation.server_urls is empty; name each server's address, or set it to null for one server."
        )
    for index, url in enumerate(urls or []):
        check_url(f"generation.server_urls[{index}]", url)
    check_between("generation.server_index", generation.server_index, 0, len(urls or [""]) - 1)


def _check_opening(generation: GenerationConfig) -> None:
    forced = generation.forced_conversation_type
    if forced is not None and forced.lower() not in CONVERSATION_TYPES:
        raise ConfigError(
            f"generation.forced_conversation_type is {forced}; it is one of {', '.join(CONVERSATION_TYPES)} or null."
        )
    if (forced is None or forced.lower() == "attempt") and generation.student_initial_attempt_prompt_path is None:
        raise ConfigError(
            "Conversations may open with the student's attempt, which needs "
            "generation.student_initial_attempt_prompt_path. Set it, or set generation.forced_conversation_type=guided."
        )


def _check_error_rate(generation: GenerationConfig) -> None:
    rate, personas = generation.student_error_rate, set(generation.student_personas_prompts_paths)
    if isinstance(rate, dict):
        weights = list(rate.values())
        if (
            set(rate) != personas
            or not all(_is_number(weight) and weight >= 0 for weight in weights)
            or sum(weights) <= 0
        ):
            raise ConfigError(
                f"generation.student_error_rate is {rate}; as a mapping it gives each persona of "
                f"generation.student_personas_prompts_paths ({', '.join(sorted(personas))}) a weight from 0, not all 0."
            )
    elif not _is_number(rate) or not 0 <= rate <= 1:
        raise ConfigError(
            f"generation.student_error_rate is {rate!r}; it is a share from 0 to 1, or a mapping from every persona to "
            "its weight."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def check_reward_model(reward: RewardModelConfig, generation: GenerationConfig) -> None:
    """Check what grades the solutions, and that the longest solution fits into the reward model."""
    if not reward.model_name_or_path:
        raise ConfigError(
            "reward_model.model_name_or_path is empty; it is Answer, None, or the name or folder of a reward model."
        )
    check_vllm("reward_model.vllm", reward.vllm)
    longest = generation.max_tokens_per_student_attempt
    if reward.is_model and reward.vllm.max_length <= longest:
        raise ConfigError(
            f"reward_model.vllm.max_length is {reward.vllm.max_length}; the reward model reads a problem and its "
            f"solution, which may have generation.max_tokens_per_student_attempt = {longest} tokens: raise the one or "
            "lower the other."
        )


def _check_guards(guards: GuardsConfig, generation: EnvironmentConfig) -> None:
    judge = guards.held_out_judge_model
    if judge is not None:
        check_judge(judge, generation, "guards.held_out_judge_model")
        if judge.model_name_or_path not in EMBEDDED_JUDGES and not judge.is_remote:
            raise ConfigError(
                f"guards.held_out_judge_model is {judge.model_name_or_path}, a model for an engine of this server; it "
                "must be behind an API (use_openrouter, use_gemini or base_url), or an embedded judge "
                f"({', '.join(EMBEDDED_JUDGES)})."
            )
    if guards.judge_check_every_n_steps == 0:
        return
    if judge is None and not guards.canaries:
        raise ConfigError(
            "guards.judge_check_every_n_steps is above 0, but there is nothing to check with: set "
            "guards.held_out_judge_model, or guards.canaries=true."
        )
    if not generation.judge_rules:
        raise ConfigError(
            "guards.judge_check_every_n_steps is above 0, but there is no judge to check: set "
            "generation.judges_rules_prompts_paths and generation.number_judge_attempts, or set it to 0."
        )


def check_logging(logging: LoggingConfig) -> None:
    """Check the run folder and the trackers."""
    if not logging.save_dir:
        raise ConfigError("logging.save_dir is empty; name the folder that the run leaves everything in.")


def _check_metrics_port(config: TrainRLConfig) -> None:
    logging = config.logging
    check_host("logging.metrics_host", logging.metrics_host)
    if logging.metrics_port == config.generation.server_port:
        raise ConfigError(
            f"logging.metrics_port and generation.server_port are both {logging.metrics_port}: give the trainer's "
            "metrics a port of their own."
        )


def check_duration(epochs: int, max_steps: int) -> None:
    """Refuse a training of no step."""
    if max_steps < 1 and epochs < 1:
        raise ConfigError(
            f"train.epochs is {epochs} and train.max_steps {max_steps}: nothing would be trained. Set one of them "
            "to at least 1."
        )


def _check_training(train: TrainConfig) -> None:
    if train.loss_type not in (losses := get_args(LossType)):
        function_of("train.loss_type", train.loss_type, losses)
    if train.loss_type == CISPO and train.upper_clip < 1:
        raise ConfigError(
            f"train.epsilon_high is {train.epsilon_high:g}; with train.loss_type={CISPO} it is the largest policy "
            "ratio itself and must be at least 1, or even tokens whose probability did not change would be held down. "
            f"Set it to null, which means {CISPO_LARGEST_RATIO:g}."
        )
    if train.max_staleness > 0 and not train.importance_sampling_correction:
        raise ConfigError(
            f"train.max_staleness is {train.max_staleness}, so batches are played with older weights, and nothing "
            "would correct for it: set train.importance_sampling_correction=true, or train.max_staleness=0."
        )
    check_duration(train.epochs, train.max_steps)


_ALL_ADDRESSES = ("0.0.0.0", "::")
"""Where a server listens that its own machine reaches, too."""


def _check_publishing(config: TrainRLConfig) -> None:
    generation = config.generation
    hosts = [urlsplit(url).hostname or "" for url in generation.server_urls or []] or [generation.server_host]
    remote_hosts = [host for host in hosts if not is_loopback(host) and host not in _ALL_ADDRESSES]
    if config.train.publish_through == MEMORY and remote_hosts:
        raise ConfigError(
            f"train.publish_through is {MEMORY}, the shared memory of one machine, but a server is at "
            f"{remote_hosts[0]}: start it on the trainer's machine and name it by 127.0.0.1, or set "
            "train.publish_through=disk."
        )
    if config.train.publish_through != NCCL:
        return
    if config.teacher_model.adapter is not None:
        raise ConfigError(
            f"train.publish_through is {NCCL}, which sends whole models, but teacher_model.lora.enable is true, and "
            "engines load adapters from files: set train.publish_through=disk (an adapter is small)."
        )
    if generation.colocate:
        raise ConfigError(
            f"train.publish_through is {NCCL}, which sends weights between different GPUs, but generation.colocate is "
            "true: server and trainer take turns on the same ones. Set train.publish_through=memory, or give the "
            "server GPUs of its own and set generation.colocate=false."
        )


def check_machines(config: TrainRLConfig, machines: int, processes: int) -> None:
    """Check what only the launch decides: how many processes the trainer has, and on how many machines.

    Raises:
        ConfigError: if weights are published through the memory of one machine to servers on several, or sent to
            servers whose addresses only their own machines know. If there are more servers than processes, which use
            all of them then: if servers have such addresses, or are to take turns with the trainer on a GPU.
    """
    if config.train.publish_through == MEMORY and machines > 1:
        raise ConfigError(
            f"train.publish_through is {MEMORY}, the shared memory of one machine, but the training was launched on "
            f"{machines}: set train.publish_through=disk."
        )
    urls = config.generation.server_urls or [f"http://{config.generation.server_host}"]
    local_urls = [url for url in urls if is_loopback(urlsplit(url).hostname or "")]
    if config.train.publish_through == NCCL and machines > 1 and local_urls and len(urls) > 1:
        raise ConfigError(
            f"train.publish_through is {NCCL}, and the training was launched on {machines} machines: its first process "
            f"sends the weights to every server, but {local_urls[0]} means each machine's own. Name the servers in "
            "generation.server_urls by addresses that all machines reach."
        )
    if len(urls) <= processes:
        return
    more = f"generation.server_urls names {len(urls)} servers for {processes} processes, so each process uses them all"
    if machines > 1 and local_urls:
        raise ConfigError(
            f"{more}, but {local_urls[0]} means each machine's own. Name the servers by addresses that all machines "
            "reach."
        )
    if config.generation.colocate:
        raise ConfigError(
            f"{more}, but generation.colocate is true: only a server of its own takes turns with a process on a GPU. "
            "Name fewer servers, start more processes, or give the servers GPUs of their own and set "
            "generation.colocate=false."
        )


def _check_groups(config: TrainRLConfig) -> None:
    """Groups are left out by their conversations' rewards; an episode of many rows, or of several players, has more."""
    train, mode = config.train, config.train.groups_without_variance
    if mode == KEEP:
        return
    if train.loss_type == BNPO:
        raise ConfigError(
            f"train.groups_without_variance is {mode}, but train.loss_type={BNPO} takes the mean of each micro-batch, "
            "and one without any group that teaches would still count. Take dapo, or set "
            "train.groups_without_variance=keep."
        )
    on_invalid = getattr(config.generation, "supervisor", SupervisionConfig()).on_invalid
    if config.supervisor_model is not None and on_invalid != OBSERVE and train.turn_credit.mode != NO_CREDIT:
        raise ConfigError(
            f"train.groups_without_variance is {mode}, but with generation.supervisor.on_invalid={on_invalid} and turn "
            "credit, rejected drafts teach even where all rewards are equal: set train.groups_without_variance=keep."
        )
    if most_rows(config) is not None:
        raise ConfigError(
            f"train.groups_without_variance is {mode}, but an episode of the environment {config.environment} is "
            f"trained on in many rows, and its messages have rewards of their own: set it to {KEEP}."
        )


def _check_micro_batches(train: TrainConfig) -> None:
    """Micro-batches of uneven numbers of rows must add up to the same gradient."""
    if train.max_tokens_per_micro_batch is not None and train.loss_type == BNPO:
        raise ConfigError(
            f"train.max_tokens_per_micro_batch is {train.max_tokens_per_micro_batch}, but train.loss_type={BNPO} takes "
            "the mean of each micro-batch, which would depend on how the batch is divided: take dapo, or set it to "
            "null, and train.per_device_train_batch_size to a number of rows."
        )


def _check_batch(config: TrainRLConfig) -> None:
    train = config.train
    batch = train.number_of_problems_per_batch * train.num_samples_per_problem
    product = (
        "train.number_of_problems_per_batch × train.num_samples_per_problem "
        f"({train.number_of_problems_per_batch} × {train.num_samples_per_problem} = {batch})"
    )
    if train.loss_type == BNPO and batch % train.per_device_train_batch_size:
        raise ConfigError(
            f"{product} must be divisible by train.per_device_train_batch_size ({train.per_device_train_batch_size}) "
            f"with train.loss_type={BNPO}, which takes the mean of each micro-batch."
        )
    if batch > LARGEST_BATCH:
        raise ConfigError(
            f"{product} is more than the {LARGEST_BATCH} conversations that a server holds at once: make the batch "
            "smaller."
        )


def check_reward_names(key: str, weights: Mapping[str, float], environment: str) -> None:
    """Check that an environment has all rewards that `key` names, or may import them as functions. Raises a
    `ConfigError` if it does not."""
    settings = module_of(environment, "config")
    names = settings.REWARD_NAMES
    unknown = sorted(set(weights) - set(names))
    if unknown and takes_own_rewards(environment):
        for name in unknown:
            function_of(key, name, names)
    elif unknown or not weights:
        raise ConfigError(f"{key} names {', '.join(unknown) or 'no reward'}; there are: {', '.join(names)}.")


def check_classroom_rewards(
    key: str, weights: Mapping[str, float], generation: GenerationConfig, reward_model: RewardModelConfig
) -> None:
    """Check that a configuration provides everything that the rewards of `key` are computed from. Raises a
    `ConfigError` if it does not."""
    check_reward_model(reward_model, generation)
    scoring_rules = SCORING_RULES & set(generation.judges_rules_prompts_paths)
    if "pedagogical" in weights and (not scoring_rules or generation.number_judge_attempts < 1):
        raise ConfigError(
            "The pedagogical reward needs a judge rule that scores: name pedagogical_eval in "
            "generation.judges_rules_prompts_paths and set generation.number_judge_attempts to at least 1."
        )
    if "end_rm" in weights and not (
        reward_model.grades and generation.number_student_attempts > 0 and generation.student_final_prompt_path
    ):
        raise ConfigError(
            "The end_rm reward needs graded solutions: set reward_model.model_name_or_path to Answer or a model, "
            "generation.number_student_attempts above 0 and generation.student_final_prompt_path, or leave end_rm out "
            f"of {key}."
        )
    if generation.post_test.caps_pedagogical and not generation.post_test.enable:
        raise ConfigError(
            "generation.post_test.caps_pedagogical is true, but there is no post-test whose ledger could cap it: set "
            "generation.post_test.enable=true."
        )
    if "post_test" in weights and not generation.post_test.enable:
        raise ConfigError(
            "The post_test reward needs a post-test: set generation.post_test.enable=true, or leave post_test out of "
            f"{key}."
        )
