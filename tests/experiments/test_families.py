"""Each measurement family: by name, as a pipeline, as a function, on both machines and in a replay; and what its figures say."""

import numpy as np
import plotly.graph_objects as go
import pytest

import specter_lab as sl
from specter_lab.cases import case_named, case_texts, stand_in
from specter_lab.experiments.recipe import Recipe, pieces_of

TEXT = sl.load_prompts(kinds="code", per_kind=1)[0].text
FAMILIES = {
    "routing": {},
    "working_set": {"lengths": (1, 3)},
    "draft_depth": {"lengths": (1, 3)},
    "prompt_length": {"lengths": (8, 16)},
    "cache_policies": {},
    "memory": {},
    "memory_sweep": {"budgets": ("11MB", "13MB")},
    "latency": {},
    "oracle_replay": {"replaced": (0.0, 0.5)},
    "ablate": {},
    "fidelity": {},
    "sensitivity": {},
}


@pytest.fixture(scope="module")
def moe():
    with sl.load_moe("tiny-moe", dtype="float32") as attached:
        yield attached


@pytest.fixture(scope="module")
def bank(moe):
    return moe.quantize("qint4")


def run(family, system, prompts, **options):
    call = getattr(sl.experiments, family)
    if family == "fidelity":
        options = {name: value for name, value in options.items() if name not in ("max_new_tokens", "do_sample", "prompt_tokens")}
    prompts = {"code": prompts} if family == "sensitivity" else prompts
    return call(system, prompts, **FAMILIES[family], **options)


def checked(family, experiment):
    assert isinstance(experiment.figure, go.Figure) and experiment.figure.data
    table = experiment.table
    assert len(table) and table.notna().any(axis=None)
    if "tpot_ms.mean" in table:
        assert (table["tpot_ms.mean"].dropna() > 0).all()
    return table


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [lambda: sl.SimulatedMachine(0.05), lambda: sl.ThrottledMachine(0.5)], ids=["simulated", "throttled"])
def test_by_name_on_both_machines(moe, bank, family, make):
    shared = {"target": moe, "machine": make(), "memory": "13MB", "context_length": 128, "bank": bank}
    checked(family, run(family, "specter", [TEXT], max_new_tokens=6, do_sample=False, **shared))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_of_ones_own(moe, bank, family):
    """Pieces that no named system has, and that keep state: what is built from them gets copies."""
    pieces = {"drafter": sl.SelfDrafter(bank), "predictor": sl.DraftLookahead(), "eviction": sl.LookaheadLRU(), "draft_length": 3}
    with sl.Pipeline(moe, machine=sl.SimulatedMachine(0.05), memory="13MB", context_length=128, **pieces) as mine:
        before = mine.generate(TEXT, max_new_tokens=6, do_sample=False).trace.events.to_csv()
        checked(family, run(family, mine, [TEXT], max_new_tokens=6, do_sample=False))
        assert mine.generate(TEXT, max_new_tokens=6, do_sample=False).trace.events.to_csv() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay(family):
    case = case_named("qwen_low")
    texts = case_texts(case, 1, 48)
    machine = sl.SimulatedMachine(case.link.gb_s)
    shared = {"target": stand_in(case), "machine": machine, "memory": case.device_bytes + 10**8, "context_length": 64}
    budgets = {"budgets": (case.device_bytes, 2 * case.device_bytes)} if family == "memory_sweep" else {}
    before, FAMILIES[family] = FAMILIES[family], {**FAMILIES[family], **budgets}
    try:
        options = {} if family == "prompt_length" else {"prompt_tokens": 8}
        table = checked(family, run(family, "specter", texts, max_new_tokens=12, **shared, **options))
    finally:
        FAMILIES[family] = before
    if family == "fidelity":
        assert table.index.name == "horizon" and table["recall"].iloc[0] > table["recall"].iloc[-1] > 0.6


SHARED = {"memory": "13MB", "context_length": 128, "max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def shared(moe, bank):
    return {"target": moe, "machine": sl.SimulatedMachine(0.05), "bank": bank, **SHARED}


def test_recall_falls_with_the_share_that_is_replaced(shared):
    table = sl.experiments.oracle_replay("specter", [TEXT], **{**shared, "machine": sl.SimulatedMachine(0.5)}).table
    assert table.index.tolist() == [0.0, 0.25, 0.5, 0.75]
    assert table["recall"].is_monotonic_decreasing and table["precision"].is_monotonic_decreasing
    assert table.loc[0.0, "precision"] > table.loc[0.75, "precision"] + 0.2
    perfect = sl.experiments.oracle_replay("oracle", [TEXT], replaced=(0.0,), **shared).table
    assert perfect["recall"].item() == perfect["acceptance_rate"].item() == 1.0


def test_a_window_shares_experts(shared):
    table = sl.experiments.working_set("lookahead", [TEXT], lengths=(0, 2, 8), **shared).table
    assert table["union"].is_monotonic_increasing and table.loc[0, "union"] == 4.0  # four experts a token
    assert table.loc[8, "experts_per_token"] < table.loc[0, "experts_per_token"] == 32.0
    assert (table["diversity"] == table["union"] / 24).all()


def test_routing_of_groups(shared):
    groups = {kind: [sl.load_prompts(kinds=kind, per_kind=1)[0].text] for kind in ("code", "prose")}
    table = sl.experiments.routing("specter", groups, **shared).table
    assert table.index.tolist() == ["code", "prose"]
    assert (table["reuse"] > table["chance"]).all() and table["window_recall"].between(0.7, 1).all()
    assert table["accepted_recall"].between(0.7, 1).all()
    del shared["bank"]
    plain = sl.experiments.routing("on_demand", groups, **shared).table
    assert plain["window_recall"].isna().all() and (plain["union"] == 4.0).all()


def test_a_longer_prompt_takes_longer_to_begin(shared):
    ids = shared["target"].tokenizer(" ".join(p.text for p in sl.load_prompts(per_kind=1))).input_ids
    table = sl.experiments.prompt_length("specter", [ids], lengths=(16, 64, 128), **{**shared, "context_length": 160}).table
    assert table["ttft_ms"].is_monotonic_increasing
    with pytest.raises(ValueError, match=r"cut to 4096 tokens; one has"):
        sl.experiments.prompt_length("specter", [ids], lengths=(4096,), **shared)


def test_the_parts_of_a_token_add_up(shared):
    del shared["bank"]
    for systems in ("fiddler", ["on_demand", "fiddler"]):
        table = sl.experiments.latency(systems, [TEXT], **shared).table
        whole = table[["draft", "attention", "experts", "other", "stalls"]].sum(axis=1)
        assert np.allclose(whole, table["tpot"])
        assert np.allclose(table[["for_demand", "for_prefetch", "for_host"]].sum(axis=1), table["stalls"], rtol=0.05)
        assert table.loc["fiddler", "for_host"] > 0


def test_what_copies_take_is_missing_from_the_slots(shared):
    table = sl.experiments.memory("specter", [TEXT], **{**shared, "memory": "13MB"}).table
    slots, kv = table["device_bytes.slots"], table["device_bytes.kv"]
    assert slots["shared"] > slots["copied KV"] > slots["copied weights and KV"]
    assert kv["copied KV"] == kv["copied weights and KV"] == 2 * kv["shared"]
    assert (table["device_bytes.total"] <= 13_000_000).all() and (table["bytes_short"] == 0).all()
    tight = sl.experiments.memory("specter", [TEXT], **{**shared, "memory": "10MB"}).table
    assert tight.loc["shared", "bytes_short"] == 0 < tight.loc["copied weights and KV", "bytes_short"]
    with pytest.raises(ValueError, match="on_demand has none"):
        del shared["bank"]
        sl.experiments.memory("on_demand", [TEXT], **shared)


def test_every_mechanism_is_removed_and_alone(shared):
    specter = sl.ablate("specter", [TEXT], **{**shared, "machine": sl.SimulatedMachine(0.2)}).table
    six = {"quantization", "speculation", "lookahead", "prefetch timing", "barrier"}
    assert {name.removeprefix("without ") for name in specter.index if name.startswith("without")} == six
    assert {name.removesuffix(" alone") for name in specter.index if name.endswith(" alone")} == six
    assert specter.loc["without speculation", "tokens_per_step"] == 1.0
    assert specter.loc["without lookahead", "recall"] != specter.loc["whole", "recall"]
    assert specter.loc["quantization alone", "device_bytes.draft"] > 0 and specter.loc["quantization alone", "tokens_per_step"] == 1
    assert specter.loc["without quantization", "device_bytes.draft"] == 0

    ours = sl.ablate("specter_plus", [TEXT], **{**shared, "machine": sl.SimulatedMachine(0.05)}).table
    assert {"without eviction", "without fewer bytes", "without host lane", "fewer bytes alone", "host lane alone"} <= set(ours.index)
    assert ours.loc["whole", "share"] == pytest.approx(1.0) and ours.loc["on_demand", "share"] == pytest.approx(0.0)
    assert ours.loc["without fewer bytes", "moved_mb_per_token"] > ours.loc["whole", "moved_mb_per_token"]
    assert ours.loc["without host lane", "host_rate"] == 0 < ours.loc["host lane alone", "host_rate"]
    assert ours.loc["fewer bytes alone", "tokens_per_step"] == 1 == ours.loc["without speculation", "tokens_per_step"]


def test_ablation_needs_a_pipeline_only(moe, bank):
    with sl.baselines.specter(moe, machine=sl.SimulatedMachine(0.2), memory="13MB", context_length=256, bank=bank) as pipeline:
        table = sl.ablate(pipeline, max_new_tokens=4).table
    assert {"whole", "on_demand", "without barrier"} <= set(table.index) and (table["prompts"] >= 4).all()


def test_pieces_are_copied_with_what_they_learned_and_not_what_they_hold(moe, bank):
    with sl.baselines.moe_speq(moe, machine=sl.SimulatedMachine(), memory="13MB", bank=bank) as pipeline:
        pieces = pieces_of(pipeline)
        assert pieces["drafter"] is pipeline.drafter and pieces["drafter"].bank is bank
        assert pieces["eviction"] is not pipeline.residency.eviction and pieces["draft_length"] is not pipeline.draft_length
        assert pieces["residual"] is False and pieces["barrier"] is False


def test_a_system_needs_a_target():
    with pytest.raises(ValueError, match="specter was given none"):
        Recipe("specter")
    with pytest.raises(ValueError, match="Did you mean specter"):
        sl.ablate("spectre", ["Once"], target="tiny-moe", machine=sl.SimulatedMachine(), memory="13MB")
    with pytest.raises(ValueError, match="on_demand has none"):
        sl.experiments.fidelity("on_demand", ["Once"], target="tiny-moe", machine=sl.SimulatedMachine(), memory="13MB")
