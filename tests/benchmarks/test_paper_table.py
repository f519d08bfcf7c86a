"""PedagogicalRL's table: what its arms are, what runs and what is left out, what the files of LightEval say, and all of
it with real engines."""

import json
import sys
from itertools import count
from pathlib import Path

import pytest

from benchmarks import paper_table
from benchmarks.paper_table import percent, read_lighteval, seconds_per_step
from classroom_rl.config.load import ROOT
from classroom_rl.config.values import LEAK_RULE, PEDAGOGY_RULE
from classroom_rl.errors import DataError
from classroom_rl.launch.quickstart import StageFailed
from classroom_rl.system.processes import free_port
from tests.support.configs import loaded
from tests.support.judge_endpoint import Behaviour, judge_endpoint, says
from tests.trainer.test_language_tutor_run import with_long_context

GAIN = {"mean": 0.125, "ci95": [0.05, 0.2], "n": 6}
ARGUMENTS = ["--config-name", "maths_small", "teacher_model.model_name_or_path=base/model", "eval.seed=7"]


def lighteval_file(folder: Path, entries: dict, name: str = "results_2026-01-01T00-00-00.json") -> Path:
    path = folder / "results" / "model" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"config_general": {"total_evaluation_time_secondes": "7.5"}, "results": entries}))
    return path


class Programs:
    """Stands for the programs that the command starts: leaves the files that each of them leaves.

    Attributes:
        started: the arguments of each, in order.
        fails: a word; a program with it in its name fails.
    """

    def __init__(self, folder: Path):
        self.folder, self.started, self.fails = folder, [], ""

    def run(self, name: str, command: list[str], log: Path, signals: object) -> None:
        self.started.append((name, list(command)))
        if self.fails and self.fails in name:
            raise StageFailed(type("Child", (), {"name": name, "log": log}), 3)
        kind, _, arm = name.rpartition(" ")
        if kind == "training":
            (self.folder / arm / "learning.json").write_text("{}")
            lines = [{"step": step, "time": 36.0 * step} for step in range(1, 101)]
            (self.folder / arm / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        elif kind == "eval":
            rules = {LEAK_RULE: {"mean": 0.25, "ci95": None, "n": 4}, PEDAGOGY_RULE: GAIN}
            metrics = {"seconds": 3600.0, "sampled": {"solve_rate": {"gain": GAIN}, "rejecting_attempts": rules}}
            (self.folder / arm / "eval" / "metrics.json").write_text(json.dumps(metrics))
        else:
            output = Path(command[command.index("--output-dir") + 1])
            lighteval_file(output, {command[3]: {"em": 0.5, "em_stderr": 0.1}})


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    fake_programs = Programs(tmp_path / "table")
    monkeypatch.setattr(paper_table, "run_program", fake_programs.run)
    monkeypatch.setattr(paper_table, "why_unfit", lambda command: "")
    return fake_programs


def run(programs: Programs, *arguments: str) -> int:
    return paper_table.main(["--folder", str(programs.folder), *ARGUMENTS, *arguments])


def test_an_arm_is_trained_and_measured_as_its_name_says(programs: Programs) -> None:
    engine = "teacher_model.vllm={max_length: 9000, max_num_seqs: 8}"
    assert run(programs, "--arms", "0.50,hard-1-think", "generation.max_turns=5", engine) == 0
    overrides = {name: arguments[3:] for name, arguments in programs.started}
    assert list(overrides) == [
        f"{kind} {arm}"
        for kind, arm in (
            ("eval", "base"),
            *((kind, arm) for arm in ("0.5", "hard-1-think") for kind in ("training", "eval")),
        )
    ]
    for arm, soft, penalty, thinks in (("0.5", True, 0.5, False), ("hard-1-think", False, 1.0, True)):
        training, measured = (
            loaded("train_rl", *overrides[f"training {arm}"]),
            loaded("eval", *overrides[f"eval {arm}"]),
        )
        generation = training.generation
        assert (generation.ignore_rejected_judge, generation.extra_penalty_for_rejected_judges) == (soft, penalty)
        for config, seed in ((training, 42), (measured, 7)):
            assert config.generation.use_thinking == config.generation.force_thinking == thinks
            assert (config.generation.max_turns, config.seed) == (5, seed)
            assert config.teacher_model.vllm.max_length == 9000, "a whole group is one override, and goes to both"
        assert training.logging.save_dir == str(programs.folder / arm)
        assert measured.teacher_model.model_name_or_path == str(programs.folder / arm / "model")
        assert measured.generation.ignore_rejected_judge, "an evaluation solves after rejected conversations, too"
    base = loaded("eval", *overrides["eval base"])
    assert (base.teacher_model.model_name_or_path, base.generation.use_thinking) == ("base/model", False)


def test_it_goes_on_where_it_was_stopped_and_prints_the_published_rows(programs: Programs, capsys) -> None:
    tools = ["--arms", "hard-1,hard-1-think", "--lighteval", sys.executable]
    programs.fails = "eval hard-1-think"
    assert run(programs, *tools) == 3
    printed = capsys.readouterr().out
    assert printed.count("; 0 of 100 steps done; hours on the CPU: unknown") == 2, printed
    assert "| λ: hard-1-think | not measured | not measured | not measured | not run |" in printed
    programs.fails, programs.started = "", []
    assert run(programs, *tools) == 0
    assert [name for name, _ in programs.started] == ["eval hard-1-think"] + [
        f"LightEval {task} {arm}" for arm in ("base", "hard-1", "hard-1-think") for task in paper_table.TASKS
    ]
    commands = {name: command for name, command in programs.started if name.startswith("LightEval")}
    assert commands["LightEval MMLU hard-1"][3] == "mmlu|5"
    assert f"model_name={programs.folder / 'hard-1' / 'model'}," in commands["LightEval MMLU hard-1"][2]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("finished") for line in lines) == 4
    assert any("eval              hard-1-think runs; hours on the CPU: 1.00" in line for line in lines), lines
    rows = [line for line in lines if line.startswith("|")][2:]
    measured = "| +12.5 [+5.0, +20.0] | 25.0 (n = 4) | 87.5 [80.0, 95.0] | 50.0 (em) | 50.0 (em) | 50.0 (em) |"
    assert rows == [
        f"| base {measured}",
        "| base, published | +11.3 | 29.3 | – | – | – | – |",
        f"| λ: hard-1 {measured}",
        f"| λ: hard-1-think {measured}",
        "| λ: hard-1-think, published | +20.5 | 6.9 | – | – | – | – |",
    ]
    results = json.loads((programs.folder / "results.json").read_text())
    assert results["arms"]["base"]["helpful"] == {"mean": 87.5, "ci95": [80.0, 95.0], "n": 6}
    programs.started = []
    assert run(programs, *tools) == 0 and not programs.started
    assert run(programs, *tools, "generation.max_turns=5") == 2, "results of other settings are not taken for these"


def test_what_does_not_fit_is_not_started_and_what_is_measured_gives_the_hours(
    programs: Programs, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(paper_table, "why_unfit", lambda command: "too large" if "launch.cli" in str(command) else "")
    like = programs.folder.parent / "like"
    like.mkdir()
    (like / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "time": {seconds}}}\n' for step, seconds in enumerate((0, 90, 100, 190)))
    )
    arguments = ["--arms", "1", "--like", str(like)]
    assert run(programs, *arguments) == 0 and not programs.started
    printed = capsys.readouterr().out
    assert "training          1            not run (1); 0 of 100 steps done; hours on the CPU: 1.39" in printed
    # With GPUs the base may fit although no training does.
    monkeypatch.setattr(paper_table, "like_gpus", lambda: [80 << 30] * 4)
    assert run(programs, *arguments) == 0
    assert [name for name, _ in programs.started] == ["eval base"]
    printed = capsys.readouterr().out
    assert "GPU hours: 5.56" in printed and "(2) its tutor is not trained" in printed
    assert run(programs, *arguments, "--plan") == 0 and len(programs.started) == 1


def test_a_dry_run_says_what_does_not_fit(tmp_path: Path) -> None:
    warning = "# warning: A machine with 2 GiB of memory cannot hold what server and trainer need of it: 9 GiB."
    for text, status, expected in (
        (f"# memory\n{warning}\n# more", 0, warning.removeprefix("# warning: ")),
        ("# warning: the batch is small", 0, ""),
        ("", 2, "no such model"),
    ):
        program = f"import sys; print({text!r}); print('no such model', file=sys.stderr); sys.exit({status})"
        assert paper_table.why_unfit([sys.executable, "-c", program]) == expected


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--arms=1,soft", "name each λ once"),
        ("--arms=1,1.0", "name each λ once"),
        ("generation.extra_penalty_for_rejected_judges=1", "--arms sets λ"),
        ("eval.logging.save_dir=a", "--folder the folder"),
        ("--lighteval=/no/such/program", "no such program"),
        ("train.no_such_key=1", "no_such_key"),
        ("eval.no_such_key=1", "no_such_key"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(argument: str, message: str, programs: Programs, capsys) -> None:
    assert run(programs, argument) == 2 and not programs.started
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "task", "value"),
    [
        ({"gsm8k|4": {"em": 0.5, "em_stderr": 0.1}, "all": {"em": 0.1}}, "gsm8k|4", 50.0),
        ({"lighteval|gsm8k|4": {"qem_stderr": 0.1, "qem": 0.25}}, "gsm8k|4", 25.0),
        ({"math_500|0": {"pass@k:k=1&n=1": 0.75}}, "math_500|0", 75.0),
        ({"mmlu:anatomy|5": {"em": 0.0}, "mmlu:_average|5": {"em": 0.5}}, "mmlu|5", 50.0),
        ({"mmlu:anatomy|5": {"em": 0.0}, "all": {"em": 0.5}}, "mmlu|5", None),
        ({}, "mmlu|5", None),
    ],
)
def test_a_file_of_lighteval_is_read(entries: dict, task: str, value: float | None, tmp_path: Path) -> None:
    path = lighteval_file(tmp_path, entries)
    if value is None:
        with pytest.raises(DataError, match="no result of mmlu"):
            read_lighteval(path, task)
    else:
        result = read_lighteval(path, task)
        assert (result["value"], result["seconds"]) == (value, 7.5)


def test_figures_without_values_and_without_steps(tmp_path: Path) -> None:
    assert percent(None) is None and percent({"mean": None, "ci95": None, "n": 0}) is None
    assert percent({"mean": 1.0, "ci95": None, "n": 1}, rest=True) == {"mean": 0.0, "ci95": None, "n": 1}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 3}\n{"step": 2, "time": 5}\n')
    assert seconds_per_step(tmp_path, 1) == 2.0 and seconds_per_step(tmp_path, 2) is None


LIGHTEVAL = """#!{python}
import json, pathlib, sys
kind, model, task, flag, folder = sys.argv[1:]
assert kind in ("accelerate", "vllm") and flag == "--output-dir"
assert pathlib.Path(model.split(",")[0].removeprefix("model_name="), "config.json").is_file()
path = pathlib.Path(folder, "results", "model", "results_2026-01-01T00-00-00.json")
path.parent.mkdir(parents=True)
path.write_text(json.dumps({{"results": {{task: {{"em": 0.5}}}}}}))
"""


@pytest.mark.full
@pytest.mark.engines
def test_a_table_of_a_tiny_tutor_with_real_engines(world: Path, tmp_path: Path, capsys) -> None:
    """Everything but LightEval is real; the judge is an endpoint on this machine."""
    model = with_long_context(world / "blank", tmp_path / "model")
    tool = tmp_path / "lighteval"
    tool.write_text(LIGHTEVAL.format(python=sys.executable))
    tool.chmod(0o755)

    requests = count()

    def judge(body: dict, nth: int) -> Behaviour:
        return says(json.dumps({"reasoning": "none", "decision": "REJECT" if next(requests) % 4 == 0 else "OK"}))

    engine = "{max_length: 8192, max_num_seqs: 8, dtype: float32, enforce_eager: true, cpu_kvcache_gib: 1, "
    engine += "number_of_gpus_per_instance: 1}"  # the evaluation is meant for two
    with judge_endpoint(judge) as endpoint:
        arguments = [
            *("--folder", str(tmp_path / "table"), "--config-name", "maths_small", "--lighteval", str(tool)),
            *(f"{role}_model.vllm={engine}" for role in ("teacher", "student")),
            *(f"{role}_model.model_name_or_path={model}" for role in ("teacher", "student")),
            f"judge_model.base_url={endpoint.url}",
            f"dataset.eval_datasets=[{{name_or_path: {ROOT / 'data/maths/test.jsonl'}}}]",
            "dataset.max_val_examples=6",
            "score_using_pedagogical_reward=false",
            f"generation.server_port={free_port()}",
            "generation.max_turns=3",
            "generation.max_tokens_in_conversation=8000",
            "generation.max_tokens_per_turn=24",
            "generation.max_tokens_per_student_attempt=24",
            "generation.number_student_attempts=2",
            "generation.number_judge_attempts=1",
            "train.number_of_problems_per_batch=2",
            "train.num_samples_per_problem=2",
            "train.per_device_train_batch_size=2",
            "train.max_steps=1",
            "train.mu=1",
            "train.optimizer=adamw_torch",
            "train.dtype=float32",
        ]
        assert paper_table.main([*arguments, "--arms", "hard-1"]) == 0
        arms = json.loads((tmp_path / "table" / "results.json").read_text())["arms"]
        assert list(arms) == ["base", "hard-1"]
        for figures in arms.values():
            assert figures["solve_rate_gain"]["n"] == figures["leaked"]["n"] == figures["helpful"]["n"] == 6
            assert 0 < figures["leaked"]["mean"] + 100 - figures["helpful"]["mean"] < 100, "some were rejected"
            assert [task["value"] for task in figures["lighteval"].values()] == [50.0] * 3
        calls = len(endpoint.calls)
        capsys.readouterr()
        assert paper_table.main([*arguments, "--arms", "hard-1"]) == 0
        assert len(endpoint.calls) == calls and capsys.readouterr().out.count("finished") == 9
