"""Perfect knowledge: what it proposes, predicts and keeps, and how a share of it is spoilt."""

import pytest
import torch

import specter_lab as sl
from specter_lab.cases import case_named, case_texts
from specter_lab.oracle import replace_identities, text_routing


@pytest.fixture(scope="module")
def moe():
    with sl.load_moe("tiny-moe", dtype="float32") as attached:
        yield attached


def test_a_text_is_read_off_the_trace_that_made_it(moe):
    """Committed tokens only: the routing of a recorder that sees the finished text, whatever was drafted and rejected."""
    drafting = {"drafter": sl.PromptLookupDrafter(), "draft_length": 4}
    with sl.Pipeline(moe, machine=sl.SimulatedMachine(), slots=6, **drafting) as pipeline:
        run = pipeline.generate("def f(x):\n    return x\n\ndef g(x):\n", max_new_tokens=24, do_sample=False)
        assert 0 < run.metrics["acceptance_rate"] < 1
        with torch.no_grad(), sl.RouterRecorder(moe.model) as recorder, moe.seam.serving(_resident(moe)):
            moe.model(torch.tensor([run.ids[:-1]]))
    prompt = run.conditions["prompt_tokens"]
    routing = torch.from_numpy(text_routing(run.trace, prompt, 4))
    assert (routing[:prompt] == -1).all()
    assert (routing[prompt:].sort(-1).values == recorder.log.experts[prompt:].sort(-1).values).all()


def _resident(moe):
    from specter_lab.offload.server import ResidentServer

    return ResidentServer(moe.store, sl.SimulatedMachine(), "target", 0)


def test_an_oracle_replay_accepts_everything_and_misses_no_prediction():
    case = case_named("ds_high")
    text = case_texts(case, 1, 60)[0]
    pieces = {"machine": sl.SimulatedMachine(22.0), "slots": 16, "draft_length": 5}
    target = sl.ReplayTarget(case.model.geometry)
    with sl.baselines.oracle(target, **pieces) as pipeline:
        runs = [pipeline.replay(text, prompt_tokens=10, max_new_tokens=40) for _ in range(2)]
        loads = runs[0].metrics["moved_mb_per_token"]
        assert runs[0].trace.events.equals(runs[1].trace.events)
    figures = runs[0].metrics
    assert figures["acceptance_rate"] == figures["recall"] == figures["precision"] == 1.0
    commits = runs[0].trace.of_kind("commit")["tokens"].tolist()
    assert commits == [1, 6, 6, 6, 6, 6, 6, 3]
    with sl.baselines.lookahead(target, **pieces) as pipeline:
        assert pipeline.replay(text, prompt_tokens=10, max_new_tokens=40).metrics["moved_mb_per_token"] > loads


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_a_share_of_the_identities_is_replaced_by_others(share):
    own = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:4] for i in range(600)]).view(300, 2, 4)
    own[0, 0, 3] = -1
    blurred = replace_identities(own, [16, 16], share)
    assert blurred[0, 0, 3] == -1 and (blurred[1:] >= 0).all()
    kept = (blurred[1:, :, :, None] == own[1:, :, None]).any(-1)
    assert (1 - kept.double().mean()).item() == pytest.approx(share, abs=0.03)
    assert (blurred.sort(-1).values.diff(dim=-1)[1:] != 0).all(), "no identity twice"
    assert (blurred[1:][kept] == own[1:][kept]).all()
    assert (replace_identities(own, [16, 16], share) == blurred).all() and (
        replace_identities(own, [16, 16], share, seed=1) != blurred
    ).any()


def test_spoilt_predictions_cost_recall_one_for_one(moe):
    """Drafting nothing, each pass has one row, so that nothing else can make up for a wrong identity."""
    recalls = {}
    for share in (0.0, 0.5):
        with sl.baselines.oracle(moe, machine=sl.SimulatedMachine(0.05), slots=8, draft_length=0, replaced=share) as pipeline:
            recalls[share] = pipeline.generate("Once upon a time", max_new_tokens=40, do_sample=False).metrics["recall"]
    assert recalls[0.0] == 1.0 and recalls[0.5] == pytest.approx(0.5, abs=0.05)


def test_refusals(moe):
    with sl.baselines.oracle(moe, machine=sl.SimulatedMachine(), slots=8) as pipeline:
        with pytest.raises(ValueError, match="knows greedy texts"):
            pipeline.generate("Once", max_new_tokens=3, do_sample=True, seed=0)
        assert pipeline.generate("Once", max_new_tokens=3, do_sample=False).metrics["tokens"] == 3
    with pytest.raises(ValueError, match="between 0 and 1; got replaced=2"):
        sl.baselines.oracle(moe, machine=sl.SimulatedMachine(), replaced=2)
    with pytest.raises(ValueError, match="smallest layer has 6"):
        replace_identities(torch.zeros(1, 1, 4, dtype=torch.int64), [6], 0.5)
