"""A door: the client of the server's HTTP API is src/server/client.py."""

from src.server.client import *  # noqa: F403
