"""PedagogicalRL's main table: a base model beside tutors trained at several λ, and the paper's figures beside them.

    python -m benchmarks.paper_table --config-name 7b [--arms 0,0.5,1,hard-1-think] [--lighteval PATH] [key=value …]

An arm is a λ (`generation.extra_penalty_for_rejected_judges`), after `hard-` in hard mode (a rejected conversation gets
−λ; otherwise λ is subtracted), before `-think` with thoughts. Each is trained by server and trainer, then measured by
eval.py on held-out problems (`--eval-config`, by default maths), as the base model is. With --lighteval, LightEval runs
MMLU, GSM8K and MATH500 with the settings in the README of the paper's repository. Overrides go to training and
evaluation, as far as these have the key, `eval.key=value` to the evaluation alone; flags such as --config_file go to
accelerate.

First the plan is printed: what is finished, what runs, what this machine cannot hold, and the hours, as far as a run in
the folder, or the one that --like names, was measured. The same command again goes on where it was stopped. The table
is printed at the end, and is in `results.json`. --plan starts nothing.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import command_line, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import LEAK_RULE, PEDAGOGY_RULE, SAMPLED
from classroom_rl.errors import ClassroomError, ConfigError, DataError
from classroom_rl.evaluation.metrics.maths import SOLVED
from classroom_rl.launch.commands import OVERRIDE, split_arguments
from classroom_rl.launch.quickstart import run_command, run_program
from classroom_rl.launch.quickstart_plan import applies, overridden_key, quoted
from classroom_rl.memory.sources import like_gpus
from classroom_rl.results.run_folder import LEARNING_NAME, METRICS_NAME, look_up, read_json, read_lines
from classroom_rl.rollout.intervals import shown
from classroom_rl.system.processes import Signals
from classroom_rl.system.storage import write_whole
from classroom_rl.trainer.run_length import load_training_problems, run_length

BASE = "base"
ARM = re.compile(r"(hard-)?(\d+(?:\.\d+)?)(-think)?")
PENALTY, SOFT_MODE = "generation.extra_penalty_for_rejected_judges", "generation.ignore_rejected_judge"
THINKING = ("generation.use_thinking=true", "generation.force_thinking=true")
PUBLISHED = {BASE: (11.3, 29.3), "hard-1-think": (20.5, 6.9)}
"""Δ solve rate and leaked solutions in percent, of Qwen2.5-7B-Instruct and of a tutor trained from it: Dinucu-Jianu et
al., "From Problem-Solving to Teaching Problem-Solving", EMNLP 2025, on Big-Math."""
TASKS = {"MMLU": "mmlu|5", "GSM8K": "gsm8k|4", "MATH500": "math_500|0"}
"""LightEval's tasks and their numbers of examples."""
SAMPLING_OF_TASKS = "generation_parameters={max_new_tokens:8192,temperature:0.6,top_p:0.95}"
TRAINING, EVALUATION = "training", "eval"
EVALUATE = (sys.executable, "-m", "classroom_rl.launch.evaluate")
UNFIT = re.compile(
    r"# (?:warning: )?(A machine with .* cannot hold .*|a start would be.*|.* not been fetched before.*)"
)
"""What a dry run says of a configuration that is right, but cannot start on this machine."""


@dataclass(frozen=True)
class Part:
    """A training, an evaluation or a task of LightEval.

    Attributes:
        settings: what its result depends on; a finished part that has others is refused.
        finished: the pattern of a file in `folder` that is there once it is finished.
        seconds: how long it will take; None if nothing like it was measured.
        because: why it is not run; "" if it is.
    """

    kind: str
    arm: str
    folder: Path
    command: Sequence[str]
    settings: Sequence[str]
    finished: str
    progress: str = ""
    seconds: float | None = None
    because: str = ""

    @property
    def is_done(self) -> bool:
        """Whether it is finished. Raises `ConfigError` if it is, with other settings."""
        if next(self.folder.glob(self.finished), None) is None:
            return False
        made_with = read_json(self.folder / "made_with.json").get("settings", ["unknown settings"])
        if made_with != self.settings:
            raise ConfigError(
                f"{self.folder} was made with {shlex.join(made_with)}, not with {shlex.join(self.settings)}: choose "
                "another --folder, or move that one away."
            )
        return True

    def run(self, signals: Signals) -> None:
        """Run it to its end. Its output is in `output.log`, too. Raises `ClassroomError` if it leaves no result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "made_with.json", json.dumps({"settings": self.settings}, indent=2) + "\n")
        log = self.folder / "output.log"
        run_program(f"{self.kind} {self.arm}", self.command, log, signals)
        if not self.is_done:
            raise ClassroomError(f"{self.kind} {self.arm} ended, but left no {self.finished}. Its log is {log}.")


class PaperTable:
    """The parts of the table, and what they found. `others` are overrides, and flags for Hydra and accelerate. Raises
    `ConfigError` if an arm, an override or one of the configurations is not valid."""

    def __init__(self, options: argparse.Namespace, others: Sequence[str]):
        self.folder, self.eval_name = options.folder, options.eval_config
        self.like, self.lighteval = options.like, options.lighteval
        split = split_arguments(others)
        command = command_line("train_rl", ["--config-name=7b", *split.hydra])
        self.name, self.flags = command.name, split.accelerate
        self.folders = [flag for path in command.folders[:-1] for flag in ("--config-dir", str(path))]
        self.overrides = [argument for argument in split.hydra if OVERRIDE.match(argument)]
        for override in self.overrides:
            if overridden_key(override).removeprefix("eval.") in (PENALTY, SOFT_MODE, "logging.save_dir"):
                raise ConfigError(f"{override}: --arms sets λ and its mode, and --folder the folder. Leave it out.")
        arms = [ARM.fullmatch(arm) for arm in options.arms.split(",")]
        self.arms = [f"{arm[1] or ''}{float(arm[2]):g}{arm[3] or ''}" for arm in arms if arm]
        if None in arms or len(set(self.arms)) < len(arms):
            raise ConfigError(f"--arms is {options.arms}: name each λ once, as in 0,0.5,hard-1,hard-1-think.")
        if self.lighteval and not shutil.which(self.lighteval):
            raise ConfigError(f"--lighteval {self.lighteval}: there is no such program. docs/evaluation.md has a way.")
        arguments = map(self.training_arguments, self.arms)
        configs = [load(TrainRLConfig, "train_rl", arm_arguments, check_train_rl) for arm_arguments in arguments]
        self.configs = dict(zip(self.arms, configs, strict=True))
        self.eval_shape = asdict(load(EvalConfig, "eval", ["--config-name", self.eval_name, *self.folders]))
        load(EvalConfig, "eval", self.eval_arguments(BASE), check_eval)

    def training_arguments(self, arm: str) -> list[str]:
        """The arguments of server and trainer; the last one is the run folder."""
        hard, penalty, thinks = ARM.fullmatch(arm).groups()
        common = [override for override in self.overrides if not override.startswith("eval.")]
        overrides = [
            override for override in common if applies(override, TrainRLConfig) or not applies(override, EvalConfig)
        ]
        mode = [f"{SOFT_MODE}={'false' if hard else 'true'}", f"{PENALTY}={float(penalty)}"]
        save_dir = f"logging.save_dir={quoted(self.folder / arm)}"
        return ["--config-name", self.name, *self.folders, *overrides, *mode, *(THINKING if thinks else ()), save_dir]

    def eval_arguments(self, arm: str) -> list[str]:
        """The arguments of eval.py; the last two are the tutor and the folder."""
        keys = {override: overridden_key(override).split(".") for override in self.overrides}
        groups = {override for override, key in keys.items() if isinstance(look_up(self.eval_shape, *key), dict)}
        shared = [override for override in self.overrides if override in groups or applies(override, EvalConfig)]
        eval_only = [override.removeprefix("eval.") for override in self.overrides if override.startswith("eval.")]
        thinking = THINKING if arm.endswith("-think") else ()
        tutor = f"teacher_model.model_name_or_path={quoted(Path(self.tutor(arm)))}"
        save_dir = f"logging.save_dir={quoted(self.folder / arm / EVALUATION)}"
        return ["--config-name", self.eval_name, *self.folders, *shared, *eval_only, *thinking, tutor, save_dir]

    def tutor(self, arm: str) -> str:
        """The folder or the name of the model that is measured."""
        base = self.configs[self.arms[0]].teacher_model.model_name_or_path
        return base if arm == BASE else str(self.folder / arm / "model")

    def lighteval_command(self, arm: str, benchmark: str) -> list[str]:
        """LightEval's command for one task: with several, all may get the first one's stop strings. Its cache knows a
        model by its name only, so each arm has its own."""
        folder = self.folder / arm / "lighteval"
        model = [f"model_name={self.tutor(arm)}", f"cache_dir={folder / 'cache'}", SAMPLING_OF_TASKS]
        if like_gpus():
            model[2:2] = ["dtype=bfloat16", "max_model_length=8192", "gpu_memory_utilization=0.85"]
        program = [self.lighteval or "lighteval", "vllm" if like_gpus() else "accelerate"]
        return [*program, ",".join(model), TASKS[benchmark], "--output-dir", str(folder / benchmark)]

    def parts(self) -> Iterator[Part]:
        """All parts, in the order in which they are run: LightEval's last."""
        base = self.tutor(BASE)
        for arm in (BASE, *self.arms):
            if arm != BASE:
                arguments = self.training_arguments(arm)
                command = [sys.executable, "-m", "classroom_rl.launch.cli", *self.flags, *arguments]
                left = self._training_left(arm)
                yield Part(TRAINING, arm, self.folder / arm, command, arguments[:-1], LEARNING_NAME, *left)
            arguments = self.eval_arguments(arm)
            command, folder = [*EVALUATE, *arguments], self.folder / arm / EVALUATION
            seconds = self._measured(lambda other: self._metrics(other).get("seconds"))
            yield Part(EVALUATION, arm, folder, command, [base, *arguments[:-2]], "metrics.json", seconds=seconds)
        for arm, benchmark in ((arm, task) for arm in (BASE, *self.arms) for task in TASKS if self.lighteval):
            command, folder = self.lighteval_command(arm, benchmark), self.folder / arm / "lighteval" / benchmark
            settings, finished = [base, command[1], SAMPLING_OF_TASKS, command[3]], "**/results_*.json"
            seconds = self._measured(lambda other, task=benchmark: (self._found(other, task) or {}).get("seconds"))
            yield Part(f"LightEval {benchmark}", arm, folder, command, settings, finished, seconds=seconds)

    def _measured(self, of_arm: Callable[[str], float | None]) -> float | None:
        return next((value for arm in (BASE, *self.arms) if (value := of_arm(arm)) is not None), None)

    def _training_left(self, arm: str) -> tuple[str, float | None]:
        """How far a training is, as text, and the seconds that it still takes; None if they are not known."""
        config, runs = self.configs[arm], [self.folder / name for name in (arm, *self.arms)] + [self.like]
        local = all(Path(source.name_or_path).is_file() for source in config.dataset.train_datasets)
        length = run_length(config.train, len(load_training_problems(config)) if local else None)
        done = max((line.get("step", 0) for line in read_lines(runs[0] / METRICS_NAME)), default=0)
        pace = next((pace for run in runs if run and (pace := seconds_per_step(run, config.train.mu))), None)
        progress = f"{done} of {length.steps if length else 'an unknown number of'} steps done"
        return progress, None if length is None or pace is None else pace * max(0, length.steps - done)

    def due(self) -> list[Part]:
        """The parts that are not finished. Those that this machine cannot hold have a reason."""
        waiting = [part for part in self.parts() if not part.is_done]
        trainings = [part for part in waiting if part.kind == TRAINING]
        unfit = why_unfit(trainings[0].command) if trainings else ""
        # On a CPU both have the same memory, and about the same models; a dry run of eval.py reckons no memory.
        unmeasured = unfit if not like_gpus() else ""
        if len(waiting) > len(trainings) and not unmeasured:
            unmeasured = why_unfit([*EVALUATE, *self.eval_arguments(BASE)])
        reasons = {part.arm: unmeasured or (unfit and "its tutor is not trained") for part in trainings}
        return [
            replace(part, because=unfit if part.kind == TRAINING else reasons.get(part.arm, unmeasured))
            for part in waiting
        ]

    def plan(self, due: Sequence[Part]) -> str:
        """The plan as text."""
        gpus = len(like_gpus())
        unit, rate = ("GPU hours", gpus / 3600) if gpus else ("hours on the CPU", 1 / 3600)
        waiting = {(part.kind, part.arm): part for part in due}
        reasons = list(dict.fromkeys(part.because for part in due if part.because))
        lines = [f"plan: {self.folder}, --config-name {self.name}, --eval-config {self.eval_name}, {gpus} GPUs"]
        for part in self.parts():
            todo = waiting.get((part.kind, part.arm))
            hours = "unknown" if part.seconds is None else f"{part.seconds * rate:.2f}"
            state = (f"not run ({reasons.index(todo.because) + 1})" if todo.because else "runs") if todo else "finished"
            notes = (state, part.progress, f"{unit}: {hours}") if todo else (state,)
            lines.append(f"  {part.kind:17} {part.arm:12} {'; '.join(filter(None, notes))}")
        seconds = [part.seconds for part in due if part.seconds is not None]
        lines.append(
            f"  {unit} in all: {sum(seconds) * rate:.2f}, and {len(due) - len(seconds)} parts of unknown length"
        )
        return "\n".join([*lines, *(f"  ({number}) {reason}" for number, reason in enumerate(reasons, 1))])

    def _metrics(self, arm: str) -> dict[str, Any]:
        return read_json(self.folder / arm / EVALUATION / "metrics.json")

    def _found(self, arm: str, benchmark: str) -> dict[str, Any] | None:
        files = (self.folder / arm / "lighteval" / benchmark).rglob("results_*.json")
        newest = max(files, key=lambda path: path.name, default=None)  # the names end with the time
        return newest and read_lighteval(newest, TASKS[benchmark])

    def results(self) -> dict[str, Any]:
        """What was measured of each arm, in percent; None for what was not."""
        arms: dict[str, Any] = {}
        for arm in (BASE, *self.arms):
            metrics = self._metrics(arm).get(SAMPLED)
            arms[arm] = {
                "solve_rate_gain": percent(look_up(metrics, SOLVED, "gain")),
                "leaked": percent(look_up(metrics, "rejecting_attempts", LEAK_RULE)),
                "helpful": percent(look_up(metrics, "rejecting_attempts", PEDAGOGY_RULE), rest=True),
                "lighteval": {benchmark: self._found(arm, benchmark) for benchmark in TASKS},
            }
        return {"config": self.name, "overrides": self.overrides, "arms": arms, "published": PUBLISHED}

    def write(self) -> None:
        """Write results.json, and print the table."""
        results, file = self.results(), self.folder / "results.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(results, indent=2) + "\n")
        print(f"\n{table(results['arms'])}\n\nfigures: {file}", flush=True)
        if not self.lighteval:
            print(f"not run: --lighteval PATH, or by hand: {shlex.join(self.lighteval_command(BASE, 'GSM8K'))}")


def seconds_per_step(run: Path, mu: int) -> float | None:
    """The median seconds of an optimizer step of a run; None before it has made `mu` + 1 steps. Of the `mu` steps on a
    batch only the first waits for conversations, so whole batches are compared."""
    times = [line["time"] for line in read_lines(run / METRICS_NAME) if "step" in line and "time" in line]
    batches = [last - first for first, last in zip(times, times[mu:], strict=False)]
    return median(batches) / mu if batches else None


def why_unfit(command: Sequence[str]) -> str:
    """Why a program cannot run on this machine, by its dry run; "" if it can."""
    done = subprocess.run([*command, "dry_run=true"], capture_output=True, text=True, check=False)
    if done.returncode:
        return " ".join(done.stderr.strip().splitlines()[-3:]) or f"its dry run ends with status {done.returncode}"
    return next((match[1] for line in done.stdout.splitlines() if (match := UNFIT.match(line))), "")


def read_lighteval(path: Path, task: str) -> dict[str, Any]:
    """A task's result in a file of LightEval, in percent: that of its own entry, or of the average over its subjects.
    Entries are named `task|examples`, in earlier versions `suite|task|examples`; of several metrics the first counts.
    Raises `DataError` if there is no such entry."""
    content, name = read_json(path), task.partition("|")[0]
    entries = {key.split("|")[-2]: value for key, value in content.get("results", {}).items() if "|" in key}
    metrics = entries.get(f"{name}:_average") or entries.get(name) or {}
    metric = next((key for key in metrics if not key.endswith("_stderr")), None)
    if metric is None:
        raise DataError(f"{path} has no result of {name}, only of {', '.join(entries) or 'nothing'}: move it away.")
    seconds = look_up(content, "config_general", "total_evaluation_time_secondes")
    return {"metric": metric, "value": 100 * metrics[metric], "seconds": None if seconds is None else float(seconds)}


def percent(estimate: Mapping[str, Any] | None, rest: bool = False) -> dict[str, Any] | None:
    """An estimate of a share in percent, or with `rest` that of 1 minus the share; None if there is none."""
    if estimate is None or estimate["mean"] is None:
        return None
    values = [100 - 100 * value if rest else 100 * value for value in (estimate["mean"], *(estimate["ci95"] or ()))]
    return {"mean": values[0], "ci95": sorted(values[1:]) or None, "n": estimate["n"]}


def table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as a table in Markdown. A published row stands below the arm that it is of."""
    heads = ["tutor", "Δ solve rate, %", "leaked solutions, %", "helpful, %", *TASKS]
    rows = [heads, ["---"] * len(heads)]
    for arm in dict.fromkeys((*arms, *PUBLISHED)):
        label = arm if arm == BASE else f"λ: {arm}"
        if figures := arms.get(arm):
            signs = {"solve_rate_gain": "+", "leaked": "", "helpful": ""}
            cells = [shown(figures[key], sign, 1) if figures[key] else "not measured" for key, sign in signs.items()]
            task_results = figures["lighteval"].values()
            tasks = [f"{task['value']:.1f} ({task['metric']})" if task else "not run" for task in task_results]
            rows.append([label, *cells, *tasks])
        if arm in PUBLISHED:
            gain, leaked = PUBLISHED[arm]
            rows.append([f"{label}, published", f"+{gain}", f"{leaked}", *["–"] * 4])
    source = "published: Dinucu-Jianu et al., EMNLP 2025: Qwen2.5-7B-Instruct, Big-Math, their prompts and judges"
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", source])


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=Path("runs/paper_table"))
    parser.add_argument("--arms", default="0,0.5,1,hard-1-think")
    parser.add_argument("--eval-config", default="maths", help="a name in config/eval, or in --config-dir")
    parser.add_argument("--lighteval", help="LightEval's program, in an environment of its own")
    parser.add_argument("--like", type=Path, help="a run folder whose seconds per step are taken for those of the arms")
    parser.add_argument("--plan", action="store_true", help="start nothing")
    options, others = parser.parse_known_args(argv)

    def start(_overrides: Sequence[str], _models_only: bool, signals: Signals) -> None:
        paper = PaperTable(options, others)
        due = paper.due()
        print(paper.plan(due), flush=True)
        try:
            for part in due:
                if not part.because and not options.plan:
                    part.run(signals)
        finally:
            paper.write()

    return run_command([], "", "The table", start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
