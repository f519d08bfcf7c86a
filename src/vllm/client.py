"""A public alias of src/server/client.py, the client of the server's HTTP API."""

from src.server.client import *  # noqa: F403
