"""Checks of the algorithm, and of what PPO cannot be combined with."""

from classroom_rl.config.base import SupervisionConfig
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.config.values import ALGORITHMS, IMMEDIATE, NO_CORRECTIONS, NO_CREDIT, PPO, STEP_KINDS, check_choice
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.supervision import OBSERVE

OF_GRPO = {
    "loss_type": "which loss GRPO has",
    "scale_rewards": "how GRPO compares the conversations of a group",
    "groups_without_variance": "what becomes of groups that teach GRPO nothing",
}
"""Keys of `train` that mean nothing to PPO, and what they say."""


def check_algorithm(config: TrainRLConfig) -> None:
    """Check which algorithm trains, and with PPO what it does without.

    Raises:
        ConfigError: with the values, the rule and the fix.
    """
    train = config.train
    check_choice("train.algorithm", train.algorithm, ALGORITHMS)
    check_choice("train.ppo.gae_over", train.ppo.gae_over, STEP_KINDS)
    if train.algorithm == PPO:
        _refuse_keys_of_grpo(train)
        _refuse_rows_beside_conversations(config)
        _check_credit(train)
        _check_steps(train)


def _refuse_keys_of_grpo(train: TrainConfig) -> None:
    for name, says in OF_GRPO.items():
        value, default = getattr(train, name), getattr(TrainConfig(), name)
        if value != default:
            raise ConfigError(
                f"train.{name} is {value}, which says {says}; train.algorithm=ppo has its own. Leave it out, or set it "
                f"to {default}."
            )


def _refuse_rows_beside_conversations(config: TrainRLConfig) -> None:
    if config.train.corrections.mode != NO_CORRECTIONS:
        raise ConfigError(
            f"train.corrections.mode is {config.train.corrections.mode}, which train.algorithm=ppo cannot train on: "
            "set train.corrections.mode=none, or train.algorithm=grpo."
        )
    on_invalid = getattr(config.generation, "supervisor", SupervisionConfig()).on_invalid
    if on_invalid != OBSERVE:
        raise ConfigError(
            f"generation.supervisor.on_invalid is {on_invalid}, but train.algorithm=ppo does not train on rejected "
            "drafts: set generation.supervisor.on_invalid=observe, or train.algorithm=grpo."
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
