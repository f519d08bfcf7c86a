"""The classroom: moves conversations through their states, one coroutine each, all of them at once.

The engines merge whatever turns are ready; a conversation is judged the moment its dialogue ends, while others still
talk.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from config.base import GenerationConfig
from src.classroom.conversation import END_OF_CONVERSATION, ClassroomRules, Conversation, Solution, State, visible_text
from src.classroom.prompt_check import refuse_long_opening
from src.classroom.record import TOKEN_FIELDS, ConversationRecord, SampleResponse
from src.classroom.replay import History, graded, replay
from src.classroom.rewards import REWARDS, weighted_sum
from src.classroom.seats import Seats
from src.classroom.setup import ConversationType, SetupOptions, draw_setup, persona_weights
from src.classroom.teacher_prompt import chat_so_far, first_messages, forced_ids, opened_thought, opening_turns
from src.classroom.verdicts import Verdict, failed_verdict, parse_judge_output, parse_verdict
from src.errors import ContextOverflow, EngineFailure, PolicyMismatch, ProviderFailure, RequestRefused, StorageError
from src.models.policy_version import PolicyVersion
from src.rollout.chat_template import Message, encode_chat
from src.rollout.datasets import Problem
from src.rollout.engines import Completion, Sampling, ask_judge
from src.rollout.journal import Journal, conversation_id
from src.rollout.prompts import render
from src.rollout.requests import SampleRequest
from src.rollout.scheduler import Attendance, Concurrent, Schedule
from src.rollout.tokens import Turn, approximate_tokens
from src.rollout.usage import BATCH

logger = logging.getLogger(__name__)

__all__ = ["Classroom", "Conversation", "parse_judge_output"]

_WITHOUT_INFLUENCE = (
    "server_host",
    "server_port",
    "allowed_hosts",
    "server_urls",
    "server_index",
    "server_start_timeout_s",
    "sample_timeout_s",
    "load_weights_timeout_s",
    "turn_timeout_s",
    "answer_timeout_s",
    "colocate",
    "student_attempt_prompt_path",
    "schedule",
)
"""Keys of GenerationConfig that no conversation depends on."""


@dataclass(frozen=True)
class Play:
    """One conversation of a request: its position, the how-many-th on its problem it is, what the teacher's weights
    contain that it is played with, and what the journal holds of it from before; `attendance` says when it may go on.
    """

    conversation: Conversation
    request: SampleRequest
    index: int
    occurrence: int
    weights: str
    history: History = field(default_factory=History)
    attendance: Attendance = field(default_factory=Concurrent)

    def sampled_with(self, sampling: Sampling) -> Sampling:
        """The sampling of the next answer, with a name of its own, and with a seed of its own where the request fixes
        seeds."""
        conversation = self.conversation
        spoken = len(conversation.turns) + len(conversation.solutions)
        sampling = replace(sampling, draw=(conversation.id, spoken))
        if not self.request.fixed_seeds:
            return sampling
        parts = (self.request.seed, conversation.problem.id, self.request.step, self.occurrence, spoken)
        digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
        return replace(sampling, seed=int.from_bytes(digest[:4]))


class Classroom:
    """Plays batches of conversations with the models in `seats` by the rules in `generation`.

    Args:
        generation: prompts, lengths and judging.
        seats: who speaks in which role.
        journal: where every turn, verdict and reward is written before it is used.
        reward_weights: which rewards are computed for each conversation, and their weights in its `reward`.
        rules: what holds for every conversation, from `classroom_rules`.
        schedule: when conversations may do what.
    """

    def __init__(
        self,
        generation: GenerationConfig,
        seats: Seats,
        journal: Journal,
        reward_weights: dict[str, float],
        rules: ClassroomRules,
        schedule: Schedule | None = None,
    ):
        self._generation = generation
        self._seats = seats
        self._journal = journal
        self._reward_weights = reward_weights
        self._rules = rules
        self._schedule = schedule or Concurrent()
        self._options = setup_options(generation)
        self._forced_ids, self._opened_thought = [], ""
        if seats.teacher_has_tokens:
            self._forced_ids = forced_ids(generation, seats.teacher.frame, seats.teacher.tokenizer)
            self._opened_thought = opened_thought(generation, seats.teacher.frame)
        self._steps = {
            State.TEACHER_TURN: self._teacher_turn if seats.teacher_has_tokens else self._teacher_message,
            State.STUDENT_TURN: self._student_turn,
            State.JUDGE_TURN: self._judge_turn,
            State.GENERATE_SOLUTION: self._generate_solutions,
            State.REWARD_TURN: self._reward_turn,
        }
        self.running = self.finished = 0

    @property
    def seats(self) -> Seats:
        """Who speaks in which role."""
        return self._seats

    @property
    def schedule(self) -> Schedule:
        """When conversations, and whoever else needs the engines, may do what."""
        return self._schedule

    @property
    def rules(self) -> ClassroomRules:
        """What holds for every conversation."""
        return self._rules

    async def sample(self, request: SampleRequest) -> SampleResponse:
        """Play, judge and reward one conversation per entry of the request. What the
        journal holds of them from the same weights is not done again.

        Raises:
            PolicyMismatch: if other weights are loaded than the request names, now or before it is done, or others
                under the same name before it is done.
            DataError: if a problem does not fit into the teacher's context. (If it is what was said that does not fit
                into some model's, that conversation ends.)
            EngineFailure: if an engine died.
            ProviderFailure: if a model behind an API refuses every request, or does not answer until its deadline.
        """
        apis = self._seats.apis
        BATCH.set(request.request_id)
        policy, weights = self._seats.teacher.policy, self._seats.teacher.weights
        self._check_policy(request, policy)
        self._journal.append(
            "batch",
            request=request.request_id,
            step=request.step,
            policy=policy,
            weights=weights,
            body=self._body(request),
            **_problems_once(request),
        )
        plays = self._open(request, weights)
        try:
            with self._schedule.attend(len(plays)) as attendance:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._play(replace(play, attendance=attendance))) for play in plays]
        except BaseExceptionGroup as failures:
            for api in apis.values():
                await api.land()
            raise _first(failures) from None
        return SampleResponse(
            request_id=request.request_id,
            policy=policy,
            conversations=[task.result() for task in tasks],
            reward_weights=self._reward_weights,
            **{seat: api.ledger.usage(request.request_id) for seat, api in apis.items()},
        )

    def _open(self, request: SampleRequest, weights: str) -> list[Play]:
        seen: Counter[str] = Counter()
        plays = []
        for index, (text, answer) in enumerate(zip(request.problems, request.answers, strict=True)):
            problem = Problem.of(text, answer)
            conversation = Conversation(
                id=conversation_id(request.request_id, index),
                problem=problem,
                setup=draw_setup(problem, request.seed, request.step, self._options),
                rules=self._rules,
            )
            conversation.start(opening_turns(self._generation, text, conversation.setup.student_name))
            history = replay(conversation, self._journal.events(conversation.id), request.judge_again)
            plays.append(Play(conversation, request, index, seen[problem.id], weights, history))
            seen[problem.id] += 1
        return plays

    async def _play(self, play: Play) -> ConversationRecord:
        conversation = play.conversation
        self.running += 1
        try:
            while conversation.state is not State.END:
                await play.attendance.reach(conversation.state)
                await self._step(play)
        finally:
            self.running -= 1
            play.attendance.leave()
        reward = weighted_sum(conversation.rewards, self._reward_weights)
        record = ConversationRecord.of(conversation, play.request, play.index, reward)
        if not play.history.finished:
            self._journal.append("conversation", conversation=record.id, record=record.model_dump(exclude=TOKEN_FIELDS))
        self.finished += 1
        return record

    async def _step(self, play: Play) -> None:
        conversation = play.conversation
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
        prompt_ids, end_ids = [], []
        if conversation.buffer is None and self._seats.teacher_has_tokens:
            end_ids = [self._seats.teacher.frame.turn_end_id]
            prompt_ids = self._prompt_ids(conversation)[: self._rules.max_tokens_in_conversation - len(end_ids)]
        event = {"reason": reason, "prompt_ids": prompt_ids, "end_ids": end_ids, "overflow": overflow}
        self._journal.append("failure", conversation=conversation.id, **event)
        conversation.give_up(**event)

    def _body(self, request: SampleRequest) -> str:
        """Stands for what is asked for under this configuration: another configuration begins a batch anew."""
        options = {name: value for name, value in asdict(self._generation).items() if name not in _WITHOUT_INFLUENCE}
        seats = [self._seats.teacher_sampling, self._seats.student_sampling]
        if self._seats.reward is not None:
            seats.append(self._seats.reward.model_name)
        return hashlib.sha256(repr((request.digest, options, self._rules, tuple(seats))).encode()).hexdigest()

    # One method per state ----------------------------------------------------------------------------------------

    async def _teacher_turn(self, play: Play) -> None:
        conversation = play.conversation
        if conversation.buffer is None:
            self._open_context(conversation)
        answer = await self._seats.teacher.generate(conversation.buffer.ids, self._teacher_sampling(play))
        self._check_answer(play, answer)
        span = conversation.buffer.append_sampled(answer.ids, answer.logprobs)
        end = self._seats.teacher.frame.turn_end_id
        given = [] if answer.ids[-1:] == (end,) else [end]
        conversation.buffer.append_given(given)
        text = self._opened_thought + answer.text
        turn = Turn("teacher", text, None, len(answer.ids), answer.ended, span, answer.policy)
        prompt = {} if conversation.teacher_turns else {"prompt_ids": conversation.buffer.prompt_ids}
        self._write_turn(conversation, turn, [*answer.ids, *given], answer.logprobs, **prompt)
        conversation.add_teacher_turn(turn)

    async def _teacher_message(self, play: Play) -> None:
        """The turn of a teacher behind an API: text in, text out."""
        conversation, opened = play.conversation, {}
        messages = chat_so_far(self._generation, conversation)
        if conversation.prompt_estimate is None:
            estimate = sum(approximate_tokens(message["content"]) for message in messages)
            said = sum(approximate_tokens(turn.text) for turn in conversation.turns if not turn.given)
            refuse_long_opening(conversation.problem, estimate, said, self._rules.max_tokens_in_conversation)
            conversation.open_estimated(estimate)
        if not conversation.teacher_turns:
            opened = {"prompt_estimate": conversation.prompt_estimate}
        answer = await self._seats.teacher.chat(messages, self._teacher_sampling(play))
        turn = Turn("teacher", answer.text, None, answer.tokens, answer.ended, policy=answer.policy)
        self._write_turn(conversation, turn, ids=(), **opened)
        conversation.add_teacher_turn(turn)

    def _teacher_sampling(self, play: Play) -> Sampling:
        sampling = replace(
            play.sampled_with(self._seats.teacher_sampling), max_tokens=play.conversation.teacher_turn_limit
        )
        return replace(sampling, temperature=0.0) if play.request.greedy else sampling

    async def _student_turn(self, play: Play) -> None:
        conversation = play.conversation
        if conversation.next_is_opening_attempt:
            await self._opening_attempt(play)
            return
        persona = conversation.next_persona
        messages = self._student_view(conversation, self._generation.student_personas_prompts_paths[persona])
        answer = await self._seats.student.chat(messages, play.sampled_with(self._seats.student_sampling))
        turn = self._student_said(answer, persona)
        framed_ids = []  # before the teacher has spoken itself, what is said is part of its prompt
        if conversation.buffer is not None:
            framed_ids = self._seats.teacher.frame.reply(turn.text) + self._forced_ids
        self._write_turn(conversation, turn, framed_ids)
        conversation.add_student_turn(turn, framed_ids)

    async def _opening_attempt(self, play: Play) -> None:
        limit = self._generation.max_tokens_per_student_attempt
        sampling = replace(play.sampled_with(self._seats.student_sampling), max_tokens=limit)
        answer = await self._seats.student.chat(self._attempt_request(play.conversation), sampling)
        turn = self._student_said(answer, persona=None)
        self._write_turn(play.conversation, turn, ids=())
        play.conversation.add_student_turn(turn)

    async def _judge_turn(self, play: Play) -> None:
        conversation = play.conversation
        async with asyncio.TaskGroup() as panel:  # what stops one attempt stops the others
            attempts = [
                panel.create_task(self._judge_once(play, rule, attempt))
                for rule in self._rules.judge_rules
                for attempt in range(self._generation.number_judge_attempts)
            ]
        conversation.add_verdicts([attempt.result() for attempt in attempts])

    async def _judge_once(self, play: Play, rule: str, attempt: int) -> Verdict:
        if known := play.history.verdicts.get((rule, attempt)):
            return known
        conversation, text = play.conversation, ""
        try:
            about = (conversation.transcript(), conversation.problem.text)
            text = await ask_judge(self._seats.judge, rule, *about, attempt, conversation.ledger)
            verdict = parse_verdict(rule, attempt, text)
        except (EngineFailure, ProviderFailure, StorageError):  # nothing was judged; once that is mended, it will be
            raise
        except Exception as error:  # the one place of this phase: a failed judge is recorded, never an opinion
            verdict = failed_verdict(rule, attempt, error, text)
        self._journal.append("verdict", conversation=conversation.id, verdict=verdict)
        return verdict

    async def _generate_solutions(self, play: Play) -> None:
        solutions = play.history.solutions
        if solutions is None:
            solutions = await self._write_solutions(play)
            self._journal.append("solutions", conversation=play.conversation.id, solutions=solutions)
        if any(solution.grade is None for solution in solutions):
            await play.attendance.reach(State.REWARD_TURN)  # where a reward model is awake, should one grade
            texts = (visible_text(solution.text) for solution in solutions)
            grades = await asyncio.gather(*(self._seats.grade(play.conversation.problem, text) for text in texts))
            self._journal.append("grades", conversation=play.conversation.id, grades=grades)
            solutions = graded(solutions, grades)
        play.conversation.add_solutions(solutions)

    async def _write_solutions(self, play: Play) -> list[Solution]:
        conversation = play.conversation
        messages = self._student_view(conversation, self._first_persona_path())
        messages.append({"role": "user", "content": self._render(conversation, self._final_prompt_path())})
        limit = self._generation.max_tokens_per_student_attempt
        texts = await asyncio.gather(
            *(
                self._seats.student.chat(messages, replace(sampling, max_tokens=limit))
                for sampling in self._solution_samplings(play)
            ),
            return_exceptions=True,  # no request goes on behind the back of a conversation that has ended
        )
        for failure in (said for said in texts if isinstance(said, BaseException)):
            raise failure
        return [Solution(said.text) for said in texts]

    async def _reward_turn(self, play: Play) -> None:
        conversation = play.conversation
        rewards = {name: REWARDS[name](conversation) for name in self._reward_weights}
        if not play.history.rewarded:
            self._journal.append("rewards", conversation=conversation.id, rewards=rewards)
        conversation.add_rewards(rewards)

    # What each model is shown ------------------------------------------------------------------------------------

    def _open_context(self, conversation: Conversation) -> None:
        prompt_ids = self._prompt_ids(conversation)
        said = 0
        if any(not turn.given for turn in conversation.turns):
            silent = [turn if turn.given else replace(turn, text="") for turn in conversation.turns]
            said = len(prompt_ids) - len(self._prompt_ids(conversation, silent))
        refuse_long_opening(conversation.problem, len(prompt_ids), said, self._rules.max_tokens_in_conversation)
        conversation.open_buffer(prompt_ids)

    def _prompt_ids(self, conversation: Conversation, turns: Sequence[Turn] | None = None) -> list[int]:
        setup, text = conversation.setup, conversation.problem.text
        turns = conversation.turns if turns is None else turns
        messages = first_messages(self._generation, text, setup.student_name, setup.type, turns)
        return encode_chat(self._seats.teacher.tokenizer, messages) + self._forced_ids

    def _student_view(self, conversation: Conversation, persona_path: str) -> list[Message]:
        """The dialogue from the student's chair: its persona, the teacher as user, itself as assistant."""
        messages = [{"role": "system", "content": self._render(conversation, persona_path)}]
        if conversation.setup.type is ConversationType.ATTEMPTED:
            messages += self._attempt_request(conversation)
        for turn in conversation.turns:
            text = visible_text(turn.text).replace(END_OF_CONVERSATION, "").strip()
            messages.append({"role": "user" if turn.role == "teacher" else "assistant", "content": text})
        return messages

    def _attempt_request(self, conversation: Conversation) -> list[Message]:
        path = self._generation.student_initial_attempt_prompt_path
        return [{"role": "user", "content": render(path, problem=conversation.problem.text)}]

    def _render(self, conversation: Conversation, path: str) -> str:
        return render(
            path,
            student_name=conversation.setup.student_name,
            problem=conversation.problem.text,
            include_thinking=self._generation.use_thinking,
        )

    def _first_persona_path(self) -> str:
        return next(iter(self._generation.student_personas_prompts_paths.values()))

    def _final_prompt_path(self) -> str:
        return self._generation.student_final_prompt_path

    def _solution_samplings(self, play: Play) -> Sequence[Sampling]:
        base = play.sampled_with(self._seats.student_sampling)
        seeds = [None if base.seed is None else base.seed + i for i in range(self._rules.solutions)]
        return [replace(base, seed=seed, draw=(*base.draw, i)) for i, seed in enumerate(seeds)]

    # Small parts ---------------------------------------------------------------------------------------------------

    def _student_said(self, answer: Completion, persona: str | None) -> Turn:
        return Turn("student", visible_text(answer.text), persona, answer.tokens, answer.ended)

    def _write_turn(
        self, conversation: Conversation, turn: Turn, ids: Sequence[int], logprobs: Sequence[float] = (), **more: Any
    ) -> None:
        """`ids` are all tokens that the turn adds to the teacher's context; those with a log-prob were sampled."""
        self._journal.append("turn", conversation=conversation.id, turn=turn, ids=ids, logprobs=logprobs, **more)

    def _check_policy(self, request: SampleRequest, loaded: PolicyVersion | None) -> None:
        wanted = request.wanted_policy
        if wanted is not None and wanted != loaded:
            raise PolicyMismatch(
                f"Request {request.request_id} asks for policy {wanted}, but {loaded} is loaded: publish the weights "
                "with POST /load_weights first."
            )

    def _check_answer(self, play: Play, answer: Completion) -> None:
        """A trainer that is started again may publish other weights under the version that its batch asked for."""
        self._check_policy(play.request, answer.policy)
        if play.request.wanted_policy is not None and answer.weights != play.weights:
            raise PolicyMismatch(
                f"Other weights were loaded as policy {answer.policy} while request {play.request.request_id} was "
                "being played. Ask for it again: it is then played with these alone."
            )


def _problems_once(request: SampleRequest) -> dict[str, list]:
    """What a batch is about, without the repeats of its groups: `problems` with their answers, and in `problem_of` the
    place in it of each conversation's."""
    asked = list(zip(request.problems, request.answers, strict=True))
    places = {problem: place for place, problem in enumerate(dict.fromkeys(asked))}
    return {"problems": list(places), "problem_of": [places[problem] for problem in asked]}


def _first(failures: BaseExceptionGroup) -> BaseException:
    """The first error in a group, however deep."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def classroom_rules(
    generation: GenerationConfig, reward_weights: dict[str, float], teacher_context: int, graded: bool
) -> ClassroomRules:
    """The rules of a configuration.

    Solutions are generated only if a reward reads them and something grades them (`graded`). The teacher's context
    in tokens bounds a conversation besides `max_tokens_in_conversation`. No judge attempts means no judging.
    """
    return ClassroomRules(
        max_turns=generation.max_turns,
        max_tokens_in_conversation=min(generation.max_tokens_in_conversation, teacher_context),
        max_tokens_per_turn=generation.max_tokens_per_turn,
        judge_rules=tuple(generation.judge_rules),
        solutions=generation.number_student_attempts if graded and "end_rm" in reward_weights else 0,
        ignore_rejected_judge=generation.ignore_rejected_judge,
        extra_penalty_for_rejected_judges=generation.extra_penalty_for_rejected_judges,
        low_score_threshold=generation.low_score_threshold,
        use_thinking=generation.use_thinking or generation.force_thinking,
    )


def setup_options(generation: GenerationConfig) -> SetupOptions:
    """What the program may draw for a conversation under this configuration."""
    forced = generation.forced_conversation_type
    personas = list(generation.student_personas_prompts_paths)
    return SetupOptions(
        types=tuple(ConversationType) if forced is None else (ConversationType(forced.lower()),),
        student_names=tuple(generation.student_names) or (None,),
        persona_weights=persona_weights(personas, generation.student_error_rate),
        student_turns=generation.max_turns // 2 + 2,
    )
