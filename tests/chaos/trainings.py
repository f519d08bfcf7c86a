"""Whole trainings of the suite: the real trainer, a server, a judge and a supervisor behind an API in a process of its
own, and the launcher in some. What dies is started again with its own command.

Each training is compared with one that was left alone: the same steps, problems, personas and supervised passes,
nothing played, judged or paid twice, nothing lost, no key in a file.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path

from classroom_rl.engines.api.call_ledger import UNUSABLE, USABLE
from classroom_rl.launch.commands import server_command, trainer_command
from classroom_rl.system.processes import Child, Signals
from tests.chaos.cases import Case, LeftOut, Result, Settings, table
from tests.chaos.programs import KEYS, files_with_keys, wait_for
from tests.conftest import free_port
from tests.support import paid_api, scripted_launcher, scripted_server
from tests.support.judged_room import PRICES, write_rule
from tests.support.kills import PHASES, Outcome, Run, differences, outcome_of, play

STEPS = 6
LIMIT_S = 900.0
_CONFIG = "quickstart_supervised"
_REQUEST_TIMEOUT_S = 20.0
_REFUSED_FOR_S = 60.0


class Training(Run):
    """A training of the suite in `folder/run`; its provider's record is in `folder`.

    Args:
        engines: `scripted` or `real`.
        launched: whether the launcher starts server and trainer.
        inside: by program, the network namespace that it runs in.
        more: further overrides of all programs.
    """

    longest_delay_s = 0.15

    def __init__(
        self,
        folder: Path,
        world: Path,
        signals: Signals,
        engines: str = "scripted",
        launched: bool = False,
        inside: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
    ):
        self._base, self._engines, self._launched, self._inside = folder, engines, launched, inside or {}
        self._api_port, self.refused, self._earlier = free_port(), 0, []
        self._died_at: float | None = None
        folder.mkdir(parents=True, exist_ok=True)
        overrides = [*provider_overrides(folder, self._api_port), *more]
        super().__init__(_CONFIG, folder / "run", world, STEPS, signals, overrides)

    @property
    def overrides(self) -> list[str]:
        """The arguments of the programs."""
        return self._overrides

    @property
    def record(self) -> Path:
        """The provider's record of what it sent."""
        return self._base / "sent.jsonl"

    def start(self) -> None:
        self.provider = self._start_provider()
        if self._launched:
            self.trainer = self._start_trainer()
        else:
            super().start()

    def start_again(self) -> None:
        """Start server and trainer, which were both killed."""
        self.server, self.trainer = self._start_server(), self._start_trainer()

    def trainer_command_with(self, overrides: Sequence[str]) -> list[str]:
        """The command of a trainer with other overrides."""
        return trainer_command(["--config_file", "config/accelerate/1CPU.yaml"], overrides)

    def _child(self, name: str, command: Sequence[str], log: Path) -> Child:
        if name in self._inside:
            command = ["ip", "netns", "exec", self._inside[name], *command]
        return Child(name, command, self._signals, log, environment={scripted_server.MESSAGE_S: "0.1"})

    def _start_provider(self) -> Child:
        command = paid_api.command(self._api_port, self.record, 0.1)
        return self._child("the provider", command, self._base / "provider.log")

    def _start_server(self) -> Child:
        real = self._engines == "real"
        command = server_command(self._overrides) if real else scripted_server.command(self._overrides)
        return self._child("the server", command, self.folder / "server.log")

    def _start_trainer(self) -> Child:
        if not self._launched:
            return self._child("the trainer", self._trainer_command(), self.folder / "trainer.log")
        command = ["./start_rl_training.sh", *self._overrides]
        if self._engines != "real":
            command = scripted_launcher.command(self._overrides)
        return self._child("the launcher", command, self._base / "launcher.log")

    def go_on(self) -> bool:
        if self.provider.poll() is not None:
            self.provider.stop()
            self.provider = self._start_provider()
        return self._go_on_with_launcher() if self._launched else super().go_on()

    def _go_on_with_launcher(self) -> bool:
        """Start the launcher again as soon as it has died. What it started is left to itself: it has to end."""
        self._signals.check()
        status = self.trainer.poll()
        if status == 0:
            return False
        if status is not None:
            self._died_at = self._died_at or time.monotonic()
            if status == 2 and time.monotonic() - self._died_at < _REFUSED_FOR_S:
                self.refused += 1
                time.sleep(1.0)
            elif status != 128 + signal.SIGKILL:
                raise RuntimeError(f"the launcher ended with status {status}: {self.trainer.last_lines(5)}")
            self._earlier.append(self.trainer)
            self.trainer = self._start_trainer()
        elif self._died_at is not None and time.monotonic() - self._died_at > _REFUSED_FOR_S:
            self._died_at = None
        return True

    def pid_of(self, target: str) -> int | None:
        if target in ("provider", "launcher"):
            child = self.provider if target == "provider" else self.trainer
            return child.pid if child.poll() is None else None
        return super().pid_of(target)

    def stop(self) -> None:
        if not self._launched:
            super().stop()
        for child in (*self._earlier, self.trainer, self.provider):
            child.stop()


def provider_overrides(folder: Path, port: int) -> list[str]:
    """A judge and a supervisor behind the provider at this port."""
    rules = write_rule(folder)
    model_options = [f"base_url=http://127.0.0.1:{port}/v1", "api_key_env=CHAOS_API_KEY"]
    model_options += [f"request_timeout_s={_REQUEST_TIMEOUT_S}", *(f"{key}={usd}" for key, usd in PRICES.items())]
    return [
        "judge_model.model_name_or_path=judge",
        "supervisor_model.model_name_or_path=supervisor",
        *(f"{role}_model.{option}" for role in ("judge", "supervisor") for option in model_options),
        f"generation.judges_rules_prompts_paths={{pedagogical_eval: {rules['pedagogical_eval']}}}",
        "generation.supervisor.prompt_path=prompt_templates/supervisors/language_tutor.txt",
        "guards.canaries=false",  # the provider draws its verdicts
        "train.corrections.min_examples=8",
        "generation.max_tokens_per_turn=32",  # rules reject a message that is cut off: no model would be asked
    ]


@contextmanager
def keys_in_environment() -> Iterator[None]:
    """The suite's keys in the environment of every program that is started in the block."""
    previous = {name: os.environ.get(name) for name in KEYS}
    os.environ.update(KEYS)
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def undisturbed(settings: Settings) -> Outcome:
    """The outcome of a training that was left alone, with scripted engines; played where it is not there. Other shards
    wait for it meanwhile.

    Raises:
        RuntimeError: if even this training is not as it has to be.
    """
    folder = settings.folder / "undisturbed"
    with (settings.folder / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _play_undisturbed(folder, settings)
            (folder / "done").touch()
    return outcome_of(folder / "run")


def _play_undisturbed(folder: Path, settings: Settings) -> None:
    print("  first, a training that is left alone", flush=True)
    with keys_in_environment(), Signals() as signals:
        training = Training(folder, settings.world, signals)
        try:
            play(training, [], lambda _: None, random.Random(0), LIMIT_S)
        finally:
            training.stop()
    outcome = outcome_of(folder / "run")
    wrong = [*differences(outcome, outcome, STEPS), *spent_wrongly(training)]
    asked_roles = {role for role, _ in ledgers(training.folder)["answered"]}
    wrong += [f"the {role}'s API was never asked" for role in ("judge", "supervisor") if role not in asked_roles]
    if wrong:
        raise RuntimeError(f"The training that was left alone is not as it has to be: {wrong}")


def ledgers(folder: Path) -> dict[str, Counter]:
    """Of the two ledgers together: answered calls by their key, and what they say was spent or is held."""
    answered, sums = Counter(), Counter()
    for role in ("judge", "supervisor"):
        with closing(sqlite3.connect(f"file:{folder / f'{role}_calls.sqlite'}?mode=ro", uri=True)) as ledger:
            for key, outcome, cost, reserved in ledger.execute(
                "SELECT key, outcome, cost_usd, reserved_usd FROM calls"
            ):
                is_answer = outcome in (USABLE, UNUSABLE)
                answered[role, key] += is_answer
                sums["answered"] += is_answer
                sums["held"] += reserved > 0
                sums["usd"] += cost + reserved
    return {"answered": answered, "sums": sums}


def spent_wrongly(training: Training) -> list[str]:
    """What was paid twice, or paid without a line in the ledger."""
    ledger, sent = ledgers(training.folder), paid_api.sent(training.record)
    twice = sum(count > 1 for count in ledger["answered"].values())
    wrong = [f"{twice} answers paid twice"] if twice else []
    if sent.total() > ledger["sums"]["answered"] + ledger["sums"]["held"]:
        wrong.append(f"{sent.total()} answers sent, {dict(ledger['sums'])} in the ledgers")
    return wrong


def compared(training: Training, alone: Outcome, hits: Counter, started: float) -> Result:
    """The result of a training that has ended."""
    outcome = outcome_of(training.folder)
    leaking_files = files_with_keys(training.folder.parent)
    wrong = [*differences(outcome, alone, STEPS), *spent_wrongly(training)]
    wrong += [f"a key stands in {', '.join(leaking_files)}"] if leaking_files else []
    sums = ledgers(training.folder)["sums"]
    figures = {
        "hits": dict(hits),
        "steps": len(outcome.steps),
        "passes": round(outcome.passes[-1]) if outcome.passes else 0,
        "played_twice": outcome.played_twice,
        "judged_twice": outcome.judged_twice,
        "lost": outcome.lost,
        "answers": sums["answered"],
        "asked_again": paid_api.sent(training.record).total() - sums["answered"],
        "refused": training.refused,
        "seconds": round(time.monotonic() - started),
    }
    return Result(figures, wrong)


Disturb = Callable[[Training, Settings, random.Random], Counter]
"""Lets a training go on to its end, and does on the way what its case is about; returns what was done, counted."""


def training_case(
    part: str,
    name: str,
    disturb: Disturb,
    around: Callable[[Path], AbstractContextManager] = nullcontext,
    **options,
) -> Case:
    """A case with one training.

    Args:
        around: makes what the training needs of the machine, from the case's folder; raises LeftOut where it cannot.
        options: those of `Training`.
    """

    def play_case(folder: Path, settings: Settings) -> Result:
        baseline, started = undisturbed(settings), time.monotonic()
        try:
            with keys_in_environment(), Signals() as signals, around(folder):
                training = Training(folder, settings.world, signals, **options)
                try:
                    hits = disturb(training, settings, random.Random(f"{part}|{name}"))
                finally:
                    training.stop()
                return compared(training, baseline, hits, started)
        except LeftOut as reason:
            return Result({}, left_out=str(reason))
        except (TimeoutError, RuntimeError) as error:
            return Result({"seconds": round(time.monotonic() - started)}, [str(error)])

    return Case(part, name, play_case)


def phases_in_turn(kills: int, first: int = 0) -> list[str]:
    """The phases that are to be hit, one after the other."""
    return [PHASES[(first + i) % len(PHASES)] for i in range(kills)]


def wait_for_step(training: Training, step: int) -> None:
    """Let a training go on until it has logged this step."""
    metrics = training.folder / "metrics.jsonl"
    wait_for(lambda: training.go_on() and _steps_in(metrics) >= step, f"step {step} of {training.folder}", LIMIT_S)


def _steps_in(metrics: Path) -> int:
    with suppress(FileNotFoundError):
        return max(
            (json.loads(line)["step"] for line in metrics.read_text().splitlines() if line.endswith("}")), default=0
        )
    return 0


def summary(results: Sequence[Result]) -> str:
    """The trainings: what was done to them, and what came of it."""
    columns = {
        "steps": "steps",
        "passes": "passes",
        "played_twice": "played twice",
        "judged_twice": "judged twice",
        "lost": "lost",
        "answers": "answers paid",
        "asked_again": "of them lost and asked again",
        "refused": "starts refused",
        "seconds": "s",
    }
    rows = []
    for result in results:
        hits = result.figures.get("hits", {})
        hit_list = ", ".join(f"{count} {kind}" for kind, count in hits.items())
        outcome = "; ".join(result.wrong) or result.left_out or "yes"
        rows.append((result.name, hit_list, *(result.figures.get(name, "") for name in columns), outcome))
    return table(("case", "hits", *columns.values(), "as undisturbed"), rows)


def log_of(training: Training) -> str:
    """Everything that server and trainer printed."""
    logs = [training.folder / name for name in ("server.log", "trainer.log")]
    return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists())
