#!/usr/bin/env bash
# Makes an environment with openenv, and checks the server there: with OpenEnv's validator, and with our test, which plays
# games over its protocol.
#
#   OPENENV_VENV=build/openenv   the environment to make or to use
#   PYTHON=python3               the interpreter to make it with, 3.11 or newer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../../../.."

HERE=src/classroom_rl/environments/marooned/openenv_server
VENV=${OPENENV_VENV:-build/openenv}
REQUIREMENTS='import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["test"]))'

if ! [ -x "$VENV/bin/openenv" ]; then
    "${PYTHON:-python3}" -m venv "$VENV"
fi
"$VENV/bin/python" -c "$REQUIREMENTS" $HERE/pyproject.toml > "$VENV/requirements.txt"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r "$VENV/requirements.txt"

"$VENV/bin/openenv" validate $HERE --level static
"$VENV/bin/openenv" validate $HERE
# Without the project's conftest.py, whose imports this environment does not have.
PYTHONPATH=src PATH="$VENV/bin:$PATH" "$VENV/bin/python" -m pytest --noconftest -q tests/environments/marooned/test_openenv_server.py
