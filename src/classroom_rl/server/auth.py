"""Access tokens. A server that listens on a loopback address needs none; any other server requires one.

The token comes from the environment and is sent as `Authorization: Bearer …`. It is never written to a file or log.
"""

import os

from classroom_rl.config.values import is_loopback
from classroom_rl.errors import ConfigError

TOKEN_VARIABLE = "CLASSROOM_TOKEN"
_MIN_TOKEN_LENGTH = 16
_TOKEN_HINT = (
    f"Make one with: export {TOKEN_VARIABLE}=$(openssl rand -hex 32), the same for server and trainer, or write it "
    "into .env."
)


def token_from_environment() -> str | None:
    """Return the token that server and clients share; None if the environment has none. Raises a `ConfigError` if it is
    too short to be a secret, or cannot be sent in a header."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        return None
    if len(token) < _MIN_TOKEN_LENGTH or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must be at least {_MIN_TOKEN_LENGTH} ASCII characters without spaces. {_TOKEN_HINT}"
        )
    return token


def token_for(host: str, key: str = "generation.server_host") -> str | None:
    """Return the token of a server that listens on `host`; None if it needs none.

    Args:
        key: the config key that `host` comes from, for the error message.

    Raises:
        ConfigError: if other machines can reach the address and there is no token.
    """
    token = token_from_environment()
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{key} is {host}, which other machines can reach: server and trainer need a token in the environment "
            f"variable {TOKEN_VARIABLE}. {_TOKEN_HINT}"
        )
    return token
