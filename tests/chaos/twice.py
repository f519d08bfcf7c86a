"""Two trainers on one server, and two servers on one run folder: the second one is refused, the first goes on."""

import random
import subprocess
from collections import Counter
from collections.abc import Sequence

import psutil

from tests.chaos.cases import Case, Settings
from tests.chaos.programs import wait_for
from tests.chaos.trainings import LIMIT_S, Training, training_case
from tests.conftest import ROOT, free_port
from tests.support import scripted_server
from tests.support.kills import Watch, play


def refused(command: Sequence[str], words: str) -> str | None:
    """What is wrong, if a program does not end with status 2 and these words."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    output = result.stdout + result.stderr
    if result.returncode == 2 and words in output:
        return None
    return f"{' '.join(command[:4])} … ended with status {result.returncode}: {output[-300:]}"


def _second_ones(training: Training, settings: Settings, generator: random.Random) -> Counter:
    """While the provider stands still, so that the first training does not end meanwhile."""
    watch = Watch(training.folder)
    wait_for(lambda: training.go_on() and watch.phase() == "judging", "a batch that is judged", LIMIT_S)
    other_folder = f"logging.save_dir={training.folder.parent / 'other'}"
    same_run, other_run = training.overrides, [*training.overrides, other_folder]
    other_port = f"generation.server_port={free_port()}"
    provider = psutil.Process(training.provider.pid)
    provider.suspend()
    try:
        wrong = [
            refused(training.trainer_command_with(same_run), "as train_rl already"),
            refused(training.trainer_command_with(other_run), "belongs to the run in"),
            refused(scripted_server.command([*same_run, other_port]), "as vllm_server already"),
            refused(scripted_server.command(other_run), f"{training.port}"),
        ]
    finally:
        provider.resume()
    if any(wrong):
        raise RuntimeError("; ".join(filter(None, wrong)))
    hits = {"second trainers refused": 2, "second servers refused": 2}
    return play(training, [], lambda _: None, generator, LIMIT_S) + Counter(hits)


def cases(settings: Settings) -> list[Case]:
    """One training, beside which others are started."""
    return [training_case("twice", "second-ones", _second_ones)]
