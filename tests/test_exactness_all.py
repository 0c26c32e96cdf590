"""The whole product of pieces on every bundled prompt (`make check-all`); a covering subset runs in tests/test_pipeline.py."""

import datetime
import itertools
import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import specter_lab as sl

pytestmark = [pytest.mark.all, pytest.mark.timeout(1800)]
NEW = 8
DRAFTERS = ("none", "qint8", "qint4", "qint2", "lookup", "qint4 ahead")
PREDICTORS = ("none", "gate", "lookahead", "oracle")
COMBINATIONS = [
    combination
    for combination in itertools.product(DRAFTERS, PREDICTORS, ("simulated", "throttled"), (1, 6, 24))
    if combination[1] != "lookahead" or combination[0].startswith("qint")
]
done: list[dict] = []


@pytest.fixture(scope="module")
def texts():
    """Every bundled prompt with the model's own greedy tokens and the routing of both."""
    moe = sl.load_moe("tiny-moe", dtype="float32")
    out = []
    for prompt in sl.load_prompts():
        ids = moe.tokenizer(prompt.text, return_tensors="pt").input_ids
        whole = moe.own_generate(ids, max_new_tokens=NEW, do_sample=False)
        with torch.no_grad(), sl.RouterRecorder(moe.model) as recorder:
            moe.model(whole)
        out.append((ids, tuple(whole[0, ids.shape[1] :].tolist()), recorder.log))
    return out


@pytest.fixture(scope="module")
def attached(texts):
    with sl.load_moe("tiny-moe", dtype="float32") as moe:
        yield moe


@pytest.fixture(scope="module")
def banks(attached):
    return {name: attached.quantize(name.split()[0]) for name in DRAFTERS if name.startswith("qint")}


@pytest.fixture(scope="module", autouse=True)
def record():
    """The last run is kept: what was run, and when."""
    yield
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "check_all.json"
    versions = {name: version(name) for name in ("torch", "transformers", "optimum-quanto", "specter-lab")}
    result = {
        "date": datetime.date.today().isoformat(),
        "combinations": len(done),
        "runs": sum(d["runs"] for d in done),
        "new_tokens": NEW,
        **versions,
    }
    path.write_text(json.dumps({**result, "passed": done}, indent=1) + "\n")


@pytest.mark.parametrize(("drafter", "predictor", "machine", "slots"), COMBINATIONS)
def test_every_prompt_gives_the_models_own_tokens(attached, banks, texts, drafter, predictor, machine, slots):
    drafters = {"none": lambda: None, "lookup": sl.PromptLookupDrafter}
    simple = {
        "none": sl.NoPrediction,
        "gate": lambda: sl.NextLayerGate(attached),
        "lookahead": sl.DraftLookahead,
    }
    shared = {"slots": slots, "poison": True, "machine": sl.SimulatedMachine(0.05) if machine == "simulated" else sl.ThrottledMachine(0.5)}
    ahead, kept = drafter.endswith("ahead"), 0
    for ids, own, log in texts:
        piece = sl.Oracle(log) if predictor == "oracle" else simple[predictor]()
        draft = drafters.get(drafter, lambda: sl.SelfDrafter(banks[drafter]))()
        length = (2 if ahead else 4) if draft else None
        with sl.Pipeline(attached, drafter=draft, predictor=piece, draft_length=length, draft_ahead=ahead, **shared) as pipeline:
            run = pipeline.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert run.new_ids == own
        kept += int((run.trace.of_kind("ahead")["outcome"] == "kept").sum())
    assert kept or not ahead or (machine, slots) != ("simulated", 1), "nothing was drafted ahead"
    done.append({"drafter": drafter, "predictor": predictor, "machine": machine, "slots": slots, "runs": len(texts)})
