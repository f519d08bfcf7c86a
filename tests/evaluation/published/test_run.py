"""What benchmarks refuse before anything is asked, and what their configurations mean."""

from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.published.mrbench import DIMENSIONS
from classroom_rl.evaluation.run import evaluate
from tests.evaluation.published.conftest import on_mathdial
from tests.support.configs import loaded
from tests.support.judge_endpoint import JudgeEndpoint

REFUSED = [
    (
        "mrbench",
        ["benchmark.name=mrbunch"],
        "benchmark.name is mrbunch; it must be one of mrbench, bea2025, mathdial, mathtutorbench",
    ),
    ("mrbench", ["benchmark.path=''"], "benchmark.path is empty"),
    ("mrbench", ["benchmark.max_dialogues=0"], "benchmark.max_dialogues is 0; it must be at least 1, or -1 for all"),
    ("mrbench", ["benchmark.max_dialogues=-2"], "benchmark.max_dialogues is -2"),
    ("mrbench", ["benchmark.tasks=[mistake_location]"], "only mathtutorbench has tasks"),
    ("mrbench", ["~benchmark.prompts_paths.judge"], "benchmark.prompts_paths has no template for judge"),
    ("mrbench", ["judges=[]"], "judges is empty; name who is compared with people"),
    (
        "mrbench",
        ["judges=[{model_name_or_path: rubric}]"],
        "judges has rubric, which reads lessons of the quickstart only",
    ),
    ("mrbench", ["judges=[{model_name_or_path: some/model}]"], "judges has some/model, a model for an engine"),
    ("mrbench", ["judges=[{model_name_or_path: rules}, {model_name_or_path: rules}]"], "judges has rules twice"),
    ("mrbench", ["judges=[{model_name_or_path: a, base_url: 'ftp://x'}]"], "judges.base_url .*must begin with http"),
    ("mrbench", ["tutors=[{name: a, model_name_or_path: x}]"], "tutors is set beside benchmark"),
    ("mrbench", ["extra_judges=[{model_name_or_path: rules}]"], "extra_judges is set beside benchmark"),
    ("mrbench", ["supervisor_model={model_name_or_path: rules}"], "supervisor_model is set beside benchmark"),
    ("mathtutorbench", ["benchmark.tasks=[]"], r"benchmark.tasks is \[\]; it must name one or more of problem_solving"),
    ("mrbench", ["benchmark.is_chat=true"], "only mathtutorbench has is_chat"),
    ("mathtutorbench", ["benchmark.reward_url=localhost:8000"], "benchmark.reward_url is 'localhost:8000'"),
    ("mathtutorbench", ["benchmark.tasks=[mistake_location,mistake_location]"], "each once"),
    ("mathtutorbench", ["benchmark.prompts_paths={solving: a.txt}"], "names solving; of mathtutorbench it names tasks"),
    ("mathtutorbench", ["judges=[{model_name_or_path: rules}]"], "no judge takes part in mathtutorbench"),
    ("mathtutorbench", ["server_url=localhost:8005"], "server_url is 'localhost:8005'"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSED)
def test_a_benchmark_that_cannot_be_measured_is_refused(name: str, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        loaded("eval", "--config-name", name, *overrides)


def test_nothing_is_filled_in_for_a_benchmark_and_its_tilde_is_a_home():
    config = loaded("eval", "--config-name", "mrbench", "benchmark.path=~/a.json")
    assert config.generation.judges_rules_prompts_paths == {} and config.dataset.eval_datasets == []
    assert config.benchmark.path == str(Path.home() / "a.json")


def test_a_missing_prompt_is_found_before_anything_is_asked(tmp_path: Path, mathdial: str, asking: JudgeEndpoint):
    config = on_mathdial(tmp_path / "run", mathdial, asking, "benchmark.prompts_paths.judge=nowhere.txt")
    with pytest.raises(DataError, match=r"There is no prompt template nowhere\.txt in "):
        evaluate(config)
    assert not asking.calls


def test_the_prompt_asks_for_what_is_read():
    text = (ROOT / "prompt_templates/benchmarks/mrbench_judge.txt").read_text(encoding="utf-8")
    for name, dimension in DIMENSIONS.items():
        offered = text.split(f'  "{name}": "')[1].split('"')[0]
        assert sorted(offered.split(" | ")) == sorted(dimension.answers), name
