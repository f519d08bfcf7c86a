"""Multi-turn rollouts of a model: prompts in, every step recorded, rewards out.

    runner = Rollouts(engine, max_steps=50, history="without_thinking", seed=0)
    done = await runner.run(prompts, next_prompt=f, stop=g, reward=h, copies=8)

Each rollout is its own coroutine, and none waits for another one's step. docs/rollouts.md is the guide.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from classroom_rl.errors import ConfigError, RolloutsStopped
from classroom_rl.rollout.player import Functions, NextPrompt, Player, Prompt, Reward, Stop, rollouts_of
from classroom_rl.rollout.policy_turn import PolicyModel
from classroom_rl.rollout.rollout_set import RolloutSet
from classroom_rl.rollout.runner import play_all
from classroom_rl.rollout.scheduler import YieldGate
from classroom_rl.rollout.step import HISTORIES, NO_NEXT_PROMPT, WITHOUT_THINKING, Rollout, Settings
from classroom_rl.rollout.tools.tool import Tool, Toolbox, ToolLimits

logger = logging.getLogger(__name__)


class Rollouts:
    """Plays rollouts with one engine.

    Args:
        engine: an `HfEngine`, an `ApiEngine`, a vLLM engine, or any other with `generate`, `tokenizer` and `frame`
            (token ids in and out), or with `chat` (text only).
        max_steps: the maximum number of the model's messages in a rollout. A rollout that reaches it is truncated.
        history: what the model sees of its earlier messages: `without_thinking` drops its thoughts and renders each
            prompt anew (one training sample for each step); `with_thinking` keeps them and continues one list of tokens
            (one training sample for the rollout).
        seed: equal seeds give equal rollouts if the engine samples equal tokens for equal seeds.
        system: a system message for all prompts without one.
        temperature, top_p, top_k, max_tokens: how each message is sampled; top_k −1 allows all tokens.
        concurrency: the maximum number of rollouts in play at a time.
        tools: what the model may call in its messages: `Tool`s, or functions to make tools of.
        tool_limits: the limits of the tool calls in one message.

    Raises:
        ConfigError: if a value is out of range.
    """

    def __init__(
        self,
        engine: Any,
        *,
        max_steps: int = 50,
        history: str = WITHOUT_THINKING,
        seed: int = 0,
        system: str | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        max_tokens: int = 1024,
        concurrency: int = 256,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        tool_limits: ToolLimits | None = None,
    ):
        if not (hasattr(engine, "generate") or hasattr(engine, "chat")):
            raise ConfigError(f"{engine!r} is no engine: it has neither generate nor chat.")
        if not _is_count(seed, 0):
            raise ConfigError(f"seed is {seed!r}; it must be an integer of at least 0.")
        if not _is_count(concurrency):
            raise ConfigError(f"concurrency is {concurrency!r}; it must be an integer of at least 1.")
        self._model = _model_of(engine, tools, tool_limits)
        self._system = system
        self._seed = seed
        self._concurrency = concurrency
        name = f"{type(engine).__name__} {getattr(engine, 'model_name', '')}".strip()
        self.settings = Settings(name, history, max_steps, temperature, top_p, top_k, max_tokens)
        _check(self.settings)
        self.settings = replace(self.settings, temperature=float(temperature), top_p=float(top_p))
        self._played: list[Rollout] = []

    @property
    def so_far(self) -> RolloutSet:
        """All rollouts of the current or last call as far as they were played, also after it was interrupted. An
        unfinished one has no `end`."""
        return RolloutSet(self._played)

    async def run(
        self,
        prompts: Iterable[Prompt],
        next_prompt: NextPrompt | None = None,
        stop: Stop | None = None,
        reward: Reward | None = None,
        copies: int = 1,
        progress: bool = True,
    ) -> RolloutSet:
        """Play `copies` rollouts on each prompt; they are returned in the order of the prompts.

        After each message `stop` is called first, then `next_prompt`. Without `next_prompt`, a rollout has one step.
        An error of the engine in one rollout is recorded as the end of that rollout.

        Args:
            prompts: texts, problems of a dataset, {"prompt": text, …} with further entries for the rollout's `meta`, or
                lists of messages that end with the user's.
            next_prompt, stop, reward: functions, plain or async, as in `Functions`.
            progress: whether to show a progress bar.

        Raises:
            DataError: if a prompt is malformed.
            RolloutsStopped: if a function raises an error or returns an invalid value, or the engine is dead. All
                rollouts end; its attribute `done` holds them as far as they were played.
        """
        if not _is_count(copies):
            raise ConfigError(f"copies is {copies!r}; it must be an integer of at least 1.")
        functions = Functions(next_prompt, stop, reward)
        rollouts = list(rollouts_of(prompts, self._system, copies, self._seed, self.settings))
        return await self._play([(rollout, functions) for rollout in rollouts], progress)

    async def replay(
        self,
        recorded: Iterable[Rollout],
        next_prompt: NextPrompt | None = None,
        stop: Stop | None = None,
        reward: Reward | None = None,
        progress: bool = True,
    ) -> RolloutSet:
        """Play recorded rollouts again with their own seeds, sampling and history. With an equal engine the tokens are
        equal; this runner's own settings are not used.

        Without `next_prompt` and `stop`, each rollout gets its recorded prompts, and ends where it ended; one without a
        step stays as it is. With one of them, the functions decide as in `run`.

        Raises:
            RolloutsStopped: as `run` does.
        """
        recorded, functions = list(recorded), Functions(next_prompt, stop, reward)
        with_functions = next_prompt is not None or stop is not None
        plays = [
            (
                _before_its_steps(rollout),
                functions if with_functions else replace(functions, next_prompt=_recorded_prompts(rollout)),
            )
            for rollout in recorded
            if with_functions or rollout.steps
        ]
        played = await self._play(plays, progress)
        if with_functions:
            return played
        replays = iter(played)
        return RolloutSet(
            _with_recorded_end(rollout, next(replays)) if rollout.steps else rollout for rollout in recorded
        )

    async def _play(self, plays: Sequence[tuple[Rollout, Functions]], progress: bool) -> RolloutSet:
        self._played = [rollout for rollout, _ in plays]
        slots, gate = asyncio.Semaphore(self._concurrency), YieldGate()
        with _progress_bar(len(plays), progress) as count:

            async def play(index: int) -> None:
                def show(changed: Rollout) -> None:
                    count(self._played[index], changed)
                    self._played[index] = changed

                async with slots:
                    await Player(self._model, *plays[index], show).play(gate)

            try:
                await play_all([*range(len(plays))], play, gate)
            except RolloutsStopped as error:
                raise self._explained(error) from error.__cause__
        self._warn_of_failures()
        return self.so_far

    def _warn_of_failures(self) -> None:
        failed = [rollout for rollout in self._played if rollout.failed]
        if failed:
            first = failed[0]
            assert first.end is not None  # it failed
            logger.warning(
                "%d of %d rollouts failed; %s: %s", len(failed), len(self._played), first.id, first.end.detail
            )

    def _explained(self, error: RolloutsStopped) -> RolloutsStopped:
        rollouts = self.so_far
        finished = sum(rollout.end is not None for rollout in rollouts)
        explained = RolloutsStopped(
            f"{str(error).rstrip('.')}. {finished} of {len(rollouts)} rollouts had ended; the attribute done of this "
            "error holds all of them as far as they came.",
            error.rollout_id,
            error.step,
        )
        explained.done = rollouts
        return explained


def _model_of(engine: Any, tools: Sequence[Any], limits: ToolLimits | None) -> PolicyModel:
    try:
        return PolicyModel(engine, Toolbox(tools, limits) if tools else None)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _before_its_steps(recorded: Rollout) -> Rollout:
    return replace(recorded, notes={}, steps=(), end=None, unanswered=None, step_rewards=(), reward=None)


def _recorded_prompts(recorded: Rollout) -> NextPrompt:
    prompts = [step.prompt for step in recorded.steps]
    return lambda _, number: prompts[number] if number < len(prompts) else None


def _with_recorded_end(recorded: Rollout, played: Rollout) -> Rollout:
    """The played rollout; if it has its recorded length, with its recorded end."""
    if played.end is None or played.end.reason != NO_NEXT_PROMPT or len(played.steps) != len(recorded.steps):
        return played
    return replace(played, end=recorded.end, unanswered=recorded.unanswered)


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[Rollout, Rollout], None]]:
    """A progress bar over rollouts; yields a function to call with (before, after) for each change of a rollout."""
    from tqdm import tqdm

    steps = failed = 0
    with tqdm(total=total, disable=not shown, unit="rollout", desc="rollouts", miniters=0, mininterval=0.2) as bar:

        def count(before: Rollout, after: Rollout) -> None:
            nonlocal steps, failed
            ended = before.end is None and after.end is not None
            steps += len(after.steps) - len(before.steps)
            failed += ended and after.failed
            bar.set_postfix_str(f"{steps} steps" + (f", {failed} failed" if failed else ""), refresh=False)
            bar.update(int(ended))

        yield count


def _check(settings: Settings) -> None:
    """Refuse settings that are out of range."""
    if settings.history not in HISTORIES:
        raise ConfigError(f"history is {settings.history!r}; it must be {' or '.join(HISTORIES)}.")
    for name in ("max_steps", "max_tokens"):
        if not _is_count(getattr(settings, name)):
            raise ConfigError(f"{name} is {getattr(settings, name)!r}; it must be an integer of at least 1.")
    if not (_is_number(settings.temperature) and 0 <= settings.temperature < float("inf")):
        raise ConfigError(f"temperature is {settings.temperature!r}; it must be a number of at least 0 (0: greedy).")
    if not (_is_number(settings.top_p) and 0 < settings.top_p <= 1):
        raise ConfigError(f"top_p is {settings.top_p!r}; it must be above 0 and at most 1.")
    if settings.top_k != -1 and not _is_count(settings.top_k):
        raise ConfigError(f"top_k is {settings.top_k!r}; it must be at least 1, or -1 for all tokens.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
