"""Samples one message of a model that may call tools: the model writes, its calls are run, their results enter its
context, and it goes on, until it makes no more calls or reaches a limit.

Every sampled token is kept as the engine sampled it, with its log-prob; the tokens of results are never trained on.
`max_tokens` limits all tokens that are sampled for the message, `room` all tokens that it adds to the context.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from statistics import fmean
from uuid import uuid4

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import ChatEngine, Completion, Sampling, TokenEngine
from classroom_rl.rollout.tools.formats import CallsInText, ToolFrame, find_calls, results_in_words, with_tools_in_words
from classroom_rl.rollout.tools.tool import ERRORS, LIMIT, AskedCall, Toolbox, ToolCall, cut_text
from classroom_rl.rollout.trajectory import Trajectory

_THOUGHT = "<think>\n"
_TOO_MANY = "no more tools may be called in this message: say what you have to say without them"
_NOT_RUN = "it was not run, because the message ends here"
_NO_ROOM = "error: the context has no room for this result"


@dataclass(frozen=True)
class SampledMessage:
    """A message with its tool calls. `ids`, `mask` and `logprobs` have equal lengths; for a model without tokens they
    are empty.

    Attributes:
        ids: all tokens that the message adds to the context, sampled or not, without an end token that the model did
            not write.
        mask: 1 for sampled tokens, 0 for results and the markup around them.
        logprobs: the engine's log-probs of sampled tokens, 0.0 for all others.
        text: the text, thoughts included, without the calls.
        calls: every call, whether it was run or not.
        ended: whether the model ended the message itself.
        sampled: the number of sampled tokens.
        policy, weights: as in `Completion`, of the last answer.
        answers: the engine's answers that make up the message.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    calls: tuple[ToolCall, ...]
    ended: bool
    sampled: int
    policy: PolicyVersion | None
    weights: str | None
    answers: tuple[Completion, ...]


def without_tools(answer: Completion) -> SampledMessage:
    """The answer of a model without tools, as a message."""
    ids = tuple(answer.ids)
    tokens = (ids, (1,) * len(ids), tuple(answer.logprobs), answer.text, ())
    return SampledMessage(*tokens, answer.ended, answer.tokens, answer.policy, answer.weights, (answer,))


async def sample_with_tools(
    engine: TokenEngine,
    frame: ToolFrame,
    context_ids: Sequence[int],
    sampling: Sampling,
    toolbox: Toolbox,
    room: int,
    opened: str = "",
) -> SampledMessage:
    """Sample a message from an engine that works on token ids.

    Results may take half of the room that is left at that time; longer ones are cut, with a note. If the context has no
    room even for short results and one more token, the calls are not run, and the message ends.

    Args:
        room: how many tokens the message may add to the context.
        opened: an opening `<think>` at the end of the context that belongs to the message; the message's text begins
            with it. A `<think>` of the chat template itself is handled without this argument.

    Raises:
        ContextOverflow, EngineFailure: as the engine does.
    """
    draft = _Draft(toolbox, sampling)
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    # An opening tag that the template wrote is needed to tell thoughts from calls, but is no part of the text.
    hidden = _THOUGHT if frame.opens_thought and not opened else ""
    while True:
        limit = min(draft.budget, room - len(ids))
        answer = await engine.generate([*context_ids, *ids], draft.sampling(limit))
        ids += answer.ids
        mask += [1] * len(answer.ids)
        logprobs += answer.logprobs
        parsed = frame.find_calls(hidden + opened + answer.text)
        parsed = _without_beginning(parsed, hidden)
        remaining = room - len(ids)
        end = [] if frame.ends(answer.ids) else [frame.turn_end_id]
        # The shortest possible results must fit, with at least one token after them.
        most_results = min(len(parsed.calls), draft.calls_left + 1)  # all calls above the limit get one result together
        may_go_on = len(end) + len(frame.results([_NO_ROOM] * most_results)) < remaining
        results = await draft.add(answer, parsed, may_go_on)
        if results is None:
            break
        shown, framed_ids = _framed(frame, results, remaining // 2, remaining - len(end) - 1)
        draft.show(shown)
        added = [*end, *framed_ids]
        ids += added
        mask += [0] * len(added)
        logprobs += [0.0] * len(added)
        hidden, opened = "", _THOUGHT if frame.opens_thought else ""
    return draft.message(ids, mask, logprobs)


async def chat_with_tools(
    engine: ChatEngine, messages: Sequence[Message], sampling: Sampling, toolbox: Toolbox, prompt_first: bool = False
) -> SampledMessage:
    """Sample a message from a model that works on text, such as one behind an API: the tools are listed in the system
    message, and results are user messages. Raises as the engine does.

    Args:
        prompt_first: whether the first message is the model's prompt and gets the list of tools, whatever its role.
    """
    draft = _Draft(toolbox, sampling)
    chat = with_tools_in_words(messages, toolbox.schemas(), prompt_first) if toolbox.tools else list(messages)
    while True:
        answer = await engine.chat(chat, draft.sampling(draft.budget))
        results = await draft.add(answer, find_calls(answer.text), may_go_on=True)
        if results is None:
            return draft.message()
        chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": results_in_words(results)}]


@dataclass
class _Draft:
    """The message so far."""

    toolbox: Toolbox
    first: Sampling
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    answers: list[Completion] = field(default_factory=list)
    told_to_stop: bool = False

    @property
    def budget(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.first.max_tokens - sum(answer.tokens for answer in self.answers)

    @property
    def calls_left(self) -> int:
        """The number of calls that may still be run."""
        return max(0, self.toolbox.limits.calls - len(self.calls))

    def sampling(self, limit: int) -> Sampling:
        """The sampling of the next answer, with its own seed and draw."""
        number = len(self.answers)
        sampling = replace(self.first, max_tokens=limit)
        if number == 0:
            return sampling
        seed = self.first.seed
        if seed is not None:
            seed = int.from_bytes(sha256(f"{seed}|segment|{number}".encode()).digest()[:4])
        draw = (*self.first.draw, "segment", number) if self.first.draw else ()
        return replace(sampling, seed=seed, draw=draw)

    async def add(self, answer: Completion, parsed: CallsInText, may_go_on: bool) -> list[str] | None:
        """Add an answer, and run its calls; returns the results for the model, or None if the message ends here.
        `may_go_on` says whether the context has room for results and for one token after them."""
        segment = len(self.answers)
        self.answers.append(answer)
        start = self._append(parsed.text)
        goes_on = may_go_on and answer.ended and self.budget >= 1 and not self.told_to_stop
        results: list[str] = []
        for asked, position in parsed.calls:
            call = await self._run(asked, goes_on, answer.ended)
            if call.error != LIMIT or not self.told_to_stop:  # all calls above the limit get one result together
                results.append(call.result)
            self.told_to_stop = self.told_to_stop or call.error == LIMIT
            self.calls.append(replace(call, at=start + position, segment=segment))
        return results if parsed.calls and goes_on else None

    async def _run(self, asked: AskedCall, goes_on: bool, complete: bool) -> ToolCall:
        """Run one call, or refuse it; `complete` if the model ended the answer itself."""
        id = ":".join(map(str, (*self.first.draw, len(self.calls)))) if self.first.draw else uuid4().hex
        if not goes_on and asked.error is not None and complete:  # unreadable, but not because a limit cut it
            return self.toolbox.refuse(asked, id, asked.error, asked.reason)
        if not goes_on:
            return self.toolbox.refuse(asked, id, LIMIT, _TOO_MANY if self.told_to_stop else _NOT_RUN)
        if self.calls_left < 1:
            return self.toolbox.refuse(asked, id, LIMIT, _TOO_MANY)
        return await self.toolbox.run(asked, id)

    def _append(self, text: str) -> int:
        """Add the text of an answer as its own paragraph; returns where it begins."""
        if self.text and text and not (self.text[-1].isspace() or text[0].isspace()):
            self.text += "\n\n"
        start = len(self.text)
        self.text += text
        return start

    def show(self, shown: Sequence[str]) -> None:
        """Record the results of the last calls as the model was shown them; all above the limit share the last one."""
        segment = len(self.answers) - 1
        last_calls = [index for index, call in enumerate(self.calls) if call.segment == segment]
        for number, index in enumerate(last_calls):
            self.calls[index] = replace(self.calls[index], result=shown[min(number, len(shown) - 1)])

    def message(
        self, ids: Sequence[int] = (), mask: Sequence[int] = (), logprobs: Sequence[float] = ()
    ) -> SampledMessage:
        """The finished message."""
        last = self.answers[-1]
        return SampledMessage(
            tuple(ids),
            tuple(mask),
            tuple(logprobs),
            self.text,
            tuple(self.calls),
            last.ended,
            sum(answer.tokens for answer in self.answers),
            last.policy,
            last.weights,
            tuple(self.answers),
        )


def _without_beginning(parsed: CallsInText, beginning: str) -> CallsInText:
    """The calls and the text without a beginning that was only put in front for parsing."""
    if not beginning:
        return parsed
    length = len(beginning)
    return replace(
        parsed, text=parsed.text[length:], calls=tuple((asked, max(0, at - length)) for asked, at in parsed.calls)
    )


def _framed(frame: ToolFrame, results: Sequence[str], target: int, limit: int) -> tuple[list[str], list[int]]:
    """The results as the model is shown them, and their framed ids. The longest result is halved until all take at most
    `target` tokens; if they still take more than `limit`, each is replaced by a note."""
    shown, lengths = list(results), [len(result) for result in results]
    ids = frame.results(shown)
    while len(ids) > target and max(lengths) > 1:
        longest = lengths.index(max(lengths))
        lengths[longest] //= 2
        shown[longest] = cut_text(results[longest], lengths[longest])
        ids = frame.results(shown)
    if len(ids) > limit:
        shown = [_NO_ROOM] * len(results)
        ids = frame.results(shown)
    return shown, ids


def tool_metrics(records: Sequence[Trajectory]) -> dict[str, float]:
    """Tool calls per conversation (rejected drafts included), the share that failed, in total and by kind of error, and
    the mean seconds of a call; empty for a batch without calls."""
    messages = [message for record in records for turn in record.turns for message in (turn, *turn.drafts)]
    calls = [call for message in messages for call in message.tool_calls]
    if not calls:
        return {}
    failed = Counter(call.error for call in calls if call.error is not None)
    return {
        "tools/calls_per_conversation": len(calls) / len(records),
        "tools/error_share": failed.total() / len(calls),
        **{f"tools/error_share/{kind}": failed[kind] / len(calls) for kind in ERRORS},
        "tools/seconds_per_call": fmean(call.seconds for call in calls),
    }
