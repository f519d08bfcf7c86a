"""What an environment's package may bring besides what it needs. Both are optional:

* a module `routes`, routes of the server: `open_for(server)` is called when the models are loaded, and
  `add_routes(router, opened)` when the application is made; in a route, `opened()` is what `open_for` returned;
* `RUN_VIEW` in its module `config`, a `RunView`: what the page and the plots show of a run.

docs/environments.md shows both.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from classroom_rl.rollout.environment import ENVIRONMENTS, Environment, module_name

if TYPE_CHECKING:
    from classroom_rl.rollout.runner import Runner
    from classroom_rl.rollout.store.journal import Journal
    from classroom_rl.rollout.trajectory import Trajectory


class PlayedEpisodes(Protocol):
    """The episodes that a server plays and has played.

    Attributes:
        environment: the environment that is played, with its loaded models in `roles`.
        runner: plays the batches.
        journal: the journal of this server.
    """

    environment: Environment[Any, Any]
    runner: "Runner"
    journal: "Journal"

    def record(self, conversation_id: str) -> "Trajectory":
        """The record of a finished episode; raises `UnknownConversation`."""

    def played_with(self, conversations: Iterable[str]) -> dict[str, str | None]:
        """The fingerprint of the weights of each request that these episodes belong to."""


@dataclass(frozen=True)
class OpenServer:
    """A server whose models are loaded, as it is handed to the environment's `open_for`.

    Attributes:
        config: the server's configuration.
        folder: the server's folder of the run, for files of its own.
        longest_reply_s: how long a model may write one reply to a person, in seconds. New weights from the trainer wait
            for replies in flight.
        open_judge: opens a judge besides the training judge, from its block of the configuration, the path of its
            ledger, and its name in messages; returns the judge, and its API client if it has one.
        closing: what is to be closed when the server ends.
    """

    config: Any
    episodes: PlayedEpisodes
    folder: Path
    longest_reply_s: float
    open_judge: Callable[[Any, Path, str], tuple[Any, Any]]
    closing: ExitStack


Colour = Literal["blue", "orange", "green", "red", "violet", "grey"]


@dataclass(frozen=True)
class MetricPanel:
    """One panel of a plot: metrics of the training log over the steps.

    Attributes:
        y: the name of the vertical axis.
        lines: name in `metrics.jsonl`, label and colour of each line.
    """

    title: str
    y: str
    lines: Sequence[tuple[str, str, Colour]]


@dataclass(frozen=True)
class RunView:
    """What the page and the plots show of an environment's runs, in addition to what they show of every run.

    Attributes:
        live_tab: what a person can do with the model of a running server: `chat` (routes `/api/chat/opening` and
            `/api/chat`), `game` (`/api/game`), or nothing.
        facts: label → value, of settings in a recorded configuration; those that are None are not shown.
        personas: the personas of a recorded configuration, for the filter of the list.
        panels: the panels of a plot of its own.
    """

    live_tab: Literal["", "chat", "game"] = ""
    facts: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    personas: Callable[[Mapping[str, Any]], Sequence[str]] = lambda config: []
    panels: Sequence[MetricPanel] = ()


def extension_of(environment: str, module: str) -> ModuleType | None:
    """A module of an environment's package; None if it has none.

    A package with a dotted name is looked into only if it is imported already, as in the server and the trainer of the
    run: no code is imported because a run folder names it.
    """
    package = ENVIRONMENTS.get(environment, environment)
    if environment not in ENVIRONMENTS and package not in sys.modules:
        return None
    name = module_name(package, module)
    # A single file holds what `config` and `environment` do, and has no routes.
    return import_module(name) if name and (name != package or module != "routes") else None


def view_of(config: Mapping[str, Any]) -> RunView:
    """What the page and the plots show of the runs of a recorded configuration's environment."""
    view: RunView = getattr(extension_of(config.get("environment") or "classroom", "config"), "RUN_VIEW", RunView())
    return view
