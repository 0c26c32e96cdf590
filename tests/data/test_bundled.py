"""The bundled data is whole, documented, licensed, and the model is as good as its card says."""

import hashlib
import json
import re
import runpy
import sys
from collections import Counter

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from specter_lab import bundled
from specter_lab.bundled import Prompt, bundled_model, data_folder, load_prompts

KINDS = ("prose", "dialogue", "docs", "code")
SCRIPTS = ("prep_corpus.py", "train.py", "analyze.py", "latency.py")
WEIGHTS_SHA256 = "bf4c2cd1a935cee417ac122255158c34ddc76fbb0d987b8be17d18148071e4fd"
FILE_NAME = r"`([\w./-]+(?:\.(?:jsonl?|md|py|toml|safetensors)|/))`"
# Nats per byte of the bundled prompts, measured in float32: prose 1.2240, dialogue 1.2162, docs 0.9057, code 0.9166.
NATS_PER_BYTE_BELOW = {"prose": 1.24, "dialogue": 1.23, "docs": 0.92, "code": 0.93}
NEARLY_DEAD = [(0, 1)]  # (layer, expert) below 5 % of an even load, as in the card


def shipped_files():
    """Every file of the data folder, without what Python itself leaves behind."""
    return [path for path in data_folder().rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def measured():
    """(nats by kind, bytes by kind, share of an even load of shape (layers, experts)) of the model on the bundled prompts."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    model = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32).eval()
    nats, byte_count = Counter(), Counter()
    uses = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for prompt in load_prompts():
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt.text)["input_ids"]]])
        with torch.no_grad():
            output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        nats[prompt.kind] += cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="sum").item()
        byte_count[prompt.kind] += len(prompt.text.encode())
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(model.config.num_experts_per_tok, -1).indices
            uses[layer] += torch.bincount(chosen.flatten(), minlength=uses.shape[1])
    return nats, byte_count, uses / uses.mean(1, keepdim=True)


def test_no_file_is_too_large_for_a_repository():
    assert max(path.stat().st_size for path in shipped_files()) < 25e6


def test_weights_are_the_documented_ones():
    weights = bundled_model() / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == WEIGHTS_SHA256


def test_held_out_quality_is_as_the_card_says(measured):
    nats, byte_count, _ = measured
    for kind, bound in NATS_PER_BYTE_BELOW.items():
        assert 0.5 < nats[kind] / byte_count[kind] < bound, kind


def test_only_the_documented_expert_is_nearly_dead(measured):
    share = measured[2]
    assert [tuple(key) for key in (share < 0.05).nonzero().tolist()] == NEARLY_DEAD


def test_prompts_are_enough_and_name_work_and_licence():
    prompts = load_prompts()
    assert Counter(prompt.kind for prompt in prompts) == dict.fromkeys(KINDS, 12)
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == len(prompts)
    assert {prompt.licence for prompt in prompts} == {"public domain", "PSF-2.0"}
    assert all(prompt.source and len(prompt.text) > 100 for prompt in prompts)


def test_prompts_are_chosen_by_kind_and_number_in_the_order_of_the_file():
    assert [prompt.id for prompt in load_prompts(kinds=("code", "prose"), per_kind=1)] == ["prose-00", "code-00"]
    assert load_prompts("docs") == [prompt for prompt in load_prompts() if prompt.kind == "docs"]
    assert load_prompts(kinds=[]) == []


def test_unknown_kind_names_the_kinds():
    with pytest.raises(ValueError, match=r"one of 4 kinds; got \['poetry'\]. Choose among prose, dialogue, docs, code"):
        load_prompts(kinds=["prose", "poetry"])


@pytest.mark.parametrize("per_kind", [0, 13])
def test_more_prompts_than_there_are_is_an_error(per_kind):
    with pytest.raises(ValueError, match=f"between 1 and 12.*got {per_kind}"):
        load_prompts(per_kind=per_kind)


@pytest.mark.parametrize("line", ["{", "[1]", '{"id": "x"}', '{"id": 1, "kind": "a", "text": "b", "source": "c", "licence": "d"}'])
def test_malformed_line_is_named(tmp_path, line):
    good = json.dumps(vars(Prompt("a-0", "a", "text", "work", "public domain")))
    (tmp_path / "prompts.jsonl").write_text(f"{good}\n{line}\n")
    (tmp_path / "good.jsonl").write_text(f"{good}\n")
    assert len(bundled._read_prompts(tmp_path / "good.jsonl")) == 1
    with pytest.raises(ValueError, match="line 2 of"):
        bundled._read_prompts(tmp_path / "prompts.jsonl")


def test_data_is_found_in_a_wheel_and_its_absence_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "__file__", str(tmp_path / "specter_lab" / "bundled.py"))
    with pytest.raises(FileNotFoundError, match="Install specter_lab again"):
        data_folder()
    wheel_data = tmp_path / "specter_lab" / "_data"
    (wheel_data / "tiny-moe").mkdir(parents=True)
    (wheel_data / "tiny-moe" / "config.json").write_text("{}")
    (wheel_data / "prompts.jsonl").write_text("")
    assert data_folder() == wheel_data


@pytest.mark.parametrize("folder", [".", "tiny-moe"])
def test_readmes_name_existing_files_only(folder):
    text = (data_folder() / folder / "README.md").read_text(encoding="utf-8")
    named = [name for name in re.findall(FILE_NAME, text) if not name.startswith("corpus/")]
    assert len(named) >= 8
    assert [name for name in named if not (data_folder() / folder / name).exists()] == []


def test_readmes_name_every_file():
    named = set()
    for folder in (".", "tiny-moe"):
        text = (data_folder() / folder / "README.md").read_text(encoding="utf-8")
        named |= {(data_folder() / folder / name).resolve() for name in re.findall(FILE_NAME, text)}
    readme = data_folder() / "README.md"
    assert [path for path in shipped_files() if path.resolve() not in named and path != readme] == []


def test_card_copies_the_figures_of_the_report():
    card = (bundled_model() / "README.md").read_text(encoding="utf-8")
    report = json.loads((bundled_model() / "report.json").read_text(encoding="utf-8"))
    for name, figures in report["drafts"].items():
        row = next(line for line in card.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {figures['text_top1_agreement']:.3f} |" in row
        assert f"| {figures['sampled_path_acceptance_T0.7']:.3f} |" in row
    last = json.loads((bundled_model() / "train_log.jsonl").read_text().splitlines()[-1])
    assert all(f"**{last[f'bpb_{kind}']}**" in card for kind in ("code", "docs", "prose", "scripture"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_training_scripts_show_their_help(script, monkeypatch, capsys):
    if script == "analyze.py":
        pytest.importorskip("optimum.quanto")
    folder = bundled_model() / "training"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(folder / script), run_name="__main__")
    assert "--" in capsys.readouterr().out
