"""Runs an action on one rank or on all ranks, so that all continue, or all raise the same error; brings what all ranks
have to the one that needs it; and runs an action beside the others, in a thread."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar, Union

import torch.distributed
from accelerate.utils import broadcast_object_list, gather_object

from classroom_rl.errors import ClassroomError

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

Processes = Union["Accelerator", "PartialState"]
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def on_main_process(processes: Processes, action: Callable[[], Result]) -> Result:
    """Run `action` on the main process and broadcast its result to all ranks.

    Raises:
        ClassroomError: on every rank, if the action raised one.
    """
    outcome: list = [None, None]
    if processes.is_main_process:
        outcome = list(_attempt(action))
    result, error = broadcast_object_list(outcome)
    if error is not None:
        raise error
    return result


def on_every_process(processes: Processes, action: Callable[[], Result]) -> Result:
    """Run `action` on every process and return this one's result.

    Raises:
        ClassroomError: on every rank, if the action failed on any: the error of the first rank that failed. A rank
            whose own error has another type logs it.
    """
    result, error = _attempt(action)
    failures = [failure for failure in gather_object([error]) if failure is not None]
    if not failures:
        return result
    if error is not None and type(error) is not type(failures[0]):
        logger.error("process %d failed, too: %s", processes.process_index, error)
    raise failures[0]


def to_main_process(processes: Processes, result: Result) -> list[Result] | None:
    """What each process has, in the order of their ranks, on the main process; None on the others. All processes call
    this together."""
    if processes.num_processes == 1:
        return [result]
    results = [result] * processes.num_processes if processes.is_main_process else None
    torch.distributed.gather_object(result, results)
    return results


def in_thread(action: Callable[[], Result], name: str) -> "Future[Result]":
    """Run an action in a thread that does not keep the program from ending."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, ClassroomError | None]:
    try:
        return action(), None
    except ClassroomError as error:
        return None, error
