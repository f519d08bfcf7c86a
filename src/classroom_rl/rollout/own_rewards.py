"""Rewards of one's own: functions of a finished conversation, named as `package.module:function` in
`train.reward_weights` or `train.turn_credit.rewards`. What they return is checked, so that a mistake ends a batch in
place of training on it."""

from collections.abc import Callable, Collection
from math import isfinite
from numbers import Real
from typing import Any

from classroom_rl.errors import DataError
from classroom_rl.system.functions import function_of


def own_reward(name: str, shipped: Collection[str] = ()) -> Callable[[Any], float | None]:
    """The reward of this name.

    Args:
        shipped: the environment's own rewards, for the message.

    Raises:
        ConfigError: if there is none. The reward itself raises a DataError if the function fails, or returns neither a
            finite number nor None.
    """
    function = function_of("train.reward_weights", name, shipped)
    return lambda conversation: _number(name, conversation, _called(name, function, conversation))


def own_turn_reward(
    name: str, messages: Callable[[Any], int], shipped: Collection[str] = ()
) -> Callable[[Any], list[float | None]]:
    """The turn reward of this name.

    Args:
        messages: how many messages of the policy a conversation has.
        shipped: the environment's own turn rewards, for the message.

    Raises:
        ConfigError: if there is none. The reward itself raises a DataError if the function fails, or returns anything
            but a finite number or None for each of the policy's messages.
    """
    function = function_of("train.turn_credit.rewards", name, shipped)

    def own(conversation: Any) -> list[float | None]:
        values, count = _called(name, function, conversation), messages(conversation)
        if not isinstance(values, list | tuple) or len(values) != count:
            raise DataError(
                f"The turn reward {name} returned {values!r} for {conversation.id}; it must return a list with a "
                f"number or None for each of the policy's {count} messages."
            )
        return [_number(name, conversation, value) for value in values]

    return own


def _called(name: str, function: Callable[[Any], Any], conversation: Any) -> Any:
    try:
        return function(conversation)
    except Exception as error:  # whatever the user's code raises
        raise DataError(f"The reward {name} failed on {conversation.id}: {type(error).__name__}: {error}") from error


def _number(name: str, conversation: Any, value: Any) -> float | None:
    if value is None or (isinstance(value, Real) and isfinite(value)):
        return None if value is None else float(value)
    raise DataError(
        f"The reward {name} returned {value!r} for {conversation.id}; it must return a finite number, or None."
    )
