"""What the bound of a step replays: what was trained on, with the prompts that it had."""

from pathlib import Path

from benchmarks.step_bound import _replayed, trained_on
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.rollout.store.journal import Journal
from tests.support.configs import loaded


def test_a_step_is_what_was_trained_on(tmp_path: Path) -> None:
    """An evaluation on the same server, a try with other weights and a conversation that was cut off are not."""
    (tmp_path / "run_id").write_text("run")
    journal = Journal(tmp_path)

    def batch(request: str, weights: str) -> None:
        journal.append("batch", request=request, weights=weights, body="b", step=3)

    def say(request: str, *texts: str, ends: bool = True) -> None:
        for text in texts:
            journal.append("turn", conversation=f"{request}-0000", turn=text)
        if ends:
            journal.append("conversation", conversation=f"{request}-0000", record={})

    batch("eval-1", "w")
    say("eval-1", "measured")
    batch("run-step000003-a", "w")
    say("run-step000003-a", "played with old weights")
    batch("run-step000003-a", "new")
    say("run-step000003-a", "one", ends=False)
    batch("run-step000003-a", "new")  # a server that came back goes on
    say("run-step000003-a", "two")
    batch("run-step000003-b", "new")
    say("run-step000003-b", "cut off", ends=False)
    ((step, (*turns, last)),) = trained_on(tmp_path)
    assert step == 3 and [event["turn"] for event in turns] == ["one", "two"] and last["event"] == "conversation"


def test_the_bound_shows_a_student_what_the_template_said(world: Path) -> None:
    """A message of the template is in no turn of the journal, but in the student's prompt."""
    named = [f"{role}_model.model_name_or_path={world / 'blank'}" for role in ("teacher", "student")]
    config = loaded("train_rl", "--config-name", "quickstart", *named)
    tokenizer = load_tokenizer("teacher_model", str(world / "blank"))
    given_turns = [
        {"role": "student", "text": "Hello!", "given": True},
        {"role": "teacher", "text": "Who?", "given": True},
    ]
    answer = {"role": "student", "text": "I see a cat.", "persona": "correct_student", "tokens": 5, "given": False}
    record = {"student_name": "Ann", "problem": "a lesson", "turns": [*given_turns, answer]}
    replayed = _replayed([{"turn": answer, "ids": [], "logprobs": []}], record, config, tokenizer)
    (message,) = replayed.messages
    prompt = tokenizer.decode(message.prompt_ids)
    assert prompt.index("Hello!") < prompt.index("Who?") and "a cat" not in prompt
