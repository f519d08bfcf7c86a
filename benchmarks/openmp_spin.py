"""How long a training step takes by how long OpenMP's threads spin, on quiet cores and beside busy processes.

    make quickstart-models
    python -m benchmarks.openmp_spin [--settings default passive 1000 10000 100000] [--rounds 7] [--steps 3] [--busy 2]

A setting is a number for GOMP_SPINCOUNT, a value of OMP_WAIT_POLICY (`passive`, `active`), or `default`, which sets
neither. Each has a process of its own, which trains the quickstart's model on micro-batches of the quickstart's size.
The processes take turns: each round measures all of them on quiet cores, then all of them beside `--busy` processes
that only count, one setting after the other and in the other order every second round. Prints the medians of the
milliseconds of a step and the ranges of the rounds. The first column is quiet if the machine has nothing else to do.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Self

from classroom_rl.system.startup import OPENMP_VARIABLES

STATES = ("quiet", "busy")
DEFAULT = "default"
SETTINGS = (DEFAULT, "passive", "300", "1000", "3000", "10000", "30000", "100000")
ROWS, TOKENS = 16, 256
"""Of a micro-batch: `train.per_device_train_batch_size` of the quickstart, and about its longest conversation."""


def environment_for(setting: str) -> dict[str, str]:
    """This process's environment, with what stands for a setting and nothing else that says how OpenMP waits."""
    others = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    if setting == DEFAULT:
        return others
    return others | {"GOMP_SPINCOUNT" if setting.isdigit() else "OMP_WAIT_POLICY": setting}


class Trainer:
    """A process that trains with one setting when it is asked to, and waits otherwise."""

    def __init__(self, setting: str, model: Path, steps: int):
        command = [sys.executable, "-m", "benchmarks.openmp_spin", "--model", str(model), "--steps", str(steps)]
        self._process = subprocess.Popen(
            [*command, "--train"],
            env=environment_for(setting),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> float:
        """The milliseconds of a step.

        Raises:
            RuntimeError: if the process has ended; it has said why.
        """
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that trains ended with status {self._process.wait()}: see its message")
        return float(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen]]:
    """Processes that count for ever, stopped at first."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        send(started, signal.SIGSTOP)
        yield started
    finally:
        send(started, signal.SIGKILL)
        for process in started:
            process.wait()


def send(processes: Sequence[subprocess.Popen], number: signal.Signals) -> None:
    """Send a signal to each process."""
    for process in processes:
        process.send_signal(number)


def measure(settings: Sequence[str], model: Path, rounds: int, steps: int, busy: int) -> dict[str, dict[str, list]]:
    """The milliseconds of a step in each round, by state and setting."""
    milliseconds = {state: {setting: [] for setting in settings} for state in STATES}
    with ExitStack() as stack:
        others = stack.enter_context(busy_processes(busy))
        trainers = {setting: stack.enter_context(Trainer(setting, model, steps)) for setting in settings}
        for trainer in trainers.values():
            trainer.step()  # the first asks for memory
        for number in range(rounds):
            for state in STATES:
                if state == "busy":
                    send(others, signal.SIGCONT)
                for setting in settings[:: -1 if number % 2 else 1]:
                    milliseconds[state][setting].append(trainers[setting].step())
                send(others, signal.SIGSTOP)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return milliseconds


def train(model_folder: Path, steps: int) -> None:
    """Train `steps` steps for each line of the standard input, and answer with the milliseconds of one."""
    import torch
    from transformers import AutoModelForCausalLM

    from classroom_rl.trainer.model_loading import prepare_cpu

    prepare_cpu("float32")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(model.config.vocab_size, (ROWS, TOKENS))
    for _ in sys.stdin:
        started = time.perf_counter()
        for _ in range(steps):
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print((time.perf_counter() - started) * 1000 / steps, flush=True)


def report(found: dict[str, dict[str, list[float]]]) -> str:
    """A table with a line for each setting: the median of each state, and it beside that of the first setting."""
    settings = list(found[STATES[0]])
    lines = ["| setting | quiet, ms | | busy, ms | |", "|---|---|---|---|---|"]
    for setting in settings:
        cells = [setting]
        for state in STATES:
            times, baseline = found[state][setting], found[state][settings[0]]
            cells += [
                f"{median(times):.0f} [{min(times):.0f}, {max(times):.0f}]",
                f"{median(times) / median(baseline):.2f} ×",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="the first is what the others stand beside")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="in a row, of each setting and round")
    parser.add_argument("--busy", type=int, default=2, help="processes that do something else")
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart/world/blank"))
    parser.add_argument("--train", action="store_true", help="be one of the processes that train")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.model, arguments.steps)
        return
    print(report(measure(arguments.settings, arguments.model, arguments.rounds, arguments.steps, arguments.busy)))


if __name__ == "__main__":
    main()
