"""No file of this project runs code from strangers: no eval, no pickle, no code of models or datasets."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.trainer import model_loading
from classroom_rl.trainer.arguments import training_arguments
from classroom_rl.trainer.model_loading import load_policy
from tests.launch.test_setup import source_files

FILES = [path for path in source_files() if path.relative_to(ROOT).parts[0] != "tests"]
MODULES = {"cloudpickle", "code", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve", "_pickle"}
"""Modules that turn bytes into running code."""
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle"}
LOADERS = {"AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModel"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of names, else what is left of it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def breaches(tree: ast.AST) -> Iterator[str]:
    """What a file does that it may not."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        yield from (f"imports {name}" for name in names if name.partition(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            yield from breaches_of_a_call(dotted(node.func), {keyword.arg: keyword.value for keyword in node.keywords})


def breaches_of_a_call(name: str, options: dict[str, ast.expr]) -> Iterator[str]:
    def given(option: str) -> object:
        return getattr(options.get(option), "value", None)

    if name in BUILTINS | CALLS:
        yield f"calls {name}"
    if name == "torch.load" and given("weights_only") is not True:
        yield "calls torch.load without weights_only=True"
    if "trust_remote_code" in options and given("trust_remote_code") is not False:
        yield "trusts remote code"
    if name.rpartition(".")[0].rpartition(".")[2] in LOADERS and given("trust_remote_code") is not False:
        yield f"calls {name} without trust_remote_code=False"
    if name.endswith("AutoModelForCausalLM.from_pretrained") and given("use_safetensors") is not True:
        yield f"calls {name} without use_safetensors=True"
    if given("shell") or given("allow_pickle") or given("unsafe_load"):
        yield f"calls {name} with shell or pickle"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    assert list(breaches(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import dill.source",
        "eval('1')",
        "exec(text)",
        "__import__(name)",
        "os.system(command)",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoTokenizer.from_pretrained(name)",
        "transformers.AutoConfig.from_pretrained(name, trust_remote_code=True)",
        "AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)",
        "GRPOConfig(trust_remote_code=config.trust)",
        "subprocess.run(command, shell=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_what_may_not_be_is_found(line: str) -> None:
    assert len(list(breaches(ast.parse(line)))) >= 1


def test_models_are_loaded_without_their_code_and_from_safetensors(world: Path, tmp_path: Path, monkeypatch) -> None:
    """The policy and its reference."""
    config = load(TrainRLConfig, "train_rl", [f"teacher_model.model_name_or_path={world / 'blank'}", "train.beta=0.1"])
    loaded, make = [], model_loading.create_model_from_path
    monkeypatch.setattr(
        model_loading, "create_model_from_path", lambda *own, **options: loaded.append(options) or make(*own, **options)
    )
    load_policy(config, training_arguments(config, tmp_path))
    assert [(options["trust_remote_code"], options["use_safetensors"]) for options in loaded] == [(False, True)] * 2
