"""Checks of the paths and texts in a configuration."""

from typing import Any

from classroom_rl.config.base import (
    DatasetSource,
    DataSource,
    GenerationConfig,
    JudgeModelConfig,
    LoggingConfig,
    ModelConfig,
    PostTestConfig,
    SupervisionConfig,
)
from classroom_rl.config.benchmark import BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig, TutorConfig
from classroom_rl.config.train_sft import TrainSFTModelConfig
from classroom_rl.config.values import check_folder_name, check_path, each_field
from classroom_rl.errors import ConfigError
from classroom_rl.system.keys import keys
from classroom_rl.system.shipped import find_shipped

PATHS: dict[type, tuple[str, ...]] = {
    ModelConfig: ("model_name_or_path",),
    GenerationConfig: (
        "teacher_prompt_path",
        "student_personas_prompts_paths",
        "student_initial_attempt_prompt_path",
        "initial_attempt_wrapper_prompt_path",
        "student_final_prompt_path",
        "student_attempt_prompt_path",
        "judges_rules_prompts_paths",
        "readers_path",
    ),
    JudgeModelConfig: ("group_prompts_paths",),
    SupervisionConfig: ("prompt_path",),
    PostTestConfig: ("prompt_path",),
    DataSource: ("name_or_path",),
    DatasetSource: ("problem_template",),
    LoggingConfig: ("save_dir",),
    TrainSFTModelConfig: ("model_name_or_path", "tokenizer_name_or_path"),
    TutorConfig: ("model_name_or_path", "adapter"),
    BenchmarkConfig: ("path", "prompts_paths"),
    EvalConfig: ("pedagogical_reward_model", "pedagogical_reward_prompt_path", "student_errors_prompt_path"),
}
"""Maps a group of keys to its keys whose value is a path, or a mapping to paths. Subclasses inherit those of their
base."""

_FOLDERS = ("model_name_or_path", "tokenizer_name_or_path", "adapter")
"""Those of a folder whose files vLLM, DeepSpeed or transformers look for by a pattern."""
_OF_TEXTS = (list[str], list[str] | None, dict[str, str])


def expand_paths(config: Any) -> None:
    """Expand the `~` of every path, and find shipped files from any folder, in place.

    Raises:
        ConfigError: for a path that the file system cannot have.
    """
    folder = check_path("logging.save_dir", config.logging.save_dir)
    check_folder_name("logging.save_dir", folder)  # first: the folders of models may be in it
    for group, item, key in each_field(config):
        if not any(item.name in PATHS.get(each, ()) for each in type(group).__mro__):
            continue
        value = getattr(group, item.name)
        if isinstance(value, str):
            setattr(group, item.name, find_shipped(check_path(key, value)))
            if item.name in _FOLDERS and not getattr(group, "is_remote", False):
                check_folder_name(key, value)
        elif isinstance(value, dict):
            paths = {name: find_shipped(check_path(f"{key}.{name}", path)) for name, path in value.items()}
            setattr(group, item.name, paths)


def check_texts(config: Any) -> None:
    """Check the strings of a configuration.

    Raises:
        ConfigError: if a list or mapping of strings holds another type, for a string that UTF-8 cannot encode because
            it holds a lone surrogate, and for one that holds a key: configurations are printed and recorded.
    """
    held = keys()
    for group, item, key in each_field(config):
        value = getattr(group, item.name)
        inner = value.values() if isinstance(value, dict) else value
        if item.type in _OF_TEXTS and not all(isinstance(each, str) for each in inner or ()):
            raise ConfigError(f"{key} is {value}; each value in it is a text.")
        for text in _texts(value):
            for variable, secret in held.items():
                if secret in text:
                    raise ConfigError(
                        f"{key} holds what the environment variable {variable} holds. Keys stay in the environment: "
                        "a configuration is printed, and kept in the run folder."
                    )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{key} holds {ascii(text[:60])}, which is no Unicode text ({error.reason})."
                ) from error


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in _texts(each)]
    return [text for each in value for text in _texts(each)] if isinstance(value, list) else []
