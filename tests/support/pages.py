"""Reading the pages of the documentation: their code, their links, and whether a command on them can be given."""

import re
import shlex
import tomllib
from pathlib import Path

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import ROOT
from classroom_rl.config.train_preferences import TrainPreferencesConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig
from classroom_rl.launch.gpu_check import PARTS
from classroom_rl.launch.quickstart_plan import SFT_PREFIX, applies

FENCED = re.compile(r"^(`{3,})[^\n`]*\n(.*?)^\1`*[ \t]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PROGRAMS = {
    "vllm_server.py": ("train_rl", TrainRLConfig),
    "train_rl.py": ("train_rl", TrainRLConfig),
    "start_rl_training.sh": ("train_rl", TrainRLConfig),
    "eval.py": ("eval", EvalConfig),
    "train_sft.py": ("train_sft", TrainSFTConfig),
    "train_preferences.py": ("train_preferences", TrainPreferencesConfig),
    "classroom-server": ("train_rl", TrainRLConfig),
    "classroom-train": ("train_rl", TrainRLConfig),
    "classroom-eval": ("eval", EvalConfig),
    "classroom-sft": ("train_sft", TrainSFTConfig),
    "classroom-preferences": ("train_preferences", TrainPreferencesConfig),
}
"""Program → the folder of its YAMLs, and its schema. `make quickstart` takes what server and trainer take."""
_COMMANDS = (
    "make ",
    "python ",
    "accelerate ",
    "./",
    *(f"{name} " for name in PROGRAMS if name.startswith("classroom-")),
)


def without_code(page: str) -> str:
    """The page's prose: no blocks, no inline code."""
    return INLINE.sub("", FENCED.sub("", page))


def inline_code(page: str) -> list[str]:
    """What stands between single backticks, outside of blocks."""
    return INLINE.findall(FENCED.sub("", page))


def commands_of(page: str) -> list[str]:
    """The commands on a page, in blocks and inline, each once; a backslash or an open quote continues a command. Flags
    of accelerate without a program are no command."""
    commands = {command for command in inline_code(page) if not command.startswith("accelerate ") or ".py" in command}
    for _, block in FENCED.findall(page):
        lines = iter(block.replace("\\\n", " ").splitlines())
        for line in lines:
            while line.startswith(_COMMANDS) and line.partition(" #")[0].count("'") % 2:
                line += f" {next(lines).strip()}"
            commands.add(line.strip())
    return sorted(command for command in commands if command.startswith(_COMMANDS) and "…" not in command)


def headings_of(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(page: str) -> list[str]:
    """The relative links of a page, images included."""
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    links += re.findall(r'(?:src|href)="([^"]+)"', without_code(page))
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def path_of(module: str) -> Path:
    """Where a module of this repository is, without the suffix of its file."""
    return ROOT / ("src" if module.partition(".")[0] == "classroom_rl" else "") / module.replace(".", "/")


def check_command(command: str) -> None:
    """Raises AssertionError if a command names a target, a program, a file, a configuration or a key that is not
    there."""
    words = _words_of(command)
    program = next((Path(word).name for word in words if Path(word).name in PROGRAMS), None)
    if words[0] == "make":
        assert words[1] in TARGETS
    elif words[1:2] == ["-m"] and words[2] not in ("pytest", "venv"):
        module = path_of(words[2])
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words[2]
    elif words[0].startswith("./"):
        assert (ROOT / words[0]).is_file()
    else:
        assert program is not None or words[1] in ("-m", "-c"), command
    assert program is None or program in SCRIPTS or (ROOT / program).is_file()
    folder, schema = PROGRAMS.get(program, ("train_rl", TrainRLConfig))
    for word in words:
        if re.fullmatch(r"(tests|config|src|benchmarks)/[\w./]+", word):
            assert (ROOT / word).exists(), word
        elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)*=.*", word, re.DOTALL):
            _check_override(word, schema)
    if "--config-name" in words and "--config-dir" not in words:
        name = words[words.index("--config-name") + 1].removesuffix(".yaml")
        assert name == "mine" or (ROOT / "config" / folder / f"{name}.yaml").is_file(), name
    if "--parts" in words:
        assert words[words.index("--parts") + 1] in PARTS


def _check_override(word: str, schema: type) -> None:
    if word.startswith(SFT_PREFIX):
        word, schema = word.removeprefix(SFT_PREFIX), TrainSFTConfig
    assert applies(word, schema), word


def _words_of(command: str) -> list[str]:
    """The command's words, without a comment; those of `ARGS="…"` are words of their own."""
    words = shlex.split(command, comments=True)
    return [part for word in words for part in (shlex.split(word[5:]) if word.startswith("ARGS=") else [word])]
