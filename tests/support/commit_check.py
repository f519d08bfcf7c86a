"""Refuses files that do not belong in the repository: large ones, and those that hold a key.

    python -m tests.support.commit_check FILE …

pre-commit runs it (.pre-commit-config.yaml). The keys that it looks for are those of the environment and of .env.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dotenv import load_dotenv

from classroom_rl.system.keys import keys
from classroom_rl.system.shipped import ROOT

LARGEST = 512 * 1024
"""Bytes. Models and larger data are downloaded or made, not committed."""
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")


def faults_of(path: Path, secrets: Mapping[str, str]) -> list[str]:
    """What is wrong with a file; `secrets` maps the name of each key to its value. The value is not repeated."""
    data = path.read_bytes()
    faults = [f"holds the value of {name}" for name, value in secrets.items() if value.encode() in data]
    if _PRIVATE_KEY.search(data):
        faults.append("holds a private key")
    if len(data) > LARGEST:
        faults.append(f"has {len(data):,} bytes; a file of the repository has at most {LARGEST:,}")
    return [f"{path}: {fault}" for fault in faults]


def main(arguments: Sequence[str]) -> int:
    load_dotenv(ROOT / ".env")
    secrets = keys()
    paths = [Path(argument) for argument in arguments]
    faults = [fault for path in paths if path.is_file() for fault in faults_of(path, secrets)]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
