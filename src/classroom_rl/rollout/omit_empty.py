"""Fields that most messages do not use, left out of what is written: files and journals of runs without tools stay as
they were before there were tools."""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import SerializerFunctionWrapHandler, TypeAdapter, model_serializer

T = TypeVar("T", bound=type)


def left_out_when_empty(*names: str) -> Callable[[T], T]:
    """Decorates a dataclass: pydantic writes it without these fields where they are empty. They need a default, which
    they have again when they are read."""

    def decorate(kind: T) -> T:
        def written(self: Any, handler: SerializerFunctionWrapHandler) -> Any:
            fields = handler(self)
            return {name: value for name, value in fields.items() if value or name not in names}

        kind._written = model_serializer(mode="wrap")(written)
        kind.__pydantic_serializer__ = TypeAdapter(kind).serializer  # `to_jsonable_python` asks the class for it
        return kind

    return decorate
