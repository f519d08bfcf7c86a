"""The classroom under the name `Environment`, where the registry looks for it."""

from classroom_rl.environments.classroom.classroom import Classroom as Environment

__all__ = ["Environment"]
