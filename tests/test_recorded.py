"""A recorded text replays as the model ran; routing of another model or version is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import specter_lab as sl
from specter_lab.planning import stand_in
from tests.families import tiny

NEW = 24


@pytest.fixture(scope="module")
def moe():
    with sl.load_moe("tiny-moe", dtype="float32") as attached:
        yield attached


@pytest.fixture(scope="module")
def bank(moe):
    return moe.quantize("qint2")  # often wrong, so that runs of wrong tokens are recorded


@pytest.fixture(scope="module")
def text(moe, bank):
    return sl.record_text(moe, bank, "Once upon a time", new_tokens=NEW, longest_draft=4)


def pair(moe, bank, name, text, **options):
    """The same system on the model and on the recording."""
    shared = {"machine": sl.SimulatedMachine(0.1), "slots": 6, "context_length": 128, **options}
    own = {} if name in sl.baselines.DRAFTLESS else {"bank": bank}
    with sl.baselines.named(name)(moe, **shared, **own) as real:
        run = real.generate("Once upon a time", max_new_tokens=NEW, do_sample=False)
    with sl.baselines.named(name)(stand_in(moe), **shared) as shapes:
        return run, shapes.replay(text, prompt_tokens=text.prompt_tokens, max_new_tokens=NEW)


@pytest.mark.parametrize("name", ["on_demand", "next_layer_gate", "fiddler"])
def test_without_a_draft_a_replay_is_the_run_itself(moe, bank, text, name):
    run, replayed = pair(moe, bank, name, text)
    assert run.ids == tuple(text.ids.tolist())
    # the model's prefill computes one row less through its head: nothing after the first token may differ
    # (but for what fills free slots meanwhile, which depends on the microsecond: a copy of 0.1 MB more or less in 23 tokens)
    close = {"rel": 0.02, "abs": 0.005} if name == "fiddler" else {}
    for column in ("tpot_ms", "hit_rate", "recall", "moved_mb_per_token", "exposed_ms_per_token"):
        assert replayed.metrics[column] == (run.metrics[column] and pytest.approx(run.metrics[column], **close))


def test_with_a_draft_it_is_close(moe, bank, text):
    """The draft of a recording reads its own keys and values, not the target's: its proposals may differ here and there."""
    assert (~text.accepted).any()
    run, replayed = pair(moe, bank, "lookahead", text, draft_length=4)
    assert 0 < replayed.metrics["acceptance_rate"] < 1
    assert replayed.metrics["acceptance_rate"] == pytest.approx(run.metrics["acceptance_rate"], abs=0.25)
    assert replayed.metrics["recall"] == pytest.approx(run.metrics["recall"], abs=0.1)


def test_a_wrong_proposal_is_followed_by_what_it_would_have_led_to(text):
    place = int(np.flatnonzero(~text.accepted)[0])
    window = text.window(place, 3)
    run = text.run[place + 1]
    assert window.accepted == 0 and len(window.draft) == 3 and len(window.needed) == 4
    assert (window.needed[1:] == text.strayed[run, :3]).all() and (window.draft[1:] == text.strayed_draft[run, :2]).all()
    with pytest.raises(ValueError, match="Record with longest_draft=5"):
        text.window(place, 5)
    with pytest.raises(ValueError, match=r"begins at token 0\. Replay with prompt_tokens="):
        text.window(0, 2)


def test_saved_and_read_again(text, tmp_path):
    again = sl.RecordedText.load(text.save(tmp_path / "text.safetensors"))
    assert (again.experts == text.experts).all() and again.fingerprint == text.fingerprint and len(again) == len(text)
    (tmp_path / "text.safetensors").write_bytes((tmp_path / "text.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match="Record it again"):
        sl.RecordedText.load(tmp_path / "text.safetensors")


def test_routing_of_another_model_is_refused(moe, text):
    pieces = {"machine": sl.SimulatedMachine(), "slots": 6}
    with sl.Pipeline(stand_in(moe), **pieces) as pipeline:
        begin = {"prompt_tokens": text.prompt_tokens}
        foreign = replace(text, fingerprint="0" * 16)
        with pytest.raises(ValueError, match="fingerprint 0000000000000000, not"):
            pipeline.replay(foreign, max_new_tokens=4, **begin)
        narrow = replace(text, experts=text.experts[:, :3])
        with pytest.raises(ValueError, match=r"3 layers of 4 a token, not 8 of 4 of tiny-moe\. Record it again"):
            pipeline.replay(narrow, max_new_tokens=4, **begin)
        assert pipeline.replay(text, max_new_tokens=4, **begin).metrics["tokens"] == 4
    other = sl.load_moe(tiny("mixtral"))
    with torch.no_grad(), sl.RouterRecorder(other) as recorder:
        other.model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="3 layers of 2 a token"):
        sl.baselines.activation_aware(moe, library=[recorder.log], **pieces)
    renamed = replace(recorder.log, model_type="other_moe")
    same_shape = SimpleNamespace(geometry=other.geometry, name="mixtral")
    with pytest.raises(ValueError, match="model type 'other_moe', not 'mixtral'"):
        sl.replay.refuse_other_model(renamed, same_shape)


def test_a_trace_of_another_version_is_refused(moe, tmp_path):
    with sl.Pipeline(moe, machine=sl.SimulatedMachine(), slots=6) as pipeline:
        trace = pipeline.generate("Once", max_new_tokens=2).trace
    assert sl.Trace.load(trace.save(tmp_path / "trace.parquet")).machine == "simulated"
    older = trace.events.copy()
    older.attrs = {"machine": "simulated"}
    older.to_parquet(tmp_path / "older.parquet")
    with pytest.raises(ValueError, match=r"read by the version that wrote it .* is None\. Run it again"):
        sl.Trace.load(tmp_path / "older.parquet")
