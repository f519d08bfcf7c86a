"""Tests of the counterfactual check: outcomes worked out by hand, and whole checks with a scripted tutor whose bad
messages have a known effect."""

import copy
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.environments.toy_language.grammar import answer, inject, parse_question
from classroom_rl.environments.toy_language.lessons import Lesson, make_lessons, parse_problem, render_problem
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.counterfactuals.comparing import Comparison
from classroom_rl.evaluation.counterfactuals.figures import NOTHING, PREDICTS, counterfactual_figures
from classroom_rl.evaluation.counterfactuals.forks import Fork, Message, all_forks, corrected, forks_of
from classroom_rl.evaluation.counterfactuals.prices import LEARNED, PRODUCED, LaterOutcome, later_messages
from classroom_rl.evaluation.counterfactuals.table import read_comparisons
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.post_test.exams import ToyExam
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.sampling_service import SamplingService
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room
from tests.support.supervised_room import ScriptedSupervisor
from tests.support.synthetic_run import record_of

LESSON = Lesson("food", "cook", "last week", ("you", "your sister", "your brother", "your friends"))
QUESTIONS = LESSON.questions
PROBLEM = Problem.of(render_problem(LESSON))


def asks(place: int) -> Turn:
    return Turn("teacher", f"Good! {QUESTIONS[place].text}")


def says(place: int, persona: str = "correct_student", right: bool = True) -> Turn:
    rng = random.Random(place)
    sentence = answer(QUESTIONS[place], rng, None if right else "tense")
    return Turn("student", (sentence if right else inject(sentence, "tense", rng)).text, persona)


# The outcome -----------------------------------------------------------------------------------------------------


def test_the_outcome_is_what_is_new_later_on_as_a_share_of_the_lesson():
    before = [asks(0), says(0)]
    outcome = LaterOutcome(ToyExam(LESSON), before)
    assert outcome.of([]) == {PRODUCED: 0.0, LEARNED: 0.0}
    assert outcome.of([says(1), asks(2), says(2)]) == {PRODUCED: 0.5, LEARNED: 0.0}
    assert outcome.of([says(0), asks(1), says(0)])[PRODUCED] == 0.0, "it was known before the fork"


def test_what_was_got_wrong_before_the_fork_and_is_right_later_was_learned():
    outcome = LaterOutcome(ToyExam(LESSON), [asks(0), says(0, "error_student", right=False)])
    assert outcome.of([says(0), asks(1), says(1)]) == {PRODUCED: 0.5, LEARNED: 0.25}
    assert outcome.of([says(1), asks(2), says(2)]) == {PRODUCED: 0.5, LEARNED: 0.0}, "the slip was passed over"


def test_an_outcome_does_not_depend_on_the_forked_message():
    """Not even if that message holds every answer of the lesson: it is never read."""
    told = " ".join(answer(question, random.Random(0)).text for question in QUESTIONS)
    found = []
    for text in ("Good!", told, "Goodbye. <end_of_conversation>"):
        record = record_of(PROBLEM.text, [asks(0), says(0), Turn("teacher", text), says(1), asks(2), says(2)])
        (fork,) = [each for each in forks_at(record.turns) if each.place == 2]
        later = later_messages(record, fork)
        assert later == record.turns[3:] and fork.said.turn not in later
        found.append(LaterOutcome(ToyExam(LESSON), fork.before).of(later))
    assert found[0] == found[1] == found[2] and found[0][PRODUCED] == 0.5


# Forks -----------------------------------------------------------------------------------------------------------


def forks_at(turns: Sequence[Turn], max_turns: int = 9) -> list[Fork]:
    record = record_of(PROBLEM.text, turns)
    events = [{"event": "turn", "turn": turn, "ids": [], "logprobs": []} for turn in turns if not turn.given]
    return forks_of(record, PROBLEM, 0, [*events, {"event": "rewards"}], max_turns)


def test_forks_are_the_tutors_own_messages_that_the_student_could_answer():
    turns = [Turn("teacher", "Hi!", given=True), Turn("student", "Hi.", given=True), asks(0), says(0), asks(1)]
    assert [fork.place for fork in forks_at(turns)] == [2, 4]
    assert [fork.place for fork in forks_at(turns, max_turns=5)] == [2], "nothing follows the last message"
    second = forks_at(turns)[1]
    assert second.before == tuple(turns[:4]) and [event["turn"] for event in second.events] == turns[2:4]
    assert second.said.turn == turns[4]


def test_every_conversation_is_forked_once_before_one_is_forked_twice():
    turns = [asks(0), says(0), asks(1), says(1), asks(2)]
    records = [record_of(PROBLEM.text, turns, index=i) for i in range(6)]
    records = [each.model_copy(update={"id": f"r-{i}", "problem_id": PROBLEM.id}) for i, each in enumerate(records)]
    events = [{"event": "turn", "turn": turn, "ids": [], "logprobs": []} for turn in turns]
    made = [all_forks(records, [PROBLEM], lambda _: events, 9, seed) for seed in (1, 1, 2)]
    assert [len({fork.conversation for fork in made[0][i : i + 6]}) for i in (0, 6, 12)] == [6, 6, 6]
    assert made[0] == made[1] != made[2] and sorted({fork.copy for fork in made[0]}) == list(range(6))
    failed = [records[0].model_copy(update={"failure": "refused"})]
    assert all_forks(failed, [PROBLEM], lambda _: events, 9, 1) == []


def test_a_correction_has_the_tokens_of_a_supervised_training(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda _: "")
    ids = [*tokenizer.encode("Hm.", add_special_tokens=False), engine.frame.turn_end_id]
    event = {"event": "turn", "turn": Turn("teacher", "Hm.", tokens=len(ids)), "ids": ids, "prompt_ids": [1, 2]}
    event["logprobs"] = [-1.0] * len(ids)
    fork = Fork(PROBLEM, "c", 0, (), (), Message.of(event))
    review = Review(False, "task", -0.5, correction="Say it.")
    found = corrected(fork, review, engine, has_tokens=True)
    right = [*tokenizer.encode("Say it.", add_special_tokens=False), engine.frame.turn_end_id]
    assert list(found.event["ids"]) == right and found.event["logprobs"] == () and found.event["prompt_ids"] == [1, 2]
    assert found.turn.text == "Say it." and found.turn.replaced and found.turn.review is None
    assert corrected(fork, review, engine, has_tokens=False).event["ids"] == ()
    assert corrected(fork, replace(review, correction=None), engine, has_tokens=True) is None


# Whole checks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["server_url=http://127.0.0.1:8005"], "a server cannot continue a conversation from the middle"),
        (["+tutors=[{name: a, model_name_or_path: a}]"], "tutors names several"),
        (["samplings=[greedy]"], "the messages come from the sampling sampled"),
        (["supervisor_model=null"], "there is no supervisor to price messages"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused(overrides: list[str], said: str):
    arguments = ["--config-name=quickstart_counterfactuals", *overrides]
    with pytest.raises(ConfigError, match=f"counterfactuals.forks is 64, but .*{said}"):
        load(EvalConfig, "eval", arguments, check_eval)


LESSONS = [render_problem(lesson) for lesson in make_lessons(1)[1][:24]]
MUMBLES, CHATTERS = "Mumble.", "Take your time."


def next_question(shown: str, problem: str) -> str:
    """The first question of the plan that a text does not hold, or the last one."""
    questions = [question.text for question in parse_problem(problem).questions]
    return next((question for question in questions if question not in shown), questions[-1])


def saying(engine: ScriptedEngine, line: str) -> ScriptedEngine:
    """The engine with this line as its next one; it shares its calls."""
    one = copy.copy(engine)
    one._script = lambda _: line
    return one


class MoodyTutor(ScriptedEngine):
    """Asks the next question; now and then, by the seed, it mumbles, or chatters on after the question."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        problem = next(each for each in LESSONS if each in prompt)
        asked, mood = f"Good! {next_question(prompt, problem)}", sampling.seed % 10
        line = MUMBLES if mood < 1 else f"{asked} {CHATTERS}" if mood < 6 else asked
        return await ScriptedEngine.generate(saying(self, line), prompt_ids, sampling)


class ShyStudent(ScriptedEngine):
    """Answers questions; once the tutor has mumbled it says nothing of use any more. In one of five answers, by the
    seed, it is distracted."""

    async def chat(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> Completion:
        heard = [each["content"] for each in messages if each["role"] == "user"]
        asked = [
            found for text in heard for each in re.findall(r"What [^?]*\?", text) if (found := parse_question(each))
        ]
        lost = any(MUMBLES in text for text in heard) or sampling.seed % 5 == 0
        line = "What?" if lost else answer(asked[-1], random.Random(0)).text
        return await ScriptedEngine.chat(saying(self, line), messages, sampling)


def reads_moods(about: MessageToReview) -> Review:
    """A supervisor that finds both moods faulty; it can correct a mumble only."""
    shown = " ".join(each["content"] for each in about.conversation)
    if MUMBLES in about.message:
        return Review(False, "off_topic", correction=f"Good! {next_question(shown, about.problem)}")
    return Review(False, "length") if CHATTERS in about.message else Review(True)


class Played:
    """The room of a check, and the configuration."""

    def __init__(self, tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch):
        lessons = folder / "lessons.jsonl"
        lessons.write_text("".join(json.dumps({"problem": text, "answer": ""}) + "\n" for text in LESSONS))
        self.config = load(
            EvalConfig,
            "eval",
            [
                "--config-name=quickstart_counterfactuals",
                f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]",
                f"logging.save_dir={folder / 'out'}",
                "counterfactuals.forks=24",
            ],
            check_eval,
        )
        self.folder = folder / "out"
        self.tokenizer, self.rooms = tokenizer, []
        self.judge = RubricJudge
        monkeypatch.setattr("classroom_rl.server.sampling_service.open_service", self._open)

    async def _open(self, config: EvalConfig, weights, folder: Path) -> SamplingService:
        room = Room(self.tokenizer, folder)
        room.teacher, room.student = MoodyTutor(self.tokenizer, str), ShyStudent(self.tokenizer, str)
        room.judge, room.supervisor = self.judge(), ScriptedSupervisor(reads_moods)
        self.rooms.append(room)
        return room.open(config.generation)


@pytest.fixture
def played(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tokenizer, tmp_path, monkeypatch)


def test_messages_that_do_harm_later_are_found_and_those_that_do_none_are_named(played: Played, capsys):
    metrics = evaluate(played.config)
    figures = metrics["counterfactuals"]
    assert figures["comparisons"] == 24 and figures["playouts"] == 8
    assert set(figures["kinds"]) == {"correction", "sibling"}
    produced = figures["outcomes"][PRODUCED]
    mumbled = produced["categories"]["off_topic"]
    assert produced["prices"]["supervisor"]["rank_correlation"] > 0.5
    assert produced["prices"]["supervisor"]["verdict"] == PREDICTS
    assert mumbled["verdict"] == PREDICTS and mumbled["mean"] < -0.1
    assert produced["categories"]["length"]["verdict"] == NOTHING and "length" in produced["predict_nothing"]
    assert produced["shuffled"]["flagged"] >= 19 and produced["reliability"] > 0.5
    printed = capsys.readouterr().out
    assert "24 messages of" in printed and "Predict nothing:" in printed and "counterfactuals.json" in printed
    assert json.loads((played.folder / "metrics.json").read_text())["counterfactuals"] == figures
    assert counterfactual_figures(read_comparisons(played.folder)) == figures


def test_both_branches_of_a_fork_meet_the_same_seeds(played: Played):
    evaluate(played.config)
    (room,) = played.rooms
    seeds: dict[tuple[str, int], dict[str, set[int]]] = {}
    for _, sampling, _ in room.student.calls:
        conversation, number = sampling.draw
        if not conversation.startswith("playouts-"):
            continue
        head, content, copy = re.fullmatch(r"(playouts-\w+-\d+-\d+)-(\w+)-(\d+)", conversation).groups()
        seeds.setdefault((f"{head}|{copy}", number), {}).setdefault(content, set()).add(sampling.seed)
    both = [branches for branches in seeds.values() if len(branches) == 2]
    assert len(both) > 24 * 8 and all(len(set.union(*branches.values())) == 1 for branches in both)
    firsts = [seed for branches in seeds.values() for seed in branches[min(branches)]]
    assert len(set(firsts)) == len(firsts), "every playout has seeds of its own"


def test_playouts_go_on_from_the_very_tokens_of_the_played_conversation(played: Played):
    evaluate(played.config)
    (room,) = played.rooms
    whole = {sampling.draw[0]: ids for ids, sampling, _ in room.teacher.calls if sampling.draw[0].startswith("eval-")}
    for comparison in read_comparisons(played.folder).comparisons:
        lesson = comparison.lesson
        continued = [
            ids
            for ids, sampling, _ in room.teacher.calls
            if sampling.draw[0].startswith(f"playouts-{lesson}-0-{comparison.place}-")
        ]
        asked = whole[comparison.conversation]
        before = tokens_before(room, comparison)
        assert before == asked[: len(before)], "a prompt of the conversation itself"
        assert all(ids[: len(before)] == before for ids in continued)


def tokens_before(room: Room, comparison: Comparison) -> list[int]:
    """The tutor's prompt for the message that was forked at."""
    return next(
        ids for ids, sampling, _ in room.teacher.calls if sampling.draw == (comparison.conversation, comparison.place)
    )


def test_prices_come_from_the_message_and_what_came_before_it(played: Played):
    shown: list[list[dict[str, str]]] = []

    class Watched(RubricJudge):
        async def judge(self, rule, conversation, problem, attempt, *facts):
            shown.append(conversation)
            return await super().judge(rule, conversation, problem, attempt, *facts)

    played.judge = Watched
    evaluate(played.config)
    (room,) = played.rooms
    for comparison in read_comparisons(played.folder).comparisons:
        asked = [
            about
            for about in room.supervisor.asked
            if Problem.of(about.problem).id == comparison.lesson and len(about.conversation) == comparison.place
        ]
        assert {comparison.said, comparison.other} <= {about.message for about in asked}
    assert all(len(about.facts.personas) == len(about.conversation) for about in room.supervisor.asked)
    cut = [conversation for conversation in shown if len(conversation) < played.config.generation.max_turns]
    assert len(cut) >= 2 * 24 and all(conversation[-1]["role"] == "teacher" for conversation in cut)
    assert len(shown) == len(LESSONS) + 2 * 24, "playouts are not judged"


def test_a_check_that_is_asked_for_again_repeats_no_playout(played: Played):
    first = evaluate(played.config)
    second = evaluate(played.config)
    assert second["counterfactuals"] == first["counterfactuals"]
    before, after = (room.student.calls for room in played.rooms)
    assert any(sampling.draw[0].startswith("playouts-") for _, sampling, _ in before)
    assert not any(sampling.draw[0].startswith(("playouts-", "siblings-")) for _, sampling, _ in after)


def test_an_interrupted_check_goes_on_where_it_was(played: Played, monkeypatch):
    class Failing(ShyStudent):
        async def chat(self, messages, sampling):
            if sampling.draw[0].startswith("playouts-") and len(self.calls) > 600:
                raise RuntimeError("the student's engine is gone")
            return await super().chat(messages, sampling)

    with monkeypatch.context() as broken:
        broken.setattr("tests.evaluation.counterfactuals.test_comparing.ShyStudent", Failing)
        with pytest.raises(RuntimeError, match="is gone"):
            evaluate(played.config)
    done = count_playout_calls(played.rooms[0])
    resumed = evaluate(played.config)["counterfactuals"]
    whole = count_playout_calls(played.rooms[1]) + done
    assert resumed["comparisons"] == 24 and done > 0
    assert 0 < count_playout_calls(played.rooms[1]) < whole


def count_playout_calls(room: Room) -> int:
    return sum(sampling.draw[0].startswith("playouts-") for _, sampling, _ in room.student.calls)


def test_messages_without_a_verdict_or_another_price_are_counted(played: Played):
    played.config.counterfactuals.forks = 96

    def silent(about: MessageToReview) -> Review:
        return Review(error="no answer") if CHATTERS in about.message else replace(reads_moods(about), correction=None)

    async def all_of_one_mood(config, weights, folder):
        service = await Played._open(played, config, weights, folder)
        played.rooms[-1].supervisor._answer = silent
        return service

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("classroom_rl.server.sampling_service.open_service", all_of_one_mood)
        figures = evaluate(played.config)["counterfactuals"]
    assert figures["unpriced"] > 0 and figures["without_other"] > 0
    assert figures["comparisons"] + figures["unpriced"] + figures["without_other"] == 24 * 4
    assert set(figures["outcomes"][PRODUCED]["categories"]) == {"off_topic"} and set(figures["kinds"]) == {"sibling"}


def test_a_lesson_that_no_program_can_read_is_refused_before_a_model_is_loaded(played: Played, tmp_path: Path):
    (tmp_path / "lessons.jsonl").write_text(json.dumps({"problem": "What is 2 + 2?", "answer": "4"}) + "\n")
    with pytest.raises(DataError, match=r"counterfactuals\.forks is 24.*'What is 2 \+ 2\?' has none.*forks=0"):
        evaluate(played.config)
    assert not played.rooms


def test_without_forks_nothing_is_new(played: Played, capsys):
    played.config.counterfactuals.forks, played.config.supervisor_model = 0, None
    assert "counterfactuals" not in evaluate(played.config)
    assert not (played.folder / "counterfactuals").exists() and not (played.folder / "counterfactuals.json").exists()
    assert "Counterfactuals" not in capsys.readouterr().out
