"""Makes maths problems with steps and siblings from templates: the same text and formulas, other numbers.

python -m classroom_rl.judges.post_test.sibling_templates --templates data/maths_siblings/templates/train.jsonl \
    --out my_problems.jsonl [--problems 4] [--siblings 3] [--seed 42]

A template is a line of JSON: `problem` (the text, with {names} for numbers), `numbers` (name → [least, most]), `steps`
(each a name and a formula) and `answer` (a formula); with `whole: false` values may have two decimals. Formulas are
computed by the calculator of the tools; no text is run as code.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.rollout.tools.calculator_worker import Mistake, compute

_TRIES = 10_000
_NAME = re.compile(r"\{([a-z]+)\}")
_WORD = re.compile(r"\b[a-z]+\b")
_VALUE = re.compile(r"\d+(?:\.\d{1,2})?")
"""Values that a problem may have: whole, or with up to two decimals."""

Text = Annotated[str, Field(min_length=1)]


class StepTemplate(BaseModel):
    """A step: its name, the same in all siblings, and how it is computed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    name: Text
    formula: Text


class ProblemTemplate(BaseModel):
    """A problem without its numbers; `whole` says that the values of its steps and its answer are whole numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    id: Text
    problem: Text
    numbers: dict[Text, Annotated[tuple[int, int], Field(strict=False)]]
    steps: Annotated[tuple[StepTemplate, ...], Field(strict=False)]
    answer: Text
    whole: bool = True


def read_templates(path: Path) -> list[ProblemTemplate]:
    """The templates of a JSONL file.

    Raises:
        DataError: if there is no such file, or a line is no template; the message names file and line.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    templates = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                templates.append(ProblemTemplate.model_validate_json(line))
            except ValidationError as error:
                raise DataError(f"{path}: line {number} is no template: {error}") from error
    return templates


def make_rows(template: ProblemTemplate, problems: int, siblings: int, seed: int) -> list[dict]:
    """Rows of a dataset: `problems` problems from one template, each with `siblings` siblings. No text occurs twice.

    Raises:
        DataError: if the template names a number that it does not give, a formula cannot be computed, or its ranges
            hold too few good numbers.
    """
    drawn = _draw(template, problems * (1 + siblings), random.Random(f"siblings|{seed}|{template.id}"))
    rows = []
    for number in range(problems):
        own, *others = drawn[number * (1 + siblings) : (number + 1) * (1 + siblings)]
        rows.append({"id": f"{template.id}-{number + 1}", **own, "sibling_problems": others})
    return rows


def _draw(template: ProblemTemplate, count: int, rng: random.Random) -> list[dict]:
    """Distinct problems of a template."""
    found: dict[str, dict] = {}
    for _ in range(_TRIES):
        if len(found) == count:
            return list(found.values())
        numbers = {name: rng.randint(*ends) for name, ends in template.numbers.items()}
        problem = _filled(template, numbers)
        if problem is not None:
            found.setdefault(problem["problem"], problem)
    raise DataError(
        f"The template {template.id} gave {len(found)} problems with good numbers in {_TRIES} draws, and {count} are "
        "wanted: widen the ranges in numbers."
    )


def _filled(template: ProblemTemplate, numbers: Mapping[str, int]) -> dict | None:
    """The problem with these numbers; None if a value is not positive, long or not whole, or two of its quantities are
    equal, so that nobody could tell which of them was named."""
    steps = [{"name": step.name, "value": _value(step.formula, numbers)} for step in template.steps]
    answer = _value(template.answer, numbers)
    values = [*(step["value"] for step in steps), answer]
    if not all(_VALUE.fullmatch(value) and float(value) > 0 for value in values):
        return None
    if template.whole and "." in "".join(values):
        return None
    quantities = [float(value) for value in values] + [float(number) for number in numbers.values()]
    if len(set(quantities)) < len(quantities):
        return None
    text = _NAME.sub(lambda found: str(_number(found[1], numbers, template.problem)), template.problem)
    return {"problem": text, "answer": answer, "steps": steps}


def _value(formula: str, numbers: Mapping[str, int]) -> str:
    written = _WORD.sub(lambda found: f"({_number(found[0], numbers, formula)})", formula)
    try:
        return compute(written)
    except Mistake as mistake:
        raise DataError(f"The formula {formula!r} cannot be computed: {mistake}.") from mistake


def _number(name: str, numbers: Mapping[str, int], where: str) -> int:
    if name not in numbers:
        raise DataError(f"{where!r} names {name}, and the template gives: {', '.join(numbers)}.")
    return numbers[name]


def dataset(templates: Sequence[ProblemTemplate], problems: int, siblings: int, seed: int) -> Iterator[str]:
    """The lines of a dataset, as JSON. Raises as `make_rows` does."""
    for template in templates:
        for row in make_rows(template, problems, siblings, seed):
            yield json.dumps(row, ensure_ascii=False)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m classroom_rl.judges.post_test.sibling_templates",
        description="Make maths problems with siblings.",
    )
    parser.add_argument("--templates", type=Path, required=True, help="a JSONL file of templates")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--problems", type=int, default=4, help="problems from each template (4)")
    parser.add_argument("--siblings", type=int, default=3, help="siblings of each problem (3)")
    parser.add_argument("--seed", type=int, default=42)
    given = parser.parse_args()
    try:
        lines = list(dataset(read_templates(given.templates), given.problems, given.siblings, given.seed))
    except ClassroomError as error:
        parser.exit(2, f"error: {error}\n")
    given.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{given.out}: {len(lines)} problems")


if __name__ == "__main__":
    main()
