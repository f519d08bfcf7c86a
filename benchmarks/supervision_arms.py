"""Measures what supervision is worth on the quickstart: the same tutor is trained several ways, with equal numbers of
conversations, and every version of it is played on held-out lessons, without a supervisor.

    rl          reinforcement learning alone: the quickstart
    penalty     and the supervisor's penalties as turn credit
    same_step   and penalties, and corrections in every step
    pass        and penalties, and a supervised pass after every third step for which 300 corrections wait
    shuffled    a control: as `penalty`, with the penalties permuted over the messages of a batch

    python -m benchmarks.supervision_arms [--folder runs/arms] [--seeds 1 2 3] [--steps 18] [--arms rl penalty …]

It needs the models of `make quickstart-models`. Each training and each measured version is kept in the folder, so the
same command goes on where it was stopped; with `--report` it only prints what is there. Seeds begin with the same
fine-tuned model, and differ in the order of lessons, in the students' errors, and in what is sampled.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from classroom_rl.config.base import default_penalties
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.launch.commands import server_command
from classroom_rl.launch.server_process import ServerProcess
from classroom_rl.models.policy_folder import policy_path
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.run_folder import read_lines
from classroom_rl.results.statistics import paired_change
from classroom_rl.rollout.intervals import shown
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.reviews import MessageToReview, Review, priced
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.server.client import ClassroomClient
from classroom_rl.supervision.embedded import review_by_rubric
from classroom_rl.system.processes import Signals

SUPERVISED = ["supervisor_model.model_name_or_path=rubric", "train.turn_credit.mode=immediate"]
ARMS: dict[str, list[str]] = {
    "rl": [],
    "penalty": SUPERVISED,
    "same_step": [
        *SUPERVISED,
        "train.corrections.targets=changed",
        "train.corrections.mode=same_step",
        "train.corrections.weight=0.2",
    ],
    "pass": [
        *SUPERVISED,
        "train.corrections.mode=pass",
        "train.corrections.interval=3",
        "train.corrections.min_examples=300",
        "train.corrections.max_kl=1",
    ],
    "shuffled": [*SUPERVISED, "train.turn_credit.shuffle=true"],
}
CONVERSATIONS_PER_STEP = 64
WANTED_REWARD = 0.9
EVERY = 3
"""Steps between two measured versions."""
EVALUATION_SEED = 2024


class Bench:
    """One benchmark's folder, and what is in it.

    Args:
        models: the run folder of the quickstart whose fine-tuned model and lessons are used.

    Attributes:
        arms: the overrides of each arm.
        config: the configuration of the arms.
        configs: those of arms that have another one.
        record: the class of its records.
        every: the steps between two measured versions.
    """

    arms: Mapping[str, Sequence[str]] = ARMS
    config = "quickstart"
    configs: Mapping[str, str] = {}
    record: type[Trajectory] = ConversationRecord
    every = EVERY

    def measured_steps(self, arm: str) -> Sequence[int]:
        """The steps of an arm after which a version is measured."""
        return range(0, self.steps + 1, self.every)

    def __init__(self, folder: Path, models: Path, steps: int, port: int):
        self.folder, self.models, self.steps, self.port = folder, models, steps, port
        self.results = folder / "results.jsonl"

    def version(self, arm: str, step: int) -> int:
        """The policy version after this many batches."""
        return step

    def figures(self, arm: str, seed: int, step: int, records: Sequence[ConversationRecord]) -> dict[str, Any]:
        """What is kept of a version's held-out conversations."""
        return figures(records)

    @property
    def base_model(self) -> Path:
        """The model that all arms begin with."""
        return self.models / "sft" / "model"

    def overrides(self, save_dir: Path, config: str = "quickstart") -> list[str]:
        """The overrides of every program of the benchmark."""
        model, lessons = self.base_model, self.models / "world" / "lessons_train.jsonl"
        return [
            *("--config-name", config),
            *("train.learning_rate=3e-4", "train.lr_scheduler_type=constant"),  # arms stop at other steps
            f"logging.save_dir={save_dir}",
            f"teacher_model.model_name_or_path={model}",
            f"student_model.model_name_or_path={model}",
            f"dataset.train_datasets=[{{name_or_path: {lessons}}}]",
            f"generation.server_port={self.port}",
        ]

    def train(self, arm: str, seed: int) -> Path:
        """Train an arm, unless it is trained already; returns its run folder."""
        return self.train_with(arm, seed)

    def train_with(self, arm: str, seed: int, more: Sequence[str] = ()) -> Path:
        """`train` with further overrides."""
        run, steps = self.folder / arm / str(seed), self.version(arm, self.measured_steps(arm)[-1])
        trained = read_lines(run / "metrics.jsonl")[-1]["step"] if (run / "learning.json").exists() else 0
        if trained >= steps:
            if not policy_path(run, steps).is_dir():
                sys.exit(f"{run} was trained for other steps, or its weights are gone: choose another --folder.")
            return run
        run_overrides = [f"seed={seed}", f"train.max_steps={steps}", "logging.save_steps=10"]
        run_overrides += ["train.keep_published_policies=1000", *self.arms[arm], *more]
        command = ["./start_rl_training.sh", *self.overrides(run, self.configs.get(arm, self.config)), *run_overrides]
        print(f"training {arm}, seed {seed}: {run}", flush=True)
        run.mkdir(parents=True, exist_ok=True)
        with (run / "launcher.log").open("a") as log:
            subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
        return run

    def measured(self) -> set[tuple[str, int, int]]:
        """The (arm, seed, step) that were measured already."""
        return {(line["arm"], line["seed"], line["step"]) for line in read_lines(self.results)}

    def measure(self, client: ClassroomClient, arm: str, seed: int, lessons: Sequence[str]) -> None:
        """Play the held-out lessons with every `EVERY`th version of an arm, and write the results down."""
        run = self.folder / arm / str(seed)
        run_id = (run / "run_id").read_text(encoding="utf-8")
        for step in self.measured_steps(arm):
            if (arm, seed, step) in self.measured():
                continue
            policy = PolicyVersion(run_id, self.version(arm, step))
            client.load_weights(policy, policy_path(run, policy.version))
            request = SampleRequest(
                problems=[*lessons, *lessons],
                answers=[""] * 2 * len(lessons),
                request_id=f"{arm}-{seed}-{step}",
                seed=EVALUATION_SEED,
                step=0,
                run_id=policy.run_id,
                policy_version=policy.version,
                fixed_seeds=True,
            )
            records = client.sample(request).conversations
            line = {"arm": arm, "seed": seed, "step": step, **self.figures(arm, seed, step, records)}
            with self.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            rewards = [record.reward for record in records if record.reward is not None]
            print(f"{arm} {seed} after {step} steps: reward {fmean(rewards):.3f}", flush=True)


def figures(records: Sequence[ConversationRecord]) -> dict[str, dict[str, float]]:
    """By problem: the reward, the share of valid messages, and the mean penalty. The conversations were played without
    a supervisor; the rubric reviews their messages afterwards."""
    rewards, valid, penalties = defaultdict(list), defaultdict(list), defaultdict(list)
    for record in records:
        reviews = list(reviews_of(record))
        rewards[record.problem_id].append(record.reward)
        valid[record.problem_id].append(fmean(review.valid for review in reviews))
        penalties[record.problem_id].append(fmean(review.penalty for review in reviews))
    named = {"rewards": rewards, "valid": valid, "process": penalties}
    return {
        name: {problem: fmean(values) for problem, values in by_problem.items()} for name, by_problem in named.items()
    }


def reviews_of(record: ConversationRecord) -> Iterator[Review]:
    """The rubric's priced reviews of the tutor's messages."""
    dialogue: list[dict[str, str]] = []
    for turn in record.turns:
        if turn.role == "teacher":
            about = MessageToReview(list(dialogue), visible_text(turn.text), record.problem, cut=not turn.ended)
            yield priced(review_by_rubric(about), default_penalties())
        dialogue.append({"role": turn.role, "content": visible_text(turn.text)})


@contextmanager
def evaluation_server(bench: Bench) -> Iterator[ClassroomClient]:
    """A server on the benchmark's folder, which holds the policies of all arms."""
    overrides = bench.overrides(bench.folder, bench.config)
    config = load(TrainRLConfig, "train_rl", overrides, check_train_rl)
    command = server_command(overrides)
    with Signals() as signals:
        server = ServerProcess(command, config.generation, signals, bench.folder / "server.log")
        try:
            server.wait_until_ready()
            yield ClassroomClient(server.url, log=server.log, record=bench.record)
        finally:
            server.stop()


def held_out_lessons(models: Path) -> list[str]:
    """The lessons that no training of these models sees."""
    path = models / "world" / "lessons_heldout.jsonl"
    return [json.loads(line)["problem"] for line in path.read_text(encoding="utf-8").splitlines()]


def report(lines: Sequence[Mapping]) -> str:
    """Three tables: the last versions with differences to `rl`, the whole way, and the conversations until 0.90."""
    by_arm = versions_by_arm(lines)
    arms = [arm for arm in ARMS if arm in by_arm]
    seeds = sorted(set.intersection(*(set(by_arm[arm]) for arm in arms)))
    last = min(max(versions) for arm in arms for versions in by_arm[arm].values())
    out = [f"seeds {seeds}, {last} steps of {CONVERSATIONS_PER_STEP} conversations", ""]
    out.append("after the last step: mean, and difference to rl [95 % interval over lessons of all seeds]")
    for figure in ("rewards", "valid"):
        for arm in arms:
            at_end = _by_lesson(by_arm[arm], seeds, figure, [last])
            out.append(f"  {figure:8}{arm:10}{_mean(at_end):.3f}  {_difference(by_arm, arm, seeds, figure, [last])}")
    steps = list(range(EVERY, last + 1, EVERY))
    out += ["", "the mean over all measured versions after the first: how fast it was learned"]
    for arm in arms:
        all_versions = _by_lesson(by_arm[arm], seeds, "rewards", steps)
        out.append(f"  rewards {arm:10}{_mean(all_versions):.3f}  {_difference(by_arm, arm, seeds, 'rewards', steps)}")
    out += ["", f"conversations until a held-out reward of {WANTED_REWARD:.2f} (interpolated), by seed, and their mean"]
    for arm in arms:
        needed = [conversations_needed(by_arm[arm][seed]) for seed in seeds]
        reached = [count for count in needed if count is not None]
        mean = f"{fmean(reached):.0f}" if len(reached) == len(needed) else "not reached by all"
        out.append(f"  {arm:10}{[round(count) if count is not None else None for count in needed]}  {mean}")
    return "\n".join(out)


def versions_by_arm(lines: Sequence[Mapping]) -> dict[str, dict[int, dict[int, Mapping]]]:
    """The lines of results by arm, seed and step; a seed with no line of a trained version is left out."""
    trained = {(line["arm"], line["seed"]) for line in lines if line["step"] > 0}
    by_arm: dict[str, dict[int, dict[int, Mapping]]] = defaultdict(lambda: defaultdict(dict))
    for line in [line for line in lines if (line["arm"], line["seed"]) in trained]:
        by_arm[line["arm"]][line["seed"]][line["step"]] = line
    return by_arm


def conversations_needed(by_step: Mapping[int, Mapping]) -> float | None:
    """The conversations until the mean held-out reward first reached `WANTED_REWARD`, interpolated between measured
    versions; None if it never did. A version that says itself how many conversations were played counts these. If the
    first measured version is there already, its conversations are the answer."""
    before: tuple[float, float] | None = None
    for step, line in sorted(by_step.items()):
        played, reward = line.get("conversations", CONVERSATIONS_PER_STEP * step), fmean(line["rewards"].values())
        if reward >= WANTED_REWARD:
            if before is None:
                return played
            share = (WANTED_REWARD - before[1]) / (reward - before[1])
            return before[0] + share * (played - before[0])
        before = (played, reward)
    return None


def _by_lesson(by_seed: Mapping, seeds: Sequence[int], figure: str, steps: Sequence[int]) -> dict[str, list[float]]:
    """The figure's mean over these steps, for each lesson of each seed."""
    means = {}
    for seed in seeds:
        for lesson in by_seed[seed][steps[0]][figure]:
            means[f"{seed}|{lesson}"] = [fmean(by_seed[seed][step][figure][lesson] for step in steps)]
    return means


def _difference(by_arm: Mapping, arm: str, seeds: Sequence[int], figure: str, steps: Sequence[int]) -> str:
    if arm == "rl" or "rl" not in by_arm:
        return ""
    change = paired_change(
        _by_lesson(by_arm["rl"], seeds, figure, steps), _by_lesson(by_arm[arm], seeds, figure, steps)
    )
    return shown(change, "+")


def _mean(by_lesson: Mapping[str, Sequence[float]]) -> float:
    return fmean(value for values in by_lesson.values() for value in values)


def main() -> None:
    """Train and measure what is missing, then print the report."""
    run(Bench, report, __doc__, Path("runs/arms"), steps=18, port=8045)


def run(
    kind: type[Bench], report: Callable[[Sequence[Mapping]], str], usage: str, folder: Path, steps: int, port: int
) -> None:
    """The command line of a benchmark that trains arms on the quickstart's models.

    Args:
        report: makes a text of the lines of results.
        usage: what `--help` prints.
        folder, steps, port: the defaults of the options of these names.
    """
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--models", type=Path, default=Path("runs/quickstart"), help="the folder of quickstart-models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=list(kind.arms), default=list(kind.arms))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--report", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    if not (arguments.models / "sft" / "model").is_dir():
        sys.exit(f"{arguments.models} has no fine-tuned model: run make quickstart-models, or give --models.")
    bench = kind(arguments.folder.resolve(), arguments.models.resolve(), arguments.steps, arguments.port)
    bench.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        lessons = held_out_lessons(bench.models)
        measure(bench, [(arm, seed) for seed in arguments.seeds for arm in arguments.arms], lessons)
    print(report(read_lines(bench.results)))


def measure(bench: Bench, wanted: Sequence[tuple[str, int]], lessons: Sequence[str]) -> None:
    """Train each (arm, seed), measure the versions of all of them on one server, and delete their weights."""
    measured = bench.measured()
    due = [
        (arm, seed) for arm, seed in wanted if not {(arm, seed, step) for step in bench.measured_steps(arm)} <= measured
    ]
    runs = [bench.train(arm, seed) for arm, seed in due]
    if not due:
        return
    with evaluation_server(bench) as client:
        for (arm, seed), run in zip(due, runs, strict=True):
            bench.measure(client, arm, seed, lessons)
            shutil.rmtree(run / "policy", ignore_errors=True)


if __name__ == "__main__":
    main()
