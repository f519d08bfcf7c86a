"""The supervisor of the game by rules: what is possible now is known exactly."""

from dataclasses import dataclass
from random import Random

from classroom_rl.environments.marooned.actions import Action
from classroom_rl.environments.marooned.episode import Episode
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.messages import format_message, parse_message
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.prompts import observation_text, system_prompt
from classroom_rl.environments.marooned.reasoning import reasoning
from classroom_rl.environments.marooned.review import review_action
from classroom_rl.environments.marooned.rules import Rules
from classroom_rl.rollout.engine import ConversationFacts
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.rollout.supervision import SampledDraft
from classroom_rl.rollout.thoughts import visible_text


@dataclass(frozen=True)
class DecisionFacts(ConversationFacts):
    """What the program knows of a decision: the game, who decides, and what a scripted player would do."""

    game: Game | None = None
    seat: int = 0
    shadow: Action | None = None


@dataclass(frozen=True)
class _Does:
    """A player who does one thing."""

    action: Action

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        return self.action


def about_decision(episode: Episode, draft: SampledDraft) -> MessageToReview:
    """What a supervisor is shown of a decision: the rules for the sailor's role, what the sailor knows, and the
    message. A supervisor of rules has the game itself."""
    game = episode.game
    shown = [
        {"role": "rules", "content": system_prompt(game.rules, game.roles[episode.due])},
        {"role": "game", "content": observation_text(game.rules, episode.view)},
    ]
    facts = DecisionFacts(game=game, seat=episode.due, shadow=episode.shadow)
    text = visible_text(draft.turn.text)
    return MessageToReview(shown, text, episode.problem.text, facts=facts, cut=not draft.turn.ended)


def review_by_rules(about: MessageToReview) -> Review:
    """The rules' review of a decision; its correction is a possible action in the exact grammar."""
    facts = about.facts
    player = None if facts.shadow is None else _Does(facts.shadow)
    found = review_action(facts.game, facts.seat, about.message, player)
    if found.valid:
        return Review(valid=True)
    message = parse_message(about.message)
    keeps = message.reasoning if found.corrected == message.action else ""
    why = keeps or reasoning(observe(facts.game, facts.seat), facts.game.rules, found.corrected)
    correction = format_message(why, found.corrected)
    return Review(False, found.category, critique=found.critique, correction=correction)
