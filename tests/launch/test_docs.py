"""The documentation: its links lead somewhere, its commands can be given, and it names every file and every page."""

import re

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import ROOT
from classroom_rl.config.train_preferences import TrainPreferencesConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig
from classroom_rl.environments.agent.config import Generation as AgentGeneration
from classroom_rl.environments.marooned.config import Generation as MaroonedGeneration
from classroom_rl.launch.quickstart_plan import applies
from tests.support.pages import check_command, commands_of, headings_of, inline_code, links_of, path_of
from tests.test_rooms import ROOMS

TEXTS = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        *("README.md", "CONTRIBUTING.md", "SECURITY.md", "data/README.md"),
        *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    )
}
SCHEMAS = (TrainRLConfig, EvalConfig, TrainSFTConfig, TrainPreferencesConfig)
EXAMPLES = {"config/deepspeed/own.yaml", "docs/screenshots/"}
"""Paths that a page makes up, or that are folders."""
OF_OTHERS = "python main.py "
"""MathTutorBench's program."""
RENAMED = {"generation.ignore_penalty_for_rejected_judges"}
"""Keys that load under another name."""


def of_pages(found_on) -> list:
    """Parameters (page, what is found on it), each with a name that says both."""
    return [
        pytest.param(page, match, id=f"{page}: {match}")
        for page, text in TEXTS.items()
        for match in sorted(set(found_on(text)))
    ]


@pytest.mark.parametrize(("page", "link"), of_pages(links_of))
def test_a_link_leads_to_a_file_and_a_heading(page: str, link: str) -> None:
    name, _, anchor = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    assert target.exists(), f"{page} links to {link}, which is not there"
    if anchor:
        assert anchor in headings_of(target.read_text(encoding="utf-8")), f"{page} links to {link}: no such heading"


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_names_no_file_that_is_not_there(page: str) -> None:
    roots = "src|tests|config|benchmarks|docs|prompt_templates|data|examples|notebooks"
    paths = re.findall(rf"(?<![\w./-])((?:{roots})/[\w./-]*\.[a-z0-9]+)\b", TEXTS[page])
    paths += re.findall(rf"`((?:{roots})/[\w./-]*)`", TEXTS[page])
    absent = {path for path in paths if path not in EXAMPLES and not (ROOT / path).exists()}
    modules = re.findall(r"(?:-m |`)((?:classroom_rl|tests|benchmarks)(?:\.\w+)+)", TEXTS[page])
    absent |= {module for module in modules if not is_module(module)}
    assert not absent, f"{page} names {', '.join(sorted(absent))}"


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_names_nothing_of_a_file_that_is_not_in_it(page: str) -> None:
    """Such as `CRITERIA` in `judges/verdicts.py`. No page has a place that is still to be filled in."""
    mentions = re.findall(r"`(\w+)` (?:in|of) `((?:src|tests|config|benchmarks)/[\w/]+\.py)`", TEXTS[page])
    absent = [name for name, path in mentions if not re.search(rf"\b{name}\b", (ROOT / path).read_text("utf-8"))]
    assert not absent, f"{page} names {', '.join(absent)}"
    assert not re.search(r"@@\w*@@|TODO|FIXME", TEXTS[page])


def test_the_table_of_rooms_names_files_that_are_there() -> None:
    absent = []
    for room, text in re.findall(r"^\| `(src/classroom_rl/[\w/]+)/` \|(.*)\|$", TEXTS["docs/inside.md"], re.MULTILINE):
        files = {path.name for path in (ROOT / room).rglob("*.py")}
        absent += [f"{room}: {name}" for name in re.findall(r"`(\w+\.py)`", text) if name not in files]
    assert not absent


def is_module(name: str) -> bool:
    """Whether it is a module, a package, or something in a module."""
    path = path_of(name)
    if name.endswith((".json", ".yaml")) or path.is_dir():
        return True
    return path.with_suffix(".py").is_file() or path.parent.with_suffix(".py").is_file()


@pytest.mark.parametrize(("page", "command"), of_pages(commands_of))
def test_a_command_can_be_given(page: str, command: str) -> None:
    if not command.startswith(OF_OTHERS):
        check_command(command)


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_names_no_key_that_no_program_has(page: str) -> None:
    heads = "train|teacher_model|student_model|judge_model|reward_model|generation|guards|logging|huggingface"
    keys = {code.partition("=")[0] for code in inline_code(TEXTS[page])}
    keys = {key.partition(":")[0] for key in keys if re.fullmatch(rf"(?:{heads})(?:\.[a-z_]+)+(:.*)?", key)}
    unknown = {key for key in keys - RENAMED if not any(has_key(schema, key) for schema in SCHEMAS)}
    assert not unknown, f"{page} names {', '.join(sorted(unknown))}"


def has_key(schema: type, key: str) -> bool:
    """Whether a schema has the key, or keys below it; `generation` has those of any environment."""
    block, _, name = key.partition(".")
    of_others = MaroonedGeneration.__dataclass_fields__ | AgentGeneration.__dataclass_fields__
    if block == "generation" and name in of_others:
        return True
    if applies(key, schema):
        return True
    for name in key.split("."):
        schema = getattr(schema, "__dataclass_fields__", {}).get(name)
        if schema is None:
            return False
        schema = schema.type
    return hasattr(schema, "__dataclass_fields__")


def test_the_contents_of_docs_name_every_page() -> None:
    contents = TEXTS["docs/README.md"]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    absent = {name for name in pages if f"]({name})" not in contents}
    others = [path for path in (ROOT / "docs").iterdir() if path.suffix != ".md" and path.name != "__pycache__"]
    names = {f"{path.name}/" if path.is_dir() else path.name for path in others}
    absent |= {name for name in names if f"`{name}`" not in contents}
    assert not absent


def test_the_page_about_the_inside_has_every_room_in_its_order() -> None:
    listed = re.findall(r"^\| `src/classroom_rl/([\w/]+?)/`", TEXTS["docs/inside.md"], re.MULTILINE)
    rooms = [room.replace(".", "/") for room in ROOMS if room != "errors"]
    assert [name for name in listed if name in rooms] == rooms
