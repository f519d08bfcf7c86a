#!/usr/bin/env bash
# Server and trainer in one command. `./start_rl_training.sh --help` tells more; the work is done by src/classroom_rl/launch/cli.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=.venv/bin/python
[ -x "$python" ] || python=python3
if ! "$python" -c 'import classroom_rl, hydra, psutil, pydantic, requests' 2>/dev/null; then
    echo "error: the packages of this project are not installed for $python. Install them with: make setup" >&2
    exit 1
fi
exec "$python" -m classroom_rl.launch.cli "$@"
