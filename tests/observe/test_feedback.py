"""Feedback against hand-made traces and a real run."""

import pytest

import specter_lab as sl
from specter_lab.observe.feedback import feedback
from specter_lab.observe.trace import TraceWriter


def made():
    """One pass at positions 4 and 5: expert 1 and 2 predicted at 4, 1 and 3 used there; all right at 5."""
    writer = TraceWriter("simulated")
    for position, expert in ((4, 1), (4, 2), (5, 1)):
        writer.add("control", "predict", 0, 0, step=1, position=position, layer=0, expert=expert, tokens=position - 4, reason="absent")
    writer.needed(1, 0, (1, 3))
    for expert in (1, 3):
        writer.add("control", "need", 5, 5, step=1, position=4, layer=0, expert=expert, tokens=1, outcome="miss")
    for position, expert in ((4, 1), (4, 3), (5, 1)):
        writer.add("control", "route", 5, 5, step=1, position=position, layer=0, expert=expert)
    writer.add("link", "transfer", 5, 15, step=1, layer=0, expert=1, bytes=20_000, request_id=0)
    writer.add("target", "expert", 15, 19, step=1, layer=0, expert=1, tokens=2)
    writer.add("control", "draft_length", 5, 5, step=1, value=2)
    writer.add("control", "commit", 20, 20, step=1, tokens=2, value=1, outcome="step")
    return writer.finish()


def test_every_table_by_hand():
    found = feedback(made())
    assert found.acceptance["acceptance"].tolist() == [1.0, 0.0]
    assert found.recall.loc[0, ["needed", "predicted", "recall", "precision"]].tolist() == [2, 2, 0.5, 0.5]
    assert found.confusion.to_dict("records") == [{"layer": 0, "predicted": 2, "used": 3, "count": 1.0}]
    assert found.rates.loc[("link", "transfer"), "gb_s"] == 2.0
    assert found.rates.loc[("target", "expert"), "us"] == 4.0


def test_two_runs_are_summed():
    one, two = feedback(made()), feedback([made(), made()])
    assert two.confusion["count"].tolist() == [2.0] and two.recall["needed"].tolist() == [4]
    assert two.recall["recall"].tolist() == one.recall["recall"].tolist()


def test_a_real_run_is_summed_up_and_shown():
    with sl.load_moe("tiny-moe", dtype="float32") as moe:
        bank = moe.quantize("qint2")
        with sl.baselines.lookahead(moe, bank=bank, machine=sl.SimulatedMachine(0.05), slots=6, draft_length=4) as pipeline:
            run = pipeline.generate(sl.load_prompts("dialogue")[0].text, max_new_tokens=24, do_sample=False)
    found = feedback(run.trace)
    assert len(found.acceptance) == 4 and len(found.recall) == 8 and len(found.confusion)
    assert found.confusion["count"].is_monotonic_decreasing and (found.confusion["predicted"] != found.confusion["used"]).all()
    assert found.rates.loc[("link", "transfer"), "gb_s"] == pytest.approx(0.05, rel=0.05)
    assert "confusion" in found._repr_html_() and "0x" not in repr(found)


def test_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one trace"):
        feedback([])
