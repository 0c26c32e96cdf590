"""Who would get which bytes, told from shapes alone, against what pipelines really take."""

from types import SimpleNamespace

import pytest
import torch

import specter_lab as sl
from tests.families import FAMILIES, tiny

CONTEXT = 256
LIBRARY = [SimpleNamespace(experts=torch.zeros(2, 8, 4, dtype=torch.int64))]


@pytest.fixture(scope="module")
def moe():
    with sl.load_moe("tiny-moe", dtype="float32") as attached:
        yield attached


@pytest.mark.parametrize("name", sl.baselines.SYSTEMS)
def test_a_plan_is_what_the_pipeline_takes(moe, name):
    options = {"library": LIBRARY} if name == "activation_aware" else {}
    budget = 15_000_000 if name == "specmoeoff_b1" else 13_000_000  # its draft has all weights twice
    with sl.baselines.named(name)(moe, machine=sl.SimulatedMachine(), memory=budget, context_length=CONTEXT, **options) as pipeline:
        taken, packed = pipeline.plan, pipeline.residency.rebuilds
    for target in (moe, "tiny-moe"):  # loaded, and from the headers of its files
        plan = sl.plan_memory(target, name, budget, context_length=CONTEXT, dtype="float32")
        assert plan.device.total <= budget
        if packed:  # how well residuals pack is known when they are built
            assert max(abs(a - b) for a, b in zip(plan.slots, taken.slots, strict=True)) <= 1
        else:
            assert plan == taken


def test_a_pipeline_is_planned_again_with_its_own_pieces(moe):
    bank = moe.quantize("qint4")
    with sl.baselines.specter(moe, machine=sl.SimulatedMachine(), bank=bank, slots=4, context_length=CONTEXT) as pipeline:
        again = sl.plan_memory(moe, pipeline, "13MB", context_length=CONTEXT)
    assert again.slots != pipeline.plan.slots
    assert again == sl.plan_memory(moe, sl.baselines.specter, "13MB", context_length=CONTEXT, bank=bank)
    residual = moe.residuals(bank)
    exact = sl.plan_memory(moe, "residual_lookahead", "13MB", context_length=CONTEXT, bank=bank, residual=residual)
    assert exact.device.slots == sum(n * residual.blob_bytes(layer) for layer, n in enumerate(exact.slots))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_folder_is_planned_from_its_headers(family, tmp_path):
    """Shared experts, a dense first layer, latent attention, biases: geometry from modules without values."""
    tiny(family).save_pretrained(tmp_path)
    with sl.load_moe(str(tmp_path), dtype="float32") as loaded:
        assert sl.plan_memory(str(tmp_path), "specter", slots=2, context_length=32) == sl.plan_memory(
            loaded, "specter", slots=2, context_length=32
        )


def test_the_cases_give_what_the_artifact_gave():
    """At Specter's own setting Specter has its own slots, in every case; who drafts nothing has more."""
    for name, case in sl.hardware().cases.items():
        plans = {system: sl.plan_memory(name, system) for system in ("specter", "on_demand")}
        assert set(plans["specter"].slots) == {case.slots["specter"]}
        assert min(plans["on_demand"].slots) > case.slots["specter"]
        assert len({plan.budget for plan in plans.values()}) == 1
    assert sl.plan_memory("deepseek_v2_lite", "on_demand", "24GB").slots == sl.plan_memory("ds_high", "on_demand", "24GB").slots


def test_who_does_not_fit_and_by_how_much():
    with pytest.raises(sl.BudgetError, match=r"specter doesn't fit: .* short\. Raise it") as refused:
        sl.plan_memory("ds_low", "specter", "8GB")
    error = refused.value
    assert error.budget == 8_000_000_000 and error.short == error.smallest - error.budget > 0
    assert sl.plan_memory("ds_low", "specter", error.smallest).slots == (1,) * 26
    with pytest.raises(sl.BudgetError):
        sl.plan_memory("ds_low", "specter", error.smallest - 1)
    with pytest.raises(ValueError, match="Did you mean specter"):
        sl.plan_memory("ds_low", "spectre")
    with pytest.raises(ValueError, match="either slots or memory"):
        sl.plan_memory("tiny-moe", "on_demand", "13MB", slots=3)
    with pytest.raises(ValueError, match=r"'ds_hihg'\. Did you mean ds_high"):
        sl.plan_memory("ds_hihg", "specter", "24GB")
