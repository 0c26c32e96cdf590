"""Calibrating on a machine whose costs are known must find them; the twin then predicts what that machine does."""

import pytest

import specter_lab as sl
from specter_lab.calibration import Twin, copy_delay_us, host_job_us
from specter_lab.machines.simulated import CostTable, LaneCosts
from specter_lab.offload.misses import AlwaysHost
from tests.toy import ToyRun, ToyStore, call, log

COSTS = CostTable(LaneCosts(210, 3, 55, 1.5, 310, 4, 12, 40), LaneCosts(110, 0, 22, 0, 160, 0, 7))


@pytest.fixture(scope="module")
def moe():
    with sl.load_moe("tiny-moe", dtype="float32") as attached:
        yield attached


@pytest.fixture(scope="module")
def known(moe):
    """A machine with late copies and a late host, the twin that calibration makes of it, and the banks."""
    machine = Twin(0.05, 5.0, COSTS, 0.15, copy_delay_us=90.0, host_delay_us=60.0)
    bank = moe.quantize("qint4")
    residual = moe.residuals(bank)
    return machine, sl.calibrate(machine, moe, bank=bank, residual=residual, max_new_tokens=16), bank, residual


def test_known_costs_are_found(known):
    machine, twin, *_ = known
    for part in ("expert_us", "expert_row_us", "plan_us", "rebuild_us"):
        assert getattr(twin.costs.target, part) == pytest.approx(getattr(COSTS.target, part), rel=0.05), part
    rows = 5  # fixed part and part for each row can't be told apart where passes are alike: their sum can
    for part in ("attention", "head"):
        assert twin.costs.target.of(part, rows, 1) == pytest.approx(COSTS.target.of(part, rows, 1), rel=0.05)
    assert twin.costs.draft.attention_us == pytest.approx(110, rel=0.05) and twin.costs.draft.expert_us == pytest.approx(22, rel=0.05)
    assert twin.copy_delay_us == pytest.approx(machine.copy_delay_us, rel=0.1)
    assert twin.host_delay_us == pytest.approx(machine.host_delay_us, rel=0.35)  # some of it lies behind compute
    assert (twin.link_gb_s, twin.latency_us, twin.host_gb_s) == (0.05, 5.0, 0.15)


@pytest.mark.parametrize("name", ["on_demand", "fiddler", "specter", "lookahead", "specter_plus"])
def test_the_twin_predicts_the_machine(moe, known, name):
    machine, twin, bank, residual = known
    own = {} if name in sl.baselines.DRAFTLESS else {"bank": bank}
    own |= {"residual": residual} if name == "specter_plus" else {}
    tpots = []
    for each in (machine, twin):
        with sl.baselines.named(name)(moe, machine=each, memory="13MB", context_length=128, **own) as pipeline:
            tpots.append(pipeline.generate("Once upon a time", max_new_tokens=16, do_sample=False).metrics["tpot_ms"])
    assert tpots[1] == pytest.approx(tpots[0], rel=0.05)


def test_a_late_copy_by_hand():
    """A copy takes 20 us and 7 of delay; two demanded at 10 arrive at 37 and 64."""
    costs = LaneCosts(attention_us=10, expert_us=5, head_us=3)
    machine = Twin(64 / 20_000, 0, CostTable(costs, costs), 64 / 6_000, copy_delay_us=7, host_delay_us=4)
    run = ToyRun(ToyStore(1, 3), [2], machine)
    run.run_pass(1, [call(0, [0, 2])])
    trace = run.finish()
    assert log(trace) == [
        ("target", "attention", 0, 10),
        ("link", "transfer 0.0", 10, 37),
        ("target", "stall 0.0", 10, 37),
        ("link", "transfer 0.2", 37, 64),
        ("target", "expert 0.0", 37, 42),
        ("target", "stall 0.2", 42, 64),
        ("target", "expert 0.2", 64, 69),
        ("target", "head", 69, 72),
    ]
    assert copy_delay_us([trace], machine.copy_us) == pytest.approx(7)


def test_a_late_host_by_hand():
    costs = LaneCosts(attention_us=10)
    machine = Twin(64 / 20_000, 0, CostTable(costs, costs), 64 / 6_000, copy_delay_us=0, host_delay_us=4)
    moe_like = ToyStore(1, 3)
    from tests.test_bounds import Decoded

    run = Decoded(moe_like, [2], machine)
    run.decode(1, [call(0, [0, 2])], split=AlwaysHost())
    assert host_job_us([run.finish()]) == pytest.approx(10)  # two jobs of 6 us, each 4 late, one after the other
