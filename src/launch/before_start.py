"""What is known of a run before anything is loaded: what is in force."""

from collections.abc import Mapping

from config.base import GenerationConfig
from config.checks import reward_weights as weights_of_training
from config.eval_model import EvalConfig
from config.eval_model import reward_weights as weights_of_evaluation
from config.supervision_checks import turn_reward_weights
from config.train_rl_model import TrainRLConfig
from src.classroom.setup import persona_weights


def in_force(config: TrainRLConfig | EvalConfig) -> list[str]:
    """The judge rules, personas and rewards of a configuration, with their shares and weights."""
    generation, lines = config.generation, []
    is_training = isinstance(config, TrainRLConfig)
    if isinstance(generation, GenerationConfig):
        attempts = generation.number_judge_attempts
        rules = ", ".join(generation.judge_rules) + f" ({attempts} × each)" if generation.judge_rules else "none"
        lines.append(f"judge rules in force: {rules}")
        personas = persona_weights(list(generation.student_personas_prompts_paths), generation.student_error_rate)
        lines.append(f"personas in force: {_weighed({name: f'{100 * it:.3g} %' for name, it in personas.items()})}")
    rewards = weights_of_training(config) if is_training else weights_of_evaluation(config)
    lines.append(f"rewards in force: {_weighed({name: f'× {weight:g}' for name, weight in rewards.items()})}")
    if is_training and (turns := turn_reward_weights(config)):
        lines.append(f"turn rewards in force: {_weighed({name: f'× {weight:g}' for name, weight in turns.items()})}")
    return lines


def show_in_force(config: TrainRLConfig | EvalConfig) -> None:
    """Print `in_force` as comments, so that the output of a dry run stays valid YAML."""
    for line in in_force(config):
        print(f"# {line}")


def _weighed(weights: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {weight}" for name, weight in weights.items())
