"""Formats evaluations as tables: rows for the report and the terminal, and the text for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from classroom_rl.config.values import LEAK_RULE, PEDAGOGY_RULE, SAMPLINGS
from classroom_rl.evaluation.metrics.level import LEVEL, LEVEL_LABELS
from classroom_rl.evaluation.metrics.maths import PEDAGOGICAL_REWARD, SCORED, SOLVED
from classroom_rl.evaluation.metrics.supervision import DIFFERENCE
from classroom_rl.judges.readings import LABELS, Trust
from classroom_rl.judges.verdicts import CRITERIA, criterion_of
from classroom_rl.results.run_folder import RunData, is_number, look_up
from classroom_rl.results.statistics import is_clear
from classroom_rl.rollout.intervals import Estimate

NO_VALUE = "–"

POST_TEST = "post_test"
"""The key of the figures of post-tests in metrics.json."""

POST_TEST_LABELS: dict[str, tuple[str, int]] = {
    "knew": ("Post-test: known before the lesson (ledger)", 0),
    "ledger": ("Post-test: known after it (ledger)", 1),
    "learned": ("Of what was not known before, known after (ledger)", 1),
    "given": ("Of the items, given away by the teacher", -1),
    "student": ("Post-test: the student's model answers right", 1),
}
"""Figure → its label in tables, and whether higher is better (+1), worse (−1), or neither (0)."""


@dataclass(frozen=True)
class Measure:
    """A row of the tables: the path of its value in metrics.json, and how the value is printed.

    Attributes:
        interval, count: paths of its 95 % interval and its n; () if it has none.
        is_share: whether it is printed in percent.
        direction: +1 if higher is better, −1 if lower is better, 0 if neither.
    """

    label: str
    path: tuple[str, ...]
    interval: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    is_share: bool = False
    direction: int = 0


def _estimated(label: str, *path: str, is_share: bool = False, direction: int = 1) -> Measure:
    """A measure whose value is an estimate: `mean`, `ci95` and `n` under one path."""
    return Measure(label, (*path, "mean"), (*path, "ci95"), (*path, "n"), is_share, direction)


def reading_name(label: str) -> str:
    """The name of a move classifier's figure in the tables."""
    return f"Replies with {label} (reader)"


MEASURES = (
    _estimated("Reward", "reward"),
    *(
        Measure(f"{criterion.label} (0–{criterion.top:g})", ("scores", name), direction=1)
        for name, criterion in CRITERIA.items()
    ),
    Measure("Error turns scaffolded", ("error_turns", "scaffolded"), (), ("error_turns", "n"), True, 1),
    Measure("Clean turns falsely corrected", ("clean_turns", "falsely_corrected"), (), ("clean_turns", "n"), True, -1),
    _estimated("Solved before the dialogue", SOLVED, "initial", is_share=True, direction=0),
    _estimated("Solved after it", SOLVED, "final", is_share=True),
    _estimated("Gain", SOLVED, "gain", is_share=True),
    _estimated("Reward model's score before the dialogue", SCORED, "initial"),
    _estimated("Reward model's score after it", SCORED, "final"),
    _estimated("Gain in the reward model's score", SCORED, "gain"),
    _estimated("Pedagogical reward, mean of messages", PEDAGOGICAL_REWARD, "micro"),
    _estimated("Pedagogical reward, mean of conversations", PEDAGOGICAL_REWARD, "macro"),
    *(
        _estimated(label, POST_TEST, name, is_share=True, direction=direction)
        for name, (label, direction) in POST_TEST_LABELS.items()
    ),
    _estimated("Messages that the supervisor called valid", "supervision", "valid", is_share=True),
    _estimated("Messages written more than once", "supervision", "retried", is_share=True, direction=-1),
    _estimated("Messages replaced by a correction", "supervision", "replaced", is_share=True, direction=-1),
    _estimated("Reviews without a verdict", "supervision", "no_verdict", is_share=True, direction=-1),
    *(_estimated(reading_name(label), "readings", "labels", label, is_share=True, direction=0) for label in LABELS),
    *(
        _estimated(label, LEVEL, name, is_share=is_share, direction=direction)
        for name, (label, is_share, direction) in LEVEL_LABELS.items()
    ),
    Measure("Rejected by the judge", ("rejected", "share"), (), ("rejected", "n"), True, -1),
    Measure("Without a verdict", ("without_verdict", "share"), (), ("without_verdict", "n"), True, -1),
    Measure("Without solutions", ("without_solutions", "share"), (), ("without_solutions", "n"), True),
    Measure("Messages in a conversation", ("talk", "messages")),
    Measure("Teacher's words in a message", ("talk", "teacher_words")),
    Measure("Teacher's share of all words", ("talk", "teacher_share"), is_share=True),
)


_REJECTIONS = {LEAK_RULE: "Leaks the answer", PEDAGOGY_RULE: "Breaks pedagogical values"}


def named_measures(metrics: Mapping[str, Any]) -> list[Measure]:
    """The measures that a configuration names, and not this file: each reward of several (`rewards`), each criterion of
    a rubric (`scores`), and each judge rule that accepts or rejects (`rejected_by`)."""
    named = [_estimated(f"Reward {name}", "rewards", name) for name in metrics.get("rewards", ())]
    named += [
        Measure(criterion_of(key).label, ("scores", key), is_share=True)  # of a penalty less is better: not said here
        for key in metrics.get("scores") or ()
        if key not in CRITERIA
    ]
    return named + [
        _estimated(_REJECTIONS.get(rule, f"Rejected by {rule}"), "rejected_by", rule, is_share=True, direction=-1)
        for rule in metrics.get("rejected_by", ())
    ]


def measures_of(*samplings: Mapping[str, Any]) -> list[Measure]:
    """The rows for some samplings' metrics: the reward, `named_measures` of any of them, and the rest of `MEASURES`."""
    named = dict.fromkeys(measure for metrics in samplings for measure in named_measures(metrics))
    return [MEASURES[0], *named, *MEASURES[1:]]


@dataclass(frozen=True)
class Cell:
    """A value as text, with its interval and n as text; these are "" if the value has none."""

    text: str
    interval: str = ""
    count: str = ""

    def __str__(self) -> str:
        notes = " ".join(note for note in (self.interval, self.count and f"n={self.count}") if note)
        return f"{self.text} {notes}".strip()


@dataclass(frozen=True)
class Line:
    """A row with the values before and after and the change. `verdict` is "better", "worse" or ""."""

    label: str
    before: Cell
    after: Cell
    change: Cell
    verdict: str

    @property
    def is_empty(self) -> bool:
        """True if neither side has the measure."""
        return self.before.text == self.after.text == NO_VALUE


def cell(measure: Measure, metrics: Mapping[str, Any]) -> Cell:
    """Format one measure of one sampling's metrics."""
    value = look_up(metrics, *measure.path)
    if not is_number(value):
        return Cell(NO_VALUE)
    interval = look_up(metrics, *measure.interval) if measure.interval else None
    count = look_up(metrics, *measure.count) if measure.count else None
    return Cell(_number(value, measure), _interval(interval, measure), "" if count is None else f"{count}")


def change_cell(measure: Measure, mean: float, interval: Optional[Sequence[float]], note: str) -> Cell:
    """Format a difference in one measure, with its sign; `note` follows the interval."""
    text = f"{_change(mean, measure)}"
    return Cell(text, f"{_interval(interval, measure, '+')} {note}".strip())


def _number(value: float, measure: Measure, sign: str = "") -> str:
    if measure.is_share:
        return _minus(f"{100 * value:{sign}.1f} %")
    return _minus(f"{value:{sign}.3f}" if measure.direction else f"{value:{sign}.1f}")


def _minus(text: str) -> str:
    """Replace hyphens with minus signs."""
    return text.replace("-", "−")


def _interval(interval: Optional[Sequence[float]], measure: Measure, sign: str = "") -> str:
    if not interval:
        return ""
    return "[" + ", ".join(_number(bound, measure, sign) for bound in interval) + "]"


def compare(before: Mapping[str, Any], after: Mapping[str, Any], reward_change: Optional[Estimate]) -> list[Line]:
    """The rows of one sampling before and after training, one for each of `measures_of` both.

    Args:
        reward_change: the change of the reward, paired by lesson. Its interval is shown, and only the reward gets a
            verdict: for other figures there is no estimate of the changes that chance would produce.
    """
    lines = []
    for measure in measures_of(before, after):
        values = [look_up(side, *measure.path) for side in (before, after)]
        change, verdict = Cell(NO_VALUE), ""
        if all(is_number(value) for value in values):
            paired = reward_change if measure.path == ("reward", "mean") else None
            difference = paired["mean"] if paired else values[1] - values[0]
            change = Cell(_change(difference, measure), _interval(paired and paired["ci95"], measure, "+"))
            verdict = _verdict(difference, measure) if paired and is_clear(paired) else ""
        lines.append(Line(measure.label, cell(measure, before), cell(measure, after), change, verdict))
    return lines


def _change(difference: float, measure: Measure) -> str:
    return _number(difference, measure, "+").replace("%", "pp")


def _verdict(difference: float, measure: Measure) -> str:
    if abs(difference) < 0.0005 or not measure.direction:  # 0.000 in the table, which prints three decimals
        return ""
    return "better" if difference * measure.direction > 0 else "worse"


def measurement_table(metrics: Mapping[str, Any]) -> str:
    """Format one evaluation, with a column for each sampling."""
    samplings = [name for name in SAMPLINGS if name in metrics]
    rows = [["", *samplings]]
    for measure in measures_of(*(metrics[name] for name in samplings)):
        cells = [cell(measure, metrics[name]) for name in samplings]
        if any(entry.text != NO_VALUE for entry in cells):
            rows.append([measure.label, *map(str, cells)])
    policy = metrics["policy"]
    version = f"run {policy['run_id']}, version {policy['version']}" if policy["run_id"] else "as it was loaded"
    spending = paid_line(metrics.get("paid", {}))
    text = f"\nTutor: {metrics['tutor']} ({version}), {metrics['problems']} problems\n\n{align(rows)}"
    readings = [line for name in samplings for line in reading_lines(metrics[name])]
    notes = [
        line for line in (*dict.fromkeys(readings), supervised_line(metrics.get(DIFFERENCE, {})), spending) if line
    ]
    return "\n\n".join([text, *notes])


def reading_lines(metrics: Mapping[str, Any]) -> list[str]:
    """How far the move classifiers agree with people, from a sampling's entry of metrics.json; [] without any."""
    readings = metrics.get("readings")
    if readings is None:
        return []
    trusted = [f"{label}: {Trust.of_json(entry['trust'])}" for label, entry in readings["labels"].items()]
    agreed = "which agreed so far with those who labelled their data"
    return [f"Read by trained readers ({readings['version']}), {agreed}. {'; '.join(trusted)}."]


def reading_lines_of_run(data: RunData) -> list[str]:
    """`reading_lines` of all evaluations of a run, each line once."""
    samplings = [side.metrics[name] for side in data.measurements.values() for name in side.samplings]
    return [*dict.fromkeys(line for metrics in samplings for line in reading_lines(metrics))]


def supervised_line(difference: Mapping[str, Any]) -> str:
    """A sentence on the change of the reward with a supervisor, from an entry of metrics.json; "" if one of the two
    samplings is missing."""
    pair = difference.get("reward")
    if pair is None or pair["mean"] is None:
        return ""
    note = f"p{format_p(pair['p'])}, {pair['lessons']} lessons"
    change = change_cell(MEASURES[0], pair["mean"], pair["ci95"], note)
    return f"Reward with the supervisor against without it, lesson by lesson: {change}."


def format_p(p: float) -> str:
    """Format a p-value to follow the letter p: " = 0.031", " < 0.001"."""
    return " < 0.001" if p < 0.001 else f" = {p:.3f}"


def paid_line(paid: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence on the tokens and dollars spent on models behind an API; "" if none was asked."""
    spending = [
        f"{name} {tokens['prompt_tokens']:,} + {tokens['completion_tokens']:,} tokens, ${tokens['cost_usd']:.4f}"
        + (
            f" (and up to ${tokens['reserved_usd']:.4f} for requests whose fate is unknown)"
            if tokens["reserved_usd"]
            else ""
        )
        for name, tokens in paid.items()
    ]
    return f"Paid for: {'; '.join(spending)}." if spending else ""


def compare_run(data: RunData) -> dict[str, list[Line]]:
    """Sampling → the rows of a run; {} if the run has no evaluation. A value that was measured only before or only
    after training has a dash on the other side."""
    changes = data.reward_changes()
    names = dict.fromkeys(name for measurement in data.measurements.values() for name in measurement.samplings)
    sides = [side.metrics if side is not None else {} for side in (data.before, data.after)]
    return {name: compare(*(side.get(name, {}) for side in sides), changes.get(name)) for name in names}


def supervised_lines_of_run(data: RunData) -> list[str]:
    """A sentence on the change of the reward with a supervisor, for each evaluation of a run that was also
    supervised."""
    sentences = {when: supervised_line(side.metrics.get(DIFFERENCE, {})) for when, side in data.measurements.items()}
    return [f"{when.capitalize()} training. {line}" for when, line in sentences.items() if line]


def comparison_table(data: RunData) -> str:
    """Format both evaluations of a run, one block for each sampling; "" if the run has none."""
    blocks = []
    for sampling, lines in compare_run(data).items():
        rows = [[f"Held-out lessons, {sampling}", "before", "after", "change"]]
        rows += [
            [line.label, str(line.before), str(line.after), str(line.change)] for line in lines if not line.is_empty
        ]
        blocks.append(align(rows))
    return "\n\n".join([*blocks, *reading_lines_of_run(data), *supervised_lines_of_run(data)])


def align(rows: Sequence[Sequence[str]]) -> str:
    """Pad the columns to equal width, with a line under the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def causes_text(failures: Mapping[str, int]) -> str:
    """Failures by cause, such as "2 too long"; "0" without any."""
    return ", ".join(f"{count} {cause}" for cause, count in failures.items()) or "0"


def estimate_text(estimate: Mapping[str, Any] | None, key: str, form: str = ".2f") -> str:
    """The figure `key` of an estimate with its interval `ci95`, if it has one."""
    if estimate is None or estimate[key] is None:
        return NO_VALUE
    return f"{estimate[key]:{form}} {interval_text(estimate['ci95'], form)}".rstrip()


def interval_text(interval: Sequence[float] | None, form: str) -> str:
    """An interval in brackets; "" for None."""
    return "" if interval is None else f"[{interval[0]:{form}}, {interval[1]:{form}}]"
