"""The environment that this folder holds, under the name by which the registry finds it."""

from src.classroom.classroom import Classroom as Environment

__all__ = ["Environment"]
