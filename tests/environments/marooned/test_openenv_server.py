"""Marooned as an OpenEnv server, over its real protocol. `make openenv-check` runs these tests where openenv is."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from classroom_rl.environments.marooned.actions import WAIT
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.messages import format_message
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import cast, play_others
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.prompts import observation_text, system_prompt

pytest.importorskip("openenv", reason="openenv is not installed; make openenv-check installs it apart and runs this")

from classroom_rl.environments.marooned.openenv_server.client import MaroonedClient  # noqa: E402
from classroom_rl.environments.marooned.openenv_server.models import MaroonedAction  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src/classroom_rl/environments/marooned/openenv_server"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("openenv") / "server.log"
    command = [
        sys.executable,
        "-m",
        "classroom_rl.environments.marooned.openenv_server.server.app",
        "--port",
        str(port),
    ]
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while True:
            try:
                assert get(f"{url}/health") == {"status": "healthy"}
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=120)


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return json.load(answer)


def post(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@pytest.fixture
def client(address: str) -> Iterator:
    with MaroonedClient(base_url=address).sync() as client:
        yield client


@pytest.mark.parametrize(("seed", "seat", "preset"), [(0, 1, "tiny"), (1, 2, "tiny"), (2, 3, "tiny"), (3, 5, "tiny")])
def test_a_game_over_the_protocol_is_the_game_of_the_rules(client, seed: int, seat: int, preset: str) -> None:
    """A scripted player plays the seat here, with every observation, reward and end compared."""
    rules = PRESETS[preset]
    game = Game(rules, seed)
    players, rng, paid = cast(game), Random(0), 0.0
    low, high = declared_range()
    play_others(game, players, seat)
    result = client.reset(seed=seed, seat=seat, preset=preset)
    observation = result.observation
    assert (observation.prompt, observation.reward) == (system_prompt(rules, game.roles[seat]), None)
    assert (observation.seat, observation.role) == (seat, game.roles[seat])
    steps = 0
    while not result.done:
        view = observe(game, seat)
        assert result.observation.text == observation_text(rules, view)
        action = players[seat].act(view, rules, rng)
        assert action.args[-1:] == ("Hello.",) or str(action) in result.observation.possible
        result = client.step(MaroonedAction(message=format_message("so", action)))
        assert game.step(action).fault is None
        play_others(game, players, seat)
        assert result.observation.fault == "" and low <= result.reward <= high
        paid += result.reward
        steps += 1
    state = client.state()
    assert game.seat != seat and steps > 5
    assert paid == pytest.approx(game.returns[seat] * rules.reward_scale)
    assert (state.step_count, state.seat, state.island, state.outcome) == (steps, seat, seed, game.outcome or "")
    assert (state.total_reward, state.ship_progress) == pytest.approx((paid, game.ship_progress))


def declared_range() -> tuple[float, float]:
    """The rewards that openenv.yaml declares."""
    import yaml

    low, high = yaml.safe_load((PACKAGE / "openenv.yaml").read_text("utf-8"))["validation"]["reward"]["range"]
    return low, high


def test_the_whole_island_can_be_played(client) -> None:
    observation = client.reset(seed=1, preset="seed").observation
    assert "100 days" in observation.prompt and "DAY" in observation.text.upper()
    for _ in range(5):
        assert not client.step(MaroonedAction(message=f"ACTION: {WAIT}")).done


def test_a_command_alone_counts_and_what_cannot_be_read_costs_a_little(client) -> None:
    client.reset(seed=0, seat=1)
    good = client.step(MaroonedAction(message="MOVE NORTH"))
    bad = client.step(MaroonedAction(message="glub"))
    assert (good.observation.fault, bad.observation.fault) == ("", "the message held no action")
    assert bad.reward < good.reward < 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"preset": "moon"}, "tiny"),
        ({"seat": 6}, "1, 2, 3, 4, 5"),
        ({"colonists": "x"}, "builder"),
        ({"x": 1}, "no option x"),
        ({"seed": -1}, "from 0"),
        ({"seed": "1"}, "from 0"),
    ],
)
def test_a_wrong_option_is_named_and_the_session_goes_on(client, options: dict, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        client.reset(**options)
    assert not client.reset(seed=0).done


def test_a_step_without_a_game_says_so(client) -> None:
    with pytest.raises(RuntimeError, match="call reset"):
        client.step(MaroonedAction(message="WAIT"))


def test_sessions_do_not_disturb_each_other(address: str) -> None:
    with MaroonedClient(base_url=address).sync() as one, MaroonedClient(base_url=address).sync() as other:
        first = one.reset(seed=0, seat=1).observation.text
        other.reset(seed=1, seat=1)
        for _ in range(3):
            other.step(MaroonedAction(message="WAIT"))
        assert one.state().step_count == 0 and other.state().step_count == 3
        assert one.reset(seed=0, seat=1).observation.text == first


def test_a_game_is_over_after_its_last_day(client) -> None:
    result = client.reset(seed=0, seat=1, colonists="waiter", traitor="waiter")
    while not result.done:
        result = client.step(MaroonedAction(message="WAIT"))
    assert result.observation.possible == []
    with pytest.raises(RuntimeError, match="call reset"):
        client.step(MaroonedAction(message="WAIT"))


def test_plain_http_gives_schemas_and_first_observations(address: str) -> None:
    assert get(f"{address}/metadata")["name"]
    schema = get(f"{address}/schema")
    assert "message" in schema["action"]["properties"] and "possible" in schema["observation"]["properties"]
    assert "ship_progress" in schema["state"]["properties"]
    first = post(f"{address}/reset", {"seed": 3, "seat": 2})
    assert first["observation"]["seat"] == 2 and not first["done"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(f"{address}/step", {"action": {"text": "WAIT"}})
    assert refused.value.code == 422


@pytest.mark.parametrize("target", ["package", "server"])
def test_the_validator_of_openenv_accepts_it(address: str, target: str) -> None:
    openenv = shutil.which("openenv", path=str(Path(sys.executable).parent)) or "openenv"
    arguments = [str(PACKAGE), "--level", "static"] if target == "package" else ["--url", address]
    result = subprocess.run([openenv, "validate", *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0 and "Verdict: PASS" in result.stdout, result.stdout + result.stderr


def test_the_pinned_openenv_is_the_one_that_runs() -> None:
    from importlib.metadata import version

    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["dependencies"] == [f"openenv=={version('openenv')}"]


def test_what_the_page_says_of_the_client_runs(address: str, capsys: pytest.CaptureFixture) -> None:
    page = (ROOT / "docs/marooned.md").read_text(encoding="utf-8")
    code = re.search(r"## OpenEnv.*?```python\n(.*?)```", page, re.DOTALL)[1]
    exec(compile(code.replace("http://127.0.0.1:8000", address), "docs/marooned.md", "exec"), {})
    assert re.search(r"^(escaped|stranded|dead)? ?-?[0-9.e-]+$", capsys.readouterr().out.splitlines()[-1])
