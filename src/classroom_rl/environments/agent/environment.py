"""The environment in which a user's own program, the agent, plays the policy through OpenAI's API.

Each try of an episode is a session with a URL of its own. A call that repeats the session's messages and adds one of
the user continues the policy's context, token for token. Any other call, such as one with a summary in place of the
history, is a message with a prompt of its own, and so a training sample of its own: nothing is rendered again. The
reward ends the session. An agent's own state is not in the journal: after a restart, an unfinished episode is played
from its beginning, by a new agent.
"""

import asyncio
import inspect
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from secrets import token_hex
from threading import Thread
from typing import Any

from classroom_rl.errors import ContextOverflow, DataError, DeadlineExceeded, UnknownConversation
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.dialogue import END, POLICY_TURN, PROGRAM, DialogueEnvironment, DialogueEpisode
from classroom_rl.rollout.environment import POLICY_ROLE, Play
from classroom_rl.rollout.policy_turn import add_policy_message, replay_event, sample_draft
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.scheduler import Phase
from classroom_rl.rollout.supervision import SampledDraft, unreviewed
from classroom_rl.rollout.tokens import TokenBuffer, Turn, replay_tokens
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.system.functions import function_of

logger = logging.getLogger(__name__)

_NO_MESSAGE = "The agent gave a reward before the policy's first message, so there is nothing to train on."
_NO_REWARD = "The agent returned without a reward: return a number, or post it before."


class BadCall(DataError):
    """A call of an agent that cannot be answered."""

    status = 400


@dataclass(eq=False)
class Session:
    """A try of an episode. Its `key` is drawn anew for each try, so that an agent that is left over from an earlier one
    reaches nothing.

    Attributes:
        outcome: the reward, or the reason why there is none; an exception ends the batch.
        taken: set once an agent elsewhere has taken it.
        heard: the messages in the policy's context: those of the last call that continued it, and its answer.
        lock: held by the call that is being answered; calls of one session are answered one after another.
    """

    play: Play[DialogueEpisode, bool]
    key: str
    outcome: asyncio.Future[float | str]
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    heard: list[Message] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def is_continued_by(self, messages: Sequence[Message]) -> bool:
        """Whether a call repeats what was heard, and adds one message of the user."""
        *history, last = messages
        return bool(self.heard) and history == self.heard and last["role"] == "user"

    def settle(self, outcome: float | str) -> None:
        """End the session, unless it has ended."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Environment(DialogueEnvironment):
    """Agents that play the policy. `first_messages` is the prompt of an episode that failed before the first call."""

    phases = (Phase("agent", (POLICY_TURN,), (POLICY_ROLE,)),)
    takes_own_rewards = False

    def __init__(self, generation: Any, *args: Any):
        super().__init__(generation, *args)
        name = generation.agent
        self._agent = None if name is None else function_of("generation.agent", name, ("null",))
        for client in ("httpx", "httpx2"):  # at level INFO they log a line for each call of an agent
            logging.getLogger(client).setLevel(logging.WARNING)
        self._places = asyncio.Semaphore(generation.agents_at_once)
        self._sessions: dict[str, Session] = {}
        self._untaken: deque[Session] = deque()
        host = "127.0.0.1" if generation.server_host in ("0.0.0.0", "::") else generation.server_host
        self._url = f"http://{host}:{generation.server_port}"

    @classmethod
    def first_messages(cls, problem: Problem, generation: Any) -> list[Message]:
        return [{"role": "user", "content": problem.text}]

    def reply(self, episode: DialogueEpisode) -> None:
        """Nobody answers the policy but its agent."""

    def reward(self, name: str, episode: DialogueEpisode) -> float:
        raise DataError(f"The reward {name} of {episode.id} comes from its agent, and cannot be computed.")

    # An episode ---------------------------------------------------------------------------------------------------

    def replay(self, episode: DialogueEpisode, events: Iterable[dict[str, Any]], judge_again: bool) -> bool:
        """Restore a finished episode; an unfinished one begins anew, and so does a failed one with `judge_again`."""
        events, closing_event = list(events), None
        for event in events:
            if event.get("prompt_ids"):  # a try begins, or failed before its first message
                episode.turns.clear()
            if (turn := replay_event(episode, event)) is not None:
                episode.turns.append(turn)
            closing_event = (
                event if event["event"] in ("rewards", "failure") else None if turn is not None else closing_event
            )
        if closing_event is None or (judge_again and closing_event["event"] == "failure"):
            episode.turns, episode.buffer = [], None
            return False
        episode.buffer, episode.state = replay_tokens(events), END
        episode.overflow, episode.failure = closing_event["overflow"], closing_event.get("reason")
        episode.rewards = closing_event.get("rewards") or dict.fromkeys(self._rewards)
        return events[-1]["event"] == "conversation"

    async def advance(self, play: Play[DialogueEpisode, bool]) -> None:
        """Play an episode: hand it to an agent, and wait for its reward."""
        episode, timeout_s = play.episode, self.generation.agent_timeout_s
        outcome: asyncio.Future[float | str] = asyncio.get_running_loop().create_future()
        session = Session(play, f"{episode.id}-{token_hex(8)}", outcome)
        async with self._places:
            self._sessions[session.key] = session
            try:
                await self._hand_out(session)
                async with asyncio.timeout(timeout_s):
                    ended = await outcome
            except TimeoutError:
                ended = f"The agent gave no reward in {timeout_s:g} s (generation.agent_timeout_s)."
            finally:
                outcome.cancel()  # a call that is still being answered adds nothing any more
                del self._sessions[session.key]
        if isinstance(ended, str):
            self._give_up(episode, ended)
        else:
            episode.rewards = dict.fromkeys(self._rewards, ended)
            event = {"rewards": episode.rewards, "overflow": episode.overflow}
            self._journal.append("rewards", conversation=episode.id, **event)
        episode.state = END

    async def _hand_out(self, session: Session) -> None:
        if self._agent is not None:
            arguments = (session, asyncio.get_running_loop())
            Thread(target=self._run_agent, args=arguments, name=session.key, daemon=True).start()
            return
        self._untaken.append(session)
        timeout_s = self.generation.sample_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await session.taken.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"No agent took episode {session.play.episode.id} with POST {self._url}/agent/next within "
                f"generation.sample_timeout_s = {timeout_s:g} s: start one, or name it in generation.agent."
            ) from None

    def _run_agent(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        """Run the agent to its end, in its own thread."""
        outcome: float | str = _NO_REWARD
        key = os.environ.get("CLASSROOM_TOKEN") or "none"  # clients of OpenAI's refuse an empty one
        try:
            reward = self._agent(f"{self._url}/agent/{session.key}/v1", key, session.play.episode.problem)
            reward = asyncio.run(reward) if inspect.iscoroutine(reward) else reward
            if reward is not None:
                outcome = float(reward) if math.isfinite(reward) else f"The agent's reward is {reward}."
        except BaseException as error:  # also SystemExit: it ends the agent, not the server
            outcome = f"The agent {self.generation.agent} raised {type(error).__name__}: {str(error)[:500]}"
            logger.warning("episode %s: %s", session.play.episode.id, outcome, exc_info=error)
        if isinstance(outcome, float) and session.play.episode.buffer is None:
            outcome = _NO_MESSAGE
        with suppress(RuntimeError):  # the event loop has ended, and nobody waits
            loop.call_soon_threadsafe(session.settle, outcome)

    def _give_up(self, episode: DialogueEpisode, reason: str) -> None:
        """Record a failure. The trainer needs tokens of every episode: one without a message gets a prompt."""
        prompt_ids, end_ids = [], []
        if episode.buffer is None:
            prompt_ids = self._policy.encode_chat(self.first_messages(episode.problem, self.generation))
            prompt_ids, end_ids = prompt_ids[: self._limit - 1], [self.roles.policy.frame.turn_end_id]
            episode.buffer = TokenBuffer(prompt_ids)
            episode.buffer.append_given(end_ids)
        event = {"reason": reason, "prompt_ids": prompt_ids, "end_ids": end_ids, "overflow": episode.overflow}
        self._journal.append("failure", conversation=episode.id, **event)
        episode.failure, episode.rewards = reason, dict.fromkeys(self._rewards)

    @classmethod
    def batch_metrics(cls, records: Sequence[Trajectory]) -> dict[str, float]:
        """The policy's messages in an episode, and the share of them that had a prompt of their own."""
        messages = sum(turn.role == POLICY_ROLE for record in records for turn in record.turns)
        own_prompts = sum(len(record.branches) for record in records)
        share = {"agent/own_prompt_share": own_prompts / messages} if messages else {}
        return {"agent/messages_per_episode": messages / len(records), **share}

    # What agents ask ----------------------------------------------------------------------------------------------

    @property
    def sampling(self) -> tuple[float, float]:
        """Temperature and top-p of the policy."""
        return self._sampling.temperature, self._sampling.top_p

    def take(self) -> Session | None:
        """An episode that no agent has taken yet; None if there is none now."""
        while self._untaken:
            session = self._untaken.popleft()
            if not session.outcome.done():
                session.taken.set()
                return session
        return None

    def end(self, key: str, reward: float) -> None:
        """End a session with its reward.

        Raises:
            UnknownConversation: if there is no such session any more.
            BadCall: if the policy has said nothing.
        """
        session = self._session(key)
        if session.play.episode.buffer is None:
            raise BadCall(_NO_MESSAGE)
        session.settle(reward)

    async def answer(
        self, key: str, messages: list[Message], max_tokens: int | None, has_left: Callable[[], Awaitable[bool]]
    ) -> tuple[Turn, int]:
        """The policy's next message, and the number of tokens before it.

        Args:
            has_left: whether the client has disconnected: then nobody reads the message, and it is dropped.

        Raises:
            UnknownConversation: if there is no such session any more.
            BadCall: if the episode or the context is full.
            ClassroomError: the engine's errors, which end the batch.
        """
        async with self._session(key).lock:
            session = self._session(key)  # it may have ended while this call waited
            episode = session.play.episode
            if len(episode.turns) >= self.generation.max_turns - bool(episode.turns):
                raise BadCall(f"The episode has generation.max_turns = {self.generation.max_turns} messages: end it.")
            ids_between = (
                self.roles.policy.frame.reply(messages[-1]["content"]) if session.is_continued_by(messages) else []
            )
            context = [*episode.buffer.ids, *ids_between] if ids_between else self._policy.encode_chat(messages)
            own_prompt = () if ids_between or episode.buffer is None else tuple(context)
            room = self._limit - len(context) - 1
            limit = min(self._sampling.max_tokens, max_tokens or room)
            try:
                if room < 1:
                    raise ContextOverflow(f"the prompt of a call has {len(context)} tokens, the context {self._limit}")
                sampling = replace(self._sampling, max_tokens=limit)
                draft = await sample_draft(session.play, self._policy, context, sampling, room, prompt_ids=own_prompt)
            except ContextOverflow as overflow:
                episode.overflow = str(overflow)
                raise BadCall(
                    f"context_length_exceeded: {overflow}. End the episode, or shorten the messages."
                ) from None
            except Exception as error:
                if not session.outcome.done():
                    session.outcome.set_exception(error)
                raise
            if await has_left():
                raise BadCall("The client has gone: its message is dropped.")
            self._session(key)  # it may have ended meanwhile
            self._add_answer(session, messages, draft, context, ids_between)
        return episode.turns[-1], len(context)

    def _session(self, key: str) -> Session:
        session = self._sessions.get(key)
        if session is None or session.outcome.done():
            raise UnknownConversation(
                f"No episode {key} is being played: its reward was given, its time was over, its batch ended, or the "
                "URL is wrong."
            )
        return session

    def _add_answer(
        self, session: Session, messages: list[Message], draft: SampledDraft, context: list[int], between: list[int]
    ) -> None:
        """Add the agent's last message and the policy's answer to journal, context and turns."""
        episode, opening = session.play.episode, {}
        if episode.buffer is None:
            episode.buffer = TokenBuffer(context)
            opening = {"prompt_ids": context}
        else:
            turn = Turn(PROGRAM, messages[-1]["content"])
            self._journal.append("turn", conversation=episode.id, turn=turn, ids=between, logprobs=())
            episode.buffer.append_given(between)
            episode.turns.append(turn)
        message = unreviewed(draft, (len(episode.turns), 0))
        if draft.prompt_ids:
            message = replace(message, ids=(), logprobs=())
        else:
            session.heard = [*messages, {"role": "assistant", "content": draft.turn.text}]
        episode.turns.append(add_policy_message(self._journal, episode, message, opening))
        episode.overflow = None
