"""Tools that a model may call while it writes a message.

A tool is a function with types and a docstring. Its arguments are checked against the JSON schema of its signature.
Whatever goes wrong with a call is an answer that the model reads and can mend, and is recorded; nothing but the tools
of a `Toolbox` ever runs.
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
"""What can be wrong with a call."""
MOST_STUCK = 8
"""How many calls of one plain function may be running after their time-out; no further call of it is run then."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_ARGUMENT = re.compile(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.+)")
_LONGEST_REASON, _LONGEST_RAW = 300, 10_000


class ToolFailure(Exception):
    """Raised by a tool with a text for the model: what is wrong with the call, and what to do."""


@dataclass(frozen=True)
class AskedCall:
    """A call as a model wrote it.

    Attributes:
        name: the tool's name; "" if it cannot be read.
        arguments: its arguments, as parsed from JSON.
        raw: the whole text of the call.
        error, reason: one of `ERRORS` and what is wrong in words, for a call that cannot be read; else None and "".
    """

    name: str
    arguments: Mapping[str, Any]
    raw: str
    error: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A call and what came of it.

    Attributes:
        id: unique among all calls.
        name, arguments, raw: as in `AskedCall`; a raw text of more than 10,000 characters is cut.
        result: the text that the model was given; of a failed call, what went wrong.
        error: one of `ERRORS`; None for a call that succeeded.
        seconds: how long it ran.
        at: the number of characters of the message's text before it.
        segment: the number of results that the model had read in this message before it wrote the call: a model may
            write several calls at once, and they have the same number.
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
    """Limits of the calls in one message: how many, how many seconds each may take, and how many characters of a result
    the model is shown."""

    calls: int = 4
    seconds: float = 5.0
    characters: int = 1000


class Tool:
    """A function that models may call.

    Args:
        function: plain or async, with typed parameters. What it returns is shown to the model: a text as it is,
            everything else as JSON. An async function must await whatever takes long. A plain one runs in a thread of
            its own: after a time-out it is left behind there, because Python cannot end a thread. Work that may run for
            ever belongs into a process, as in calculator_tool.py.
        name: the function's own name, if None.
        description: the docstring before `Args:`, if None. What `Args:` says of a parameter becomes its description.
        parameters: the JSON schema of the arguments; made from the signature if None.
        check: raises a `ValueError` for arguments that do not fit `parameters`; needed with these only.

    Raises:
        TypeError: if a parameter has no type, or cannot be given by name.
        ValueError: if there is no description, or the name holds more than letters, digits, `_`, `.` and `-`.
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
        head, _, about = (inspect.getdoc(function) or "").partition("Args:\n")
        self.description = " ".join(head.split()) if description is None else description
        if not self.description:
            why = " Python runs with -OO, which removes docstrings." if sys.flags.optimize > 1 else ""
            raise ValueError(
                f"The tool {self.name} has no docstring: say in one what it does; the model reads it.{why}"
            )
        self._arguments: type[BaseModel] | None = None
        if parameters is None:
            self._arguments = _arguments_of(function, self.name, dict(_ARGUMENT.findall(f"\n{about}")))
            parameters = _without_titles(self._arguments.model_json_schema())
        self.parameters = dict(parameters)
        self._check = check
        self._stuck = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form that chat templates and APIs take."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them.

        Raises:
            ValidationError, ValueError: if they do not fit the schema.
        """
        if self._arguments is None:
            if self._check is not None:
                self._check(arguments)
            return dict(arguments)
        given = self._arguments.model_validate_json(json.dumps(arguments))
        fields = type(given).model_fields
        return {fields[name].alias: getattr(given, name) for name in fields if name in given.model_fields_set}

    async def run(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        """Run the function; `arguments` are checked ones.

        Raises:
            TimeoutError: if it takes longer than `seconds`.
            Exception: what it raises itself.
        """
        if inspect.iscoroutinefunction(self.function):
            return await _awaited(self.function(**arguments), seconds)
        if self._stuck >= MOST_STUCK:
            raise TimeoutError(f"{self.name} was not run: {self._stuck} earlier calls of it have not returned yet")
        return await self._in_thread(arguments, seconds)

    async def _in_thread(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            try:
                outcome = context.run(self.function, **arguments), None
            except BaseException as error:  # also SystemExit: it is the tool that ends, not the program
                outcome = None, error
            try:
                loop.call_soon_threadsafe(settle, outcome)
            except RuntimeError:  # the loop has ended meanwhile, and nobody waits
                return

        def settle(outcome: tuple[Any, BaseException | None]) -> None:
            if done.cancelled():
                self._stuck -= 1
            else:
                done.set_result(outcome)

        threading.Thread(target=work, name=f"tool {self.name}", daemon=True).start()
        try:
            await asyncio.wait({done}, timeout=seconds)
        finally:
            if not done.done():
                done.cancel()
                self._stuck += 1
        if done.cancelled():
            raise TimeoutError
        value, error = done.result()
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
        return lambda each: Tool(each, name, description)
    return Tool(function, name, description)


class Toolbox:
    """The tools that a model may call, and their limits.

    Args:
        tools: tools, or functions to make tools of.

    Raises:
        ValueError: if two tools have one name.
    """

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]], limits: ToolLimits | None = None):
        listed = [each if isinstance(each, Tool) else Tool(each) for each in tools]
        twice = [name for name, count in Counter(each.name for each in listed).items() if count > 1]
        if twice:
            raise ValueError(f"Two tools are named {twice[0]}: give one of them another name.")
        self.tools = {each.name: each for each in listed}
        self.limits = limits or ToolLimits()

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and APIs take them."""
        return [each.schema for each in self.tools.values()]

    async def run(self, asked: AskedCall, id: str) -> ToolCall:
        """Run a call, or say what is wrong with it. No failure of a tool is raised."""
        found = self.tools.get(asked.name)
        if asked.error is not None:
            return self.refuse(asked, id, asked.error, asked.reason)
        if found is None:
            known = ", ".join(self.tools) or "none"
            return self.refuse(
                asked, id, UNKNOWN_TOOL, f"there is no tool {asked.name[:64]!r}. Tools that you can call: {known}."
            )
        try:
            arguments = found.checked(asked.arguments)
        except (ValidationError, ValueError, RecursionError) as error:
            return self.refuse(asked, id, BAD_ARGUMENTS, f"{found.name}: {_said_by(error)}. Call it again.")
        began = time.monotonic()
        try:
            error, result = None, _shown(await found.run(arguments, self.limits.seconds))
        except TimeoutError as late:
            reason = str(late)[:_LONGEST_REASON] or f"{found.name} took too long and was given up"
            error, result = TIMEOUT, f"{reason}. Ask for less, or go on without it."
        except (Exception, SystemExit) as raised:  # whatever a tool does, the message goes on: the model is told of it
            reason = str(raised) if isinstance(raised, ToolFailure) else f"{type(raised).__name__}: {raised}"
            error, result = EXCEPTION, f"{found.name} failed: {reason[:_LONGEST_REASON]}"
        call = self.refuse(asked, id, error, result) if error else _recorded(asked, id, self.cut(result))
        return replace(call, seconds=round(time.monotonic() - began, 4))

    def refuse(self, asked: AskedCall, id: str, error: str, reason: str) -> ToolCall:
        """A call that failed or was not run, for this reason."""
        return replace(_recorded(asked, id, self.cut(f"error: {reason}")), error=error)

    def cut(self, text: str) -> str:
        """A result within the limit of characters; one that is cut says so."""
        return cut_text(without_surrogates(text), self.limits.characters)


def cut_text(text: str, characters: int) -> str:
    """The first characters of a text, and a note if there were more."""
    return text if len(text) <= characters else f"{text[:characters]}… (cut: it has {len(text)} characters)"


# Signatures ----------------------------------------------------------------------------------------------------------


def _arguments_of(function: Callable[..., Any], name: str, about: Mapping[str, str]) -> type[BaseModel]:
    """The arguments of a function as an object without further keys, in which nothing is converted. Its fields have
    names of their own, since a parameter may have any; the parameters' names are their aliases."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for place, each in enumerate(inspect.signature(function).parameters.values()):
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise TypeError(f"The tool {name} has the parameter {each}; models give every argument by its name.")
        if each.name not in hints:
            raise TypeError(f"The tool {name} does not say of which type {each.name} is: write {each.name}: str.")
        default = ... if each.default is each.empty else each.default
        described = {"description": about[each.name].strip()} if each.name in about else {}
        fields[f"argument_{place}"] = hints[each.name], Field(default, alias=each.name, **described)
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model("Arguments", __config__=config, **fields)


def _without_titles(schema: Any) -> Any:
    """A JSON schema without pydantic's titles, which repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if not (name == "title" and isinstance(value, str))}
    return {name: _without_titles(value) for name, value in kept.items()}


# Running -------------------------------------------------------------------------------------------------------------


async def _awaited(work: Any, seconds: float) -> Any:
    """What a coroutine returns. After `seconds` it is cancelled, and not waited for any longer."""

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
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks
        raise TimeoutError
    if task.cancelled():
        raise ToolFailure("it was cancelled")
    return task.result()


def _shown(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(to_jsonable_python(result), ensure_ascii=False)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise ToolFailure(f"its result, a {type(result).__name__}, is no text and no JSON") from error


def _said_by(error: Exception) -> str:
    """What is wrong with arguments, in a line."""
    if not isinstance(error, ValidationError):
        return str(error)[:_LONGEST_REASON] or "the arguments are no JSON of a reasonable size"
    found = error.errors(include_url=False, include_context=False, include_input=False)
    parts = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in found[:3]]
    return "; ".join(parts)[:_LONGEST_REASON].rstrip(".")


def _recorded(asked: AskedCall, id: str, result: str) -> ToolCall:
    small = len(asked.raw) <= _LONGEST_RAW
    raw = asked.raw if small else f"{asked.raw[:_LONGEST_RAW]}…"
    return ToolCall(
        id, without_surrogates(asked.name), asked.arguments if small else {}, without_surrogates(raw), result
    )
