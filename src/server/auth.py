"""Who may talk to the server: on this machine anybody; from anywhere else only who has the token.

The token is read from the environment and sent as `Authorization: Bearer …`; it is written nowhere.
"""

import ipaddress
import os

from src.errors import ConfigError

TOKEN_VARIABLE = "CLASSROOM_TOKEN"
_SHORTEST_TOKEN = 16
_HOW_TO_MAKE_ONE = (
    f"Make one with: export {TOKEN_VARIABLE}=$(openssl rand -hex 32), the same for server and trainer, or write it "
    "into .env."
)


def token_from_environment() -> str | None:
    """The token that server and clients share; None if there is none.

    Raises:
        ConfigError: if it is too short to be a secret, or cannot be sent in a header.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        return None
    if len(token) < _SHORTEST_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must be at least {_SHORTEST_TOKEN} ASCII characters without spaces. {_HOW_TO_MAKE_ONE}"
        )
    return token


def token_for(host: str, key: str = "generation.server_host") -> str | None:
    """The token of a server that listens on `host`, as the config key says; None where it needs none.

    Raises:
        ConfigError: if others can reach the address and there is no token.
    """
    token = token_from_environment()
    if token is None and not _is_this_machine_only(host):
        raise ConfigError(
            f"{key} is {host}, which other machines can reach: server and trainer need a token in the environment "
            f"variable {TOKEN_VARIABLE}. {_HOW_TO_MAKE_ONE}"
        )
    return token


def _is_this_machine_only(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
