"""Every causal-LM type of the installed transformers with experts in the registry goes through the whole loop, exactly.

Cases 16, 44, 45 and 48: offloaded tokens equal the model's own for each architecture, whatever its router, and a cache that
can't be rolled back is refused a drafter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import specter_lab as sl
from specter_lab.architectures import Architecture, as_markdown, discover, examine, in_registry
from specter_lab.records import ExpertKey
from tests.architectures.conftest import NEW, build
from tests.drafters import Knowing
from tests.invariants import check_trace

TABLE = Path(__file__).resolve().parents[2] / "notebooks" / "architectures.md"
ROWS: dict[str, Architecture] = {}


def listed(text: str) -> list[str]:
    """The types in a part of the table: cheap, unlike looking through transformers."""
    names = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return sorted(name for name in names if name not in ("type", "---"))


TAKEN, REFUSED = map(listed, TABLE.read_text("utf-8").split("## Refused"))


def row_of(model_type: str) -> Architecture:
    if model_type not in ROWS:
        ROWS[model_type] = examine(model_type, build(model_type).moe.model if model_type in TAKEN else None)
    return ROWS[model_type]


@pytest.mark.parametrize("model_type", TAKEN)
def test_the_whole_loop_gives_the_models_own_tokens(model_type: str) -> None:
    """Cases 1, 16, 45 and 48. Two slots a layer, forgotten ones poisoned; a quantized self-draft with lookahead, always wrong
    and always right drafts, the gate.

    Each assembly proves that it was at work: experts crossed the link, some ahead of their use; the draft is in few bits.
    """
    row, built = row_of(model_type), build(model_type)
    moe, vocabulary = built.moe, built.moe.geometry.vocab_size
    assert row.without_drafter, row.reason
    assemblies = {"next-layer gate": {"predictor": sl.NextLayerGate(moe)}}
    if row.supported:
        assemblies |= {
            "lookahead": {"drafter": sl.SelfDrafter(quantized(moe)), "predictor": sl.DraftLookahead(), "draft_length": 4},
            "all rejected": {"drafter": Knowing(built.own, 6, 0, vocabulary), "draft_length": 4},
            "all accepted": {"drafter": Knowing(built.own, 6, 4, vocabulary), "draft_length": 4},
        }
    figures = {}
    with moe:
        if row.supported:  # a draft that is the target itself: what it drafts ahead, on its branch of the cache, must hold
            assemblies["ahead"] = {"drafter": sl.SelfDrafter(moe.store), "draft_length": 2, "draft_ahead": True}
        for name, pieces in assemblies.items():
            machine = sl.SimulatedMachine(0.001 if name == "ahead" else 0.2)
            with sl.Pipeline(moe, slots=2, poison=True, machine=machine, **pieces) as pipeline, sl.RouterRecorder(moe) as recorder:
                run = pipeline.generate(built.prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
            assert run.new_ids == built.own, f"{name}: {run.new_ids} instead of {built.own}"
            figures[name] = run.metrics
            if model_type != "inkling2_loop_text":  # its layers run three times in a pass, and may be fetched as often
                check_trace(run.trace, pipeline.plan.slots, [moe.store.blob_bytes(layer) for layer in range(moe.layers)])
            assert all(p.is_meta for module in moe.seam.modules for p in module._parameters.values())
            moved = run.trace.of_kind("transfer")
            assert (moved["reason"] == "demand").any(), "nothing was offloaded"
            if name in ("next-layer gate", "lookahead"):
                ahead = moved[moved["reason"] == "prefetch"]
                assert (ahead["outcome"] == "used").any(), f"{name} fetched nothing ahead of its use"
            drafted = run.trace.events[run.trace.events["lane"] == "draft"]
            assert set(drafted["kind"]) == ({"attention", "expert", "head"} if name in ("lookahead", "ahead") else set())
            judged = run.trace.of_kind("draft_length")["value"].sum()
            committed = run.trace.of_kind("commit")["tokens"].sum()
            assert committed == NEW and len(recorder.log) >= 6 + NEW - 1 + (judged if name == "lookahead" else 0)
    predicted = {name for name, metrics in figures.items() if metrics["recall"]}
    if row.supported:
        assert figures["all rejected"]["acceptance_rate"] == 0 and figures["all accepted"]["acceptance_rate"] == 1
        assert figures["ahead"]["acceptance_rate"] == 1 and figures["ahead"]["drafted_ahead"] > 0.5
        assert figures["lookahead"]["acceptance_rate"] > 0 and figures["lookahead"]["steps"] < NEW
        assert predicted == {"next-layer gate", "lookahead"}
    else:
        assert predicted == {"next-layer gate"}
        with pytest.raises(ValueError, match=r"can't be rolled back: .* Leave out the drafter"):
            sl.Pipeline(moe, drafter=sl.PromptLookupDrafter())
        assert not moe.seam.attached


def quantized(moe: sl.MoE) -> sl.ExpertBank:
    """A draft's experts: every matrix in four bits, and another one than the target's."""
    bank = moe.quantize("qint4")
    assert bank.name.startswith("qint4") and bank.layers == moe.layers
    for key in (ExpertKey(layer, expert) for layer in range(moe.layers) for expert in range(moe.experts(layer))):
        own, low = moe.tensors(key), bank.own_weights(key)
        matrices = [name for name, tensor in own.items() if tensor.ndim == 2]
        assert matrices and all(low[name].qtype.name == "qint4" for name in matrices)
        sides = (low[name].dequantize().T if moe.transposed(key.layer) else low[name].dequantize() for name in matrices)
        assert not any(torch.equal(side.to(own[name]), own[name]) for name, side in zip(matrices, sides, strict=True))
    return bank


@pytest.mark.parametrize("model_type", TAKEN)
def test_routers_asked_ahead_answer_as_in_the_forward(model_type: str) -> None:
    """Each router, asked just before its own call with the states it is about to get, picks what it then picks."""
    moe = build(model_type).moe
    asked: dict[int, torch.Tensor] = {}

    def ask(layer: int) -> Callable[..., None]:
        def before(router: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            asked.setdefault(layer, moe.route(layer, args[0].flatten(0, -2)))

        return before

    handles = [router.register_forward_pre_hook(ask(layer)) for layer, router in enumerate(moe.routers.modules)]
    try:
        with torch.no_grad(), moe.seam.probed() as calls, moe.routers.watched():
            moe.model(input_ids=torch.arange(3, 20)[None])
    finally:
        for handle in handles:
            handle.remove()
    for layer in range(moe.layers):
        experts = calls[layer][1]
        assert torch.equal(asked[layer].reshape(experts.shape), experts), f"MoE layer {layer}"


def test_no_type_is_missing_from_the_table() -> None:
    """Fails when a newer transformers has a type that isn't in the table: run the command in its head, and look."""
    assert discover() == sorted(TAKEN + REFUSED)


def test_the_table_is_current() -> None:
    """The page in notebooks/ says what is measured now; with another transformers only its types are compared (above)."""
    written = TABLE.read_text("utf-8").splitlines()[0].rpartition(" ")[2]
    if written != transformers.__version__:
        pytest.skip(f"the table is of transformers {written}, this is {transformers.__version__}")
    assert as_markdown([row_of(name) for name in discover()]) == TABLE.read_text("utf-8")


def test_no_recipe_is_missing() -> None:
    assert [row.reason for row in map(row_of, discover()) if row.reason.startswith("No tiny model")] == []


def test_types_outside_the_registry_are_refused_and_say_why() -> None:
    refused = {name: row_of(name).reason for name in REFUSED}
    assert {"jetmoe", "llama4_text", "longcat_flash", "dbrx"} <= set(refused) and not set(refused) & set(filter(in_registry, refused))
    assert all("experts registry" in reason and "Use a model type" in reason for reason in refused.values())


def test_the_command_line_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from specter_lab.__main__ import main

    monkeypatch.setattr(sys.modules[discover.__module__], "discover", lambda: ["mixtral", "qwen3_next", "jetmoe"])
    assert main(["architectures", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(row["model_type"], row["supported"]) for row in printed["architectures"]] == [
        ("mixtral", True), ("qwen3_next", False), ("jetmoe", False),
    ]  # fmt: skip
    assert main(["architectures"]) == 0
    assert "qwen3_next" in capsys.readouterr().out
