"""Training on pairs: gradients beside a plain float64 reference, what is held out and swapped, resuming, adapters, and
the figures before and after."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from classroom_rl.config.load import load
from classroom_rl.config.train_preferences import TrainPreferencesConfig, check_train_preferences
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.results.pairs import PairMaker, PreferencePair, write_pairs
from classroom_rl.rollout.chat_template import encode_reply
from classroom_rl.trainer import preferences
from classroom_rl.trainer.preferences import (
    PairCollator,
    SingleCollator,
    figures_of,
    make_trainer,
    preference_arguments,
    read_short_pairs,
    rows_of,
    singles,
    split,
    with_swapped,
)
from tests.results.test_pairs import TOKENIZER, talk
from tests.rollout.test_chat_template import CHATML, make_tokenizer
from tests.trainer.sft.test_run import blank_model, one_thread  # noqa: F401

PAD = TOKENIZER.pad_token_id
PROBLEMS = ["eggs", "sister", "user", "think", "Hello.", "and", "no", "more", "two", "cooked"]


def recorded_pairs() -> list[PreferencePair]:
    """A pair of conversations of two messages for each problem: those that end in `No more.` are better."""
    maker = PairMaker({}, lambda text: encode_reply(TOKENIZER, text), TOKENIZER.decode)
    records = [
        talk(index, [f"{problem} {index}", last], float(1 - index), problem)
        for problem in PROBLEMS
        for index, last in enumerate(["No more.", "She cooked eggs."])
    ]
    return list(maker.of_step(records))


PAIRS = recorded_pairs()


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    return blank_model(tmp_path_factory.mktemp("blank"), CHATML)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "pairs.parquet"
    write_pairs(path, PAIRS, TOKENIZER)
    return path


def make_config(folder: Path, blank: Path, pairs: Path, *overrides: str) -> TrainPreferencesConfig:
    arguments = [
        *(f"logging.save_dir={folder}", f"model.model_name_or_path={blank}", f"dataset.pairs={pairs}"),
        *("model.max_length=128", "train.dtype=float32", "train.per_device_train_batch_size=4"),
        *("train.max_steps=6", "train.learning_rate=1e-2", "train.gradient_checkpointing=false", *overrides),
    ]
    return load(TrainPreferencesConfig, "train_preferences", arguments, check_train_preferences)


def trainer_of(config: TrainPreferencesConfig):
    folder = Path(config.logging.save_dir)
    return make_trainer(config, preference_arguments(config, folder), folder)


# The loss -------------------------------------------------------------------------------------------------------


def summed_log_probs(model, ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Plainly: the log-softmax of all logits, and the entries of the tokens that the mask keeps."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    chosen = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return (chosen * mask[:, 1:]).sum(dim=1)


def plain_loss(kind: str, model, reference, batch: dict, beta: float) -> torch.Tensor:
    """DPO: equation 7 of Rafailov et al. 2023. KTO: equation 8 of Ethayarajh et al. 2024, both weights 1."""

    def ratios(prefix: str = "") -> torch.Tensor:
        tensors = [batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask")]
        with torch.no_grad():
            reference_log_probs = summed_log_probs(reference, *tensors)
        return summed_log_probs(model, *tensors) - reference_log_probs

    if kind == "dpo":
        better, worse = ratios().chunk(2)
        return -torch.nn.functional.logsigmoid(beta * (better - worse)).mean()
    kl = ratios("KL_").mean().clamp(min=0).detach()
    signs = torch.where(batch["label"], 1.0, -1.0).double()
    return (1 - torch.sigmoid(beta * signs * (ratios() - kl))).mean()


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_loss_and_gradients_are_those_of_a_plain_reference(tmp_path, blank, file, kind):
    trainer = trainer_of(make_config(tmp_path, blank, file, f"train.loss={kind}", "train.beta=0.3"))
    with torch.no_grad():  # away from the reference, where all ratios are 1
        generator = torch.Generator().manual_seed(3)
        for weight in trainer.model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    reference = AutoModelForCausalLM.from_pretrained(blank, dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(blank, dtype=torch.float64)
    model.load_state_dict({name: weight.double() for name, weight in trainer.model.state_dict().items()})
    batch = next(iter(trainer.get_train_dataloader()))
    assert ((batch["completion_mask"] == 0) & (batch["attention_mask"] == 1)).sum() > 0
    loss, expected = trainer.compute_loss(trainer.model, dict(batch)), plain_loss(kind, model, reference, batch, 0.3)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    loss.backward()
    expected.backward()
    expected_parameters = dict(model.named_parameters())
    largest = max(weight.grad.abs().max().item() for weight in expected_parameters.values())
    for name, weight in trainer.model.named_parameters():
        worst = (weight.grad.double() - expected_parameters[name].grad).abs().max().item()
        assert worst < 1e-6, f"{name}: {worst} of {largest}"
    assert largest > 1e-2


def test_without_masks_the_batches_are_trls_own():
    unmasked = [
        replace(pair, chosen_mask=[1] * len(pair.chosen_ids), rejected_mask=[1] * len(pair.rejected_ids))
        for pair in PAIRS
    ]
    rows = rows_of(unmasked)[:3]
    for batch, expected in (
        (PairCollator(PAD)(rows), DataCollatorForPreference(PAD)(rows)),
        (
            SingleCollator(PAD, 40)(texts := singles(unmasked, 1)[:3]),
            DataCollatorForUnpairedPreference(PAD, max_length=40)(
                [text | {"KL_completion_ids": texts[index - 1]["completion_ids"]} for index, text in enumerate(texts)]
            ),
        ),
    ):
        assert batch.keys() == expected.keys()
        for name in batch:
            assert (
                batch[name][:, :40].equal(expected[name][:, :40])
                if batch[name].dim() > 1
                else batch[name].equal(expected[name])
            )


def test_the_batch_holds_the_masks_of_the_pairs_and_no_students_words():
    for batch in (PairCollator(PAD)(rows_of(PAIRS)), SingleCollator(PAD, 128)(singles(PAIRS, 1))):
        for prefix in ("", "KL_") if "label" in batch else ("",):
            for ids, mask in zip(batch[f"{prefix}input_ids"], batch[f"{prefix}completion_mask"], strict=True):
                learned = TOKENIZER.decode(ids[mask.bool()])
                assert learned.count("<|im_end|>") == 2 and learned.endswith(("No more.<|im_end|>", "eggs.<|im_end|>"))
                assert "user" not in learned.replace("user 0", "").replace("user 1", "")


def test_kto_takes_every_text_once_and_neighbours_have_other_prompts():
    texts = singles(PAIRS, 5)
    assert {(tuple(text["completion_ids"]), text["label"]) for text in texts} == {
        *((tuple(pair.chosen_ids), True) for pair in PAIRS),
        *((tuple(pair.rejected_ids), False) for pair in PAIRS),
    }
    assert all(text["prompt_ids"] != next_text["prompt_ids"] for text, next_text in zip(texts, texts[1:], strict=False))


# What is trained on -----------------------------------------------------------------------------------------------


def test_problems_are_held_out_whole_and_the_same_ones_for_the_same_seed():
    twice = [*PAIRS, *(replace(pair, step=1) for pair in PAIRS)]
    learned, held_out = split(twice, 0.3, 7)
    problem_ids = [{pair.problem_id for pair in part} for part in (learned, held_out)]
    assert len(problem_ids[1]) == 3 and not problem_ids[0] & problem_ids[1] and len(held_out) == 6
    assert split(twice[::-1], 0.3, 7)[1] == held_out[::-1]
    assert {pair.problem_id for pair in split(twice, 0.3, 8)[1]} != problem_ids[1]
    assert split(PAIRS, 0, 7) == (PAIRS, [])
    with pytest.raises(DataError, match="All pairs are on 1 problem, which dataset.held_out_share=0.1 holds out"):
        split(PAIRS[:1], 0.1, 7)


SHAPES = st.tuples(st.sampled_from(["group", "draft"]), st.integers(1, 9), st.integers(1, 9))


@given(st.lists(SHAPES, max_size=30), st.integers(0, 99))
def test_the_control_swaps_one_of_every_two_pairs_that_are_alike(shapes, seed):
    """Half of all, half of each source but for one, and what is left of the differences of length is no more than they
    are apart."""
    pairs = [
        replace(
            PAIRS[0],
            source=source,
            chosen_ids=[1] * (good + 1),
            chosen_mask=[0] + [1] * good,
            rejected_ids=[2] * bad,
            rejected_mask=[1] * bad,
        )
        for source, good, bad in shapes
    ]
    swapped = with_swapped(pairs, seed)
    signs = [1 if pair == swapped_pair else -1 for pair, swapped_pair in zip(pairs, swapped, strict=True)]
    assert signs.count(-1) == len(pairs) // 2 and swapped == with_swapped(pairs, seed)
    for pair, swapped_pair, sign in zip(pairs, swapped, signs, strict=True):
        if sign < 0:
            assert (pair.chosen_ids, pair.chosen_mask) == (swapped_pair.rejected_ids, swapped_pair.rejected_mask)
            assert (pair.rejected_ids, pair.rejected_mask) == (swapped_pair.chosen_ids, swapped_pair.chosen_mask)
    for source in ("group", "draft"):
        signed = [
            (sign, good - bad) for sign, (origin, good, bad) in zip(signs, shapes, strict=True) if origin == source
        ]
        assert abs(sum(sign for sign, _ in signed)) <= 2
        if len(signed) == len(pairs) and not len(signed) % 2:
            differences = [difference for _, difference in signed] or [0]
            assert abs(sum(sign * difference for sign, difference in signed)) <= max(differences) - min(differences)


def test_another_seed_of_the_control_swaps_others_and_holds_the_same_ones_out(tmp_path, blank, file, monkeypatch):
    splits = []
    monkeypatch.setattr(preferences, "rows_of", lambda pairs: splits.append(list(pairs)) or rows_of(pairs))
    for seed in (0, 1):
        control = ("dataset.shuffle_pairs=true", f"dataset.shuffle_seed={seed}", "dataset.held_out_share=0.3")
        trainer_of(make_config(tmp_path, blank, file, *control))
    (learned, held_out), (other_learned, other_held_out) = splits[:2], splits[2:]
    assert held_out == other_held_out and learned != other_learned
    assert [pair.problem_id for pair in learned] == [pair.problem_id for pair in other_learned]


def test_pairs_that_do_not_fit_are_told_about_or_refused(tmp_path, blank, file, caplog):
    config = make_config(tmp_path, blank, file)
    long = replace(PAIRS[0], chosen_ids=PAIRS[0].chosen_ids * 9, chosen_mask=PAIRS[0].chosen_mask * 9)
    write_pairs(tmp_path / "long.parquet", [long, *PAIRS[1:]], TOKENIZER)
    options = replace(config.dataset, pairs=str(tmp_path / "long.parquet"))
    assert len(read_short_pairs(options, TOKENIZER, 128)) == 9
    assert "1 of 10 pairs have more than 128 tokens (model.max_length) and are left out" in caplog.text
    for changed, length, message in (
        (options, 5, r"holds 10 pairs, 10 of them .* none of these has at most 5 tokens"),
        (replace(options, sources=["desk"]), 128, r"10 pairs, 0 of them of the sources desk"),
        (replace(options, pairs=str(tmp_path / "no.parquet")), 128, "no.parquet does not exist. Make it with"),
    ):
        with pytest.raises(DataError, match=message):
            read_short_pairs(changed, TOKENIZER, length)
    other_tokenizer = make_tokenizer(CHATML)
    other_tokenizer.add_tokens(["another"])
    with pytest.raises(DataError, match="holds token ids of another tokenizer than the model's"):
        read_short_pairs(config.dataset, other_tokenizer, 128)
    for override, message in (
        ("dataset.pairs=null", "dataset.pairs names no file"),
        ("dataset.sources=[]", "dataset.sources is empty; name at least one of group, draft, desk, judge"),
        ("dataset.held_out_share=1", "it must be from 0 to 0.9"),
        ("dataset.shuffle_seed=3", "shuffle_seed is 3, but dataset.shuffle_pairs is false and nothing is swapped: set"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(tmp_path, blank, file, override)
    with pytest.raises(ConfigError, match="is 1; with train.loss=kto it must be at least 2"):
        make_config(tmp_path, blank, file, "train.loss=kto", "train.per_device_train_batch_size=1")


# Whole runs -------------------------------------------------------------------------------------------------------


def test_figures_by_hand():
    """Margins 1, −1 and 0 nats; β is 0.5, so implicit rewards 0.5 · (1 − 2), 0.5 · (−1 + 3) and 0."""
    log_probs = torch.tensor([[-1.0, -2.0, -1.0, -3.0], [-2.0, -1.0, -4.0, -1.0], [-1.0, -1.0, -1.0, -1.0]])
    pairs = [replace(pair, source=source) for pair, source in zip(PAIRS, ["group", "desk", "desk"], strict=False)]
    figures = figures_of(log_probs, pairs, 0.5)
    assert list(figures) == ["all", "desk", "group"]
    actual = {
        source: (
            *(entry["pairs"], entry["accuracy"]["mean"], entry["margin"]),
            *(entry["reward_accuracy"]["mean"], entry["reward_margin"]),
        )
        for source, entry in figures.items()
    }
    assert actual == {
        "all": (3, 0.5, 0.0, 0.5, pytest.approx(0.5 / 3)),
        "desk": (2, 0.25, -0.5, 0.75, 0.5),
        "group": (1, 1.0, 1.0, 0.0, -0.5),
    }


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_the_model_learns_what_is_better_and_from_swapped_pairs_it_does_not(tmp_path, blank, file, loss):
    margins = {}
    for name in ("false", "true"):
        folder = tmp_path / name
        learning = ("train.max_steps=12", "train.lr_scheduler_type=constant", "dataset.held_out_share=0.3")
        control = f"dataset.shuffle_pairs={name}"
        run = make_config(folder, blank, file.parent, f"train.loss={loss}", control, *learning)
        assert preferences.train(run) == folder / "model"
        figures = json.loads((folder / "preferences.json").read_text())
        before, after = figures["before"]["all"], figures["after"]["all"]
        assert (before["reward_margin"], before["reward_accuracy"]["mean"], before["problems"]) == (0, 0.5, 3)
        margins[name] = after["reward_margin"]
        assert after["reward_margin"] == pytest.approx(0.1 * (after["margin"] - before["margin"]), abs=1e-4)
        names = ["config", "metrics.jsonl", "model", "preferences.json", "run_id"]
        assert sorted(path.name for path in folder.iterdir()) == names
        assert "pairs of a better and a worse text" in (folder / "model/README.md").read_text()
    assert margins["false"] > 1 and margins["false"] > 3 * abs(margins["true"]), margins


@pytest.mark.parametrize(("loss", "lora"), [("dpo", False), ("kto", True)])
def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path, blank, file, monkeypatch, loss, lora):
    adapter = ("model.lora={enable: true, rank: 8, alpha: 32, dropout: 0.1}",) if lora else ()
    overrides = (f"train.loss={loss}", "logging.save_steps=3", *adapter)
    preferences.train(make_config(tmp_path / "whole", blank, file, *overrides))
    config = make_config(tmp_path / "broken", blank, file, *overrides)
    on_log, steps, stop_after = preferences.MetricsCallback.on_log, [], 4

    def counted(self, args, state, control, logs=None, **_):
        on_log(self, args, state, control, logs)
        steps.append(state.global_step)
        if state.global_step == stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(preferences.MetricsCallback, "on_log", counted)
    with pytest.raises(KeyboardInterrupt):
        preferences.train(config)
    before = json.loads((tmp_path / "broken/preferences.json").read_text())
    assert list(before) == ["held_out", "before"] and not (tmp_path / "broken/model").exists()
    content = file.read_bytes()
    file.write_bytes(content + b"\n")
    with pytest.raises(ConfigError, match=r"pairs.parquet is not what it was .dataset.pairs."):
        preferences.train(config)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="Other pairs are held out now"):
        preferences.train(make_config(tmp_path / "broken", blank, file, *overrides, "dataset.held_out_share=0.5"))
    stop_after = None
    preferences.train(config)
    assert steps[:7] == [1, 2, 3, 4, 4, 5, 6]
    figures = [json.loads((tmp_path / name / "preferences.json").read_text()) for name in ("whole", "broken")]
    assert figures[1]["before"] == before["before"] and figures[0] == figures[1]
    first, last = (figures[1][when]["all"] for when in ("before", "after"))
    assert last["reward_margin"] == pytest.approx(0.1 * (last["margin"] - first["margin"]), abs=1e-4) != 0
    whole, resumed = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "broken"))
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name
    if lora:
        base = AutoModelForCausalLM.from_pretrained(blank, dtype=torch.float32)
        ids = torch.tensor([PAIRS[0].prompt_ids + PAIRS[0].chosen_ids])
        with torch.no_grad():
            plain = base(ids).logits
            adapted = PeftModel.from_pretrained(base, tmp_path / "broken/adapter").eval()(ids).logits
            assert torch.allclose(resumed(ids).logits, adapted, atol=1e-4) and not torch.allclose(
                plain, adapted, atol=1e-2
            )
