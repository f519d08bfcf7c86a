"""Finds the sets of conversations in a run folder: the steps of the training, and the evaluations."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from classroom_rl.errors import UnknownConversation
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME

TRAINING, NOW, EVALUATION = "training", "now", "evaluation"
_ROLLOUT = re.compile(r"step_(\d+)-(\d+)(?:-(\d+))?\.parquet")


@dataclass(frozen=True)
class ConversationSets:
    """The files of a run folder that hold conversations.

    Attributes:
        steps: step → the files of its ranks, in order, those of further problems behind each.
        evaluations: name ("before", "after", …) → its file.
    """

    steps: dict[int, list[Path]]
    evaluations: dict[str, Path]

    def files(self, where: str) -> list[Path]:
        """The files of a set: `step-12`, `training` (every step), or `eval-before`.

        Raises:
            UnknownConversation: if there is no such set.
        """
        if where == TRAINING:
            return [path for step in sorted(self.steps) for path in self.steps[step]]
        kind, _, name = where.partition("-")
        if kind == "step" and name.isdecimal() and int(name) in self.steps:
            return self.steps[int(name)]
        if kind == "eval" and name in self.evaluations:
            return [self.evaluations[name]]
        known = [f"step-{step}" for step in sorted(self.steps)][-3:] + [f"eval-{name}" for name in self.evaluations]
        raise UnknownConversation(f"This run folder has no set of conversations {where!r}. There are: {known}.")

    @property
    def latest_step(self) -> int | None:
        """The last step that has a file; None without one."""
        return max(self.steps, default=None)

    def settled_until(self) -> float:
        """When the last file was written, in seconds since 1970. Files of the latest step do not count, because some of
        its ranks may still be playing."""
        earlier = [path for step, files in self.steps.items() if step != self.latest_step for path in files]
        return max((path.stat().st_mtime for path in [*earlier, *self.evaluations.values()]), default=0.0)


def find_conversation_sets(run_folder: Path) -> ConversationSets:
    """Find the sets that the folder holds now. No file is read."""
    steps: dict[int, list[tuple[int, int, Path]]] = defaultdict(list)
    for path in (run_folder / "rollouts").glob("step_*.parquet"):
        if found := _ROLLOUT.fullmatch(path.name):
            steps[int(found[1])].append((int(found[2]), int(found[3] or 0), path))
    evaluations = {path.parent.name: path for path in sorted((run_folder / "eval").glob(f"*/{CONVERSATIONS_NAME}"))}
    evaluations = {name: evaluations.pop(name) for name in ("before", "after") if name in evaluations} | evaluations
    if (run_folder / CONVERSATIONS_NAME).is_file():
        evaluations[EVALUATION] = run_folder / CONVERSATIONS_NAME
    return ConversationSets(
        {step: [path for *_, path in sorted(files)] for step, files in sorted(steps.items())}, evaluations
    )
