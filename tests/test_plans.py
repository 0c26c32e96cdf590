"""Every plan: exact tokens, its mechanism at work, at most the budget; and the choice among them."""

import pytest

import specter_lab as sl
from specter_lab.cases import case_texts, stand_in
from specter_lab.hardware import case_named
from specter_lab.plans import PLANS, planned, try_plans
from tests.invariants import check_trace

NEW = 24


@pytest.fixture(scope="module")
def moe():
    return sl.load_moe("tiny-moe", dtype="float32")


@pytest.fixture(scope="module")
def text(moe):
    ids = moe.tokenizer(sl.load_prompts("prose")[1].text, return_tensors="pt").input_ids
    return ids, tuple(moe.own_generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def attached(moe, text):
    with moe:
        yield moe


@pytest.mark.parametrize("machine", [sl.SimulatedMachine(0.05, 5), sl.ThrottledMachine(0.5)], ids=lambda m: m.label)
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_is_exact_within_its_budget_and_at_work(attached, text, plan, machine):
    ids, own = text
    with planned(attached, plan, machine=machine, memory="13MB", poison=True) as pipeline:
        run = pipeline.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert run.new_ids == own
        assert pipeline.plan.device.total <= 13_000_000
        trace, store = run.trace, pipeline.residency.store
        check_trace(trace, pipeline.plan.slots, [store.blob_bytes(layer) for layer in range(store.layers)])
        rebuilds, uses = len(trace.of_kind("rebuild")), int((trace.of_kind("expert")["lane"] == "target").sum())
        moved, reasons = trace.of_kind("transfer")["bytes"].max(), set(trace.of_kind("transfer")["reason"])
        assert (pipeline.drafter is not None) == plan.startswith("residual")
        if plan == "dense":
            assert rebuilds == 0 and moved == 98_304 and reasons == {"demand", "fill"}
        else:
            assert 0 < rebuilds < uses if plan.endswith("on arrival") else rebuilds == uses > 0
            assert moved < 75_000 and "prefetch" in reasons


def test_a_trial_orders_what_fits_and_says_what_does_not():
    case = case_named("phi_low")
    target = stand_in(case)
    options = {"machine": sl.SimulatedMachine(22.0), "context_length": 64}
    table = try_plans(target, case_texts(case, 1, 64), max_new_tokens=8, memory=case.device_bytes - 3 * 10**9, **options)
    assert set(table.index) == set(PLANS)
    fitting = table["tpot_ms"].dropna()
    assert fitting.is_monotonic_increasing and 1 <= len(fitting) < 5
    assert table[table["tpot_ms"].isna()]["reason"].str.endswith("bytes short").all()
    with sl.baselines.specter_plus(target, trial=case_texts(case, 1, 64), memory=case.device_bytes - 3 * 10**9, **options) as pipeline:
        assert pipeline.drafter is None and pipeline.residency.rebuilds
    assert str(fitting.index[0]).startswith("compressed")


def test_bad_plans_and_trials_are_refused(attached):
    with pytest.raises(ValueError, match=r"A plan is one of residual, .*; got 'best'"):
        planned(attached, "best")
    with pytest.raises(ValueError, match="at least one text; got none"):
        try_plans(attached, [])
