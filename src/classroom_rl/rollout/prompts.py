"""Prompt templates: Jinja files in which an unknown variable is an error, never an empty string. They are rendered
once before a run begins, so that a mistake in one does not stop the run hours later.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from classroom_rl.errors import DataError
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.template_sandbox import MOST_CHARACTERS, PromptEnvironment

_ENVIRONMENT = PromptEnvironment()


@cache
def _load(path: str) -> jinja2.Template:
    tree = _parse(path)
    try:
        return _ENVIRONMENT.compile_prompt(tree, path)
    except Exception as error:
        raise DataError(_does_not_parse(path, error)) from error


def _parse(path: str) -> jinja2.nodes.Template:
    text = _read(path)
    try:
        tree = _ENVIRONMENT.parse(text)
        _ENVIRONMENT.refuse_other_files(tree)
    except Exception as error:
        raise DataError(_does_not_parse(path, error)) from error
    return tree


def _read(path: str) -> str:
    try:
        file = Path(path)
        if not file.is_file():
            where = "" if file.is_absolute() else f" in {Path.cwd()}, which is where programs look for it"
            raise DataError(f"There is no prompt template {path}{where}.")
        if file.stat().st_size > 4 * MOST_CHARACTERS:  # a character has at most four bytes
            raise DataError(f"The prompt template {path} is larger than {4 * MOST_CHARACTERS} bytes.")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"The prompt template {path} is not UTF-8: {error}.") from error
    except (OSError, ValueError) as error:  # a name too long, a null byte in it, a file that may not be read
        raise DataError(f"The prompt template {path[:200]!r} cannot be read: {error}.") from error


def _does_not_parse(path: str, error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"The prompt template {path} does not parse: line {error.lineno}: {_reason(error)}."
    if isinstance(error, SyntaxError):  # from Python's compiler, about the code that Jinja generated
        return f"The prompt template {path} does not parse: {error.msg}: nest its loops and conditions less deep."
    if isinstance(error, RecursionError | MemoryError):
        return f"The prompt template {path} does not parse: it nests too deep."
    return f"The prompt template {path} does not parse: {_reason(error)}."


def variables_of(path: str) -> set[str]:
    """The variables that the template at `path` uses. Raises a `DataError` if the file is missing or does not parse."""
    tree = _parse(path)
    try:
        return jinja2.meta.find_undeclared_variables(tree)
    except Exception as error:
        raise DataError(_does_not_parse(path, error)) from error


def render(path: str, **variables: Any) -> str:
    """The template at `path` rendered with `variables`, without surrounding white space. Raises a `DataError` with
    file, line and cause, if the file is missing, does not parse, uses an unknown variable, breaks a rule or a limit of
    the sandbox, or fails in any other way."""
    template = _load(path)
    try:
        return _ENVIRONMENT.fill_in(template, variables).strip()
    except Exception as error:
        raise DataError(_cannot_be_filled_in(path, error, variables)) from error


def _cannot_be_filled_in(path: str, error: Exception, variables: dict[str, Any]) -> str:
    line = _line_of(path, error)
    location = path if line is None else f"{path}, line {line}"
    if isinstance(error, jinja2.exceptions.SecurityError):
        return f"{location}: the sandbox of prompt templates forbids it: {_reason(error)}."
    if isinstance(error, jinja2.UndefinedError):
        return f"{location}: {error.message}. It may use: {', '.join(sorted(variables))}."
    return f"{location} cannot be filled in: {_reason(error)}."


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "a macro or a loop goes into itself without an end, or too deep"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, jinja2.TemplateError):
        return str(error.message).rstrip(".")
    text = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line_of(path: str, error: Exception) -> int | None:
    """The line of the template that raised an error; the innermost one if macros called each other."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:  # Jinja names the compiled code after the template
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _transcript(text: str) -> list[Message]:
    return [{"role": role, "content": f"{text} {number}"} for number in range(3) for role in ("teacher", "student")]


_GROUP_SIZE = 3
TRANSCRIPT, _OTHER_TRANSCRIPT = _transcript("How are you?"), _transcript("Where do you live?")
OF_SUPERVISORS = {"conversation": TRANSCRIPT, "message": "Well?", "problem": "…", "answer": "…"}
"""The variables of a supervisor's template."""
GROUP = [TRANSCRIPT] * _GROUP_SIZE
"""The conversations of a group, as a group judge's template gets them."""


def check_template(key: str, path: str, variables: Mapping[str, Any]) -> None:
    """Check a template by rendering it with the variables that it may use.

    Args:
        key: the configuration key of the template.

    Raises:
        DataError: if the template is wrong or uses another variable, or if the conversation or the message that it may
            use does not appear in the prompt; the error names key and template.
    """
    try:
        unknown = sorted(variables_of(path) - set(variables))
        if unknown:  # rendering would miss those in branches that are not taken with these values
            raise DataError(f"{path} uses {', '.join(unknown)}. It may use: {', '.join(sorted(variables))}.")
        # If another conversation gives the same prompt, the template does not show the conversation.
        prompt = render(path, **variables)
        if "conversation" in variables and prompt == render(path, **{**variables, "conversation": _OTHER_TRANSCRIPT}):
            _refuse_blind_judge(path)
        if "conversations" in variables:
            for changed in range(_GROUP_SIZE):
                transcripts = [_OTHER_TRANSCRIPT if i == changed else transcript for i, transcript in enumerate(GROUP)]
                if prompt == render(path, **{**variables, "conversations": transcripts}):
                    _refuse_blind_group_judge(path)
        if "message" in variables and "message" not in variables_of(path):
            raise DataError(f"{path} never uses message, the one that the supervisor is asked about.")
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _refuse_blind_group_judge(path: str) -> None:
    raise DataError(
        f"{path} does not show every one of conversations: the judge would rank lessons that it has not read. Write "
        "them out, for example {% for conversation in conversations %}Lesson {{ loop.index }}: {% for message in "
        "conversation %}{{ message.role }}: {{ message.content }}{% endfor %}{% endfor %}."
    )


def _refuse_blind_judge(path: str) -> None:
    used = "conversation" in variables_of(path)
    fault = "uses conversation, but what was said does not get into the prompt" if used else "never uses conversation"
    raise DataError(
        f"{path} {fault}: the judge would give its verdict without having read the lesson. Write the messages out, for "
        "example {% for message in conversation %}{{ message.role }}: {{ message.content }}{% endfor %}."
    )
