"""`./start_rl_training.sh` with scripted engines: launcher and trainer are real, the server is scripted_server.py.

python -m tests.support.scripted_launcher --config-name quickstart logging.save_dir=…
"""

import sys
from collections.abc import Sequence

import classroom_rl.launch.cli
from tests.support import scripted_server


def command(arguments: Sequence[str]) -> list[str]:
    """The command that starts it, from the project's folder."""
    return [sys.executable, "-m", "tests.support.scripted_launcher", *arguments]


def main(arguments: Sequence[str]) -> int:
    classroom_rl.launch.cli.server_command = scripted_server.command
    return classroom_rl.launch.cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
