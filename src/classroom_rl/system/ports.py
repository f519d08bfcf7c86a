"""Checks that a server can listen at an address, and finds the process that listens there already."""

import socket

import psutil

from classroom_rl.errors import ConfigError


def refuse_taken_port(host: str, port: int) -> None:
    """Refuse an address at which the server cannot listen.

    Raises:
        ConfigError: if a process listens there already (the message names it), or the address is not this machine's.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"The server cannot listen on {host}:{port}: {error.strerror}.{_holder(port)} End that, or choose "
                "another port with generation.server_port=…"
            ) from error


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _holder(port: int) -> str:
    """A sentence that names the process listening on a port; empty if none is found."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            if connection.pid is None:
                return " A process of another user listens there."
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                command = "?"
            return f" Process {connection.pid} listens there: {command[:200]}."
    return ""
