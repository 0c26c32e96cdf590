"""Every system of the literature: exact tokens, its own mechanism at work, the rules of every trace."""

import pytest

import specter_lab as sl
from specter_lab.offload.server import ResidentServer
from tests.invariants import check_trace

NEW = 16


@pytest.fixture(scope="module")
def moe():
    return sl.load_moe("tiny-moe", dtype="float32")


@pytest.fixture(scope="module")
def texts(moe):
    """Prompt ids and the model's own greedy tokens, one of each kind of text."""
    out = []
    for prompt in sl.load_prompts(per_kind=1):
        ids = moe.tokenizer(prompt.text, return_tensors="pt").input_ids
        out.append((ids, tuple(moe.own_generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist())))
    return out


@pytest.fixture(scope="module")
def attached(moe, texts):
    with moe:
        yield moe


@pytest.fixture(scope="module")
def library(attached, texts):
    """Routing of another prompt than those compared."""
    ids = attached.tokenizer(sl.load_prompts("code")[5].text, return_tensors="pt").input_ids
    with (
        attached.seam.serving(ResidentServer(attached.store, sl.SimulatedMachine(), "target", 0)),
        sl.RouterRecorder(attached.model) as recorder,
    ):
        attached.model(ids)
    return [recorder.log]


def _moved(trace):
    """Bytes of one copy: a bf16 expert of the bundled model has 98,304."""
    return trace.of_kind("transfer")["bytes"].max()


ACTIVE = {  # what proves that the mechanism did something
    "on_demand": lambda m, t: m["recall"] is None and m["hit_rate"] > 0,
    "next_layer_gate": lambda m, t: m["recall"] > 0.3 and "prefetch" in set(t.of_kind("transfer")["reason"]),
    "activation_aware": lambda m, t: m["recall"] > 0.05 and "prefetch" in set(t.of_kind("transfer")["reason"]),
    "fiddler": lambda m, t: m["host_rate"] > 0.05 and "fill" in set(t.of_kind("transfer")["reason"]),
    "speculative_on_demand": lambda m, t: m["tokens_per_step"] > 1.2 and m["recall"] is None,
    "specmoeoff_b1": lambda m, t: m["tokens_per_step"] > 1.2 and "prefetch" in set(t.of_kind("transfer")["reason"]),
    "sp_moe": lambda m, t: m["recall"] > 0.05 and "prefetch" in set(t.of_kind("transfer")["reason"]),
    "moe_speq": lambda m, t: m["recall"] > 0.4 and len(set(t.of_kind("draft_length")["value"])) > 1,
    "specter": lambda m, t: m["recall"] > 0.2 and "prefetch" in set(t.of_kind("transfer")["reason"]),
    "residual_lookahead": lambda m, t: m["recall"] > 0.7 and (t.of_kind("rebuild")["end_us"] > 0).all() and _moved(t) < 70_000,
    "specter_plus": lambda m, t: m["recall"] > 0.7 and m["host_rate"] > 0.02 and _moved(t) < 70_000,
    "oracle": lambda m, t: m["acceptance_rate"] == m["recall"] == m["precision"] == 1.0 and m["tokens_per_step"] > 4,
    "lookahead": lambda m, t: m["recall"] > 0.7 and "prefetch" in set(t.of_kind("transfer")["reason"]),
}


def test_every_system_is_covered():
    assert set(ACTIVE) == set(sl.baselines.SYSTEMS)


@pytest.mark.parametrize("name", list(ACTIVE))
@pytest.mark.parametrize("machine", [sl.SimulatedMachine(0.05, 5), sl.ThrottledMachine(0.5)], ids=lambda m: m.label)
def test_tokens_are_the_models_own_and_the_mechanism_is_active(attached, texts, library, name, machine):
    extra = {"library": library} if name == "activation_aware" else {}
    with sl.baselines.named(name)(attached, machine=machine, slots=6, poison=True, **extra) as pipeline:
        for ids, own in texts if machine.label == "simulated" else texts[:1]:
            run = pipeline.generate(ids, max_new_tokens=NEW, do_sample=False)
            assert run.new_ids == own
            check_trace(run.trace, pipeline.plan.slots, [pipeline.prefetcher.blob_bytes(layer) for layer in range(8)])
    if machine.label == "simulated":
        assert ACTIVE[name](run.metrics, run.trace), f"{name} shows no sign of its mechanism: {run.metrics}"


def test_the_barrier_holds_verification_until_the_plan_has_arrived(attached, texts):
    """No prefetch is on the link when the target's pass begins, unless the pass's own demands put it there."""
    with sl.baselines.specter(attached, machine=sl.SimulatedMachine(0.02), slots=6) as pipeline:
        trace = pipeline.generate(texts[0][0], max_new_tokens=NEW, do_sample=False).trace
    prefetches = trace.of_kind("transfer").query("reason == 'prefetch'")
    assert len(prefetches)
    for step, group in prefetches.groupby("step"):
        passes = trace.of_kind("attention").query(f"lane == 'target' and step == {step}")
        assert group["end_us"].max() <= passes["start_us"].min() + 1e-6


@pytest.mark.parametrize("name", ["on_demand", "fiddler", "specmoeoff_b1", "sp_moe", "moe_speq", "specter", "lookahead", "specter_plus"])
def test_a_cold_request_knows_nothing_of_earlier_ones(attached, texts, name):
    """The same request gives the same trace whatever ran before it: results can't depend on the order of prompts."""
    with sl.baselines.named(name)(attached, machine=sl.SimulatedMachine(0.05), slots=6) as pipeline:
        first, _, again = (pipeline.generate(texts[i][0], max_new_tokens=NEW, do_sample=False).trace for i in (0, 1, 0))
    assert first.events.to_csv() == again.events.to_csv()


def test_an_unknown_system_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean specter"):
        sl.baselines.named("spectre")
