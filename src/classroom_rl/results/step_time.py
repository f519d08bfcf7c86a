"""Where the time of a training's steps goes, by `metrics.jsonl`, and one line of advice about it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from classroom_rl.config.values import DISK, GROUP, PHASED, is_loopback
from classroom_rl.results.run_folder import ENVIRONMENT_NAME, is_number, look_up, read_json
from classroom_rl.system.storage import write_whole

PHASES = ("play", "judging", "publish", "train")
"""The phases of a step. `play` is what the trainer waits for a batch's messages, `judging` what it then waits for the
judge, solutions and post-test alone; `train` is all that is neither of these nor `publish`, checkpoints included."""

Placement = Literal["cpu", "shared", "split"]
"""Where the trainer runs: on CPUs, on GPUs that it shares with the server, or on GPUs of its own."""

_RECENT = 50
"""The number of the last steps whose time is looked at."""
_LARGE_JUDGING, _LARGE_PUBLISH, _LARGE_WAIT = 0.3, 0.15, 0.2
"""The shares of a step from which on there is advice."""


@dataclass(frozen=True)
class Advice:
    """What would shorten a step.

    Attributes:
        at_stake: the share of the step that it is about.
        text: one line for the user.
        overrides: the keys to set, as on the command line; empty if no key alone does it.
    """

    at_stake: float
    text: str
    overrides: tuple[str, ...] = ()


def time_of(
    lines: Sequence[Mapping[str, Any]], config: Mapping[str, Any], folder: Path
) -> tuple[dict[str, float], str | None]:
    """Return `time_shares` of a run folder's metrics, and the text of the advice about them."""
    shares = time_shares(lines)
    advice = advise(shares, config, read_json(folder / "config" / ENVIRONMENT_NAME).get("placement"))
    return shares, advice and advice.text


def seconds_by_phase(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by phase, from its line of `metrics.jsonl`. A step that trains on a batch again has
    no rollout."""
    rollout, judging, publish, train = (
        value if is_number(value := line.get(f"seconds/{name}")) else 0.0
        for name in ("rollout", "judging", "publish", "train")
    )
    return {"play": max(0.0, rollout - judging), "judging": judging, "publish": publish, "train": train}


def sampled_tokens_per_second(line: Mapping[str, Any], conversations: int) -> float:
    """Return the policy's sampled tokens of a batch of so many conversations divided by the time of the whole rollout,
    which includes the other roles' turns and the judging."""
    return line["conversation/teacher_tokens"] * conversations / line["seconds/rollout"]


def time_shares(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of each phase in the seconds of the last steps; empty if no step has any. The first step of a
    run is left out if there are others, because models are compiled and caches filled in it."""
    phases = [seconds_by_phase(line) for line in (lines[1:] or lines)[-_RECENT:]]
    seconds = {phase: sum(step_seconds[phase] for step_seconds in phases) for phase in PHASES}
    total = sum(seconds.values())
    return {phase: value / total for phase, value in seconds.items()} if total else {}


def record_placement(run_folder: Path, placement: Placement) -> None:
    """Add to the recorded environment of the trainer where it runs."""
    path = run_folder / "config" / ENVIRONMENT_NAME
    write_whole(path, json.dumps(read_json(path) | {"placement": placement}, indent=2))


def advise(shares: Mapping[str, float], config: Mapping[str, Any], placement: Placement | None) -> Advice | None:
    """Return the advice about the largest share of a step that could be saved; None if there is none. What the
    configuration has already, or its checks would refuse, is not advised.

    Args:
        shares: those of `time_shares`.
        config: the recorded configuration. A key that it lacks gives no advice.
        placement: None if it was not recorded, as in runs of earlier versions.
    """
    if not shares or placement is None:
        return None
    rules = (_about_judging, _about_publishing, _about_waiting)
    candidates = [candidate for rule in rules if (candidate := rule(shares, config, placement)) is not None]
    return max(candidates, key=lambda candidate: candidate.at_stake, default=None)


def _about_judging(shares: Mapping[str, float], config: Mapping[str, Any], placement: Placement) -> Advice | None:
    """Advice for a judge behind an API: one on an engine keeps the engines at work."""
    share, judge = shares["judging"], look_up(config, "judge_model") or {}
    if share < _LARGE_JUDGING or not (judge.get("use_openrouter") or judge.get("use_gemini") or judge.get("base_url")):
        return None
    reason = f"Judging takes {_percent(share)} of a step"
    problems = look_up(config, "train", "number_of_problems_per_batch") or 0
    samples = look_up(config, "train", "num_samples_per_problem") or 0
    servers = len(look_up(config, "generation", "server_urls") or [""])
    requests = problems if judge.get("mode") == GROUP else problems * samples  # at least; more with several rules
    requests_per_server, max_concurrent = -(-requests // servers), judge.get("max_concurrent_requests")
    if (
        max_concurrent is not None
        and max_concurrent < requests_per_server
        and not (judge.get("requests_per_minute") or judge.get("tokens_per_minute"))
    ):
        override = f"judge_model.max_concurrent_requests={requests_per_server}"
        return Advice(
            share,
            f"{reason}, {max_concurrent} requests at a time for {requests_per_server} conversations: set {override}.",
            (override,),
        )
    # Otherwise the next batch could be played meanwhile, unless it waits for this one's phase or verdicts.
    if look_up(config, "generation", "schedule") == PHASED or look_up(config, "dataset", "curriculum"):
        return None
    return _play_ahead(share, reason, config, placement)


def _about_publishing(shares: Mapping[str, float], config: Mapping[str, Any], placement: Placement) -> Advice | None:
    share, generation = shares["publish"], look_up(config, "generation") or {}
    urls = generation.get("server_urls") or [f"http://{generation.get('server_host')}"]
    on_one_machine = len(urls) == 1 and is_loopback(urlsplit(urls[0]).hostname or "")
    if share < _LARGE_PUBLISH or look_up(config, "train", "publish_through") != DISK or not on_one_machine:
        return None
    override = "train.publish_through=memory"
    text = f"Publishing weights takes {_percent(share)} of a step: set {override}, if /dev/shm has room for them."
    return Advice(share, text, (override,))


def _about_waiting(shares: Mapping[str, float], config: Mapping[str, Any], placement: Placement) -> Advice | None:
    if placement == "cpu":  # server and trainer have the same cores
        return None
    if look_up(config, "train", "max_staleness") == 1:
        share = shares["play"]
        text = (
            f"The trainer waits {_percent(share)} of a step for messages of a batch that was begun ahead: give the "
            "server more of the GPUs, or name further servers in generation.server_urls."
        )
        return Advice(share, text) if share >= _LARGE_WAIT else None
    at_stake = min(shares["play"] + shares["judging"], shares["train"])  # nothing is played while weights are loaded
    idle = shares["publish"] + shares["train"]
    reason = f"The engines wait {_percent(idle)} of a step"
    return _play_ahead(at_stake, reason, config, placement) if at_stake >= _LARGE_WAIT else None


def _play_ahead(share: float, why: str, config: Mapping[str, Any], placement: Placement) -> Advice | None:
    train, override = look_up(config, "train") or {}, "train.max_staleness=1"
    if train.get("max_staleness") != 0 or not train.get("importance_sampling_correction"):
        return None
    if placement == "shared":
        text = (
            f"{why}: where there are more GPUs, give server and trainer their own (--server-gpus, --trainer-gpus), and "
            f"set {override}."
        )
        return Advice(share, text)
    return Advice(share, f"{why}: set {override}, which plays the next batch meanwhile.", (override,))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
