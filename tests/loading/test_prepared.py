"""Prepared folders: the same model again, or a refusal that names what differs."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import specter_lab as sl
from specter_lab.loading import folder as folder_module
from specter_lab.loading import prepared as prepared_module
from specter_lab.loading.folder import read_manifest, replace_content
from specter_lab.records import ExpertKey
from tests.loading.conftest import FAMILIES, IDS, logits, random_model


def data_of(folder):
    return read_manifest(folder)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, tied, tmp_path):
    """Cases 7, 10: target and draft give identical logits again; tied weights are one and the same object, and real."""
    moe = sl.load_moe(random_model(family, tie_word_embeddings=tied)).attach()
    draft = moe.quantize("qint8")
    moe.save_prepared(tmp_path / "new" / "folder", drafts=[draft])
    again = sl.load_moe(tmp_path / "new" / "folder")
    assert torch.equal(logits(again), logits(moe))
    assert torch.equal(logits(again, again.quantize("qint8")), logits(moe, draft))
    assert again.geometry == moe.geometry and again.seam.attached and again.tokenizer is None
    head, embedding = again.model.get_output_embeddings().weight, again.model.get_input_embeddings().weight
    assert (head is embedding) == tied and not head.is_meta
    assert again.model.generation_config.to_dict() == moe.model.generation_config.to_dict()


def test_attention_is_computed_as_before(tmp_path):
    """A saved config doesn't say how; another way rounds otherwise."""
    model = random_model("mixtral")
    model.set_attn_implementation("eager")
    sl.load_moe(model).save_prepared(tmp_path)
    assert sl.load_moe(tmp_path).model.config._attn_implementation == "eager"


def test_a_model_with_its_experts_in_place(tmp_path):
    """Not attached before, nor afterwards; usable all along, and a detached copy computes the same."""
    moe = sl.load_moe("tiny-moe", dtype="float32")
    moe.save_prepared(tmp_path / "folder")
    own = moe.own_generate(IDS, max_new_tokens=6, do_sample=False)
    again = sl.load_moe(tmp_path / "folder")
    assert (again.store.name, again.dtype, again.name) == ("bfloat16", torch.float32, "tiny-moe")
    assert again.tokenizer("once").input_ids == moe.tokenizer("once").input_ids
    with sl.Pipeline(again, slots=4, machine=sl.SimulatedMachine()) as pipeline:
        run = pipeline.generate(IDS, max_new_tokens=6, do_sample=False)
    assert run.ids == tuple(own[0].tolist()) and len(run.trace.of_kind("transfer")) > 0
    again.detach()
    assert torch.equal(again.own_generate(IDS, max_new_tokens=6, do_sample=False), own)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_prepared_from_a_checkpoint_and_mapped(family, checkpoint, tmp_path):
    """Case 11: tied, all experts on disk and meta; values are those of the names, never of an address."""
    folder = checkpoint(family, tie_word_embeddings=True)
    sl.prepare_moe(folder, tmp_path, drafts=["qint8", sl.Quanto("qfloat8")])
    whole, mapped = sl.load_moe(folder, stream=True), sl.load_moe(tmp_path, mapped=True)
    assert torch.equal(logits(mapped), logits(whole))
    assert mapped.model.lm_head.weight is mapped.model.model.embed_tokens.weight
    for name in ("qint8", "qfloat8"):
        assert torch.equal(logits(mapped, mapped.quantize(name)), logits(whole, whole.quantize(name)))
    with sl.Pipeline(mapped, slots=2, machine=sl.ThrottledMachine(10.0)) as pipeline:
        run = pipeline.generate(IDS, max_new_tokens=4, do_sample=False)
    assert len(run.trace.of_kind("transfer")) > 0
    whole.detach()
    assert whole.own_generate(IDS, max_new_tokens=4, do_sample=False)[0].tolist() == list(run.ids)
    mapped.detach()
    assert torch.equal(mapped.model(IDS).logits, whole.model(IDS).logits)


def test_a_mapped_bank_is_its_file(checkpoint, tmp_path):
    """No bytes of its own: a change of the file shows; its rows are aligned as in memory."""
    sl.prepare_moe(checkpoint("mixtral"), tmp_path)
    path = data_of(tmp_path) / "experts" / "bank.safetensors"
    bank = sl.ExpertBank.load(path.parent, mapped=True)
    loaded = sl.ExpertBank.load(path.parent)
    assert bank.blobs(1).data_ptr() % 4096 % 64 == 0 and bank.report().equals(loaded.report())
    assert all(torch.equal(bank.blobs(layer), loaded.blobs(layer)) for layer in range(3))
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 255]))
    assert bank.blob(ExpertKey(2, 7))[-1].item() == last ^ 255
    with pytest.raises(ValueError, match="those of layer 2 have changed"):
        sl.ExpertBank.load(path.parent)


def test_a_store_that_does_not_fit_is_refused(saved, monkeypatch):
    size = (data_of(saved) / "experts" / "bank.safetensors").stat().st_size
    monkeypatch.setattr(prepared_module, "available_bytes", lambda: size - 1)
    with pytest.raises(ValueError, match=rf"takes {size:,} bytes, {size - 1:,} are free.*mapped=True"):
        sl.load_moe(saved)
    assert sl.load_moe(saved, mapped=True).layers == 3


def test_quantised_banks_and_checkpoints_are_not_mapped(checkpoint, tmp_path):
    sl.load_moe(checkpoint("mixtral")).quantize("qint4").save(tmp_path)
    with pytest.raises(ValueError, match="isn't quantised can be mapped"):
        sl.ExpertBank.load(tmp_path, mapped=True)
    with pytest.raises(ValueError, match=r"prepare_moe\(name, folder\) once"):
        sl.load_moe(checkpoint("mixtral"), mapped=True)


@pytest.fixture
def saved(tmp_path):
    sl.load_moe(random_model("mixtral"), tokenizer=None).save_prepared(tmp_path / "saved")
    return tmp_path / "saved"


def edit_manifest(folder, **changes):
    manifest = json.loads((folder / "prepared.json").read_text())
    manifest["fingerprint"] |= changes
    (folder / "prepared.json").write_text(json.dumps(manifest))


def test_what_differs_is_named(saved, monkeypatch):
    """Case 8's kind: never a KeyError, always the entry and both values."""
    sl.load_moe(saved, dtype="float32")
    with pytest.raises(ValueError, match=r"dtype \(prepared 'float32', here 'bfloat16'\)"):
        sl.load_moe(saved, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"revision \(prepared None, here 'abc'\)"):
        sl.load_moe(saved, revision="abc")
    monkeypatch.setattr(prepared_module, "version", lambda name: "5.99.1")
    with pytest.raises(ValueError, match=r"transformers \(prepared '5\.\d+', here '5\.99'\)"):
        sl.load_moe(saved)


def test_a_bank_of_another_model_is_refused(saved):
    """Also one of the same shapes: the bank says itself what it belongs to."""
    edit_manifest(saved, model="another")
    with pytest.raises(ValueError, match=r"model \(saved .*asked for 'another'\)"):
        sl.load_moe(saved)


def test_a_changed_config_is_refused(saved):
    path = data_of(saved) / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 97', '"vocab_size": 98'))
    with pytest.raises(ValueError, match="differs in layout"):
        sl.load_moe(saved)


def test_missing_and_extra_tensors_are_listed(saved):
    path = data_of(saved) / "skeleton.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file({**tensors, "made.up": torch.zeros(1), "lm_head.weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"missing: model.norm.weight; extra: made.up; of another shape: lm_head.weight"):
        sl.load_moe(saved)
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"must hold a whole skeleton\.safetensors"):
        sl.load_moe(saved)


def test_a_lost_draft_or_folder_is_named(saved, tmp_path):
    edited = json.loads((saved / "prepared.json").read_text())
    (saved / "prepared.json").write_text(json.dumps({**edited, "drafts": [{"name": "qint8", "group_size": None}]}))
    with pytest.raises(ValueError, match=r"there is none in .*draft-0"):
        sl.load_moe(saved).quantize("qint8")
    (saved / "prepared.json").write_text(json.dumps({**edited, "version": 99}))
    with pytest.raises(ValueError, match=r"must have version 1; .* has 99"):
        sl.load_moe(saved)
    (saved / "prepared.json").write_text(json.dumps({**edited, "data": "gone"}))
    with pytest.raises(ValueError, match="no folder gone"):
        sl.load_moe(saved)
    (saved / "prepared.json").write_text("{")
    with pytest.raises(ValueError, match="Prepare it again"):
        sl.load_moe(saved)


def test_a_model_that_its_config_does_not_make_is_refused(tmp_path):
    model = random_model("mixtral")
    model.register_parameter("extra", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="extra: extra"):
        sl.load_moe(model).save_prepared(tmp_path / "a")
    model = random_model("mixtral")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
    with pytest.raises(ValueError, match=r"lm_head\.weight is a Parameter on meta"):
        moe = sl.load_moe(random_model("mixtral"))
        moe.model = model
        moe.save_prepared(tmp_path / "b")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("moment", ["skeleton", "experts", "manifest"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_while_writing_leaves_the_old_content(saved, monkeypatch, moment, error):
    before = logits(sl.load_moe(saved))
    content = sorted(os.listdir(saved))

    def fail(*_args, **_options):
        raise error("No space left on device")

    where = {"skeleton": (prepared_module, "save_file"), "experts": (sl.ExpertBank, "pack_to"), "manifest": (folder_module.os, "replace")}
    other = sl.load_moe(random_model("mixtral", num_hidden_layers=2))
    with monkeypatch.context() as patch:
        if moment == "manifest":  # the bank file is replaced inside, which must go well
            real = os.replace
            patch.setattr(folder_module.os, "replace", lambda a, b: fail() if str(b).endswith(".json") else real(a, b))
        else:
            patch.setattr(*where[moment], fail)
        with pytest.raises(error):
            other.save_prepared(saved)
    assert sorted(os.listdir(saved)) == content
    assert torch.equal(logits(sl.load_moe(saved)), before)
    other.save_prepared(saved)
    assert sl.load_moe(saved).layers == 2 and len(os.listdir(saved)) == 2


def test_a_crash_is_cleaned_up_by_the_next_save_and_other_files_are_never_touched(saved, tmp_path):
    (saved / "data-crashed").mkdir()
    sl.load_moe(saved).save_prepared(saved)  # over itself
    assert sorted(os.listdir(saved)) == sorted([data_of(saved).name, "prepared.json"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("...")
    with pytest.raises(ValueError, match="holds something else"):
        sl.load_moe(saved).save_prepared(tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]


def test_a_mapped_model_outlives_the_replacement_of_its_folder(saved):
    mapped = sl.load_moe(saved, mapped=True)
    before = logits(mapped)
    mapped.save_prepared(saved)
    assert torch.equal(logits(mapped), before) and torch.equal(logits(sl.load_moe(saved, mapped=True)), before)


def test_an_empty_folder_is_filled(tmp_path):
    replace_content(tmp_path, lambda data: {"bytes": (data / "a").write_bytes(b"abc")})
    data, manifest = read_manifest(tmp_path)
    assert (data / "a").read_bytes() == b"abc" and manifest["bytes"] == 3
