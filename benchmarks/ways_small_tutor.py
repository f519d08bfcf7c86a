"""What ways of learning are worth for a real chat model: the small tutor (SmolLM2-135M-Instruct), the same lessons,
equally many conversations.

    grpo        config/train_rl/small_tutor.yaml, with batches of 32 conversations and a constant rate
    level       and the turn reward `level`, at the same weight as the judge's
    distilled   half of the steps, no rewards: the finished tutor of `grpo` reads what is written, and is followed
    dpo         once `grpo` is trained: pairs of its conversations, from the model that it began with

    python -m benchmarks.ways_small_tutor MODEL [--folder runs/ways_small] [--seeds 1 2] [--steps 16] [--report]
        [--arms grpo level …] [key=value …]

MODEL is the folder of `python -m classroom_rl.models.smollm2`, and `level` needs `pip install wordfreq==3.1.1`. The
model that all begin with, the tutors after half of the steps and after all play the 40 held-out lessons, two
conversations each. Overrides go to all programs. What is trained and measured is kept in the folder, as by the other
benchmarks of arms; more steps go on from those that were made.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.supervision_arms import measure, versions_by_arm
from benchmarks.ways_to_learn import DISTILLED, GRPO, OFFLINE, WITHOUT_REWARDS, WaysBench
from classroom_rl.config.base import DatasetSource
from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.metrics.level import level_by_lesson
from classroom_rl.judges.difficulty import LevelRules
from classroom_rl.results.run_folder import read_lines
from classroom_rl.results.statistics import paired_change
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.intervals import mean_with_ci, shown

LEVEL = "level"
RULES = LevelRules(of_lessons="A1", language="English")
FIGURES = {
    "rewards": "reward",
    "score": "level score of a message",
    "slope/score": "its change per message",
    "score_of_new": "level score of a message that is no repetition",
    "slope/score_of_new": "its change per message, too",
    "words_above": "words above the level",
    "slope/words_above": "their change per message",
    "sentence_words": "words in a sentence",
    "slope/sentence_words": "their change per message",
}


class SmallBench(WaysBench):
    """The benchmark of the small tutor. `models` is the folder of the chat model."""

    config = "small_tutor"
    configs: Mapping[str, str] = {}
    arms: Mapping[str, Sequence[str]] = {
        GRPO: [],
        LEVEL: ["train.turn_credit.rewards={judge: 1.0, level: 1.0}"],
        DISTILLED: [WITHOUT_REWARDS, "train.turn_credit.mode=none"],
        "dpo": OFFLINE["dpo"],
    }
    more: Sequence[str] = ()

    @property
    def base_model(self) -> Path:
        return self.models

    def measured_steps(self, arm: str) -> Sequence[int]:
        half = self.steps // 2
        all_versions = [0, half, self.steps]
        return {GRPO: all_versions, LEVEL: all_versions, DISTILLED: [half]}.get(arm, [self.steps])

    def overrides(self, save_dir: Path, config: str = "small_tutor") -> list[str]:
        return [
            *("--config-name", config, "train.num_samples_per_problem=4", "train.lr_scheduler_type=constant"),
            f"logging.save_dir={save_dir}",
            f"teacher_model.model_name_or_path={self.models}",
            f"student_model.model_name_or_path={self.models}",
            f"generation.level.of_lessons={RULES.of_lessons}",
            f"generation.level.language={RULES.language}",
            f"generation.server_port={self.port}",
            *self.more,
        ]

    def figures(self, arm: str, seed: int, step: int, records: Sequence[ConversationRecord]) -> dict[str, Any]:
        by_figure: dict[str, dict[str, list[float]]] = {"rewards": defaultdict(list)}
        for record in records:
            if record.reward is not None:
                by_figure["rewards"][record.problem_id].append(record.reward)
        by_figure |= {name: values for name, values in level_by_lesson(records, RULES).items() if name in FIGURES}
        (self.folder / arm / str(seed) / f"held_out_{step}.jsonl").write_text(
            "".join(f"{record.model_dump_json()}\n" for record in records), encoding="utf-8"
        )
        return {
            name: {lesson: fmean(values) for lesson, values in by_lesson.items() if values}
            for name, by_lesson in by_figure.items()
        }


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """Each figure of the model that all arms begin with, and of every measured tutor: by seed, the mean with its 95 %
    interval over lessons, and the difference to the beginning, and to `grpo` of the same seed after as many steps."""
    by_arm = versions_by_arm(lines)
    out = []
    for figure, title in FIGURES.items():
        out.append(title)
        for seed in sorted({seed for by_seed in by_arm.values() for seed in by_seed}):
            grpo = by_arm.get(GRPO, {}).get(seed, {})
            versions = [
                (arm, step, line[figure])
                for arm in SmallBench.arms
                for step, line in sorted(by_arm.get(arm, {}).get(seed, {}).items())
                if figure in line
            ]
            begin = next((means for _, step, means in versions if not step), {})
            out.append(f"  seed {seed}  {'begin':10}{0:4}  {shown(_estimate(begin))}")
            for arm, step, means in versions:
                if not step:
                    continue
                text = f"  seed {seed}  {arm:10}{step:4}  {shown(_estimate(means))}  to begin {_change(begin, means)}"
                if arm != GRPO and step in grpo:
                    text += f"  to grpo {_change(grpo[step].get(figure, {}), means)}"
                out.append(text)
    return "\n".join(out)


def _estimate(by_lesson: Mapping[str, float]) -> Any:
    return mean_with_ci({lesson: [value] for lesson, value in by_lesson.items()})


def _change(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    common = sorted(set(before) & set(after))
    return shown(paired_change({key: [before[key]] for key in common}, {key: [after[key]] for key in common}), "+")


def main() -> None:
    """Train and measure what is missing, then print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("more", nargs="*", metavar="key=value")
    parser.add_argument("--folder", type=Path, default=Path("runs/ways_small"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(SmallBench.arms), default=list(SmallBench.arms))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--port", type=int, default=8059)
    parser.add_argument("--report", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    bench = SmallBench(arguments.folder.resolve(), arguments.model.resolve(), arguments.steps, arguments.port)
    bench.more = arguments.more
    bench.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        measure(bench, [(arm, seed) for seed in arguments.seeds for arm in arguments.arms], held_out())
    print(report(read_lines(bench.results)))


def held_out() -> list[str]:
    """The lessons that the small tutor is not trained on, as the tutor sees them."""
    source = DatasetSource(
        name_or_path=str(ROOT / "data" / "english_lessons" / "test.jsonl"),
        problem_template=str(ROOT / "prompt_templates" / "small_tutor" / "lesson.txt"),
        answer_column=None,
    )
    return [problem.text for problem in load_problems([source])]


if __name__ == "__main__":
    main()
