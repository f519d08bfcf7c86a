"""One message of a model that may call tools: it writes, its calls are run, their results enter its context, and it
writes on, until a message without calls or a limit.

Every sampled token is kept as the engine sampled it, with its log-prob; results are tokens that nobody trains on.
`max_tokens` bounds all that is sampled for the message, `room` all that it adds to the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from uuid import uuid4

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.engine import ChatEngine, Completion, Sampling, TokenEngine
from classroom_rl.rollout.tools.formats import CallsInText, find_calls, results_in_words, with_tools_in_words
from classroom_rl.rollout.tools.frame import ToolFrame
from classroom_rl.rollout.tools.tool import LIMIT, AskedCall, Toolbox, ToolCall, cut_text

_THOUGHT = "<think>\n"
_TOO_MANY = "no more tools may be called in this message: say what you have to say without them"
_NOT_RUN = "it was not run, because the message ends here"
_NO_ROOM = "error: the context has no room for this result"


@dataclass(frozen=True)
class SampledMessage:
    """A message with the calls in it. All lists have one entry per token, and are empty for a model without tokens.

    Attributes:
        ids: everything that the message adds to the context, sampled and given, without an end that the model left out.
        mask: 1 for sampled tokens, 0 for results and the markup around them.
        logprobs: the engine's log-probs of sampled tokens, 0.0 for all others.
        text: what was said and thought, without the calls.
        calls: every call, run or not.
        ended: whether the model ended the message itself.
        sampled: the number of sampled tokens.
        policy, weights: as in `Completion`, of the last answer.
        answers: the engine's answers, of which the message is put together.
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

    Results may take half of the room that is left when they come; longer ones are cut, and say so. If not even that
    leaves a token for the model to go on with, the calls are not run, and the message ends.

    Args:
        room: how many tokens the message may add to the context.
        opened: what the context ends with that belongs to the message, an opening `<think>`; the text begins with it.
            One that the chat template opens is taken into account without it.

    Raises:
        ContextOverflow, EngineFailure: as the engine does.
    """
    written = _Written(toolbox, sampling)
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    hidden = _THOUGHT if frame.opens_thought and not opened else ""
    while True:
        limit = min(written.budget, room - len(ids))
        answer = await engine.generate([*context_ids, *ids], written.sampling(limit))
        ids += answer.ids
        mask += [1] * len(answer.ids)
        logprobs += answer.logprobs
        found = frame.find_calls(hidden + opened + answer.text)
        found = _without_beginning(found, hidden)
        left = room - len(ids)
        end = [] if frame.ends(answer.ids) else [frame.turn_end_id]
        may_go_on = len(end) + len(frame.results([_NO_ROOM] * _answers_to(found, written))) < left
        results = await written.add(answer, found, may_go_on)
        if results is None:
            break
        shown, framed = _framed(frame, results, left // 2, left - len(end) - 1)
        written.show(shown)
        given = [*end, *framed]
        ids += given
        mask += [0] * len(given)
        logprobs += [0.0] * len(given)
        hidden, opened = "", _THOUGHT if frame.opens_thought else ""
    return written.message(ids, mask, logprobs)


async def chat_with_tools(
    engine: ChatEngine, messages: Sequence[Message], sampling: Sampling, toolbox: Toolbox, prompt_first: bool = False
) -> SampledMessage:
    """Sample a message from a model that works on text, such as one behind an API: the tools are listed in the system
    message, and results are messages of the user. Raises as the engine does.

    Args:
        prompt_first: whether the first message is the model's prompt and gets the list of tools, whatever its role is.
    """
    written = _Written(toolbox, sampling)
    shown = with_tools_in_words(messages, toolbox.schemas(), prompt_first) if toolbox.tools else list(messages)
    while True:
        answer = await engine.chat(shown, written.sampling(written.budget))
        results = await written.add(answer, find_calls(answer.text), may_go_on=True)
        if results is None:
            return written.message()
        shown += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": results_in_words(results)}]


@dataclass
class _Written:
    """A message so far."""

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
        """The sampling of the next answer, with a seed and a draw of its own."""
        number = len(self.answers)
        sampling = replace(self.first, max_tokens=limit)
        if number == 0:
            return sampling
        seed = self.first.seed
        if seed is not None:
            seed = int.from_bytes(sha256(f"{seed}|segment|{number}".encode()).digest()[:4])
        draw = (*self.first.draw, "segment", number) if self.first.draw else ()
        return replace(sampling, seed=seed, draw=draw)

    async def add(self, answer: Completion, found: CallsInText, may_go_on: bool) -> list[str] | None:
        """Add an answer, and run its calls; returns what the model is shown, or None if the message ends here.

        Args:
            may_go_on: whether the context has room for results, and for a token after them.
        """
        segment = len(self.answers)
        self.answers.append(answer)
        start = self._append(found.text)
        goes_on = may_go_on and answer.ended and self.budget >= 1 and not self.told_to_stop
        results: list[str] = []
        for asked, position in found.calls:
            call = await self._one(asked, goes_on, answer.ended)
            if call.error != LIMIT or not self.told_to_stop:
                results.append(call.result)
            self.told_to_stop = self.told_to_stop or call.error == LIMIT
            self.calls.append(replace(call, at=start + position, segment=segment))
        return results if found.calls and goes_on else None

    async def _one(self, asked: AskedCall, goes_on: bool, whole: bool) -> ToolCall:
        id = ":".join(map(str, (*self.first.draw, len(self.calls)))) if self.first.draw else uuid4().hex
        if not goes_on and asked.error is not None and whole:  # it is no call that the limit cut
            return self.toolbox.refuse(asked, id, asked.error, asked.reason)
        if not goes_on:
            return self.toolbox.refuse(asked, id, LIMIT, _TOO_MANY if self.told_to_stop else _NOT_RUN)
        if self.calls_left < 1:
            return self.toolbox.refuse(asked, id, LIMIT, _TOO_MANY)
        return await self.toolbox.run(asked, id)

    def _append(self, text: str) -> int:
        """Add what an answer said, as a paragraph of its own; returns where it begins."""
        if self.text and text and not (self.text[-1].isspace() or text[0].isspace()):
            self.text += "\n\n"
        start = len(self.text)
        self.text += text
        return start

    def show(self, shown: Sequence[str]) -> None:
        """Record what the model was shown of the results of its last calls; all above the limit share the last."""
        segment = len(self.answers) - 1
        last = [place for place, call in enumerate(self.calls) if call.segment == segment]
        for number, place in enumerate(last):
            self.calls[place] = replace(self.calls[place], result=shown[min(number, len(shown) - 1)])

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


def _without_beginning(found: CallsInText, beginning: str) -> CallsInText:
    """The text without a beginning that was put before it to be read."""
    if not beginning:
        return found
    length = len(beginning)
    return replace(
        found, text=found.text[length:], calls=tuple((asked, max(0, at - length)) for asked, at in found.calls)
    )


def _answers_to(found: CallsInText, written: _Written) -> int:
    """How many results the calls in an answer get at most: all calls above the limit get one together."""
    return min(len(found.calls), written.calls_left + 1)


def _framed(frame: ToolFrame, results: Sequence[str], wanted: int, most: int) -> tuple[list[str], list[int]]:
    """The results as the model is shown them, and their framed ids: in `wanted` tokens, if halving the longest again
    and again can do that, and in `most` at any rate."""
    shown, lengths = list(results), [len(each) for each in results]
    ids = frame.results(shown)
    while len(ids) > wanted and max(lengths) > 1:
        longest = lengths.index(max(lengths))
        lengths[longest] //= 2
        shown[longest] = cut_text(results[longest], lengths[longest])
        ids = frame.results(shown)
    if len(ids) > most:
        shown = [_NO_ROOM] * len(results)
        ids = frame.results(shown)
    return shown, ids
