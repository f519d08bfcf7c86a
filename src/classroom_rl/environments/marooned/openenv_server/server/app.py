"""The server, from the repository's root:

python -m classroom_rl.environments.marooned.openenv_server.server.app --port 8000
"""

import argparse

import uvicorn
from openenv.core.env_server.http_server import create_app

from classroom_rl.environments.marooned.openenv_server.models import MaroonedAction, MaroonedObservation, MaroonedState
from classroom_rl.environments.marooned.openenv_server.server.environment import MaroonedEnvironment

SESSIONS = 256
"""How many games can be played at the same time."""

app = create_app(
    MaroonedEnvironment,
    MaroonedAction,
    MaroonedObservation,
    env_name="marooned",
    max_concurrent_envs=SESSIONS,
    state_cls=MaroonedState,
)


def main() -> None:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(description="Marooned as an OpenEnv server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
