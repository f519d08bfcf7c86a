"""Which YAML a program takes, what it may build on, and files and overrides that no run needs."""

import subprocess
import sys

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.config.compose import DEEPEST, LARGEST_FILE, MOST_VALUES, _override, quoted
from classroom_rl.config.load import ROOT, command_line
from classroom_rl.errors import ConfigError
from classroom_rl.launch.cli import main as launcher
from tests.support.configs import BASE, PROGRAMS, loaded_text, own_file, training
from tests.support.programs import run_program


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_file_of_ones_own_comes_before_the_shipped_one_of_its_name_and_is_named(program, tmp_path):
    folder = program.removesuffix(".py").replace("vllm_server", "train_rl")
    shipped = (ROOT / "config" / folder / "quickstart.yaml").read_text(encoding="utf-8")
    arguments = own_file(tmp_path, f"{shipped}\nseed: 8\n", "quickstart")
    result = run_program(program, *arguments, "dry_run=true")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["seed"] == 8
    assert result.stdout.startswith(f"# configuration: {tmp_path / 'quickstart.yaml'}\n")
    assert f"configuration: {tmp_path / 'quickstart.yaml'}" in result.stderr, "as at every start"
    assert command_line(folder, arguments).file == tmp_path / "quickstart.yaml"
    assert command_line(folder, arguments[2:]).file == ROOT / "config" / folder / "quickstart.yaml"


def test_the_launcher_takes_the_same_file_and_names_it(tmp_path, capsys):
    text = (ROOT / "config/train_rl/quickstart.yaml").read_text(encoding="utf-8")
    arguments = own_file(tmp_path, f"{text}\nseed: 8\n", "quickstart")
    assert launcher([*arguments, "dry_run=true"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"# configuration: {tmp_path / 'quickstart.yaml'}\n") and "\nseed: 8\n" in output


def test_a_file_may_build_on_others_of_its_folder_and_on_shipped_ones(tmp_path):
    own_file(tmp_path, f"{BASE}seed: 8\n", "base")
    arguments = own_file(tmp_path, "defaults: [base, _self_]\ntrain: {mu: 3}\n", "mine")
    config = training(*arguments)
    assert (config.seed, config.train.mu, config.judge_model.model_name_or_path) == (8, 3, "rubric")


def test_a_file_that_builds_on_its_own_name_is_told_to_take_another(tmp_path):
    arguments = own_file(tmp_path, f"{BASE}seed: 8\n", "quickstart")
    with pytest.raises(ConfigError, match="names itself in its defaults.*Give yours another name"):
        training(*arguments)


def test_files_that_build_on_each_other_are_refused(tmp_path):
    own_file(tmp_path, "defaults: [second]\n", "first")
    with pytest.raises(ConfigError, match="lead back to where they began"):
        training(*own_file(tmp_path, "defaults: [first]\n", "second"))


@pytest.mark.parametrize("name", ["mine[1]", "mine*", "mine?", "a b", "ü"])
def test_a_name_is_no_pattern(tmp_path, name):
    own_file(tmp_path, f"{BASE}seed: 9\n", "mine1")
    assert training(*own_file(tmp_path, f"{BASE}seed: 8\n", name)).seed == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-name", "a" * 300], "--config-name is aaaa.*name has at most 255"),
        (["--config-dir", "b" * 300], "--config-dir is bbbb.*name has at most 255"),
        (["--config-name", "a\0b"], "NUL character"),
        (["--config-path", "conf"], "--config-path cannot be given here. Use --config-dir"),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun cannot be given here. It reads a pickle"),
        (["--config-name", "nowhere"], "Cannot find primary config 'nowhere'"),
        (["--config-name"], "--config-name needs a value"),
        (["--config-dir", "no/such/folder"], "There is no folder no/such/folder"),
    ],
)
def test_flags_that_name_no_file_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        training(*arguments)


@pytest.mark.parametrize("name", ["own", "own.yaml"])
def test_a_folder_of_ones_own_can_build_on_what_is_shipped(tmp_path, name):
    own_file(tmp_path, f"{BASE}seed: 7\n")
    config = training(f"--config-dir={tmp_path}", "--config-name", name, "train.mu=3")
    assert (config.seed, config.train.mu) == (7, 3)
    shipped = training()
    config.seed, config.train.mu = shipped.seed, shipped.train.mu
    assert config == shipped


def test_overrides_count_whether_the_yaml_names_the_key_or_not():
    config = training("train.epsilon_high=0.28", "train.reward_weights={pedagogical: 2.0}", "+seed=3")
    assert (config.train.epsilon_high, config.train.reward_weights, config.seed) == (0.28, {"pedagogical": 2.0}, 3)


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]\n", r"own\.yaml, line 1: \*a stands inside of what it stands for, which has no end"),
        ("seed: 1\ngeneration: &a {student_names: [*a]}\n", r"line 2: \*a stands inside of what it stands for"),
        (BOMB, rf"own\.yaml, line \d+: with its aliases unfolded .* more than {MOST_VALUES} values"),
        (f"seed: {'[' * 3000}{']' * 3000}\n", rf"own\.yaml, line 1: .* nested more than {DEEPEST} deep"),
        (f"seed: {'{a: ' * 3000}\n", rf"own\.yaml, line 1: .* nested more than {DEEPEST} deep"),
        (CHAIN, rf"own\.yaml, line \d+: .* nested more than {DEEPEST} deep"),
        ("#" * (LARGEST_FILE + 1), rf"own\.yaml has {LARGEST_FILE + 1} bytes; a configuration has at most"),
        ("5", r"own\.yaml cannot be read"),
        ("null: 1\n", r"own\.yaml cannot be read"),
        ("seed: !!int x\n", r"own\.yaml cannot be read: a value does not fit its tag"),
        ("seed: !!timestamp x\n", r"own\.yaml cannot be read: a value does not fit its tag"),
        ("defaults: 5\n", "defaults must be a list"),
        ("logging: {save_dir: '${a'}\n", r"own\.yaml cannot be read"),
        (f"seed: {'9' * 5000}\n", r"own\.yaml cannot be read"),
        ('logging: {wandb_run_name: "\\ud800"}\n', r"logging\.wandb_run_name holds '\\ud800', which is no Unicode"),
        (f"{BASE}generation: {{student_error_rate: 0x{'f' * 6000}}}\n", r"student_error_rate is 2\*\*23999 and more"),
        ("train: {learning_rate: 1\nseed: 2\n", r'own\.yaml", line 2'),
        ("seed: 1\nseed: 2\n", r'found duplicate key seed\n.*own\.yaml", line 2'),
        ("seed:\t- 1\n", r'own\.yaml", line 1'),
        ("a: !!python/object/apply:os.system [exit]\n", "could not determine a constructor for the tag"),
        (b"# caf\xe9\nseed: 1\n", "A configuration file is not UTF-8: .* after '# caf'. Save it as UTF-8"),
        ("- a\n", "must be a DictConfig, got ListConfig"),
        ("generation: [1]\n", r"Config key generation is \[1\], but it is a group of keys"),
        ("generation: {max_turns: null}\n", "generation.max_turns is None; it must be a whole number"),
        ("seed: ${oc.env:NO_SUCH_VARIABLE}\n", "key seed: .*NO_SUCH_VARIABLE"),
        ("defaults: [nowhere]\n", "nowhere"),
    ],
)  # fmt: skip
def test_a_yaml_that_no_run_needs_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        loaded_text(tmp_path, text)


def test_aliases_as_people_write_them_are_taken(tmp_path):
    text = f"{BASE}teacher_model: {{vllm: &e {{max_length: 512}}}}\nstudent_model: {{vllm: {{<<: *e, top_k: 5}}}}\n"
    config = loaded_text(tmp_path, text)
    assert (config.teacher_model.vllm.max_length, config.student_model.vllm.max_length) == (512, 512)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"seed={'[' * 3000}{']' * 3000}", rf"The override seed=\[.*… is nested more than {DEEPEST} deep"),
        ("+=5", r"\+=5 is no override: there is no key before the ="),
        ("foo", "The override foo cannot be read"),
        ("", "The override  cannot be read"),
        ("train.mu=1,2", "Ambiguous value for argument"),
        ("hydra=5", "cannot be read: Config group override must be"),
        (f"seed={'9' * 5000}", "4300 digits"),
        ("train.learning_rate.x=5", r"train\.learning_rate"),
        (f"logging.save_dir={'x' * 300}", "with a name of 300 bytes .* name has at most 255"),
        (f"logging.save_dir={'x/' * 3000}", "a path at most 4096"),
        ("generation.student_personas_prompts_paths.a=~nobody-here/x.txt", "this machine has no user nobody-here"),
        ('logging.save_dir="a\0b"', "no path holds a NUL character"),
    ],
)  # fmt: skip
def test_an_override_that_no_run_needs_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        loaded_text(tmp_path, BASE, override)


@given(st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="*?[,$"), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_quoted_text_is_read_as_itself(text):
    override = OverridesParser.create().parse_override(f"++a={quoted(text)}")
    assert override.value() == text
    assert OverridesParser.create().parse_override(_override(f"a=x/{text}", sweeps=False)).value() == f"x/{text}"


def test_a_folder_of_configurations_may_be_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    own_file(tmp_path, f"{BASE}seed: 8\n")
    assert training("--config-dir=~", "--config-name=own").seed == 8


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "train: {learning_rate: 1\nseed: 2\n", b"# caf\xe9\nseed: 1\n"])
def test_such_a_yaml_ends_a_program_with_a_message(tmp_path, text):
    result = run_program("vllm_server.py", *own_file(tmp_path, text), "dry_run=true")
    assert result.returncode == 2 and "error: " in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("program", ["train_rl.py", "-m classroom_rl.launch.cli"])
def test_optimized_python_is_refused_because_libraries_work_in_assert_statements(program):
    """Hydra reads dictionaries in them: train.reward_weights={…} would end in a traceback, or worse."""
    line = [*program.split(), "--config-name", "quickstart", "generation.max_turns=5", "dry_run=true"]
    result = subprocess.run([sys.executable, "-OO", *line], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "error: Python runs optimized (-OO, or PYTHONOPTIMIZE=2)" in result.stderr
    assert "Start the program without -O, and with PYTHONOPTIMIZE unset." in result.stderr
