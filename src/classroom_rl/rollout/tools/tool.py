"""Tools that a model may call while it writes a message.

A tool is a function with types and a docstring. Its arguments are checked against the JSON schema of its signature.
Every error of a call is recorded and returned to the model, which can correct the call. Only the tools of a `Toolbox`
are ever run.
"""

import asyncio
import contextvars
import inspect
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_jsonable_python

from classroom_rl.rollout.text import without_surrogates

UNKNOWN_TOOL, BAD_JSON, BAD_ARGUMENTS, EXCEPTION, TIMEOUT, LIMIT = ERRORS = (
    *("unknown_tool", "bad_json", "bad_arguments", "exception", "timeout", "limit"),
)
"""The errors of a call."""
MOST_STUCK = 8
"""How many calls of one plain function may still be running after their time-out; then no further call is run."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_ARGUMENT = re.compile(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.+)")
_LONGEST_REASON, _LONGEST_RAW = 300, 10_000


class ToolFailure(Exception):
    """Raised by a tool, with a message for the model: what is wrong with the call, and what to do."""


@dataclass(frozen=True)
class AskedCall:
    """A call as a model wrote it.

    Attributes:
        name: the tool's name; "" if it cannot be parsed.
        arguments: its arguments, parsed from JSON.
        raw: the whole text of the call.
        error, reason: for a call that cannot be parsed, one of `ERRORS` and an explanation; otherwise None and "".
    """

    name: str
    arguments: Mapping[str, Any]
    raw: str
    error: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A call and its result.

    Attributes:
        id: unique among all calls.
        name, arguments, raw: as in `AskedCall`; a raw text of more than 10,000 characters is cut.
        result: the text that the model was shown; for a failed call, what went wrong.
        error: one of `ERRORS`; None for a call that succeeded.
        seconds: how long it ran.
        at: its position in the message's text, in characters.
        segment: the number of times that the model had been given results in this message before it wrote the call.
            Calls that it writes at once have the same number.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw: str
    result: str
    error: str | None = None
    seconds: float = 0.0
    at: int = 0
    segment: int = 0


@dataclass(frozen=True)
class ToolLimits:
    """Limits of the calls in one message: their number, the seconds that each may take, and the characters of a result
    that the model is shown."""

    calls: int = 4
    seconds: float = 5.0
    characters: int = 1000


class Tool:
    """A function that models may call.

    Args:
        function: plain or async, with typed parameters. Its return value is shown to the model: text as it is,
            everything else as JSON. An async function must not block the event loop. A plain one runs in its own
            thread, which goes on after a time-out, because Python cannot end a thread. Work that may never end belongs
            in a process, as in tools/calculator.py.
        name: the function's name if None.
        description: the docstring before `Args:` if None. The `Args:` section gives the parameters' descriptions.
        parameters: the JSON schema of the arguments; made from the signature if None.
        check: raises a `ValueError` for arguments that do not match `parameters`; only needed with `parameters`.

    Raises:
        TypeError: if a parameter has no type, or cannot be passed by name.
        ValueError: if there is no description, or the name has other characters than letters, digits, `_`, `.`, `-`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ):
        self.function = function
        self.name = function.__name__ if name is None else name
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"A tool cannot be named {self.name!r}: letters, digits, _, . and - make up a name.")
        head, _, args_section = (inspect.getdoc(function) or "").partition("Args:\n")
        self.description = " ".join(head.split()) if description is None else description
        if not self.description:
            reason = " Python runs with -OO, which removes docstrings." if sys.flags.optimize > 1 else ""
            raise ValueError(
                f"The tool {self.name} has no docstring: say in one what it does; the model reads it.{reason}"
            )
        self._arguments: type[BaseModel] | None = None
        if parameters is None:
            self._arguments = _arguments_of(function, self.name, dict(_ARGUMENT.findall(f"\n{args_section}")))
            parameters = _without_titles(self._arguments.model_json_schema())
        self.parameters = dict(parameters)
        self._check = check
        self._stuck = 0  # threads that still run after their time-out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the form that chat templates and APIs expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, parsed into the types of the function's parameters. Raises `ValidationError` or `ValueError`
        if they do not match the schema."""
        if self._arguments is None:
            if self._check is not None:
                self._check(arguments)
            return dict(arguments)
        parsed = self._arguments.model_validate_json(json.dumps(arguments))
        checked: dict[str, Any] = {}
        for name, field in type(parsed).model_fields.items():
            assert field.alias is not None  # `_arguments_of` gives one to every field
            if name in parsed.model_fields_set:
                checked[field.alias] = getattr(parsed, name)
        return checked

    async def run(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        """Run the function; `arguments` must come from `checked`.

        Raises:
            TimeoutError: if it takes longer than `seconds`.
            Exception: any error of the function itself.
        """
        if inspect.iscoroutinefunction(self.function):
            return await _awaited(self.function(**arguments), seconds)
        if self._stuck >= MOST_STUCK:
            raise TimeoutError(f"{self.name} was not run: {self._stuck} earlier calls of it have not returned yet")
        return await self._in_thread(arguments, seconds)

    async def _in_thread(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = context.run(self.function, **arguments), None
            except BaseException as error:  # also SystemExit: it ends the tool, not the program
                outcome = None, error
            try:
                loop.call_soon_threadsafe(settle, outcome)
            except RuntimeError:  # the event loop has ended in the meantime, and nobody waits
                return

        def settle(outcome: tuple[Any, BaseException | None]) -> None:
            if future.cancelled():  # the thread ended after its time-out
                self._stuck -= 1
            else:
                future.set_result(outcome)

        threading.Thread(target=work, name=f"tool {self.name}", daemon=True).start()
        try:
            await asyncio.wait({future}, timeout=seconds)
        finally:
            if not future.done():
                future.cancel()
                self._stuck += 1
        if future.cancelled():
            raise TimeoutError
        value, error = future.result()
        if error is not None:
            raise error if isinstance(error, Exception) else ToolFailure(f"it ended with {type(error).__name__}")
        return value


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> Any:
    """Make a `Tool` of a function: `@tool`, or `@tool(name="search")`."""
    if function is None:
        return lambda decorated: Tool(decorated, name, description)
    return Tool(function, name, description)


class Toolbox:
    """The tools that a model may call, and their limits.

    Args:
        tools: tools, or functions to make tools of.

    Raises:
        ValueError: if two tools have the same name.
    """

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]], limits: ToolLimits | None = None):
        all_tools = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        duplicates = [name for name, count in Counter(tool.name for tool in all_tools).items() if count > 1]
        if duplicates:
            raise ValueError(f"Two tools are named {duplicates[0]}: give one of them another name.")
        self.tools = {tool.name: tool for tool in all_tools}
        self.limits = limits or ToolLimits()

    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools, as chat templates and APIs expect them."""
        return [tool.schema for tool in self.tools.values()]

    async def run(self, asked: AskedCall, id: str) -> ToolCall:
        """Run a call. Errors are never raised: they are in the returned call."""
        tool = self.tools.get(asked.name)
        if asked.error is not None:
            return self.refuse(asked, id, asked.error, asked.reason)
        if tool is None:
            names = ", ".join(self.tools) or "none"
            return self.refuse(
                asked, id, UNKNOWN_TOOL, f"there is no tool {asked.name[:64]!r}. Tools that you can call: {names}."
            )
        try:
            arguments = tool.checked(asked.arguments)
        except (ValidationError, ValueError, RecursionError) as error:
            return self.refuse(asked, id, BAD_ARGUMENTS, f"{tool.name}: {_reason(error)}. Call it again.")
        started = time.monotonic()
        failure: str | None = None
        try:
            result = _as_text(await tool.run(arguments, self.limits.seconds))
        except TimeoutError as timeout:
            reason = str(timeout)[:_LONGEST_REASON] or f"{tool.name} took too long and was given up"
            failure, result = TIMEOUT, f"{reason}. Ask for less, or go on without it."
        except (Exception, SystemExit) as raised:  # whatever a tool raises, the message goes on: the model is told
            reason = str(raised) if isinstance(raised, ToolFailure) else f"{type(raised).__name__}: {raised}"
            failure, result = EXCEPTION, f"{tool.name} failed: {reason[:_LONGEST_REASON]}"
        call = self.refuse(asked, id, failure, result) if failure else _recorded(asked, id, self.cut(result))
        return replace(call, seconds=round(time.monotonic() - started, 4))

    def refuse(self, asked: AskedCall, id: str, error: str, reason: str) -> ToolCall:
        """The record of a call that failed or was not run, for this reason."""
        return replace(_recorded(asked, id, self.cut(f"error: {reason}")), error=error)

    def cut(self, text: str) -> str:
        """A result within the character limit, with a note if it was cut."""
        return cut_text(without_surrogates(text), self.limits.characters)


def cut_text(text: str, characters: int) -> str:
    """The text, cut to this many characters, with a note if it was longer."""
    return text if len(text) <= characters else f"{text[:characters]}… (cut: it has {len(text)} characters)"


# Signatures ----------------------------------------------------------------------------------------------------------


def _arguments_of(function: Callable[..., Any], name: str, descriptions: Mapping[str, str]) -> type[BaseModel]:
    """A pydantic model of a function's arguments: strict, and without further keys. Its fields are named argument_0,
    argument_1 and so on, because pydantic does not allow every parameter name; the parameters' names are aliases."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"The tool {name} has the parameter {parameter}; models give every argument by its name.")
        key = parameter.name
        if key not in hints:
            raise TypeError(f"The tool {name} does not say of which type {key} is: write {key}: str.")
        default: Any = ... if parameter.default is parameter.empty else parameter.default
        description: dict[str, Any] = {"description": descriptions[key].strip()} if key in descriptions else {}
        fields[f"argument_{index}"] = hints[key], Field(default, alias=key, **description)
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model("Arguments", __config__=config, **fields)


def _without_titles(schema: Any) -> Any:
    """A JSON schema without pydantic's titles, which repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Only text is a title: an object under this key is the schema of a parameter named `title`.
    items = [(name, value) for name, value in schema.items() if not (name == "title" and isinstance(value, str))]
    return {name: _without_titles(value) for name, value in items}


# Running -------------------------------------------------------------------------------------------------------------


async def _awaited(work: Any, seconds: float) -> Any:
    """The result of a coroutine. After `seconds` it is cancelled, but its end is not awaited: it may ignore that."""

    async def guarded() -> Any:
        try:
            return await work
        except SystemExit as error:  # it would end the event loop
            raise ToolFailure("it ended with SystemExit") from error

    task = asyncio.ensure_future(guarded())
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        # Retrieve its exception, or asyncio warns that nobody did.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise TimeoutError
    if task.cancelled():
        raise ToolFailure("it was cancelled")
    return task.result()


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(to_jsonable_python(result), ensure_ascii=False)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise ToolFailure(f"its result, a {type(result).__name__}, is no text and no JSON") from error


def _reason(error: Exception) -> str:
    """What is wrong with the arguments, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)[:_LONGEST_REASON] or "the arguments are no JSON of a reasonable size"
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    parts = [f"{'.'.join(map(str, entry['loc'])) or 'arguments'}: {entry['msg']}" for entry in errors[:3]]
    return "; ".join(parts)[:_LONGEST_REASON].rstrip(".")


def _recorded(asked: AskedCall, id: str, result: str) -> ToolCall:
    is_short = len(asked.raw) <= _LONGEST_RAW
    raw = asked.raw if is_short else f"{asked.raw[:_LONGEST_RAW]}…"
    return ToolCall(
        id, without_surrogates(asked.name), asked.arguments if is_short else {}, without_surrogates(raw), result
    )
