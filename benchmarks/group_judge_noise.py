"""How fast the quickstart learns from a judge with errors of a known size, asked about conversations or about groups.

The judge is the rubric plus two normally distributed errors: one that all conversations of a call share (`level`), and
one of each conversation's own (`own`). A single call has both; between the conversations of a group that are judged in
one call the first cancels out, because GRPO compares them with each other only, save where a score is cut off at 0 or
1. No arm has a threshold for low scores.

    exact               no errors
    level_alone         level 0.2, own 0.1, each conversation by itself
    level_group         the same judge, asked about groups
    own_alone           level 0, own 0.3, each conversation by itself
    own_group           the same judge, asked about groups: no better
    crowded_group       level 0.2, and own 0.3, because it reads eight conversations less well than one

    python -m benchmarks.group_judge_noise [--folder runs/group_judge] [--seeds 1 2 3] [--steps 24] [--arms exact …]

Training goes through the classroom's own judge over HTTP; held-out lessons are judged by the rubric itself. All arms
begin with the same model, which `make quickstart-models` makes. The same command goes on where it was stopped.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.signal_arms import SignalBench
from benchmarks.supervision_arms import conversations_needed, run, versions_by_arm
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.judges.verdicts import CRITERIA
from classroom_rl.results.run_folder import METRICS_NAME, read_lines
from classroom_rl.rollout.engine import ConversationFacts
from tests.support.judge_endpoint import Behaviour, judge_endpoint, says

RULE = "pedagogical_eval"
_MATERIAL = "{{ {'problem': problem, 'conversations': %s} | tojson }}"
_FIGURES = ("judge/anchor_gap", "judge/anchor_error", "judge/anchor_correlation")
_FACTS = ConversationFacts(max_turns=9)
"""As in the quickstart's configuration."""


@dataclass(frozen=True)
class Errors:
    """The standard deviations of a judge's errors, on a scale from 0 to 1."""

    level: float
    own: float

    @property
    def model(self) -> str:
        """The name under which the judge is asked for."""
        return f"level={self.level},own={self.own}"

    @classmethod
    def of(cls, model: str) -> "Errors":
        """The errors of the judge with this name."""
        return cls(*(float(value) for value in re.fullmatch(r"level=([\d.]+),own=([\d.]+)", model).groups()))


JUDGES = {
    "exact": (Errors(0, 0), False),
    "level_alone": (Errors(0.2, 0.1), False),
    "level_group": (Errors(0.2, 0.1), True),
    "own_alone": (Errors(0, 0.3), False),
    "own_group": (Errors(0, 0.3), True),
    "crowded_group": (Errors(0.2, 0.3), True),
}
"""By arm: the judge's errors, and whether it is asked about groups."""


class NoiseBench(SignalBench):
    """The benchmark of a judge with errors."""

    arms: Mapping[str, Sequence[str]] = dict.fromkeys(JUDGES, ())

    def train(self, arm: str, seed: int) -> Path:
        def answer(body: Mapping[str, Any], nth: int) -> Behaviour:
            return says(verdict_of(body, Random(f"{seed} {nth}")))

        with judge_endpoint(answer, self.port + 1) as endpoint:
            return self.train_with(arm, seed, self.judged_at(endpoint.url, *JUDGES[arm]))

    def figures(self, arm: str, seed: int, step: int, records: Sequence[ConversationRecord]) -> dict[str, Any]:
        logged = read_lines(self.folder / arm / str(seed) / METRICS_NAME)
        named = {name: [line[name] for line in logged if name in line] for name in _FIGURES}
        compared = {name: fmean(values) for name, values in named.items() if values}
        return {**super().figures(arm, seed, step, records), "anchors": compared}

    def judged_at(self, url: str, errors: Errors, in_groups: bool) -> list[str]:
        """The overrides that role a judge with these errors. Its prompts, which this writes, hold nothing but the
        material."""
        paths = {}
        for name, shown in (("alone", "[conversation]"), ("group", "conversations")):
            paths[name] = self.folder / f"{name}.txt"
            paths[name].write_text(_MATERIAL % shown, encoding="utf-8")
        return [
            f"judge_model.model_name_or_path='{errors.model}'",
            f"judge_model.base_url={url}",
            f"generation.judges_rules_prompts_paths={{{RULE}: {paths['alone']}}}",
            *(["judge_model.mode=group", "judge_model.anchor_share=0.125"] if in_groups else []),
            f"judge_model.group_prompts_paths={{{RULE}: {paths['group']}}}",
            "generation.low_score_threshold=0",
        ]


def verdict_of(body: Mapping[str, Any], chance: Random) -> str:
    """The rubric's scores with errors of the size that the model's name says.

    Args:
        chance: draws the errors of this call. Every call needs one of its own: two calls about equal conversations err
            differently, as those of a model that samples.
    """
    errors, material = Errors.of(body["model"]), json.loads(body["messages"][0]["content"])
    level = chance.gauss(0, errors.level)
    scored = []
    for conversation in material["conversations"]:
        judged = asyncio.run(RubricJudge().judge(RULE, conversation, material["problem"], 0, _FACTS))
        error = level + chance.gauss(0, errors.own)
        exact = {name: json.loads(judged)[name] / criterion.top for name, criterion in CRITERIA.items()}
        scored.append(
            {name: criterion.top * min(1, max(0, exact[name] + error)) for name, criterion in CRITERIA.items()}
        )
    if "ranking" not in body["response_format"]["json_schema"]["schema"]["properties"]:
        return json.dumps(scored[0])
    means = [
        sum(criterion.weight * scores[name] / criterion.top for name, criterion in CRITERIA.items())
        for scores in scored
    ]
    ranking = sorted(range(1, len(scored) + 1), key=lambda number: -means[number - 1])
    entries = [{"number": i + 1, "reasoning": "", **scores} for i, scores in enumerate(scored)]
    return json.dumps({"comparison": "", "ranking": ranking, "conversations": entries})


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """By arm: the conversations until the wanted reward, the mean held-out reward over all measured versions and of the
    last, and, for judges of groups, how they compare with their anchors in training."""
    by_arm = versions_by_arm(lines)
    out = ["arm             level  own   conversations until 0.90   reward: mean of versions, last    seeds"]
    for arm in [arm for arm in JUDGES if arm in by_arm]:
        seeds, errors = by_arm[arm], JUDGES[arm][0]
        needed = [conversations_needed(versions) for versions in seeds.values()]
        shown = ", ".join("–" if count is None else f"{count:.0f}" for count in needed)
        means = {
            seed: [fmean(version["rewards"].values()) for _, version in sorted(versions.items())]
            for seed, versions in seeds.items()
        }
        mean_reward, last_reward = (
            fmean(fmean(rewards[1:]) for rewards in means.values()),
            fmean(rewards[-1] for rewards in means.values()),
        )
        noise = f"{errors.level:5.2f} {errors.own:4.2f}"
        out.append(f"{arm:15} {noise}   {shown:24} {mean_reward:10.3f} {last_reward:16.3f}       {[*seeds]}")
        compared = [versions[max(versions)]["anchors"] for versions in seeds.values()]
        for name in _FIGURES:
            if all(name in anchors for anchors in compared):
                out.append(f"    {name} {fmean(anchors[name] for anchors in compared):+.2f}")
    return "\n".join(out)


def main() -> None:
    """Train and measure what is missing, then print the report."""
    run(NoiseBench, report, __doc__, Path("runs/group_judge"), steps=24, port=8053)


if __name__ == "__main__":
    main()
