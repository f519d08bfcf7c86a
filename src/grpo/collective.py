"""Doing something on one rank, or on all, so that all ranks go on or stop together."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from accelerate.utils import broadcast_object_list, gather_object

from src.errors import ClassroomError

if TYPE_CHECKING:
    from accelerate import Accelerator

Result = TypeVar("Result")


def on_main_process(accelerator: "Accelerator", action: Callable[[], Result]) -> Result:
    """Run `action` on the main process and give its result to all.

    Raises:
        ClassroomError: on every rank, if the action raised one.
    """
    outcome: list = [None, None]
    if accelerator.is_main_process:
        outcome = list(_attempt(action))
    result, error = broadcast_object_list(outcome)
    if error is not None:
        raise error
    return result


def on_every_process(accelerator: "Accelerator", action: Callable[[], Result]) -> Result:
    """Run `action` on every process and return this one's result.

    Raises:
        ClassroomError: on every rank, if it failed on any.
    """
    result, error = _attempt(action)
    failures = [failure for failure in gather_object([error]) if failure is not None]
    if failures:
        raise error or failures[0]
    return result


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, ClassroomError | None]:
    try:
        return action(), None
    except ClassroomError as error:
        return None, error
