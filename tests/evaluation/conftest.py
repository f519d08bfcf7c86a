"""Fixtures of all evaluations."""

from tests.support.evaluated_server import config, server  # noqa: F401
