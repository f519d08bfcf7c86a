"""What each way of learning is worth on the quickstart: the same tutor, the same lessons, equally many conversations.

    grpo          the quickstart
    turns         and the embedded supervisor's penalties as turn advantages
    ppo           config/train_rl/quickstart_ppo.yaml
    online_dpo    config/train_rl/quickstart_online_dpo.yaml
    distilled     no rewards: the tutor of `grpo` of the same seed reads what is written, and is followed
    dpo, kto      once `grpo` is trained: pairs of its conversations, from the model that it began with
    informed      as `own_teacher`, and the strong tutor's prompt says which answers will have mistakes
    own_teacher   a control of both: the strong tutor is the model that the training begins with
    shuffled      a control of the rewards: those of each batch are permuted
    swapped       a control of `dpo`: one of two pairs that are alike is turned round

    python -m benchmarks.ways_to_learn [--folder runs/ways] [--seeds 1 2 3] [--steps 24] [--arms grpo ppo …] [--report]

It needs the models of `make quickstart-models`. Every third version of a training plays the held-out lessons, two
conversations each; of `dpo`, `kto` and `swapped` the finished model does. All are measured alike: paid for form, and by
the post-test. Each training and each measured version is kept in the folder, so the same command goes on where it was
stopped. The line "sft" is the model that all arms begin with.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.outcome_arms import OutcomeBench
from benchmarks.ppo_quickstart import passes_of
from benchmarks.supervision_arms import SUPERVISED, WANTED_REWARD, conversations_needed, run, versions_by_arm
from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.models.policy_folder import policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.run_folder import read_lines
from classroom_rl.results.statistics import paired_change
from classroom_rl.rollout.intervals import shown

SFT, GRPO, DISTILLED = "sft", "grpo", "distilled"
INFORMED_PROMPT = ROOT / "prompt_templates" / "benchmarks" / "informed_tutor.txt"
WITHOUT_REWARDS = "train.reward_weights={pedagogical: 0}"
OFFLINE = {
    "dpo": ["train.loss=dpo"],
    "kto": ["train.loss=kto"],
    "swapped": ["train.loss=dpo", "dataset.shuffle_pairs=true"],
}
"""The arms that learn from the conversations of `grpo`, and their overrides of train_preferences.py."""
FIGURES = {"rewards": "paid for form", "post_test": "post-test", "scaffolded": "slips scaffolded"}


class WaysBench(OutcomeBench):
    """The benchmark of ways of learning. A step is a batch."""

    arms: Mapping[str, Sequence[str]] = {
        GRPO: [],
        "turns": SUPERVISED,
        "ppo": ["train.lr_scheduler_type=constant"],
        "online_dpo": [],
        DISTILLED: [WITHOUT_REWARDS],
        **OFFLINE,
        "informed": [WITHOUT_REWARDS, f"train.distillation.prompt_path={INFORMED_PROMPT}"],
        "own_teacher": [WITHOUT_REWARDS],
        "shuffled": ["train.shuffle_rewards=true"],
    }
    configs = {"ppo": "quickstart_ppo", "online_dpo": "quickstart_online_dpo"}

    def version(self, arm: str, step: int) -> int:
        return step * passes_of(self.configs.get(arm, self.config), ())

    def measured_steps(self, arm: str) -> Sequence[int]:
        return [self.steps] if arm in OFFLINE else super().measured_steps(arm)

    def train(self, arm: str, seed: int) -> Path:
        if arm in OFFLINE:
            return self._train_offline(arm, seed)
        if arm == DISTILLED:
            return self.train_with(arm, seed, [f"train.distillation.model={self._finished_grpo(seed) / 'model'}"])
        overrides = [f"train.distillation.model={self.base_model}"] if arm in ("own_teacher", "informed") else []
        return self.train_with(arm, seed, overrides)

    def _finished_grpo(self, seed: int) -> Path:
        """The run of `grpo` that others learn from, trained if it is not finished; once it is measured, its published
        versions are gone, and its model is still there."""
        run = self.folder / GRPO / str(seed)
        return run if (run / "model").is_dir() else self.train_with(GRPO, seed)

    def _train_offline(self, arm: str, seed: int) -> Path:
        """Train on pairs of what `grpo` of this seed played, and put the model where a policy version is."""
        run = self.folder / arm / str(seed)
        if policy_path(run, self.steps).is_dir():
            return run
        source = self._finished_grpo(seed)
        run.mkdir(parents=True, exist_ok=True)
        pairs = ["-m", "classroom_rl.results.pairs", str(source)]
        preferences = [
            *("train_preferences.py", "--config-name", self.config, f"seed={seed}", f"logging.save_dir={run}"),
            *(f"dataset.pairs={source}", f"model.model_name_or_path={self.base_model}", *OFFLINE[arm]),
        ]
        with (run / "launcher.log").open("a") as log:
            for command in (pairs, preferences):
                subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
        policy = PolicyVersion(f"{arm}-{seed}", self.steps)
        (run / "run_id").write_text(policy.run_id, encoding="utf-8")
        write_policy(
            policy_path(run, self.steps),
            policy,
            lambda folder: shutil.copytree(run / "model", folder, dirs_exist_ok=True),
        )
        return run

    def figures(self, arm: str, seed: int, step: int, records: Sequence[ConversationRecord]) -> dict[str, Any]:
        """The figures of the held-out conversations, and the seconds from the first step of training to this one."""
        steps = read_lines(self.folder / arm / str(seed) / "metrics.jsonl")
        times = [line["time"] for line in steps if arm in OFFLINE or line["step"] <= self.version(arm, step)]
        seconds = times[-1] - times[0] if times else 0.0
        return super().figures(arm, seed, step, records) | {"seconds": seconds}


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """By way of learning: conversations until the held-out reward for form was reached, seconds of all training, and
    the figures of the last version with their difference to `grpo` [95 % interval over lessons of the same seeds]."""
    by_arm: dict[str, dict[int, dict[int, Mapping]]] = dict(versions_by_arm(lines))
    begin = {seed: {0: by_step[0]} for seed, by_step in by_arm.get(GRPO, {}).items() if 0 in by_step}
    out = [
        f"conversations until a held-out reward for form of {WANTED_REWARD:.2f}, and seconds of all training, by seed"
    ]
    for arm in [arm for arm in WaysBench.arms if arm in by_arm]:
        needed = [conversations_needed(by_step) for _, by_step in sorted(by_arm[arm].items())]
        seconds = [round(by_step[max(by_step)]["seconds"]) for _, by_step in sorted(by_arm[arm].items())]
        reached = [round(count) if count is not None else None for count in needed]
        out.append(f"  {arm:12}{'after grpo' if arm in OFFLINE else reached!s:24}{seconds}")
    out.append("held-out lessons after the last step: mean of the seeds, each, and the difference to grpo")
    for figure, title in FIGURES.items():
        for arm, by_seed in ({SFT: begin} | by_arm).items():
            last = {seed: by_step[max(by_step)][figure] for seed, by_step in sorted(by_seed.items())}
            means = [round(fmean(values.values()), 3) for values in last.values() if values]
            line = f"  {title:18}{arm:12}{fmean(means):.3f}  {means}"
            common = sorted(set(last) & set(by_arm.get(GRPO, {}))) if arm != GRPO else []
            if common:
                ours = {seed: by_arm[GRPO][seed][max(by_arm[GRPO][seed])][figure] for seed in common}
                line += f"  {shown(paired_change(_by_lesson(ours), _by_lesson({s: last[s] for s in common})), '+')}"
            out.append(line)
    return "\n".join(out)


def _by_lesson(by_seed: Mapping[int, Mapping[str, float]]) -> dict[str, list[float]]:
    return {f"{seed}|{lesson}": [value] for seed, by_lesson in by_seed.items() for lesson, value in by_lesson.items()}


def main() -> None:
    """Train and measure what is missing, then print the report."""
    run(WaysBench, report, __doc__, Path("runs/ways"), steps=24, port=8057)


if __name__ == "__main__":
    main()
