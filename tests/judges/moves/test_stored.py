"""Trained readers that were changed, damaged or made by another version are refused, and say what to do."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from classroom_rl.errors import DataError, StorageError
from classroom_rl.judges.moves import stored
from classroom_rl.judges.moves.classifier import Vectoriser, fit_linear, seen, texts_of
from classroom_rl.judges.moves.cross_validation import BY_CLASSIFIER
from classroom_rl.judges.moves.labelled import LabelledMessage
from classroom_rl.judges.moves.stored import CARD_NAME, JSON_NAME, TENSORS_NAME, digest_of, load_readers, save_readers
from classroom_rl.judges.readings import Exchange

RIGHT = "está en casa rojo"
ABOUT = Exchange("Not quite: libro is another word, you need casa.", "está en libro rojo", RIGHT)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def values_of(folder: Path) -> dict:
    return json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))


def rewrite(folder: Path, values: dict) -> None:
    """Write readers.json with a digest that fits, as somebody would who changes it on purpose."""
    values = {name: value for name, value in values.items() if name != "digest"}
    values["tensors_sha256"] = hashlib.sha256((folder / TENSORS_NAME).read_bytes()).hexdigest()
    (folder / JSON_NAME).write_text(json.dumps(values | {"digest": digest_of(values)}), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load((folder / TENSORS_NAME).read_bytes())
    change(tensors)
    (folder / TENSORS_NAME).write_bytes(save(tensors))
    rewrite(folder, values_of(folder))


# What is read --------------------------------------------------------------------------------------------------------


def test_what_is_saved_again_is_the_same(folder: Path, tmp_path: Path):
    readers = load_readers(folder)
    content = readers.stored.model_dump(exclude={"tensors_sha256"})
    save_readers(tmp_path / "again", content, load((folder / TENSORS_NAME).read_bytes()), "a card")
    reloaded = load_readers(tmp_path / "again")
    assert reloaded.version == readers.version == f"readers.{values_of(folder)['digest'][:12]}"
    assert reloaded.trust == readers.trust and (tmp_path / "again" / CARD_NAME).read_text() == "a card"


def test_a_loaded_reader_scores_as_the_fitted_one(folder: Path, labelled: Sequence[LabelledMessage]):
    readers = load_readers(folder)
    classifiers = {label: reader for label, reader in readers.stored.readers.items() if reader.by == BY_CLASSIFIER}
    assert len(classifiers) >= 3
    for label, reader in classifiers.items():
        messages = [message for message in labelled if message.source == reader.source]
        exchanges = [seen(label, message.exchange) for message in messages]
        tables = Vectoriser.fit(exchanges, texts_of(label)).tables(exchanges)
        scores = fit_linear(tables, [message.labels[label] for message in messages]).scores(tables)
        loaded_scores = [readers.score(label, message.exchange) for message in messages]
        assert loaded_scores == pytest.approx(scores.tolist(), abs=1e-9)


def test_a_reader_of_the_message_alone_does_not_look_at_the_student(folder: Path):
    readers = load_readers(folder)
    variants = (replace(ABOUT, student=RIGHT), Exchange(ABOUT.message))
    assert all(readers.reads("treats_as_wrong", exchange) for exchange in (ABOUT, *variants))


def test_a_rewritten_folder_that_fits_is_read(copy: Path):
    """So that the refusals below are not due to the rewriting."""
    change_tensors(copy, lambda tensors: None)
    assert load_readers(copy).reads("treats_as_wrong", ABOUT) is True


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [JSON_NAME, TENSORS_NAME])
def test_a_file_that_is_missing_or_too_large(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stored, "LARGEST_FILE", (copy / name).stat().st_size - 1)
    with pytest.raises(DataError, match="is larger than"):
        load_readers(copy)
    monkeypatch.undo()
    (copy / name).unlink()
    with pytest.raises(DataError, match=f"There is no .*{name}: name the folder"):
        load_readers(copy)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_noticed_or_means_the_same(folder: Path, tmp_path: Path, data: st.DataObject):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken, dirs_exist_ok=True)
    path = broken / data.draw(st.sampled_from([JSON_NAME, TENSORS_NAME]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    try:
        readers = load_readers(broken)
    except DataError:
        return
    assert readers.stored == load_readers(folder).stored  # white space between values, for instance


def test_a_threshold_that_was_changed_is_noticed(copy: Path):
    values = values_of(copy)
    values["readers"]["hint"]["threshold"] += 0.5
    (copy / JSON_NAME).write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(DataError, match="do not match their digest"):
        load_readers(copy)


def put(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            put("hint.words", lambda tensor: np.where(np.arange(len(tensor)) == 0, np.nan, tensor)),
            "'hint.words' does not hold .* finite numbers",
        ),
        (put("hint.words", lambda tensor: tensor[:-1]), "'hint.words' does not hold"),
        (put("hint.words", lambda tensor: tensor.reshape(1, -1)), "'hint.words' does not hold"),
        (put("hint.words", lambda tensor: tensor.astype(np.float32)), "of type float64"),
        (put("CIMA.words_letters_student.words.idf", lambda tensor: -tensor), "not above 0"),
        (lambda tensors: tensors.pop("hint.figures"), "'hint.figures' is missing"),
        (lambda tensors: tensors.update(more=np.zeros(3)), "'more' is not asked for"),
    ],
)
def test_tensors_that_do_not_fit(copy: Path, change: Callable, words: str):
    change_tensors(copy, change)
    with pytest.raises(DataError, match=words):
        load_readers(copy)


def test_what_is_no_safetensors_file(copy: Path):
    (copy / TENSORS_NAME).write_bytes(b"\x80\x04K\x01.")
    rewrite(copy, values_of(copy))
    with pytest.raises(DataError, match="readers.safetensors cannot be read"):
        load_readers(copy)


def set_in(*path: str, value: object) -> Callable[[dict], None]:
    def apply(values: dict) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return apply


def twice(values: dict) -> None:
    ngrams = values["vocabularies"]["CIMA.words_letters_student"]["words"]
    ngrams[0] = ngrams[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_in("format", value=2), "of another version"),
        (set_in("features_version", value=0), "of another version"),
        (set_in("figures", value=["one"]), "of another version"),
        (set_in("more", value=1), "cannot be read"),
        (set_in("readers", "hint", "threshold", value="1"), "cannot be read"),
        (set_in("readers", "hint", "by", value="a guess"), "cannot be read"),
        (set_in("readers", "hint", "by", value="rules_with_target"), "nothing was measured"),
        (set_in("readers", "hint", "vocabularies", value="MRBench"), "has no n-grams of"),
        (set_in("readers", "hint", "vocabularies", value=None), "has no n-grams of"),
        (set_in("readers", "hint", "measured", "rules", "kappa", value=1.5), "cannot be read"),
        (set_in("readers", "hint", "measured", "rules", "ci95", value=[0.5, 0.1]), "the interval of hint"),
        (set_in("readers", value={}), "cannot be read"),
        (lambda values: values["readers"].update(kindness=values["readers"]["hint"]), "reader for 'kindness'"),
        (twice, "one occurs twice"),
    ],
)
def test_content_that_does_not_fit(copy: Path, change: Callable, words: str):
    values = values_of(copy)
    change(values)
    rewrite(copy, values)
    with pytest.raises(DataError, match=words) as caught:
        load_readers(copy)
    assert "classroom_rl.judges.moves.train" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, '{"digest": 1}', "\ud800"])
def test_what_is_no_content(copy: Path, text: str):
    (copy / JSON_NAME).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(DataError, match="readers.json cannot be read"):
        load_readers(copy)


def test_a_number_that_is_not_finite(copy: Path):
    values = values_of(copy)
    values["readers"]["hint"]["threshold"] = float("inf")
    (copy / JSON_NAME).write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(DataError, match="readers.json cannot be read"):
        load_readers(copy)


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    content = load_readers(folder).stored.model_dump(exclude={"tensors_sha256"})
    with pytest.raises(StorageError):
        save_readers(tmp_path / "file", content, load((folder / TENSORS_NAME).read_bytes()), "")
