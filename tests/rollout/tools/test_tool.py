"""Tools: schemas from signatures, checked arguments, and failures that are answers."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic_core import to_jsonable_python

from classroom_rl.rollout.tools.tool import (
    MOST_STUCK,
    AskedCall,
    Tool,
    Toolbox,
    ToolCall,
    ToolFailure,
    ToolLimits,
    tool,
)

LIMITS = ToolLimits(calls=4, seconds=30, characters=60)


@tool
def shop(item: str, count: int = 1, *, kind: Literal["sold", "bought"] = "sold", _tag: list[int] | None = None) -> dict:
    """Says what a shop
    sold.

    Args:
        item: what it is
        count (int): how many
    """
    return {"item": item, "count": count, "kind": kind, "tag": _tag}


def ask(box: Toolbox, name: str, **arguments: Any) -> ToolCall:
    return asyncio.run(box.run(AskedCall(name, arguments, "raw"), "id"))


def box_of(*functions: Any, **limits: Any) -> Toolbox:
    return Toolbox(functions, replace(LIMITS, **limits))


# Schemas -------------------------------------------------------------------------------------------------------------


def test_the_schema_is_that_of_the_signature():
    assert shop.schema == {
        "type": "function",
        "function": {
            "name": "shop",
            "description": "Says what a shop sold.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "what it is"},
                    "count": {"type": "integer", "description": "how many", "default": 1},
                    "kind": {"enum": ["sold", "bought"], "type": "string", "default": "sold"},
                    "_tag": {
                        "anyOf": [{"items": {"type": "integer"}, "type": "array"}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }
    assert shop("tea", 2)["count"] == 2, "a tool is still a function"
    assert Toolbox([shop]).schemas() == [shop.schema]


def test_a_name_and_a_description_of_its_own():
    @tool(name="find", description="Finds.")
    def _(word: Annotated[str, Field(description="a word", max_length=3)]) -> str:
        return word

    assert _.schema["function"]["name"] == "find" and _.description == "Finds."
    assert _.parameters["properties"]["word"] == {"type": "string", "maxLength": 3, "description": "a word"}
    assert ask(box_of(_), "find", word="four").error == "bad_arguments"


def silent(x: int) -> int:
    return x


def untyped(x):
    """Does."""


def many(*x: int):
    """Does."""


def positional(x: int, /):
    """Does."""


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Tool(silent), ValueError, "silent has no docstring"),
        (lambda: Tool(untyped), TypeError, "does not say of which type x is"),
        (lambda: Tool(many), TypeError, "by its name"),
        (lambda: Tool(positional), TypeError, "by its name"),
        (lambda: Tool(silent, name="a b", description="Does."), ValueError, "cannot be named 'a b'"),
        (lambda: Toolbox([shop, shop]), ValueError, "Two tools are named shop"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_at_once(make, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        make()


# Calls ---------------------------------------------------------------------------------------------------------------


def test_a_call_is_recorded_with_all_of_it():
    call = ask(box_of(shop, characters=1000), "shop", item="tea", kind="bought", _tag=[1])
    assert json.loads(call.result) == {"item": "tea", "count": 1, "kind": "bought", "tag": [1]}
    assert (call.id, call.name, call.raw, call.error) == ("id", "shop", "raw", None)
    assert call.arguments == {"item": "tea", "kind": "bought", "_tag": [1]} and call.seconds >= 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "item: Field required"),
        ({"item": 3}, "item: Input should be a valid string"),
        ({"item": "a", "count": "3"}, "count: Input should be a valid integer"),
        ({"item": "a", "count": True}, "count"),
        ({"item": "a", "kind": "lent"}, "kind: Input should be 'sold' or 'bought'"),
        ({"item": "a", "price": 3}, "price: Extra inputs"),
        ({"item": "a", "_tag": [1.5]}, "_tag"),
        ({"item": None}, "item"),
        ({"item": "\ud800"}, ""),
    ],
)
def test_arguments_that_do_not_fit_never_reach_the_function(arguments: dict, said: str):
    reached = []

    @tool(name="shop")
    def watched(item: str, count: int = 1, kind: Literal["sold", "bought"] = "sold", _tag: list[int] | None = None):
        """Shops."""
        reached.append(item)

    call = ask(box_of(watched, characters=500), "shop", **arguments)
    assert (call.error, reached) == ("bad_arguments", [])
    assert call.result.startswith("error: shop: ") and said in call.result and call.result.endswith("Call it again.")


def test_what_is_not_listed_is_not_run():
    call = ask(box_of(shop, characters=500), "os.system", command="ls")
    assert call.error == "unknown_tool"
    assert call.result == "error: there is no tool 'os.system'. Tools that you can call: shop."


def raising(error: BaseException) -> Any:
    def fails() -> str:
        """Fails."""
        raise error

    return fails


def raising_later(error: BaseException) -> Any:
    async def fails() -> str:
        """Fails."""
        await asyncio.sleep(0)
        raise error

    return fails


async def cancels_itself() -> str:
    """Cancels itself."""
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


def gives_no_json() -> object:
    """Gives an object."""
    return object()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raising(RuntimeError("no\ud800 luck")), "RuntimeError: no\ufffd luck"),
        (raising(ToolFailure("give a number")), "fails failed: give a number"),
        (raising(SystemExit(3)), "fails failed: it ended with SystemExit"),
        (raising_later(KeyError("x")), "KeyError: 'x'"),
        (raising_later(SystemExit(3)), "it ended with SystemExit"),
        (cancels_itself, "it was cancelled"),
        (gives_no_json, "a object, is no text and no JSON"),
    ],
)
def test_an_exception_is_an_answer(function: Any, said: str):
    call = ask(box_of(function, characters=500), function.__name__)
    assert call.error == "exception" and said in call.result
    to_jsonable_python(call)
    call.result.encode()


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("é" * 60, "é" * 60),
        ("x" * 61, "x" * 60 + "… (cut: it has 61 characters)"),
        (None, "null"),
        ({"a": [1]}, '{"a": [1]}'),
    ],
)
def test_results_are_text_and_long_ones_are_cut(value: Any, result: str):
    assert ask(box_of(Tool(lambda: value, "gives", "Gives.")), "gives").result == result


# Time ----------------------------------------------------------------------------------------------------------------


def test_a_plain_function_that_never_returns_is_given_up_and_at_last_not_run_any_more():
    release, begun, started = threading.Event(), [], threading.Semaphore(0)

    def hangs() -> str:
        """Hangs."""
        begun.append(threading.current_thread())
        started.release()
        release.wait()
        return "at last"

    box = box_of(hangs, seconds=0.01, characters=500)

    async def many() -> list[ToolCall]:
        return [await box.run(AskedCall("hangs", {}, ""), str(n)) for n in range(MOST_STUCK + 3)]

    calls = asyncio.run(many())
    for _ in range(MOST_STUCK):
        assert started.acquire(timeout=120)
    assert {call.error for call in calls} == {"timeout"} and len(begun) == MOST_STUCK
    assert "given up" in calls[0].result and "was not run: 8 earlier calls" in calls[-1].result
    release.set()
    for thread in begun:
        thread.join(60)


def test_calls_that_return_late_make_room_for_others():
    release = threading.Event()

    def slow() -> str:
        """Waits."""
        release.wait()
        return "done"

    box = box_of(slow, seconds=0.01)

    async def late_and_again() -> ToolCall:
        for n in range(MOST_STUCK):
            await box.run(AskedCall("slow", {}, ""), str(n))
        release.set()
        box.limits = replace(box.limits, seconds=600)
        while (call := await box.run(AskedCall("slow", {}, ""), "again")).error is not None:
            await asyncio.sleep(0.01)
        return call

    assert asyncio.run(late_and_again()).result == "done"


def test_an_async_function_that_does_not_take_no_for_an_answer_is_not_waited_for():
    release = asyncio.Event()

    async def stubborn() -> str:
        """Hangs."""
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "at last"

    async def ends() -> ToolCall:
        call = await box_of(stubborn, seconds=0.01).run(AskedCall("stubborn", {}, ""), "1")
        release.set()
        await asyncio.sleep(0)
        return call

    assert asyncio.run(ends()).error == "timeout"


def test_a_rollout_that_is_cancelled_cancels_its_tool():
    begun, ended = asyncio.Event(), []

    async def waits() -> str:
        """Waits."""
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def cancelled() -> None:
        task = asyncio.ensure_future(box_of(waits, seconds=3600).run(AskedCall("waits", {}, ""), "1"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(cancelled())
    assert ended == [True]
