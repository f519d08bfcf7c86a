"""`classroom-rollouts`: from a dataset to a file of rollouts, and what a stranger is told."""

from pathlib import Path

import pytest

from classroom_rl import RolloutSet
from classroom_rl.launch.rollouts import main
from tests.support.judge_endpoint import JudgeEndpoint, fails, judge_endpoint, says

FUNCTIONS = """
def next_prompt(rollout, step):
    return f"Question {step}."


async def stop(rollout, last):
    return "four" if rollout.meta["answer"] == "4" and last.index == 1 else False


def reward(rollout):
    return float(rollout.terminated)
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"problem": "2 + 2?", "answer": "4"}\n{"problem": "2 + 3?", "answer": "5"}\n')
    (tmp_path / "task.py").write_text(FUNCTIONS)
    return path


def test_a_dataset_becomes_a_file_of_rollouts(tiny_model: Path, data: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out/played.parquet"
    status = main(
        [
            *("--model", str(tiny_model), "--device", "cpu", "--data", str(data), "--answer-column", "answer"),
            *("--functions", str(tmp_path / "task.py"), "--copies", "2", "--steps", "3", "--max-tokens", "4"),
            *("--seed", "3", "--history", "with_thinking", "--system", "Be brief.", "--temperature", "0.8"),
            *("--out", str(out), "--plots", str(tmp_path / "plots")),
        ]
    )
    captured = capsys.readouterr()
    rollouts = RolloutSet.load(out)
    assert status == 0 and "4 rollouts on 2 prompts" in captured.out and "2 stop (four)" in captured.out
    assert [(rollout.id, len(rollout.steps), rollout.reward) for rollout in rollouts] == [
        ("0-0", 2, 1.0),
        ("0-1", 2, 1.0),
        ("1-0", 3, 0.0),
        ("1-1", 3, 0.0),
    ]
    assert rollouts[0].opening[0]["content"] == "Be brief." and rollouts[0].settings.temperature == 0.8
    assert len(rollouts.rows()) == 4 and (tmp_path / "plots/steps.png").is_file()


def behind(endpoint: JudgeEndpoint) -> list[str]:
    return ["--engine", "api", "--base-url", endpoint.url, "--api-key-env", "", "--model", "m"]


def test_a_model_behind_an_api_is_one_option_away(data: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "played.jsonl"
    with judge_endpoint(lambda body, nth: says("4")) as endpoint:
        status = main([*behind(endpoint), "--data", str(data), "--limit", "1", "--out", str(out), "--quiet"])
    assert status == 0 and [rollout.answer for rollout in RolloutSet.load(out)] == ["4"]
    with judge_endpoint(lambda body, nth: fails(422)) as endpoint:
        assert main([*behind(endpoint), "--data", str(data), "--quiet"]) == 1, "all failed"


def test_what_was_played_before_an_error_is_saved(data: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "task.py").write_text("def next_prompt(rollout, step):\n    return [][step]\n")
    out = tmp_path / "played.jsonl"
    with judge_endpoint(lambda body, nth: says("4")) as endpoint:
        functions = ["--functions", str(tmp_path / "task.py"), "--out", str(out), "--quiet"]
        status = main([*behind(endpoint), "--data", str(data), "--limit", "1", *functions])
    assert status == 2 and "next_prompt raised an error in rollout 0-0 at step 1: IndexError" in capsys.readouterr().err
    assert len(RolloutSet.load(out)[0].steps) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "nothing.jsonl"], "no file nothing.jsonl"),
        (["--functions", "nothing.py"], "nothing.py, which is no Python file"),
        (["--functions", "broken.py"], "broken.py cannot be run: NameError"),
        (["--functions", "empty.py"], "empty.py defines none of next_prompt, stop, reward"),
        (["--out", "a.pkl"], "must end with .jsonl or .parquet"),
        (["--model", "nothing/at/all"], "nothing/at/all"),
        (["--problem-column", "question"], "has no column question"),
        (["--copies", "0"], "copies is 0"),
    ],
)
def test_a_mistake_is_named(
    options: list[str], words: str, tiny_model: Path, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("next_promt\n")
    Path("empty.py").write_text("a = 1\n")
    status = main(["--model", str(tiny_model), "--device", "cpu", "--data", str(data), "--quiet", *options])
    assert status == 2 and words in capsys.readouterr().err


def test_help_explains_the_functions(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    for words in ("def next_prompt(rollout, step)", "--engine", "--copies", "classroom-rollouts --model"):
        assert words in output
