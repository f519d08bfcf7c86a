"""Tests of the quickstart's world: its English, lessons, corpus, tokenizer and folder."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.toy_language.build import build_world
from classroom_rl.environments.toy_language.corpus import PERSONAS, PROMPTS, student_row, teacher_row
from classroom_rl.environments.toy_language.grammar import (
    ERROR_KINDS,
    PAST_TIMES,
    PLACES,
    PRESENT_TIMES,
    SUBJECTS,
    TOPICS,
    Question,
    Slip,
    answer,
    corrected,
    find_slips,
    holds_statement,
    indefinite,
    inject,
    kinds_for,
    kinds_of,
    parse_question,
    parse_sentence,
    past,
    plural,
    third_person,
)
from classroom_rl.environments.toy_language.lessons import (
    HELD_OUT,
    LESSONS,
    Lesson,
    make_lessons,
    parse_problem,
    render_problem,
)
from classroom_rl.errors import DataError

VERBS = [verb for topic in TOPICS.values() for verb in topic.verbs]
NOUNS = [noun for topic in TOPICS.values() for noun in topic.nouns]

PLAN = "Lesson: food, boil, yesterday\nPlan: you, sister"

questions = st.builds(
    Question, st.sampled_from(list(SUBJECTS)), st.sampled_from(VERBS), st.sampled_from(PAST_TIMES + PRESENT_TIMES)
)
generators = st.integers(0, 2**32).map(random.Random)


@settings(max_examples=1000, deadline=None)
@given(questions, generators)
def test_correct_sentences_have_no_slip(question, rng):
    sentence = answer(question, rng)
    assert find_slips(sentence.text) == []
    assert corrected(sentence) == sentence


@settings(max_examples=2000, deadline=None)
@given(questions, generators, st.data())
def test_the_one_slip_put_in_is_the_one_found_in_the_text(question, rng, data):
    kind = data.draw(st.sampled_from(kinds_for(question)))
    sentence = answer(question, rng, kind)
    wrong = inject(sentence, kind, rng).text
    assert wrong != sentence.text
    [slip] = find_slips(wrong)
    assert slip.kind == kind
    assert slip.word in wrong.rstrip(".").split()
    assert slip.fix in sentence.text.rstrip(".").split()
    assert corrected(parse_sentence(wrong)).verb == sentence.verb


@given(questions, generators)
def test_sentences_and_questions_are_read_back(question, rng):
    sentence = answer(question, rng)
    assert parse_question(f"Good!  {question.text} Take your time.") == question
    assert parse_sentence(sentence.text.upper()).text == sentence.text
    assert holds_statement(f"Well, {sentence.text}") and not holds_statement(question.text)


@pytest.mark.parametrize(
    ("text", "slip"),
    [
        ("Yesterday I go to bed, I boil two eggs.", Slip("tense", "boil", "boiled")),
        ("Every day my sister cooked an egg in the kitchen.", Slip("tense", "cooked", "cooks")),
        ("Last week my brother orders a cake at the market.", Slip("tense", "orders", "ordered")),
        ("Every day my sister cook an egg in the kitchen.", Slip("verb ending", "cook", "cooks")),
        ("Every month my friends packs a map on the bus.", Slip("verb ending", "packs", "pack")),
        ("Yesterday I boiled a egg in the kitchen.", Slip("article", "egg", "an")),
        ("Yesterday I ordered cake in the kitchen.", Slip("article", "cake", "a")),
        ("Yesterday I printed three report in the garden.", Slip("plural", "report", "reports")),
        ("Yesterday I boiled an egg on the kitchen.", Slip("preposition", "on", "in")),
    ],
)
def test_slips_by_hand(text, slip):
    assert find_slips(text) == [slip]


def test_every_slip_of_a_sentence_is_found():
    found = find_slips("Yesterday my sister cook two egg at the kitchen.")
    assert [slip.kind for slip in found] == ["tense", "plural", "preposition"]


@pytest.mark.parametrize(
    "text", ["", "Thank you!", "What did you cook yesterday?", "I do not know.", "The egg, my egg."]
)
def test_other_text_has_no_slip(text):
    assert find_slips(text) == []
    assert parse_sentence(text) is None


@pytest.mark.parametrize(
    "text", ["", "What does you cook every day?", "What did you cook?", "What did you cook tomorrow?"]
)
def test_ill_formed_questions_are_none(text):
    assert parse_question(text) is None


def test_word_forms():
    assert (third_person("cook"), past("cook"), plural("egg")) == ("cooks", "cooked", "eggs")
    assert [indefinite(n) for n in ("egg", "horse")] == ["an", "a"]


def test_no_word_has_two_parts_of_speech():
    forms = {form for verb in VERBS for form in (verb, third_person(verb), past(verb))}
    nouns = {form for noun in NOUNS for form in (noun, plural(noun))}
    assert not forms & nouns and not forms & set(PLACES) and not nouns & set(PLACES)
    assert len(VERBS) == len(set(VERBS)) and len(NOUNS) == len(set(NOUNS))
    assert len(TOPICS) == 8


def test_a_slip_without_a_place_is_refused():
    rng = random.Random(0)
    question = Question("you", "cook", "yesterday")
    with pytest.raises(ValueError, match="verb ending"):
        answer(question, rng, "verb ending")
    with pytest.raises(ValueError, match="plural"):
        inject(answer(question, rng, "article"), "plural", rng)
    assert kinds_of(answer(question, rng, "article")) == ["tense", "article", "preposition"]


def test_lessons_are_split_without_overlap_and_by_seed_alone():
    train, heldout = make_lessons(42)
    assert (len(train) + len(heldout), len(heldout)) == (LESSONS, HELD_OUT) == (576, 116)
    assert len({render_problem(lesson) for lesson in train + heldout}) == LESSONS
    assert Counter(lesson.topic for lesson in train + heldout) == dict.fromkeys(TOPICS, 72)
    assert make_lessons(42) == (train, heldout) != make_lessons(43)


def test_problems_are_read_back():
    for lesson in make_lessons(7)[0]:
        assert parse_problem(render_problem(lesson)) == lesson


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Solve x + 1 = 2.",
        "Lesson: food",
        PLAN.replace("boil", "play"),
        PLAN.replace("sister", "dog"),
        f"{PLAN}\nHi!",
    ],
)
def test_other_problems_are_refused(text):
    with pytest.raises(DataError, match="not a lesson"):
        parse_problem(text)


@pytest.fixture(scope="module")
def corpus(world):
    return [json.loads(line) for line in (world / "corpus.jsonl").read_text().splitlines()]


def test_corpus_rows_are_chats_that_end_with_something_to_learn(corpus):
    for row in corpus:
        roles = [message["role"] for message in row["messages"]]
        first, second = ("user", "assistant") if roles[1] == "user" else ("assistant", "user")
        assert roles == ["system", *[(first, second)[i % 2] for i in range(len(roles) - 1)]]
        assert roles[-1] == "assistant" and row["messages"][-1]["weight"] == 1
        assert all(message["content"].strip() == message["content"] != "" for message in row["messages"])


def test_what_a_student_learns_agrees_with_its_persona(corpus):
    prompts = {path: (PROMPTS / path).read_text().strip() for path in PERSONAS.values()}
    learned = Counter()
    for row in corpus:
        system = row["messages"][0]["content"]
        if system not in prompts.values():
            continue
        for message in row["messages"]:
            if message["role"] == "assistant" and message["weight"]:
                slips = find_slips(message["content"])
                assert len(slips) == (system == prompts[PERSONAS["error_student"]])
                learned.update(slip.kind for slip in slips)
    assert set(learned) == set(ERROR_KINDS) and min(learned.values()) > 200


def test_corpus_follows_the_seed():
    lesson = make_lessons(1)[0][0]
    for row in (teacher_row, student_row):
        assert row(lesson, random.Random(1)) == row(lesson, random.Random(1)) != row(lesson, random.Random(2))


def test_world_is_complete_and_made_once(world):
    lessons = [json.loads(line) for line in (world / "lessons_heldout.jsonl").read_text().splitlines()]
    assert len(lessons) == 116 and set(lessons[0]) == {"problem", "answer"}
    assert isinstance(parse_problem(lessons[0]["problem"]), Lesson)
    before = {path: path.stat().st_mtime_ns for path in world.rglob("*")}
    assert not build_world(world, 7)
    assert {path: path.stat().st_mtime_ns for path in world.rglob("*")} == before
    assert [path.name for path in world.parent.iterdir()] == ["world"]


def test_a_world_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("classroom_rl.environments.toy_language.build.save_blank", fail)
    with pytest.raises(OSError, match="disk full"):
        build_world(tmp_path / "world", 42)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_kept(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="something else"):
        build_world(tmp_path, 42)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_tokenizer_and_blank_model(world):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "blank")
    model = AutoModelForCausalLM.from_pretrained(world / "blank")
    assert len(tokenizer) == model.config.vocab_size <= 1024
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id is not None
    assert model.num_parameters() < 1_000_000 and str(model.dtype) == "torch.float32"
    for word in [*VERBS, *NOUNS, *PLACES]:
        assert len(tokenizer.encode(f" {word}")) == 1, f"{word} must be one token, in a sentence and after `here:`"
    for verb in VERBS:
        assert [tokenizer.decode(i) for i in tokenizer.encode(f" {past(verb)}")] == [f" {verb}", "ed"]
    for text in ("Check the tense here: go.", "naïve → 你好\n\t<|im_start|>", "<end_of_conversation>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_is_learned_is_marked_by_the_chat_template(world):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "blank")
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Hi!", "weight": 0},
        {"role": "user", "content": "Good."},
        {"role": "assistant", "content": "Yes."},
    ]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    learned = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(learned) == "Yes.<|im_end|>"
    assert tokenizer.decode(encoded["input_ids"]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n"
        "<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    )


def test_prompts_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert student_row(make_lessons(1)[0][0], random.Random(1))["messages"]
