"""Exports of a run that was trained and measured without a model, whose tutor has random weights."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import yaml
from huggingface_hub import HfApi, ModelCard, constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from classroom_rl.environments.toy_language.lessons import make_lessons
from classroom_rl.environments.toy_language.scripts import ideal
from classroom_rl.export import _CHATML_IN_GO, add_older_names, chatml_system, main
from classroom_rl.models.random_model import write_tiny_chat_model
from classroom_rl.results import hub
from classroom_rl.system.run_lock import claim
from tests.support.configs import training
from tests.support.scripted_teachers import ignores_errors
from tests.support.synthetic_run import played, step_line, write_evaluation, write_training

SAMPLING = {"temperature": 0.7, "top_k": -1, "top_p": 1.0, "max_length": 1024}
CONFIG: dict[str, Any] = {
    "environment": "classroom",
    "teacher_model": {"model_name_or_path": "some/base", "vllm": SAMPLING},
    "judge_model": {"model_name_or_path": "rubric"},
    "guards": {"judge_check_every_n_steps": 5, "held_out_judge_model": {"model_name_or_path": "other/judge"}},
    "dataset": {"train_datasets": [{"name_or_path": "some/lessons", "split": "train", "ratio": 0.5}]},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder, personas = tmp_path / "tutor", ["error_student", *["correct_student"] * 3]
    for when, teacher in (("before", ignores_errors), ("after", ideal)):
        records = [played(teacher, lesson, personas, number) for number, lesson in enumerate(make_lessons(1)[1][:12])]
        write_evaluation(folder / "eval" / when, {"sampled": records})
    write_training(folder, [step_line(1, 0.5), step_line(2, 0.6, **{"guard/gap": 0.25})], CONFIG)
    check = {"step": 2, "gap": {"mean": 0.2}, "canaries": {}, "warnings": ["The judge can be fooled: it pays praise."]}
    (folder / "judge_checks.jsonl").write_text(json.dumps(check) + "\n", encoding="utf-8")
    write_tiny_chat_model(folder / "model", ["Where does Ann walk?"] * 3)
    hub.write_card(folder / "model", training("--config-name=quickstart"), "some/base", "grpo", {"reward": 0.5})
    return folder


def exported(run: Path, to: str, *arguments: str) -> Path:
    assert main([str(run), "--to", to, *arguments]) == 0
    return run / "export" / to


def refusal(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_the_merged_model_answers_as_in_the_run_and_has_the_older_names(run: Path) -> None:
    folder = exported(run, "merged", "--license", "apache-2.0")
    config, settings = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    assert config["torch_dtype"] == config["dtype"] and config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert settings["chat_template"] == (folder / "chat_template.jinja").read_text()
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in settings
    chat = [{"role": "user", "content": "Where does Ann walk?"}]
    answers = []
    for model_folder in (run / "model", folder):
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        model = AutoModelForCausalLM.from_pretrained(model_folder, use_safetensors=True)
        answers.append(model.generate(**prompt, max_new_tokens=12, do_sample=False).tolist())
    assert answers[0] == answers[1]
    assert {path.name for path in folder.iterdir()} >= {"teacher_prompt.txt", "generation_config.json", "export.json"}
    assert not (run / "export/merged.unfinished").exists()


@pytest.mark.parametrize("rope_type", ["default", "llama3"])
def test_version_5_reads_the_same_positions_with_the_older_names(rope_type: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 5e5, "rope_type": rope_type}
    if rope_type == "llama3":
        rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    LlamaConfig(rope_parameters=dict(rope), dtype="bfloat16").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert add_older_names(config) == [] and config["torch_dtype"] == "bfloat16" and config["rope_theta"] == 5e5
    scaling = None if rope_type == "default" else {key: value for key, value in rope.items() if key != "rope_theta"}
    assert config.get("rope_scaling") == scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    reloaded = AutoConfig.from_pretrained(tmp_path)
    assert reloaded.rope_parameters == rope and str(reloaded.dtype) == "torch.bfloat16"
    assert add_older_names({"rope_parameters": {"full_attention": rope}}), "a note"


def test_the_card_says_what_is_known_of_the_run(run: Path, capsys: pytest.CaptureFixture) -> None:
    card = ModelCard.load(exported(run, "merged") / "README.md")
    for expected in (
        "Held-out lessons, sampled",
        "On held-out lessons (sampled) the reward rose by",
        "`some/lessons`, split train, share 0.5",
        "The judge was `rubric`, the held-out judge `other/judge`.",
        "Of 1 checks whether it can be fooled, 1 warned.",
        "- The judge can be fooled: it pays praise.",
        "- guard/gap: 0.25",
        "## Its prompt, a Jinja template",
        "## Configuration",
    ):
        assert expected in card.text
    assert "licence of the base model, some/base, is not known" in capsys.readouterr().out
    assert card.data.license is None and "was not stated" in card.text
    assert [result.dataset_name for result in card.data.eval_results] == ["training", "held-out lessons"]
    exported(run, "merged", "--overwrite", "--license", "mit")
    assert ModelCard.load(run / "export/merged/README.md").data.license == "mit"


def test_gguf_and_modelfile(run: Path) -> None:
    text = (exported(run, "ollama", "--dtype", "float16") / "Modelfile").read_text()
    values = dict(re.findall(r"^PARAMETER (\w+) (.+)$", text, re.MULTILINE))
    assert values == {
        **{"stop": '"<|im_end|>"', "temperature": "0.7", "top_p": "1", "top_k": "0", "min_p": "0"},
        **{"repeat_penalty": "1", "num_ctx": "1024"},
    }
    assert text.startswith("FROM ./tutor.gguf\nTEMPLATE") and "template of include_thinking, problem, student" in text
    assert "SYSTEM" not in text and (run / "export/ollama/teacher_prompt.txt").is_file()
    reader = gguf.GGUFReader(run / "export/ollama/tutor.gguf")
    assert reader.get_field("general.file_type").contents() == 1
    (run / "model/teacher_prompt.txt").write_text("Teach kindly.\n")
    assert 'SYSTEM """Teach kindly."""' in (exported(run, "ollama", "--overwrite") / "Modelfile").read_text()
    exported(run, "gguf", "--pre-tokenizer", "qwen2")
    notes = json.loads((run / "export/gguf/export.json").read_text())["notes"]
    assert re.search(r"rule qwen2: \d+ of \d\d+ texts of the run's evaluations get other tokens", notes[0])


def test_llama_cpp_converts_a_folder_whose_template_has_no_marks(run: Path, tmp_path: Path) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text(
        "import sys, shutil; shutil.copy(sys.argv[1] + '/chat_template.jinja', sys.argv[3])"
    )
    converted = (exported(run, "gguf", "--llama-cpp", str(tmp_path)) / "tutor.gguf").read_text()
    assert "{#- generation #}" in converted and "{%- generation %}" in (run / "model/chat_template.jinja").read_text()
    assert sorted(path.name for path in (run / "export/gguf").iterdir() if path.is_dir()) == []


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = f"{{% for m in messages %}}{TURN}{{% endfor %}}{{{{ '<|im_start|>assistant\\n' }}}}"
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.\nAlways.<|im_end|>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "system"),
    [
        (CHATML, ""),
        (SYSTEM + CHATML, "Be good.\nAlways."),
        (CHATML.replace("m.content", "m.content | trim"), None),
        (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), None),
        (CHATML.replace("<|im_end|>", "</s>"), None),
        (SYSTEM.replace("<|im_end|>", "</s>") + CHATML, None),
        ("{{ raise_exception('no system') }}", None),
    ],
)
def test_chatml_is_told_from_what_is_like_it(template: str, system: str | None, run: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokenizer.chat_template = template
    assert chatml_system(tokenizer, {}) == system


def test_the_template_for_ollama_renders_chatml(run: Path) -> None:
    """Read here as Go's text/template would: a loop over the messages, and what follows it."""
    turn_template, ending = re.fullmatch(
        r"\{\{- range \.Messages \}\}(.*)\{\{ end \}\}(.*)", _CHATML_IN_GO, re.DOTALL
    ).groups()
    chat = [{"role": "system", "content": "Teach."}, {"role": "user", "content": "Who?"}]
    turns = [
        turn_template.replace("{{ .Role }}", turn["role"]).replace("{{ .Content }}", turn["content"]) for turn in chat
    ]
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert "".join(turns) + ending == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_an_adapter_is_exported_with_the_tokenizer(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert "has no adapter/: it was trained without LoRA" in refusal(capsys, run, "--to", "adapter")
    (run / "adapter").mkdir()
    (run / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "/models/mine"}')
    (run / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    folder = exported(run, "adapter")
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights" and (folder / "tokenizer.json").is_file()
    assert "base is a local folder, /models/mine" in (folder / "README.md").read_text()


def test_the_hub_gets_the_merged_folder(run: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--name user/name" in refusal(capsys, run, "--to", "hub")
    assert "HF_HUB_OFFLINE is set" in refusal(capsys, run, "--to", "hub", "--name", "me/tutor")
    assert not (run / "export").exists()
    pushed = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_token", lambda: "hf_one")
    monkeypatch.setattr("classroom_rl.export.why_unreachable", lambda: "it is a test")
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, exist_ok: type("Repository", (), {"repo_id": name}))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **given: pushed.append(given))
    folder = exported(run, "hub", "--name", "me/tutor")
    assert [(upload["repo_id"], upload["folder_path"]) for upload in pushed] == [("me/tutor", folder)]
    assert (folder / "model.safetensors").is_file()


def test_what_is_not_finished_or_would_be_lost_is_refused(run: Path, capsys, tmp_path: Path) -> None:
    assert "is no run folder" in refusal(capsys, tmp_path, "--to", "merged")
    assert "--dtype is for --to gguf and ollama only" in refusal(capsys, run, "--to", "merged", "--dtype", "float16")
    for out in (run / "model", run):
        assert "exists: name another --out" in refusal(capsys, run, "--to", "merged", "--overwrite", "--out", out)
    exported(run, "merged")
    assert "exists: name another --out" in refusal(capsys, run, "--to", "merged")
    with claim("train_rl", run):
        assert "A training works in" in refusal(capsys, run, "--to", "gguf")
    shutil.rmtree(run / "model")
    assert "holds no model/, which a training writes last" in refusal(capsys, run, "--to", "gguf")


def test_a_trained_student_is_no_tutor_to_export(run: Path, capsys) -> None:
    write_training(run, [step_line(1, 0.5)], CONFIG | {"generation": {"trained_role": "student"}})
    assert "trained the student, and only tutors are exported" in refusal(capsys, run, "--to", "merged")


def test_a_fine_tuned_model_is_exported_without_a_judge(run: Path) -> None:
    (run / "config/train_rl.yaml").unlink()
    dataset = {"train_datasets": [{"name_or_path": "some/talks", "split": "train", "ratio": 1.0}], "val_datasets": []}
    config = {"model": {"model_name_or_path": "some/base"}, "dataset": dataset}
    (run / "config/train_sft.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    text = (exported(run, "ollama") / "README.md").read_text()
    assert "`some/talks`" in text and "Judge" not in text.split("## Its prompt")[0]
    assert "PARAMETER temperature" not in (run / "export/ollama/Modelfile").read_text()
