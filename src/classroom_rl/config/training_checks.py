"""Checks of the algorithm, of what PPO and online DPO cannot be combined with, and of supervision: the supervisor, turn
advantages and corrections; and of evaluations during training.
"""

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from types import ModuleType
from typing import Any

from classroom_rl.config.base import EnvironmentConfig, SupervisionConfig, default_penalties
from classroom_rl.config.model_checks import check_key_variable, check_model
from classroom_rl.config.models import SupervisorModelConfig
from classroom_rl.config.train_rl import (
    CorrectionsConfig,
    DistillationConfig,
    PPOConfig,
    TrainConfig,
    TrainRLConfig,
    TurnCreditConfig,
)
from classroom_rl.config.values import (
    EMBEDDED_SUPERVISORS,
    GREEDY,
    IMMEDIATE,
    KEEP,
    NO_CORRECTIONS,
    NO_CREDIT,
    ONLINE_DPO,
    PPO,
    REVERSE,
    RUBRIC,
    RULES,
    SAMPLED,
    SUPERVISOR_REWARD,
    check_url,
)
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.chat_template import set_variables, why_other_tokens
from classroom_rl.rollout.environment import module_of
from classroom_rl.rollout.supervision import OBSERVE, REPLACE, RETRY
from classroom_rl.system.functions import function_of

OF_GRPO = {
    "loss_type": "which loss GRPO has",
    "importance_sampling_level": "whether GRPO's ratio is of a token or of a sample",
    "scale_rewards": "how GRPO compares the conversations of a group",
    "normalise_per_criterion": "how GRPO compares the conversations of a group",
    "reward_step": "how GRPO compares the conversations of a group",
    "groups_without_variance": "what becomes of groups that teach GRPO nothing",
}
"""Keys of `train` that mean nothing to PPO, and what they say."""

NOT_OF_ONLINE_DPO = {
    **{key: meaning for key, meaning in OF_GRPO.items() if key not in ("reward_step", "groups_without_variance")},
    **dict.fromkeys(["epsilon", "epsilon_high"], "how far ratios of probabilities may move"),
    **dict.fromkeys(["importance_sampling_mode", "importance_sampling_clip_max"], "how ratios to the engine count"),
    **{f"ppo.{key.name}": "something of PPO alone" for key in fields(PPOConfig)},
    "turn_credit.mode": "what single messages are credited with",
    "distillation.model": "whose log-probs are added to the advantages of tokens",
    "beta": "how much the KL to the initial policy weighs, beside a loss",
}
"""The same of online DPO."""


def check_algorithm(config: TrainRLConfig) -> None:
    """Check which algorithm trains, and with PPO and online DPO what they do without.

    Raises:
        ConfigError: with the values, the rule and the fix.
    """
    train = config.train
    _check_distillation(config)
    if train.algorithm == PPO:
        _refuse_keys(train, OF_GRPO)
        _refuse_rows_beside_conversations(config)
        _check_credit(train)
        _check_steps(train)
    elif train.algorithm == ONLINE_DPO:
        _refuse_keys(train, NOT_OF_ONLINE_DPO)
        _refuse_rows_beside_conversations(config)
        if train.mu != 1:
            raise ConfigError(
                f"train.mu is {train.mu}; with train.algorithm=online_dpo it is 1, because after a step the weights of "
                "pairs are no longer those of DPO's gradient: set train.mu=1."
            )
    elif train.normalise_per_criterion and train.scale_rewards != TrainConfig().scale_rewards:
        raise ConfigError(
            f"train.scale_rewards is {train.scale_rewards}, which has no effect on train.normalise_per_criterion: it "
            "divides each criterion by the deviation of its group, and their sum by that of the batch. Leave it out."
        )


def _check_distillation(config: TrainRLConfig) -> None:
    model, path = config.train.distillation.model, config.train.distillation.prompt_path
    for key in ("kl", "top_k", "base_url", "api_key_env"):
        value = getattr(config.train.distillation, key)
        if model is None and value != getattr(DistillationConfig(), key):
            raise ConfigError(
                f"train.distillation.{key} is {value}, but there is no strong tutor to compare the model with: set "
                "train.distillation.model, or leave it out."
            )
    if config.train.distillation.base_url is not None:
        _check_strong_tutor_api(config)
    if path is not None and model is None:
        raise ConfigError(
            f"train.distillation.prompt_path is {path}, but there is no strong tutor to read it: set "
            "train.distillation.model, for example to the trained model itself."
        )
    if path is not None and not hasattr(_environment(config), "informed_prompt"):
        raise ConfigError(
            f"train.distillation.prompt_path is {path}, but the environment {config.environment} has no prompt in "
            "which a strong tutor could be told more: leave it out."
        )
    if model is not None and config.train.groups_without_variance != KEEP:
        raise ConfigError(
            f"train.groups_without_variance is {config.train.groups_without_variance}, but with "
            "train.distillation.model a group learns from the strong tutor even where all rewards are equal: set "
            f"train.groups_without_variance={KEEP}."
        )


def _check_strong_tutor_api(config: TrainRLConfig) -> None:
    distillation, temperature = config.train.distillation, config.teacher_model.vllm.temperature
    check_url("train.distillation.base_url", distillation.base_url)
    check_key_variable("train.distillation.api_key_env", distillation.api_key_env)
    if temperature != 1:
        raise ConfigError(
            f"teacher_model.vllm.temperature is {temperature}, but the server at train.distillation.base_url gives the "
            "log-probs of a prompt at temperature 1: set it to 1, or leave base_url out, so that the strong tutor is "
            "loaded here."
        )
    if distillation.kl != REVERSE and distillation.top_k is None:
        raise ConfigError(
            f"train.distillation.kl is {distillation.kl}, which compares all tokens, and the server at "
            "train.distillation.base_url does not send all: set train.distillation.top_k, such as to 20."
        )


def check_strong_tutor(config: TrainRLConfig, name: str) -> None:
    """Refuse a strong tutor to whom the trained model's token ids mean something else, and more tokens to compare than
    there are. Reads both tokenizers.

    Raises:
        ConfigError: with the difference, or if a tokenizer cannot be loaded.
    """
    from classroom_rl.models.pretrained import load_tokenizer

    key = "train.distillation.model"
    own_key, own_name = "teacher_model.model_name_or_path", config.teacher_model.model_name_or_path
    own_tokenizer, strong_tokenizer = load_tokenizer(own_key, own_name), load_tokenizer(key, name)
    for tokenizer in (own_tokenizer, strong_tokenizer):
        set_variables(tokenizer, config.teacher_model.vllm.chat_template_kwargs)
    reason = why_other_tokens(own_tokenizer, strong_tokenizer)
    if reason is not None:
        raise ConfigError(
            f"{key} is {name}, whose tokenizer is not that of {own_key}, {own_name}: {reason}. The strong tutor reads "
            "the token ids that the trained model wrote: take one of the same family, with the same chat template."
        )
    top_k = config.train.distillation.top_k
    if top_k is not None and top_k >= len(own_tokenizer):
        raise ConfigError(
            f"train.distillation.top_k is {top_k}, but {own_name} has {len(own_tokenizer)} tokens, and one at least "
            "must be left for the others: make it smaller, or leave it out to compare all."
        )


def _refuse_keys(train: TrainConfig, keys: Mapping[str, str]) -> None:
    for name, meaning in keys.items():
        value, default = attrgetter(name)(train), attrgetter(name)(TrainConfig())
        if value != default and (name, value) != ("beta", 0):  # 0 says the same: there is no such term
            raise ConfigError(
                f"train.{name} is {value}, which says {meaning}; train.algorithm={train.algorithm} has no use for it. "
                f"Leave it out, or set it to {default}."
            )


def _refuse_rows_beside_conversations(config: TrainRLConfig) -> None:
    if config.train.corrections.mode != NO_CORRECTIONS:
        raise ConfigError(
            f"train.corrections.mode is {config.train.corrections.mode}, which "
            f"train.algorithm={config.train.algorithm} cannot train on: set it to none, or train.algorithm to grpo."
        )
    on_invalid = getattr(config.generation, "supervisor", SupervisionConfig()).on_invalid
    if on_invalid != OBSERVE:
        raise ConfigError(
            f"generation.supervisor.on_invalid is {on_invalid}, but train.algorithm={config.train.algorithm} does not "
            "train on rejected drafts: set generation.supervisor.on_invalid=observe, or train.algorithm=grpo."
        )


def _check_credit(train: TrainConfig) -> None:
    if train.turn_credit.mode not in (NO_CREDIT, IMMEDIATE):
        raise ConfigError(
            f"train.turn_credit.mode is {train.turn_credit.mode}; with train.algorithm=ppo it is none or immediate: "
            "the advantages of PPO already count what follows a message, discounted by train.ppo.gamma."
        )


def _check_steps(train: TrainConfig) -> None:
    if train.ppo.target_kl is not None and train.mu == 1:
        raise ConfigError(
            f"train.ppo.target_kl is {train.ppo.target_kl:g}, but train.mu is 1: the only update on a batch is made "
            "before the policy has moved. Set train.mu to 2 or more, or train.ppo.target_kl to null."
        )
    if 0 <= train.max_steps <= train.ppo.value_warmup_steps and train.ppo.value_warmup_steps > 0:
        raise ConfigError(
            f"train.ppo.value_warmup_steps is {train.ppo.value_warmup_steps} and train.max_steps {train.max_steps}: "
            "the policy would never be trained. Lower the one or raise the other."
        )


def reward_weights(config: TrainRLConfig) -> dict[str, float]:
    """The weights of the rewards that are computed: as configured, otherwise as the judge rules imply."""
    configured = config.train.reward_weights
    if configured is not None:
        return dict(configured)
    return module_of(config.environment, "config").default_weights(config.generation)


def criterion_weights(config: TrainRLConfig) -> dict[str, float]:
    """The weights of what is compared one by one, by the names of a record's `criteria`: as the environment divides its
    rewards, or else the rewards' own; those of weight 0 are left out. {} without `train.normalise_per_criterion`."""
    if not config.train.normalise_per_criterion:
        return {}
    divided = getattr(module_of(config.environment, "config"), "criterion_weights", reward_weights)
    return {name: weight for name, weight in divided(config).items() if weight}


def check_supervision(config: TrainRLConfig) -> None:
    """Check the supervisor, turn credit and corrections of a training.

    Raises:
        ConfigError: with the values, the rule and the fix.
    """
    generation, train = config.generation, config.train
    supervision = getattr(generation, "supervisor", SupervisionConfig())
    if config.supervisor_model is not None and not getattr(_environment(config), "HAS_SUPERVISOR", False):
        raise ConfigError(
            f"supervisor_model is {config.supervisor_model.model_name_or_path}, but the environment "
            f"{config.environment} asks no supervisor: leave supervisor_model out."
        )
    penalties = getattr(_environment(config), "default_penalties", default_penalties)()
    check_supervisor(config.supervisor_model, supervision, generation, penalties)
    _check_turn_credit(config, train.turn_credit)
    _check_corrections(config, train.corrections)
    changes = supervision.on_invalid in (RETRY, REPLACE)
    learns = train.turn_credit.mode != NO_CREDIT or train.corrections.mode != NO_CORRECTIONS
    if config.supervisor_model is not None and changes and not learns:
        raise ConfigError(
            f"generation.supervisor.on_invalid is {supervision.on_invalid}, but nothing is learned from what the "
            "supervisor rejects: the teacher would only learn to rely on it. Set train.turn_credit.mode=immediate or "
            "train.corrections.mode=same_step, or generation.supervisor.on_invalid=observe."
        )


def check_readers(config: TrainRLConfig) -> None:
    """Refuse trained readers in a training that nobody reads with: only the judge `rules` and the rules of a supervisor
    do."""
    path = getattr(config.generation, "readers_path", None)  # only the classroom's configuration has the key
    held_out = config.guards.held_out_judge_model
    judges = [config.judge_model, *([held_out] if held_out else [])]
    supervisor = config.supervisor_model
    supervised_by_rules = supervisor is not None and supervisor.model_name_or_path != RUBRIC
    if path is not None and not supervised_by_rules and all(judge.model_name_or_path != RULES for judge in judges):
        raise ConfigError(
            f"generation.readers_path is {path}, but nobody here reads by rules: the judge is "
            f"{config.judge_model.model_name_or_path}, and the supervisor "
            f"{supervisor.model_name_or_path if supervisor else 'null'}. Set judge_model.model_name_or_path={RULES} or "
            f"supervisor_model.model_name_or_path={RULES}, or leave readers_path out."
        )


def check_supervisor(
    supervisor: SupervisorModelConfig | None,
    supervision: Any,
    generation: EnvironmentConfig,
    known: Mapping[str, float],
) -> None:
    """Check how a supervisor is reached, its prompt, and its table of penalties.

    Args:
        known: the categories of the environment's rules, and their default penalties.
    """
    for name, penalty in supervision.penalties.items():
        if penalty > 0:
            raise ConfigError(
                f"generation.supervisor.penalties.{name} is {penalty:g}; a penalty is at most 0: write {-penalty:g}."
            )
    missing = sorted(set(known) - set(supervision.penalties))
    if missing:
        raise ConfigError(
            f"generation.supervisor.penalties lacks {', '.join(missing)}: give each a number, 0 for one that costs "
            "nothing."
        )
    if supervisor is None:
        if supervision.on_invalid != OBSERVE:
            raise ConfigError(
                f"generation.supervisor.on_invalid is {supervision.on_invalid}, but there is no supervisor: set "
                "supervisor_model.model_name_or_path, to rules or to a model."
            )
        return
    check_model("supervisor_model", supervisor, generation)
    embedded = supervisor.model_name_or_path in EMBEDDED_SUPERVISORS
    unknown = sorted(set(supervision.penalties) - set(known))
    if embedded and unknown:
        raise ConfigError(
            f"generation.supervisor.penalties names {', '.join(unknown)}, which {supervisor.model_name_or_path} never "
            f"finds; it knows {', '.join(known)}."
        )
    if not embedded and supervision.prompt_path is None:
        raise ConfigError(
            f"supervisor_model is {supervisor.model_name_or_path}, which needs a prompt: set "
            "generation.supervisor.prompt_path, for example to prompt_templates/supervisors/language_tutor.txt."
        )


def takes_own_rewards(environment: str) -> bool:
    """Whether an environment's rewards may be functions of one's own. Imports the environment."""
    return bool(module_of(environment, "environment").Environment.takes_own_rewards)


def _environment(config: TrainRLConfig) -> ModuleType:
    return module_of(config.environment, "config")


def _check_turn_credit(config: TrainRLConfig, credit: TurnCreditConfig) -> None:
    environment_rewards = getattr(_environment(config), "TURN_REWARD_NAMES", ())
    names = tuple(dict.fromkeys((SUPERVISOR_REWARD, *environment_rewards)))
    for name in credit.rewards:
        if name not in names and takes_own_rewards(config.environment):
            function_of("train.turn_credit.rewards", name, names)
        elif name not in names:
            raise ConfigError(f"train.turn_credit.rewards names {name}; there are: {', '.join(names)}.")
    weights = config.train.turn_credit.weights
    if SUPERVISOR_REWARD in weights and config.supervisor_model is None:
        raise ConfigError(
            f"train.turn_credit.mode is {credit.mode}, which pays the supervisor's penalties, and there is no "
            "supervisor: set supervisor_model.model_name_or_path, or name turn rewards that need none in "
            f"train.turn_credit.rewards ({', '.join(environment_rewards) or 'this environment has none'})."
        )


def _check_corrections(config: TrainRLConfig, corrections: CorrectionsConfig) -> None:
    if corrections.mode != NO_CORRECTIONS and config.supervisor_model is None:
        raise ConfigError(
            f"train.corrections.mode is {corrections.mode}, but nobody writes corrections: set "
            "supervisor_model.model_name_or_path, to rules or to a model."
        )


def check_evaluation(config: TrainRLConfig) -> None:
    """Check the evaluations during training.

    Raises:
        ConfigError: with the values, the rule and the fix.
    """
    options = config.evaluation
    if options.every == 0:
        if options.keep_best:
            raise ConfigError(
                "evaluation.keep_best is true, but evaluation.every is 0, so nothing is evaluated during training: set "
                "evaluation.every to a number of steps, or evaluation.keep_best=false."
            )
        return
    names = options.samplings
    if SAMPLED not in names or len(set(names)) < len(names):
        raise ConfigError(f"evaluation.samplings is {names}; it must name {SAMPLED}, may name {GREEDY}, and each once.")
    if not options.eval_datasets:
        raise ConfigError(
            f"evaluation.every is {options.every}, but evaluation.eval_datasets is empty: name lessons that are not "
            "trained on, for example [{name_or_path: lessons_heldout.jsonl}], or set evaluation.every=0."
        )
