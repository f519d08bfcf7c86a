"""The classroom environment: runs each state of a conversation with the model of that role, checks problems and
prompts, and turns finished conversations into records.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import (
    LEAK_RULE,
    LEVEL_REWARD,
    RUBRIC,
    RULES,
    SCORING_RULES,
    SUPERVISOR_REWARD,
    TRAINS_STUDENT,
)
from classroom_rl.environments.classroom.config import classroom_rules, setup_options
from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation, Solution, State
from classroom_rl.environments.classroom.judging import JudgePanel
from classroom_rl.environments.classroom.metrics import batch_metrics
from classroom_rl.environments.classroom.post_test_turn import take_post_test
from classroom_rl.environments.classroom.prompt_check import (
    check_judge_prompts,
    check_lengths,
    check_levels,
    check_prompts,
    refuse_long_opening,
)
from classroom_rl.environments.classroom.record import ConversationRecord, ReplayedState, graded, replay
from classroom_rl.environments.classroom.rewards import reward_of, turn_reward_of
from classroom_rl.environments.classroom.role_checks import check_lessons
from classroom_rl.environments.classroom.roles import Roles, models_in_use
from classroom_rl.environments.classroom.setup import ConversationType, draw_setup
from classroom_rl.environments.classroom.student import TrainedStudent, attempt_request, student_chat
from classroom_rl.environments.classroom.supervised_turn import SupervisedTurn
from classroom_rl.environments.classroom.teacher import (
    INFORMED,
    chat_so_far,
    first_messages,
    forced_ids,
    opened_thought,
    opening_turns,
    toolbox_of,
)
from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.errors import ContextOverflow, DataError, RequestRefused
from classroom_rl.judges.rule_judge import read_judged_answer, read_judged_plan
from classroom_rl.rollout import environment as rollout_environment
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import Completion, Sampling, TokenEngine
from classroom_rl.rollout.environment import Environment as BaseEnvironment
from classroom_rl.rollout.environment import Play
from classroom_rl.rollout.policy_turn import (
    PolicyModel,
    add_policy_message,
    policy_sampling,
    policy_turn_of,
    sample_draft,
)
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import check_template, render
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.scheduler import Phase
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.supervision import ReviewedMessage, SampledDraft, is_supervised, unreviewed
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn, approximate_tokens
from classroom_rl.rollout.trajectory import NEVER_SPOKE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


DIALOGUE_ROLES = ("teacher", "student", "supervisor")
DIALOGUE = (State.TEACHER_TURN, State.SUPERVISOR_TURN, State.STUDENT_TURN)
PHASES = (
    Phase("dialogue", DIALOGUE, DIALOGUE_ROLES),
    Phase("judging", (State.JUDGE_TURN,), ("judge",)),
    Phase("solutions", (State.POST_TEST, State.GENERATE_SOLUTION), ("student",)),
    Phase("rewards", (State.REWARD_TURN,), ("reward",)),
)
"""The phases in order. The last one grades solutions, with the reward model if there is one. A role without an engine
on this server (an API, an embedded judge, an empty role) needs no GPU memory."""


_PROMPTS_IN_MEMORY = 512
_READ_BY_JUDGE = {RUBRIC: parse_problem, RULES: read_judged_plan}
"""How an embedded judge reads a problem; raises `DataError` for one of another kind."""


class Classroom(BaseEnvironment[Conversation, ReplayedState]):
    """Plays conversations with the models in `roles`, as configured in `generation`.

    Args:
        journal: gets every turn, verdict and reward before it is used.
        reward_weights: the rewards to compute, and their weights in a conversation's `reward`.
        rules: the limits and judging rules of all conversations, from `classroom_rules`.
        turn_rewards: the turn rewards to compute.
        judge_options: whether conversations are judged one by one or in groups; None for one by one.
        student_context: the context length of the student's model in tokens, for a student under training.
    """

    Record = ConversationRecord
    phases = PHASES
    takes_own_rewards = True

    def __init__(
        self,
        generation: GenerationConfig,
        roles: Roles,
        journal: Journal,
        reward_weights: Mapping[str, float],
        rules: ClassroomRules,
        turn_rewards: Iterable[str] = (),
        judge_options: JudgeModelConfig | None = None,
        student_context: int = 0,
    ):
        self._generation = generation
        self._turn_rewards = tuple(turn_rewards)
        self.roles = roles
        self._journal = journal
        self._reward_weights = reward_weights
        self._rules = rules
        self._options = setup_options(generation)
        self._forced_ids, self._opened_thought = [], ""
        if roles.teacher_has_tokens:
            self._forced_ids = forced_ids(generation, roles.teacher.frame, roles.teacher.tokenizer)
            self._opened_thought = opened_thought(generation, roles.teacher.frame)
        self._policy = PolicyModel(roles.teacher, toolbox_of(generation))
        self._student = TrainedStudent(roles, journal, student_context) if roles.trains_student else None
        # All conversations of a group have the same first prompt.
        self._encode_once = lru_cache(_PROMPTS_IN_MEMORY)(self._encode)
        attempts, options = generation.number_judge_attempts, judge_options or JudgeModelConfig()
        self._panel = JudgePanel(roles, journal, rules.judge_rules, attempts, options)
        self._supervised_turn = SupervisedTurn(generation.supervisor, roles, self._forced_ids)
        self._steps = {
            State.TEACHER_TURN: self._teacher_turn if roles.teacher_has_tokens else self._teacher_message,
            State.SUPERVISOR_TURN: self._supervisor_turn,
            State.STUDENT_TURN: self._student_turn,
            State.JUDGE_TURN: self._judge_turn,
            State.POST_TEST: self._take_post_test,
            State.GENERATE_SOLUTION: self._generate_solutions,
            State.REWARD_TURN: self._reward_turn,
        }

    @classmethod
    def models(cls, config: Any, reward_weights: Mapping[str, float]) -> dict[str, Any]:
        return models_in_use(config, reward_weights)

    @classmethod
    def check(cls, config: Any, judge_reads_templates: bool) -> None:
        """Check the prompt templates."""
        check_prompts(config.generation, judge_reads_templates)
        if isinstance(config, TrainRLConfig) and (path := config.train.distillation.prompt_path) is not None:
            check_template("train.distillation.prompt_path", path, INFORMED)
        check_judge_prompts(config.judge_model, config.generation.judge_rules)

    @classmethod
    def open_with(
        cls, config: Any, roles: rollout_environment.Roles, journal: Journal, reward_weights: Mapping[str, float]
    ) -> "Classroom":
        generation, teacher = config.generation, config.teacher_model
        # The context length of a teacher behind an API is not known here.
        context_length = generation.max_tokens_in_conversation if teacher.is_remote else teacher.vllm.max_length
        rules = classroom_rules(generation, reward_weights, context_length, config.reward_model.grades)
        configured = config.train.turn_credit.weights if isinstance(config, TrainRLConfig) else {}
        supervised = {} if roles.supervisor is None else {SUPERVISOR_REWARD: 1.0}
        turn_rewards = supervised | configured  # with a supervisor, its penalties are always recorded
        classroom_roles, judge = Roles.of(config, roles), config.judge_model
        context_length = config.student_model.vllm.max_length
        return cls(generation, classroom_roles, journal, reward_weights, rules, turn_rewards, judge, context_length)

    @classmethod
    def check_problems(
        cls, config: Any, problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase", limit: int
    ) -> None:
        """Refuse problems that leave no room for a conversation in the teacher's context, that an embedded judge cannot
        read, or whose level the turn reward `level` cannot tell."""
        if config.generation.trained_role == TRAINS_STUDENT:
            check_lessons(problems, config)
        else:
            check_lengths(problems, config.generation, tokenizer, limit)
        check_levels(config.generation.level, problems if LEVEL_REWARD in config.train.turn_credit.weights else ())
        judge, rules = config.judge_model.model_name_or_path, config.generation.judge_rules
        for problem in problems if judge in _READ_BY_JUDGE else ():
            if SCORING_RULES.intersection(rules):
                _READ_BY_JUDGE[judge](problem.text)
            if LEAK_RULE in rules:
                read_judged_answer(problem.text, problem.answer)

    @property
    def rules(self) -> ClassroomRules:
        """The limits and judging rules of all conversations."""
        return self._rules

    @property
    def identity(self) -> tuple[Any, ...]:
        """Everything that a conversation depends on: `generation` without the server's keys, the rules, the sampling
        options, the reward model's name, and the supervision."""
        models = [self.roles.teacher_sampling, self.roles.student_sampling]
        if self.roles.reward is not None:
            models.append(self.roles.reward.model_name)
        identity = (self._generation.identity(), self._rules, tuple(models), *self._panel.identity)
        if self.roles.supervisor is not None:
            identity = (*identity, self._generation.supervisor, self.roles.supervisor_name)
        return (*identity, self._turn_rewards) if self._turn_rewards else identity

    def open(self, id: str, problem: Problem, request: SampleRequest) -> Conversation:
        """A new conversation, with its drawn setup and the opening messages of the teacher's prompt template."""
        setup = draw_setup(problem, request.seed, request.step, self._options)
        conversation = Conversation(id=id, problem=problem, setup=setup, rules=self._rules)
        if request.supervised and self.roles.supervisor is not None:
            conversation.supervised = is_supervised(self._generation.supervisor, problem, request.seed, request.step)
        conversation.start(opening_turns(self._generation, problem.text, setup.student_name))
        return conversation

    def replay(self, episode: Conversation, events: Iterable[dict[str, Any]], judge_again: bool) -> ReplayedState:
        return replay(episode, events, judge_again)

    def is_recorded(self, replayed: ReplayedState) -> bool:
        return replayed.finished

    def trajectory(self, play: Play, reward: float | None) -> ConversationRecord:
        turn_rewards = {name: turn_reward_of(name)(play.episode) for name in self._turn_rewards}
        return ConversationRecord.of(play, reward, turn_rewards)

    def reward_of(self, name: str, record: ConversationRecord) -> float | None:
        try:
            return reward_of(name)(record.conversation(self._rules))
        except ValueError as error:
            raise DataError(str(error)) from error

    @classmethod
    def batch_metrics(cls, records: Sequence[ConversationRecord]) -> dict[str, float]:
        return batch_metrics(records)

    def needs_policy(self, episode: Conversation) -> bool:
        """Whether the dialogue goes on. Judge, post-test and solutions do not need the teacher."""
        return episode.state in DIALOGUE

    async def advance(self, play: Play) -> None:
        """Run the step of the conversation's current state. A refusal by a model or a full context ends the
        conversation."""
        conversation = play.episode
        if self._student and not (conversation.failure or conversation.buffer or self.needs_policy(conversation)):
            self._give_up(conversation, NEVER_SPOKE, overflow=False)
        if conversation.failure is not None:
            self._panel.left(play)
        try:
            await self._steps[conversation.state](play)
        except RequestRefused as refusal:  # by the student's or the teacher's API; a judge's is a failed attempt
            self._give_up(conversation, str(refusal), overflow=False)
        except ContextOverflow as overflow:  # of any model but the judge's
            logger.warning("conversation %s ends early: %s", conversation.id, overflow)
            if conversation.state is State.STUDENT_TURN and conversation.teacher_turns:
                self._journal.append("cut_short", conversation=conversation.id, reason=str(overflow))
                conversation.cut_short(str(overflow))
            else:
                self._give_up(conversation, str(overflow), overflow=True)

    def _give_up(self, conversation: Conversation, reason: str, overflow: bool) -> None:
        # The trainer needs tokens of every conversation, so one that failed before its first turn gets its prompt.
        prompt_ids, end_ids = [], []
        if self._student and conversation.buffer is None:
            persona = next(iter(self._generation.student_personas_prompts_paths.values()))
            prompt_ids, end_ids = self._student.encode(self._student_view(conversation, persona)), self._student.end_ids
        elif not (conversation.buffer and conversation.buffer.completion_ids) and self.roles.teacher_has_tokens:
            end_ids = [self.roles.teacher.frame.turn_end_id]
            prompt_ids = self._prompt_ids(conversation)[: self._rules.max_tokens_in_conversation - len(end_ids)]
        event = {"reason": reason, "prompt_ids": prompt_ids, "end_ids": end_ids, "overflow": overflow}
        self._journal.append("failure", conversation=conversation.id, **event)
        conversation.give_up(**event)

    # One method per state ----------------------------------------------------------------------------------------

    async def _teacher_turn(self, play: Play) -> None:
        conversation = play.episode
        if conversation.buffer is None:
            self._open_context(conversation)
        hint_ids = self._supervised_turn.hint_ids(conversation)
        draft = await sample_draft(
            play,
            self._policy,
            conversation.buffer.ids,
            self.roles.teacher_sampling,
            conversation.tokens_left - len(hint_ids) - 1,  # one token is reserved for the end of the turn
            hint_ids=hint_ids,
            opened=self._opened_thought,
        )
        self._submit(conversation, draft)

    async def _teacher_message(self, play: Play) -> None:
        """The turn of a teacher behind an API, or of one that is not trained: text in, text out."""
        conversation, on_engine = play.episode, isinstance(self.roles.teacher, TokenEngine)
        messages = chat_so_far(self._generation, conversation, with_user=not on_engine)
        if conversation.prompt_estimate is None:
            estimate = sum(approximate_tokens(message["content"]) for message in messages)
            # Turns before the teacher's first are the student's, apart from those of the prompt template (`given`).
            student_tokens = sum(approximate_tokens(turn.text) for turn in conversation.turns if not turn.given)
            refuse_long_opening(conversation.problem, estimate, student_tokens, self._rules.max_tokens_in_conversation)
            conversation.open_estimated(estimate)
        hints = self._supervised_turn.hint_messages(conversation)
        max_tokens = conversation.turn_limit_after(sum(approximate_tokens(message["content"]) for message in hints))
        sampling = policy_sampling(play, self.roles.teacher_sampling, max_tokens)
        message = await self._policy.chat([*messages, *hints], sampling, prompt_first=True)
        turn = policy_turn_of(message)
        self._submit(conversation, SampledDraft(replace(turn, policy=None) if self._student else turn))

    def _submit(self, conversation: Conversation, draft: SampledDraft) -> None:
        """Add a message of the teacher to the conversation, or, if it is supervised, submit it for review."""
        if conversation.supervised:
            opened = self._opened_context(conversation)
            self._journal.append("draft", conversation=conversation.id, draft=draft, **opened)
            conversation.add_draft(draft)
        else:
            self._add_message(conversation, unreviewed(draft, (len(conversation.turns), 0)))

    async def _supervisor_turn(self, play: Play) -> None:
        conversation = play.episode
        review = await self._supervised_turn.review(conversation)
        message = self._supervised_turn.settle(conversation, review)
        if message is None:
            self._journal.append("review", conversation=conversation.id, review=review)
            conversation.reject_draft(review)
        else:
            self._add_message(conversation, message)

    def _add_message(self, conversation: Conversation, message: ReviewedMessage) -> None:
        """Add a message of the teacher to the journal, the teacher's context, and the conversation. The journal comes
        first, so that a restart can replay the message."""
        opening = self._opened_context(conversation)
        if self._student:
            message = replace(message, in_context=False)  # the context is the student's
        conversation.add_teacher_turn(add_policy_message(self._journal, conversation, message, opening))

    def _opened_context(self, conversation: Conversation) -> dict[str, Any]:
        """The journal fields that restore the beginning of the teacher's context; empty but for its first message."""
        if conversation.teacher_turns:
            return {}
        if conversation.prompt_estimate is not None:
            return {"prompt_estimate": conversation.prompt_estimate}
        return {"prompt_ids": conversation.buffer.prompt_ids}

    async def _student_turn(self, play: Play) -> None:
        conversation = play.episode
        if conversation.next_is_opening_attempt:
            await self._opening_attempt(play)
            return
        persona = conversation.next_persona
        messages = self._student_view(conversation, self._generation.student_personas_prompts_paths[persona])
        if self._student:
            conversation.add_student_turn(await self._student.speak(play, messages, persona))
            return
        answer = await self.roles.student.chat(messages, play.sampled_with(self.roles.student_sampling))
        turn = self._student_turn_of(answer, persona)
        framed_ids = []  # messages before the teacher's first sampled turn are part of its prompt
        if conversation.buffer is not None:
            framed_ids = self.roles.teacher.frame.reply(turn.text) + self._forced_ids
        self._write_turn(conversation, turn, framed_ids)
        conversation.add_student_turn(turn, framed_ids)

    async def _opening_attempt(self, play: Play) -> None:
        max_tokens = self._generation.max_tokens_per_student_attempt
        sampling = replace(play.sampled_with(self.roles.student_sampling), max_tokens=max_tokens)
        answer = await self.roles.student.chat(attempt_request(self._generation, play.episode.problem.text), sampling)
        turn = self._student_turn_of(answer, persona=None)
        self._write_turn(play.episode, turn, ids=())
        play.episode.add_student_turn(turn)

    async def _judge_turn(self, play: Play) -> None:
        play.episode.add_verdicts(await self._panel.judge(play))

    async def _take_post_test(self, play: Play) -> None:
        post_test = play.replayed.post_test
        if post_test is None:
            sampling = play.sampled_with(self.roles.student_sampling)
            post_test = await take_post_test(self._generation.post_test, self.roles, play.episode, sampling)
            self._journal.append("post_test", conversation=play.episode.id, post_test=post_test)
        play.episode.add_post_test(post_test)

    async def _generate_solutions(self, play: Play) -> None:
        solutions = play.replayed.solutions
        if solutions is None:
            solutions = await self._write_solutions(play)
            self._journal.append("solutions", conversation=play.episode.id, solutions=solutions)
        if any(solution.grade is None for solution in solutions):
            await play.registration.wait_for_phase(State.REWARD_TURN)  # the phase in which a reward model is awake
            texts = (visible_text(solution.text) for solution in solutions)
            grades = await asyncio.gather(*(self.roles.grade(play.episode.problem, text) for text in texts))
            self._journal.append("grades", conversation=play.episode.id, grades=grades)
            solutions = graded(solutions, grades)
        play.episode.add_solutions(solutions)

    async def _write_solutions(self, play: Play) -> list[Solution]:
        conversation = play.episode
        persona_path = next(iter(self._generation.student_personas_prompts_paths.values()))
        messages = self._student_view(conversation, persona_path)
        request = self._render(conversation, self._generation.student_final_prompt_path)
        messages.append({"role": "user", "content": request})
        max_tokens = self._generation.max_tokens_per_student_attempt
        results = await asyncio.gather(
            *(
                self.roles.student.chat(messages, replace(sampling, max_tokens=max_tokens))
                for sampling in self._solution_samplings(play)
            ),
            return_exceptions=True,  # wait for all requests, so that none outlives the conversation
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        for message in dict.fromkeys(str(failure) for failure in failures[1:] if str(failure) != str(failures[0])):
            logger.warning("conversation %s: another solution failed, too: %s", conversation.id, message)
        if failures:
            raise failures[0]
        return [Solution(result.text) for result in results]

    async def _reward_turn(self, play: Play) -> None:
        conversation = play.episode
        rewards = {name: reward_of(name)(conversation) for name in self._reward_weights}
        if not play.replayed.rewarded:
            self._journal.append("rewards", conversation=conversation.id, rewards=rewards)
        conversation.add_rewards(rewards)

    # What each model is shown ------------------------------------------------------------------------------------

    def _open_context(self, conversation: Conversation) -> None:
        prompt_ids = self._prompt_ids(conversation)
        # The tokens of the student's messages: the difference to a prompt in which their text is empty.
        student_tokens = 0
        if any(not turn.given for turn in conversation.turns):
            silent_turns = [turn if turn.given else replace(turn, text="") for turn in conversation.turns]
            student_tokens = len(prompt_ids) - len(self._prompt_ids(conversation, silent_turns))
        refuse_long_opening(
            conversation.problem, len(prompt_ids), student_tokens, self._rules.max_tokens_in_conversation
        )
        conversation.open_buffer(prompt_ids)

    def _prompt_ids(self, conversation: Conversation, turns: Sequence[Turn] | None = None) -> list[int]:
        setup, text = conversation.setup, conversation.problem.text
        turns = conversation.turns if turns is None else turns
        messages = first_messages(self._generation, text, setup.student_name, setup.type, turns)
        return [*self._encode_once(*((message["role"], message["content"]) for message in messages)), *self._forced_ids]

    def _encode(self, *messages: tuple[str, str]) -> tuple[int, ...]:
        return tuple(self._policy.encode_chat([{"role": role, "content": text} for role, text in messages]))

    def _student_view(self, conversation: Conversation, persona_path: str) -> list[Message]:
        attempted = conversation.setup.type is ConversationType.ATTEMPTED
        system, problem = self._render(conversation, persona_path), conversation.problem.text
        return student_chat(self._generation, system, problem, conversation.turns, attempted)

    def _render(self, conversation: Conversation, path: str) -> str:
        return render(
            path,
            student_name=conversation.setup.student_name,
            problem=conversation.problem.text,
            include_thinking=self._generation.use_thinking,
        )

    def _solution_samplings(self, play: Play) -> Sequence[Sampling]:
        base = play.sampled_with(self.roles.student_sampling)
        # Solutions of one conversation must differ: each has a seed of its own.
        seeds = [None if base.seed is None else base.seed + index for index in range(self._rules.solutions)]
        return [replace(base, seed=seed, draw=(*base.draw, index)) for index, seed in enumerate(seeds)]

    # Helpers ----------------------------------------------------------------------------------------------------

    def _student_turn_of(self, answer: Completion, persona: str | None) -> Turn:
        return Turn("student", visible_text(answer.text), persona, answer.tokens, answer.ended)

    def _write_turn(
        self, conversation: Conversation, turn: Turn, ids: Sequence[int], logprobs: Sequence[float] = (), **extra: Any
    ) -> None:
        """Write a turn to the journal. `ids` are all tokens that it adds to the teacher's context; the first
        `len(logprobs)` of them were sampled, except where a `mask` is 0."""
        self._journal.append("turn", conversation=conversation.id, turn=turn, ids=ids, logprobs=logprobs, **extra)


Environment = Classroom
"""The name under which the server finds the environment of a package."""
