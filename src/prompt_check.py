"""Every configured prompt template is tried once before models are loaded: a mistake in one must not wait for the
conversation that meets it."""

from collections.abc import Iterator
from typing import Any

from config.base import GenerationConfig
from src.errors import DataError
from src.prompts import render, variables_of

_TRANSCRIPT = [{"role": "teacher", "content": "How are you?"}, {"role": "student", "content": "Fine."}]


def check_prompts(generation: GenerationConfig, judge_reads_templates: bool) -> None:
    """Fill in every template with the variables that it may use.

    Args:
        judge_reads_templates: whether the judge is a model that is asked with the rules' templates.

    Raises:
        DataError: naming the config key, the template, and what is wrong with it.
    """
    for key, path, variables in _uses(generation, judge_reads_templates):
        try:
            unknown = sorted(variables_of(path) - set(variables))
            if unknown:  # found in every branch, also in those that these values do not take
                raise DataError(f"{path} uses {', '.join(unknown)}. It may use: {', '.join(sorted(variables))}.")
            render(path, **variables)
        except DataError as error:
            raise DataError(f"generation.{key}: {error}") from error


def _uses(generation: GenerationConfig, judge_reads_templates: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(config key, template, variables) of everything that is rendered in a conversation."""
    personas = generation.student_personas_prompts_paths
    roles = {
        "teacher_prompt_path": generation.teacher_prompt_path,
        **{f"student_personas_prompts_paths.{name}": path for name, path in personas.items()},
        "student_final_prompt_path": generation.student_final_prompt_path,
    }
    for name in dict.fromkeys(generation.student_names or [None]):
        role = {"student_name": name, "problem": "…", "include_thinking": generation.use_thinking}
        yield from ((key, path, role) for key, path in roles.items() if path is not None)
    if generation.student_initial_attempt_prompt_path is not None:
        yield (
            "student_initial_attempt_prompt_path",
            generation.student_initial_attempt_prompt_path,
            {"problem": "…"},
        )
    if generation.initial_attempt_wrapper_prompt_path is not None:
        yield "initial_attempt_wrapper_prompt_path", generation.initial_attempt_wrapper_prompt_path, {"attempt": "…"}
    if judge_reads_templates:
        for name, path in generation.judges_rules_prompts_paths.items():
            yield f"judges_rules_prompts_paths.{name}", path, {"conversation": _TRANSCRIPT, "problem": "…"}
