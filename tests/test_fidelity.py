"""Draft against target on identical inputs: by hand, against the model's own forward, and by number format."""

from __future__ import annotations

import pytest
import torch

import specter_lab as sl
from specter_lab.fidelity import expected_acceptance, fidelity, routing_match, weight_error
from specter_lab.quantize import TensorSource
from tests.families import tiny

TEXTS = [prompt.text for prompt in sl.load_prompts(per_kind=1)]


@pytest.fixture(scope="module")
def moe():
    return sl.load_moe("tiny-moe", dtype="float32")


def test_routing_by_hand() -> None:
    target = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, -1]]])
    draft = torch.tensor([[[1, 0], [2, 9]], [[8, 9], [6, -1]]])
    table = routing_match(target, draft)
    assert table.index.name == "layer"
    assert table.loc[0].to_dict() == {"set_match": 0.5, "part_match": 0.5, "recall": 0.5}
    assert table.loc[1].to_dict() == {"set_match": 0.5, "part_match": 1.0, "recall": pytest.approx(2 / 3)}


def test_more_experts_than_the_targets_are_no_match() -> None:
    table = routing_match(torch.tensor([[[3, -1]]]), torch.tensor([[[3, 7]]]))
    assert table.loc[0].to_dict() == {"set_match": 0.0, "part_match": 1.0, "recall": 1.0}


def test_acceptance_by_hand() -> None:
    target, draft = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]).log(), torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.3, 0.5]]).log()
    assert expected_acceptance(target, draft).tolist() == pytest.approx([0.9, 1.0])
    sharp = torch.tensor([[0.4, 0.4, 0.2]]) ** 2, torch.tensor([[0.5, 0.3, 0.2]]) ** 2
    wanted = torch.minimum(*(probs / probs.sum() for probs in sharp)).sum().item()
    assert expected_acceptance(target[:1], draft[:1], temperature=0.5).tolist() == pytest.approx([wanted], abs=1e-6)


def test_the_expectation_is_what_verification_accepts() -> None:
    """Speculative sampling over many seeds, against the formula."""
    target, draft = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(draft.expand(4000, -1), 1, generator=generator).flatten().tolist()
    accepted = [sl.verify_sampled([sl.DraftToken(t, 0, probs=draft)], lambda i: target, generator).accepted for t in tokens]
    wanted = expected_acceptance(target.log()[None], draft.log()[None]).item()
    assert sum(accepted) / len(accepted) == pytest.approx(wanted, abs=0.03)


def test_a_bank_that_changes_nothing_agrees_fully(moe) -> None:
    own = fidelity(moe, sl.ExpertBank.pack(moe, "bfloat16"), TEXTS)  # the bundled weights were stored in bfloat16
    assert (own.top1_agreement, own.acceptance) == (1.0, pytest.approx(1.0))
    assert (own.routing == 1.0).all(axis=None)
    assert own.positions == sum(len(moe.tokenizer(text).input_ids) for text in TEXTS)


def test_the_target_side_is_the_models_own(moe) -> None:
    """Packed experts put back into a plain transformers model must disagree with it exactly as much."""
    bank, ids = moe.quantize("qint2"), torch.tensor([moe.tokenizer(TEXTS[0]).input_ids])
    with torch.no_grad():
        target = moe.model(ids).logits[0]
        plain = sl.load_moe("tiny-moe", dtype="float32")
        for layer, experts in enumerate(plain.seam.modules):
            for expert in range(bank.experts(layer)):
                for name, weight in bank.own_weights(sl.ExpertKey(layer, expert)).items():
                    experts.get_parameter(name).data[expert] = weight.dequantize().float()
        draft = plain.model(ids).logits[0]
    found = fidelity(moe, bank, [ids[0].tolist()], temperature=0.7)
    assert found.acceptance == pytest.approx(expected_acceptance(target, draft, temperature=0.7).mean().item(), abs=0.02)
    assert found.top1_agreement == pytest.approx((target.argmax(-1) == draft.argmax(-1)).double().mean().item(), abs=0.03)


def test_fewer_bits_agree_less(moe) -> None:
    with moe:
        banks = [moe.quantize(name) for name in ("qint8", "qint4", "qint2")]
        found = [fidelity(moe, bank, TEXTS, temperature=0.7) for bank in banks]
        errors = [weight_error(moe, bank) for bank in banks]
    for figures in (
        [f.acceptance for f in found], [f.top1_agreement for f in found], [f.routing["recall"].mean() for f in found],
        [-error.mean() for error in errors],
    ):  # fmt: skip
        assert figures == sorted(figures, reverse=True) and figures[0] > figures[2]
    for f in found:
        assert (f.routing.loc[0] == 1.0).all(), "layer 0 routes before any expert has computed"
        assert (f.routing["set_match"] <= f.routing["recall"]).all() and (f.routing["recall"] <= f.routing["part_match"]).all()
    assert 0.003 < errors[0].mean() < 0.01 and 0.06 < errors[1].mean() < 0.12
    assert "qint8" in repr(found[0]) and "T = 0.7" in repr(found[0])


def test_the_model_is_left_as_it_was(moe) -> None:
    assert not moe.seam.attached
    fidelity(moe, moe.quantize("qint8"), ["Once"])
    assert not moe.seam.attached
    with moe:
        fidelity(moe, moe.quantize("qint8"), ["Once"])
        assert moe.seam.attached


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "deepseek_v3"])
def test_other_families(family: str) -> None:
    """Biases and transposed weights; a dense first layer; ids alone, without a tokenizer."""
    moe = sl.load_moe(tiny(family))
    bank = moe.quantize("qint8")
    found = fidelity(moe, bank, [[1, 2, 3], [5, 6]])
    assert found.positions == 5 and found.acceptance > 0.9
    assert weight_error(moe, bank).max() < 0.02


def test_transposed_weights_are_compared_the_right_way_round() -> None:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    source = TensorSource([[{"up_proj": weight}]], transposed=True)
    assert weight_error(source, sl.ExpertBank.pack(source, "qint8")).item() < 0.02


def test_refusals(moe) -> None:
    bank = moe.quantize("qint8")
    for texts, temperature, message in (
        ([], 1.0, "at least one text"),
        ([""], 1.0, "at least one token"),
        (["Once"], 0.0, "temperature above 0; got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            fidelity(moe, bank, texts, temperature=temperature)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        fidelity(sl.load_moe(tiny("mixtral")), bank, ["Once"])
    for other in (torch.zeros(1, 2), torch.zeros(1, 3, 1), torch.zeros(0, 2, 1)):
        with pytest.raises(ValueError, match="token by token"):
            routing_match(torch.zeros(1, 2, 1), other)
