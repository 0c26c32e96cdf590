"""How far a draft agrees with its target on the same tokens, apart from any loop, machine or cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor

from specter_lab.machines.simulated import SimulatedMachine
from specter_lab.models import MoE
from specter_lab.offload.server import ResidentServer
from specter_lab.pieces import ExpertStore
from specter_lab.quantize import ExpertBank, ExpertSource
from specter_lab.records import ExpertKey


@dataclass(frozen=True)
class Fidelity:
    """Draft against target on identical inputs.

    ``routing``: by layer, see ``routing_match``. ``top1_agreement``: the share of positions at which both have the same
    most probable token, so the acceptance of greedy drafting there. ``acceptance``: the mean of sum(min(draft_probs,
    target_probs)) at ``temperature``, the acceptance that speculative sampling would have. ``positions``: how many.

    >>> import specter_lab as sl
    >>> moe = sl.load_moe("tiny-moe", dtype="float32")
    >>> fidelity(moe, moe.quantize("qint8"), ["Once upon a time"]).routing.loc[0, "recall"].item()
    1.0
    """

    draft: str
    temperature: float
    positions: int
    top1_agreement: float
    acceptance: float
    routing: pd.DataFrame

    def __repr__(self) -> str:
        figures = f"top-1 agreement {self.top1_agreement:.3f}, acceptance {self.acceptance:.3f} at T = {self.temperature:g}"
        return f"Fidelity({self.draft}: {self.positions} positions, {figures}, expert recall {self.routing['recall'].mean():.3f})"


def fidelity(moe: MoE, bank: ExpertStore, texts: Sequence[str | Sequence[int]], *, temperature: float = 1.0) -> Fidelity:
    """Run target and draft (``moe`` with the experts of ``bank``) over the same texts or token ids, all positions at once.

    The draft reads keys and values of its own all the way, as it would after a long draft; in a pipeline it reads
    the target's up to the last committed token, so it does a little better there. ``ValueError`` for no text, an empty
    one, or a temperature that isn't above 0.

    >>> import specter_lab as sl
    >>> moe = sl.load_moe("tiny-moe", dtype="float32")
    >>> fidelity(moe, moe.quantize("qint2"), ["Once upon a time"]).top1_agreement < 1
    True
    """
    _refuse_cold(temperature)
    rows = [_ids(moe, text) for text in texts]
    if not rows:
        raise ValueError("A comparison needs at least one text; got none. Give some, for instance those of load_prompts().")
    moe.lease()  # as a pipeline does: the experts move out, and back after the last lease
    try:
        pairs = [(_run(moe, moe.store, ids), _run(moe, bank, ids)) for ids in rows]
    finally:
        moe.release()
    target_logits, draft_logits = (torch.cat([pair[side][0] for pair in pairs]) for side in (0, 1))
    target_experts, draft_experts = (torch.cat([pair[side][1] for pair in pairs]) for side in (0, 1))
    agreement = float((target_logits.argmax(-1) == draft_logits.argmax(-1)).double().mean())
    acceptance = float(expected_acceptance(target_logits, draft_logits, temperature=temperature).mean())
    return Fidelity(bank.name, temperature, len(target_logits), agreement, acceptance, routing_match(target_experts, draft_experts))


def expected_acceptance(target_logits: Tensor, draft_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """(positions, vocabulary) twice -> (positions,): the chance that a token drawn from the draft there stands.

    Source: Leviathan et al. (arXiv 2211.17192), theorem 3.5: sum over tokens of min(draft_probs, target_probs).

    >>> expected_acceptance(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -torch.inf]])).tolist()
    [0.5]
    """
    _refuse_cold(temperature)
    target, draft = ((logits.double() / temperature).softmax(-1) for logits in (target_logits, draft_logits))
    return torch.minimum(target, draft).sum(-1)


def routing_match(target: Tensor, draft: Tensor) -> pd.DataFrame:
    """Expert ids (tokens, layers, ranks) twice, -1 where a rank is unused -> a row a layer.

    ``set_match``: the share of tokens whose experts are all the same; ``part_match``: of those with at least one in
    common; ``recall``: the share of the target's picks that the draft has too. The order of ranks doesn't matter.

    >>> routing_match(torch.tensor([[[1, 2]], [[3, 4]]]), torch.tensor([[[2, 1]], [[3, 5]]])).loc[0].tolist()
    [0.5, 1.0, 0.75]
    """
    if {target.dim(), draft.dim()} != {3} or target.shape[:2] != draft.shape[:2] or not len(target):
        raise ValueError(
            f"Routing is compared token by token and layer by layer; got shapes {tuple(target.shape)} and {tuple(draft.shape)}. "
            "Record both on the same tokens."
        )
    common = ((target[..., :, None] == draft[..., None, :]) & (target[..., :, None] >= 0)).any(-1).sum(-1).double()
    wanted, offered = (target >= 0).sum(-1), (draft >= 0).sum(-1)
    same = (common == wanted) & (common == offered)
    columns = {"set_match": same.double(), "part_match": (common > 0).double()}
    table = pd.DataFrame({name: values.mean(0).numpy() for name, values in columns.items()})
    table["recall"] = (common.sum(0) / wanted.sum(0)).numpy()
    return table.rename_axis("layer")


def weight_error(source: ExpertSource, bank: ExpertBank) -> pd.Series:
    """By layer, the mean over experts and matrices of |packed - source| / |source| (Frobenius norms).

    >>> from specter_lab.quantize import TensorSource
    >>> source = TensorSource([[{"up_proj": torch.ones(16, 128)}]])
    >>> weight_error(source, ExpertBank.pack(source, "bfloat16")).tolist()
    [0.0]
    """
    errors = []
    for layer in range(bank.layers):
        turned = getattr(source, "transposed", lambda layer: False)(layer) != bank.transposed(layer)
        of_layer = []
        for key in (ExpertKey(layer, expert) for expert in range(bank.experts(layer))):
            packed = bank.weights(layer, bank.blob(key))
            for name, weight in source.tensors(key).items():
                if weight.dim() == 2:
                    other = cast(Any, packed[name])
                    other = (other.dequantize() if type(other) is not Tensor else other).to(weight.dtype)
                    of_layer.append(float((weight - (other.T if turned else other)).norm() / weight.norm()))
        errors.append(sum(of_layer) / len(of_layer))
    return pd.Series(errors, name="weight_error").rename_axis("layer")


def _run(moe: MoE, bank: ExpertStore, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(1, tokens) ids -> (tokens, vocabulary) fp32 logits and (tokens, layers, ranks) expert ids, with that bank's experts."""
    with torch.no_grad(), moe.seam.serving(ResidentServer(bank, SimulatedMachine(), "target", 0)) as calls:
        logits = moe.model(input_ids=ids, use_cache=False).logits[0].float()
    experts = torch.full((ids.shape[1], len(calls), max(call.experts.shape[1] for call in calls)), -1)
    for call in calls:
        kept = call.experts.cpu().masked_fill(call.experts.cpu() >= bank.experts(call.layer), -1)
        experts[:, call.layer, : kept.shape[1]] = kept
    return logits.cpu(), experts


def _ids(moe: MoE, text: str | Sequence[int]) -> Tensor:
    if isinstance(text, str) and moe.tokenizer is None:
        raise ValueError(f"Text needs a tokenizer; {moe.name} came without one. Give token ids, or load_moe(..., tokenizer=...).")
    ids = moe.tokenizer(text).input_ids if isinstance(text, str) else list(text)
    if not ids:
        raise ValueError(f"A text to compare on has at least one token; got {text!r}. Leave it out.")
    return torch.tensor([ids], device=moe.device)


def _refuse_cold(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"Probabilities need a temperature above 0; got {temperature}. For greedy choices read top1_agreement.")
