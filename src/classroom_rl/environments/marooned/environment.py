"""Marooned as a training environment: the model plays one seat of each game, or all, and every decision has its own
prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import EMBEDDED_SUPERVISORS, SUPERVISOR_REWARD
from classroom_rl.environments.marooned.actions import Action
from classroom_rl.environments.marooned.config import STEP_REWARD, Generation
from classroom_rl.environments.marooned.episode import (
    DECISION,
    REVIEW,
    REWARDS,
    Episode,
    GameRecord,
    SeatReward,
    batch_metrics,
)
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.messages import format_message, parse_message, reasoning
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.prompts import decision_prompt, observation_text, system_prompt
from classroom_rl.environments.marooned.review import review_action
from classroom_rl.environments.marooned.rules import Rules
from classroom_rl.errors import DataError
from classroom_rl.rollout import environment
from classroom_rl.rollout.chat_template import encode_chat, encode_further_text
from classroom_rl.rollout.engine import ConversationFacts, Sampling
from classroom_rl.rollout.environment import POLICY_ROLE, Play, Roles
from classroom_rl.rollout.policy_turn import PolicyModel, add_policy_message, replay_event, sample_draft
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import OF_SUPERVISORS, check_template
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.reviews import MessageToReview, Review, reviewed
from classroom_rl.rollout.runner import weighted_sum
from classroom_rl.rollout.scheduler import Phase
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.supervision import (
    REPLACE,
    RETRY,
    ReviewedMessage,
    SampledDraft,
    decide,
    is_supervised,
    settle,
    unreviewed,
)
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import TokenBuffer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DecisionFacts(ConversationFacts):
    """What a rule-based supervisor knows about a decision: the game, the seat that decides, and the action that a
    scripted player would choose."""

    game: Game | None = None
    seat: int = 0
    shadow: Action | None = None


@dataclass(frozen=True)
class _FixedPlayer:
    """A player that always chooses the same action."""

    action: Action

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        return self.action


def about_decision(episode: Episode, draft: SampledDraft) -> MessageToReview:
    """What a supervisor is shown about a decision: the rules for the sailor's role, what the sailor knows, and the
    message. A rule-based supervisor also gets the game itself."""
    game = episode.game
    transcript = [
        {"role": "rules", "content": system_prompt(game.rules, game.roles[episode.due])},
        {"role": "game", "content": observation_text(game.rules, episode.view)},
    ]
    facts = DecisionFacts(game=game, seat=episode.due, shadow=episode.shadow)
    text = visible_text(draft.turn.text)
    return MessageToReview(transcript, text, episode.problem.text, facts=facts, cut=not draft.turn.ended)


def review_by_rules(about: MessageToReview) -> Review:
    """The rule-based review of a decision. Its correction is a possible action in the exact grammar."""
    facts = about.facts
    player = None if facts.shadow is None else _FixedPlayer(facts.shadow)
    review = review_action(facts.game, facts.seat, about.message, player)
    if review.valid:
        return Review(valid=True)
    message = parse_message(about.message)
    # A message that only had the wrong form keeps its own reasoning.
    own_reasoning = message.reasoning if review.corrected == message.action else ""
    reason = own_reasoning or reasoning(observe(facts.game, facts.seat), facts.game.rules, review.corrected)
    correction = format_message(reason, review.corrected)
    return Review(False, review.category, critique=review.critique, correction=correction)


SUPERVISOR_ROLE = "supervisor"


@dataclass
class Replayed:
    """Whether the journal holds the finished game."""

    finished: bool = False


class Environment(environment.Environment[Episode, Replayed]):
    """Games of Marooned in which one seat is trained, or, in self-play, all seats.

    Args:
        generation: limits, rules, players and supervision.
        context: the context length of the policy's model, in tokens.
        sampling: how decisions are sampled.
        rewards: the rewards to compute, and their weights.
        turn_rewards: the names of the rewards of single decisions to record.
        supervisor_name: the supervisor's model; "" without a supervisor.
    """

    Record = GameRecord
    phases = (Phase("game", (DECISION, REVIEW), (POLICY_ROLE, SUPERVISOR_ROLE)),)
    review_by_rules = staticmethod(review_by_rules)

    def __init__(
        self,
        generation: Generation,
        context: int,
        sampling: Sampling,
        roles: Roles,
        journal: Journal,
        rewards: Mapping[str, float],
        turn_rewards: Sequence[str] = (),
        supervisor_name: str = "",
    ):
        self.roles = roles
        self._policy = PolicyModel(roles.policy)
        self._generation = generation
        self._limit = min(generation.max_tokens_in_conversation, context)
        self._sampling = sampling
        self._journal = journal
        self._weights = dict(rewards)
        self._turn_rewards = tuple(turn_rewards)
        self._supervisor_name = supervisor_name

    # Opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def models(cls, config: Any, reward_weights: Mapping[str, float]) -> dict[str, Any]:
        """The models to load, by role: the policy, and the supervisor if it is a model."""
        models = {POLICY_ROLE: config.teacher_model}
        supervisor = getattr(config, "supervisor_model", None)
        if supervisor is not None and supervisor.model_name_or_path not in EMBEDDED_SUPERVISORS:
            models[SUPERVISOR_ROLE] = supervisor
        return models

    @classmethod
    def check(cls, config: Any, judge_reads_templates: bool) -> None:
        """Check the supervisor's prompt template."""
        path = config.generation.supervisor.prompt_path
        if path is not None:
            check_template("generation.supervisor.prompt_path", path, OF_SUPERVISORS)

    @classmethod
    def open_with(
        cls, config: Any, roles: Roles, journal: Journal, reward_weights: Mapping[str, float]
    ) -> "Environment":
        options, generation = config.teacher_model.vllm, config.generation
        sampling = Sampling.of(options, generation.max_tokens_per_turn)
        configured = config.train.turn_credit.weights if isinstance(config, TrainRLConfig) else {}
        supervised = {} if roles.supervisor is None else {SUPERVISOR_REWARD: 1.0}
        supervisor = "" if roles.supervisor is None else config.supervisor_model.model_name_or_path
        turn_rewards = list(supervised | configured)
        return cls(generation, options.max_length, sampling, roles, journal, reward_weights, turn_rewards, supervisor)

    @classmethod
    def check_problems(
        cls, config: Any, problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase", limit: int
    ) -> None:
        """Check that all problems are games, and that their first prompts leave room for a decision.

        Raises:
            DataError: for the first problem that is not.
        """
        for problem in problems:
            episode = Episode.of("check", problem, config.generation)
            length = len(encode_chat(tokenizer, prompt_of(episode, config.generation.show_rules)))
            if length + 1 >= limit:
                raise DataError(
                    f"Problem {problem.id} ({problem.text[:60]!r}) opens with {length} tokens, but the policy's "
                    f"context has {limit}: raise generation.max_tokens_in_conversation and "
                    "teacher_model.vllm.max_length."
                )

    # Playing -----------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> tuple[Any, ...]:
        """The class, `generation` without the server's keys, the context, the sampling, rewards, and the supervisor."""
        identity = (
            type(self).__qualname__,
            self._generation.identity(),
            self._limit,
            self._sampling,
            self._reward_identity,
        )
        return (*identity, self._turn_rewards, self._supervisor_name)

    @property
    def _reward_identity(self) -> tuple[Any, ...]:
        """What records depend on: the names of the rewards, and in self-play also their weights."""
        # In self-play a record holds weighted sums for each seat; otherwise it holds the rewards themselves.
        return tuple(self._weights.items()) if self._generation.self_play else tuple(self._weights)

    def open(self, id: str, problem: Problem, request: SampleRequest) -> Episode:
        """A new game, played up to the model's first decision."""
        episode = Episode.of(id, problem, self._generation)
        if request.supervised and self.roles.supervisor is not None:
            episode.supervised = is_supervised(self._generation.supervisor, problem, request.seed, request.step)
        return episode

    def replay(self, episode: Episode, events: Iterable[dict[str, Any]], judge_again: bool) -> Replayed:
        """Replay a game up to the point where the journal ends."""
        replayed = Replayed()
        for event in events:
            turn = replay_event(episode, event)
            if turn is not None:
                episode.act(turn)
            replayed.finished = replayed.finished or event["event"] == "conversation"
        if episode.finished:
            self._score(episode)
        return replayed

    def is_recorded(self, replayed: Replayed) -> bool:
        return replayed.finished

    async def advance(self, play: Play[Episode, Replayed]) -> None:
        """Sample a decision, or review its draft."""
        if play.episode.state == DECISION:
            await self._decide(play)
        else:
            await self._review(play)
        if play.episode.finished:
            self._score(play.episode)

    async def _decide(self, play: Play[Episode, Replayed]) -> None:
        episode = play.episode
        prompt_ids = self._prompt_of(episode)
        room = self._limit - len(prompt_ids) - 1
        if room < 1:
            episode.cut(f"the prompt of a decision has {len(prompt_ids)} tokens, the context {self._limit}")
            return
        # The first decision opens the buffer with its prompt; a draft of a later one must carry its own prompt.
        own_prompt = () if episode.buffer is None else prompt_ids
        draft = await sample_draft(play, self._policy, prompt_ids, self._sampling, room, prompt_ids=own_prompt)
        if episode.supervised:
            self._journal.append("draft", conversation=episode.id, draft=draft)
            episode.add_draft(draft)
        else:
            self._add_message(episode, unreviewed(draft, (len(episode.turns), 0)))

    def _prompt_of(self, episode: Episode) -> tuple[int, ...]:
        """The tokens of the prompt of the decision that is due, encoded once."""
        if not episode.prompt_ids:
            messages = prompt_of(episode, self._generation.show_rules)
            episode.prompt_ids = tuple(self._policy.encode_chat(messages))
        return episode.prompt_ids

    async def _review(self, play: Play[Episode, Replayed]) -> None:
        episode, supervision = play.episode, self._generation.supervisor
        request = about_decision(episode, episode.drafts[-1])
        review = await reviewed(self.roles.supervisor, request, supervision.penalties)
        decision = decide(review, supervision, len(episode.drafts))
        if decision == RETRY:
            self._journal.append("review", conversation=episode.id, review=review)
            episode.reject_draft(review)
            return
        position = (len(episode.turns), 0)
        self._add_message(episode, settle(episode.drafts, review, decision == REPLACE, position, self._target_of))

    def _target_of(self, draft: SampledDraft, correction: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        policy = self.roles.policy
        return (), (*encode_further_text(policy.tokenizer, correction), policy.frame.turn_end_id)

    def _add_message(self, episode: Episode, message: ReviewedMessage) -> None:
        """Add a message to the journal, the training samples, and the game. The first one fills the episode's
        buffer; later ones are branches with their own prompts."""
        opening = {}
        if episode.buffer is None:
            episode.buffer = TokenBuffer(self._prompt_of(episode))
            opening = {"prompt_ids": episode.buffer.prompt_ids}
        else:
            message = replace(message, ids=(), logprobs=())
        episode.act(add_policy_message(self._journal, episode, message, opening))

    # Finished games ----------------------------------------------------------------------------------------------

    def _score(self, episode: Episode) -> None:
        episode.rewards = self._rewards_of(episode, episode.seat)

    def _rewards_of(self, episode: Episode, seat: int) -> dict[str, float | None]:
        return {name: REWARDS[name](episode, seat) for name in self._weights}

    def _seats(self, episode: Episode) -> list[SeatReward]:
        """The reward of each seat in self-play; empty for a game that could not be scored."""
        if not self._generation.self_play or not episode.rewards:
            return []
        roles = episode.game.roles
        return [
            SeatReward(seat, roles[seat], weighted_sum(self._rewards_of(episode, seat), self._weights))
            for seat in episode.own
        ]

    def trajectory(self, play: Play[Episode, Replayed], reward: float | None) -> GameRecord:
        episode = play.episode
        turn_rewards = {
            SUPERVISOR_REWARD: [
                None if turn.review is None else turn.review.penalty
                for turn in episode.turns
                if turn.role == POLICY_ROLE
            ],
            STEP_REWARD: [decision.reward for decision in episode.decisions],
        }
        return GameRecord(
            **play.common_fields(reward),
            turn_rewards={name: turn_rewards[name] for name in self._turn_rewards},
            preset=self._generation.preset,
            seat=episode.seat,
            role=episode.role,
            outcome=episode.game.outcome or "",
            ship_progress=episode.game.ship_progress,
            fell=not episode.game.state.sailors[episode.seat].active,
            decisions=episode.decisions,
            seats=self._seats(episode),
        )

    @classmethod
    def batch_metrics(cls, records: Sequence[GameRecord]) -> dict[str, float]:
        return batch_metrics(records)


def prompt_of(episode: Episode, show_rules: bool) -> list[dict[str, str]]:
    """The prompt of a decision: the rules, if `show_rules`, and what the sailor knows now."""
    return decision_prompt(episode.game.rules, episode.view, show_rules)
