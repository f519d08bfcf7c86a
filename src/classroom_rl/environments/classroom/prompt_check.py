"""Renders all prompt templates before a run begins, so that a mistake in one does not stop the run hours later."""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from classroom_rl.config.base import GenerationConfig, LevelConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.values import EMBEDDED_JUDGES, SCORING_RULES
from classroom_rl.config.values import GROUP as IN_GROUPS
from classroom_rl.environments.classroom.setup import ConversationType
from classroom_rl.environments.classroom.teacher import (
    OPENING_VARIABLES,
    encode_prompt,
    first_messages,
    opening_turns,
    opens_dialogue,
)
from classroom_rl.errors import ContextOverflow, DataError
from classroom_rl.judges.difficulty import LevelRules, lesson_level
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import GROUP, OF_SUPERVISORS, TRANSCRIPT, check_template, variables_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_LEAST_TURN = 2  # tokens: one of text, and the end of the turn


def check_prompts(generation: GenerationConfig, judge_reads_templates: bool) -> None:
    """Render every template with the variables that it may use. Log a warning if the teacher's never uses `problem`.

    Args:
        judge_reads_templates: whether the judge is a model that is prompted with the templates of the judge rules.

    Raises:
        DataError: if a template is invalid, or a judge's template does not show the conversation. The message names
            the config key and the template.
    """
    _check_teacher_prompt(generation)
    for rule, path in generation.judges_rules_prompts_paths.items() if judge_reads_templates else ():
        if path in EMBEDDED_JUDGES:
            raise DataError(
                f"generation.judges_rules_prompts_paths.{rule} is {path}, which an embedded judge needs instead of a "
                "template, but judge_model is a model, which reads one: name it, such as "
                "prompt_templates/judges/language_tutor_eval.txt."
            )
    for key, path, variables in _rendered_templates(generation, judge_reads_templates):
        check_template(f"generation.{key}", path, variables)


def check_judge_prompts(judge: JudgeModelConfig, rules: Collection[str]) -> None:
    """Render the templates of the judge's own: the one that asks by its rubric, and those that ask about a whole group.

    Raises:
        DataError: if a template is invalid, or does not show every conversation and the rubric's criteria.
    """
    if judge.rubric is not None:
        key, path = "judge_model.rubric_prompt_path", judge.rubric_prompt_path
        criterion = {"name": "…", "question": "…", "anchors": [{"score": "0", "text": "…"}]}
        check_template(key, path, {"conversation": TRANSCRIPT, "problem": "…", "criteria": [criterion]})
        if "criteria" not in variables_of(path):
            raise DataError(f"{key}: {path} never uses criteria, so the judge would not know what to judge by.")
    for name in SCORING_RULES.intersection(rules) if judge.mode == IN_GROUPS else ():
        key = f"judge_model.group_prompts_paths.{name}"
        check_template(key, judge.group_prompts_paths[name], {"conversations": GROUP, "problem": "…"})


def _check_teacher_prompt(generation: GenerationConfig) -> None:
    key, path = "generation.teacher_prompt_path", generation.teacher_prompt_path
    try:
        is_opening = opens_dialogue(path)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    if is_opening and (generation.forced_conversation_type or "").lower() != "guided":
        raise DataError(
            f"{key}: {path} opens the dialogue itself (it uses {' and '.join(OPENING_VARIABLES)}), which leaves no "
            "place for a student's attempt: set generation.forced_conversation_type=guided."
        )
    if "problem" not in variables_of(path):
        logger.warning(
            "%s: %s never uses problem, so the teacher is not told what the lesson is about. Write {{ problem }} where "
            "it is to stand, unless the student's first message says it.",
            key,
            path,
        )


def check_lengths(
    problems: Sequence[Problem], generation: GenerationConfig, tokenizer: "PreTrainedTokenizerBase", limit: int
) -> None:
    """Check that the teacher's prompt leaves room for a turn in a context of `limit` tokens.

    Raises:
        DataError: for the first problem whose prompt is too long.
    """
    # The student's name is drawn later, so the check uses the longest one.
    longest_name = max(generation.student_names or [None], key=lambda name: len(name or ""))
    for problem in problems:
        opening = opening_turns(generation, problem.text, longest_name)
        messages = first_messages(generation, problem.text, longest_name, ConversationType.GUIDED, opening)
        refuse_long_prompt(problem, len(encode_prompt(generation, tokenizer, messages)), limit)


def check_levels(level: LevelConfig, problems: Sequence[Problem]) -> LevelRules:
    """Check that the level of each lesson is known, and that its word list can be read. Returns how it is measured.

    Raises:
        ConfigError: as `lesson_level`.
    """
    rules = LevelRules(**asdict(level))
    for problem in problems:
        lesson_level(problem.text, rules)
    return rules


def refuse_long_prompt(problem: Problem, length: int, limit: int) -> None:
    """Raise a `DataError` if a teacher prompt of `length` tokens leaves no room for a turn."""
    if length + _LEAST_TURN > limit:
        raise DataError(
            f"Problem {problem.id} ({problem.text[:60]!r}) makes a teacher prompt of {length} tokens, but a "
            f"conversation may have {limit}: shorten the problem, or raise generation.max_tokens_in_conversation and "
            "teacher_model.vllm.max_length."
        )


def refuse_long_opening(problem: Problem, length: int, student_tokens: int, limit: int) -> None:
    """`refuse_long_prompt` for a prompt that also contains `student_tokens` tokens of student messages.

    Raises:
        DataError: if the prompt leaves no room even without these messages.
        ContextOverflow: if it leaves no room because of them.
    """
    refuse_long_prompt(problem, length - student_tokens, limit)
    if length + _LEAST_TURN > limit:
        raise ContextOverflow(
            f"What the student said before the teacher takes {student_tokens} of {length} tokens of the teacher's "
            f"prompt, and a conversation may have {limit}: lower generation.max_tokens_per_student_attempt or "
            "generation.max_tokens_per_turn, or raise generation.max_tokens_in_conversation and "
            "teacher_model.vllm.max_length."
        )


def _rendered_templates(
    generation: GenerationConfig, judge_reads_templates: bool
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (config key, template, variables) for every rendering in a conversation."""
    personas = generation.student_personas_prompts_paths
    student_paths = {
        **{f"student_personas_prompts_paths.{name}": path for name, path in personas.items()},
        "student_final_prompt_path": generation.student_final_prompt_path,
    }
    opening_variables: list[dict[str, Any]] = [{}]
    if opens_dialogue(generation.teacher_prompt_path):
        opening_variables = [
            {name: name == opened for name in OPENING_VARIABLES} for opened in ("", *OPENING_VARIABLES)
        ]
    for name in dict.fromkeys(generation.student_names or [None]):
        variables = {"student_name": name, "problem": "…", "include_thinking": generation.use_thinking}
        yield from ((key, path, variables) for key, path in student_paths.items() if path is not None)
        yield from (
            ("teacher_prompt_path", generation.teacher_prompt_path, variables | opening)
            for opening in opening_variables
        )
    if generation.student_initial_attempt_prompt_path is not None:
        yield (
            "student_initial_attempt_prompt_path",
            generation.student_initial_attempt_prompt_path,
            {"problem": "…"},
        )
    if generation.student_attempt_prompt_path is not None:
        yield "student_attempt_prompt_path", generation.student_attempt_prompt_path, {"problem": "…"}
    if generation.initial_attempt_wrapper_prompt_path is not None:
        yield "initial_attempt_wrapper_prompt_path", generation.initial_attempt_wrapper_prompt_path, {"attempt": "…"}
    if generation.supervisor.prompt_path is not None:
        yield "supervisor.prompt_path", generation.supervisor.prompt_path, OF_SUPERVISORS
    if generation.post_test.ask_student and generation.post_test.prompt_path is not None:
        entry = {"item": "…", "cue": "…"}
        prompt_variables = {
            "student_name": "Alex",
            "problem": "…",
            "known": [entry],
            "unknown": [entry],
            "knows": False,
        }
        yield "post_test.prompt_path", generation.post_test.prompt_path, prompt_variables
    if judge_reads_templates:
        for name, path in generation.judges_rules_prompts_paths.items():
            yield f"judges_rules_prompts_paths.{name}", path, {"conversation": TRANSCRIPT, "problem": "…"}
