"""Every system of the literature as a named assembly of the pieces.

Each function takes a target (a ``MoE``, or a ``ReplayTarget`` for a replay) and the options of ``Pipeline`` (machine,
memory, ...) and returns a pipeline; a piece given under its name (``predictor=``, ``eviction=``, ...) replaces the
system's own. Where a system differs from its original, the docstring says how and why. All of them forget an evicted
expert instead of copying it back, and compute the target's experts in full precision.

>>> import specter_lab as sl
>>> sl.baselines.named("specter").__name__
'specter'
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from specter_lab.models import MoE
from specter_lab.offload.eviction import LFU, LookaheadLRU
from specter_lab.offload.misses import SplitByFinish
from specter_lab.oracle import oracle
from specter_lab.pieces import ExpertStore
from specter_lab.pipeline import Pipeline
from specter_lab.plans import planned, try_plans
from specter_lab.replay import ReplayTarget, refuse_other_model
from specter_lab.routing.activation import ActivationAware, RecordedRequest
from specter_lab.routing.chunked import ChunkedLookahead, Schedule
from specter_lab.routing.predictors import CutoffLookahead, DraftLookahead, NextLayerGate
from specter_lab.speculate.copied import CopiedDrafter
from specter_lab.speculate.drafters import SelfDrafter
from specter_lab.speculate.governor import Governor

Target = MoE | ReplayTarget


def _build(target: Target, options: dict[str, Any], **pieces: Any) -> Pipeline:
    """A pipeline of these pieces; whatever the caller gives under the same name replaces one."""
    return Pipeline(target, **{**pieces, **options})


def _self_draft(target: Target, bank: ExpertStore | None) -> SelfDrafter:
    return SelfDrafter(bank or target.quantize("qint4"))


def on_demand(target: Target, **options: Any) -> Pipeline:
    """LRU slots in each layer; an expert is fetched when the router asks; no draft.

    Source: mixtral-offloading (arXiv 2312.17238), without its speculative loading and its quantization.

    >>> import specter_lab as sl
    >>> with sl.baselines.on_demand(sl.load_moe("tiny-moe")) as pipeline: pipeline.predictor.name
    'none'
    """
    return _build(target, options)


def next_layer_gate(target: Target, **options: Any) -> Pipeline:
    """``on_demand``, and the next layer's router on this layer's input says what to prefetch.

    Source: mixtral-offloading (arXiv 2312.17238), section 3.2; AdapMoE (arXiv 2408.10284).

    >>> import specter_lab as sl
    >>> with sl.baselines.next_layer_gate(sl.load_moe("tiny-moe")) as pipeline: pipeline.predictor.name
    'next-layer gate'
    """
    return _build(target, options, predictor=NextLayerGate(target))


def activation_aware(target: Target, *, library: Sequence[RecordedRequest], **options: Any) -> Pipeline:
    """``on_demand`` with prefetches from the recorded request (of ``library``) that this one resembles.

    Source: MoE-Infinity (arXiv 2401.14361). Differs: LRU instead of its activation-aware cache, to isolate the prefetch.

    >>> import specter_lab as sl, torch
    >>> from types import SimpleNamespace
    >>> earlier = SimpleNamespace(experts=torch.zeros(5, 8, 4, dtype=torch.long))
    >>> with sl.baselines.activation_aware(sl.load_moe("tiny-moe"), library=[earlier]) as pipeline: pipeline.predictor.name
    'activation matching'
    """
    for log in library:
        refuse_other_model(log, target)
    return _build(target, options, predictor=ActivationAware(library, max(target.geometry.experts)))


def fiddler(target: Target, **options: Any) -> Pipeline:
    """The most used experts stay in the slots; a layer's misses are split between link and host so that the later ends first.

    Source: Fiddler (arXiv 2402.07033). Differs: its rule weighs each expert alone, here the later of the two lanes is
    minimised for the layer; popularity is counted while running (LFU) instead of profiled offline, and an idle link fills the
    free slots with what the host computed last, instead of loading them before the start.

    >>> import specter_lab as sl
    >>> with sl.baselines.fiddler(sl.load_moe("tiny-moe")) as pipeline: pipeline.assembly.split.name
    'split by finish'
    """
    return _build(target, options, eviction=LFU(), split=SplitByFinish())


def speculative_on_demand(target: Target, *, bank: ExpertStore | None = None, **options: Any) -> Pipeline:
    """A quantized self-draft whose routing is ignored: what speculation alone gives. ``bank``: qint4 if not given.

    >>> import specter_lab as sl
    >>> with sl.baselines.speculative_on_demand(sl.load_moe("tiny-moe")) as pipeline: pipeline.drafter.name
    'self-draft (qint4 group 128)'
    """
    return _build(target, options, drafter=_self_draft(target, bank))


def lookahead(target: Target, *, bank: ExpertStore | None = None, **options: Any) -> Pipeline:
    """A quantized self-draft whose routing is prefetched as it appears, streaming on through verification.

    Specter's idea with our own schedule: no observation phase and no barrier before verification.

    >>> import specter_lab as sl
    >>> with sl.baselines.lookahead(sl.load_moe("tiny-moe")) as pipeline: pipeline.predictor.name
    'draft lookahead'
    """
    return _build(target, options, drafter=_self_draft(target, bank), predictor=DraftLookahead())


def specmoeoff_b1(
    target: Target, *, bank: ExpertStore | None = None, draft_length: int = 3, separate: bool = True, **options: Any
) -> Pipeline:
    """A self-draft of 3 tokens; the top M of each layer by count are planned at 0.2 and 0.6 of the draft; no barrier.

    Its draft has non-expert weights and KV of its own, so the same device memory holds fewer slots; ``separate=False``
    shares the target's.

    Source: the batch-1 adaptation of SpecMoEOff (arXiv 2508.21706) in Specter's artifact. Differs: every non-expert weight
    is copied, in the target's dtype; what of the embeddings the artifact's copy shares is unknown to us.

    >>> import specter_lab as sl
    >>> with sl.baselines.specmoeoff_b1(sl.load_moe("tiny-moe")) as pipeline: pipeline.drafter.name
    'copied self-draft (qint4 group 128)'
    """
    bank = bank or target.quantize("qint4")
    drafter = CopiedDrafter(target, bank) if separate else SelfDrafter(bank)
    return _build(target, options, drafter=drafter, predictor=ChunkedLookahead((0.2, 0.6)), draft_length=draft_length)


def sp_moe(target: Target, *, bank: ExpertStore | None = None, **options: Any) -> Pipeline:
    """A self-draft whose routing is prefetched for the layers before a cutoff: those the link can fetch while drafting.

    Source: SP-MoE (arXiv 2510.10302). Differs: the draft is the target itself in low bits, so that its attention output
    through the target's gate is the draft's own routing; copies aren't batched (one latency each).

    >>> import specter_lab as sl
    >>> with sl.baselines.sp_moe(sl.load_moe("tiny-moe")) as pipeline: pipeline.predictor.name
    'cutoff lookahead'
    """
    return _build(target, options, drafter=_self_draft(target, bank), predictor=CutoffLookahead())


def moe_speq(target: Target, *, bank: ExpertStore | None = None, **options: Any) -> Pipeline:
    """A self-draft, a lookahead buffer that eviction respects, and a governor that chooses the draft length.

    Source: MoE-SpeQ (arXiv 2511.14102). Differs: the governor measures the time of a step instead of modelling it; its
    fused kernel has no counterpart here.

    >>> import specter_lab as sl
    >>> with sl.baselines.moe_speq(sl.load_moe("tiny-moe")) as pipeline: pipeline.residency.eviction.name
    'lookahead-aware LRU'
    """
    pieces = {"predictor": DraftLookahead(), "eviction": LookaheadLRU(), "draft_length": Governor()}
    return _build(target, options, drafter=_self_draft(target, bank), **pieces)


def specter(target: Target, *, bank: ExpertStore | None = None, schedule: Schedule = "adaptive", **options: Any) -> Pipeline:
    """A self-draft of fixed length, a count table planned in chunks while drafting, a barrier, then verification.

    Source: Specter's artifact. Differs: copies wait in software until the link is free, so a demand waits for one copy
    at most instead of for the whole chunk; shared experts run with the attention segment of the next layer.

    >>> import specter_lab as sl
    >>> with sl.baselines.specter(sl.load_moe("tiny-moe")) as pipeline: pipeline.assembly.barrier
    True
    """
    return _build(target, options, drafter=_self_draft(target, bank), predictor=ChunkedLookahead(schedule), barrier=True)


def residual_lookahead(target: Target, *, bank: ExpertStore | None = None, **options: Any) -> Pipeline:
    """``lookahead`` over residual experts: a slot holds, and the link moves, only what the resident 4-bit code lacks.

    The draft stops being a cost in memory: its codes are the top bits of the target's experts, which are rebuilt bit for
    bit at use. About 8.5 bits a weight instead of 16 cross the link, and the same memory holds nearly twice the experts.

    >>> import specter_lab as sl
    >>> with sl.baselines.residual_lookahead(sl.load_moe("tiny-moe")) as pipeline: pipeline.residency.rebuilds
    True
    """
    pieces = {"predictor": DraftLookahead(), "eviction": LookaheadLRU(), "residual": True}
    return _build(target, options, drafter=_self_draft(target, bank), **pieces)


def specter_plus(
    target: Target, *, bank: ExpertStore | None = None, plan: str | None = None, trial: Sequence[Any] = (), **options: Any
) -> Pipeline:
    """The best of our plans for this target, machine and memory: see ``plans.planned`` for what each is made of.

    Fewer bytes for each expert, a window of tokens for each read where a draft is worth its memory, slots by expected
    use, and the host beside the link: no single one of them beats the draft-free rivals that may use the host. ``plan``:
    one of ``plans.PLANS``; without it, the fastest on the texts of ``trial``, or "residual" if there are none.

    >>> import specter_lab as sl
    >>> with sl.baselines.specter_plus(sl.load_moe("tiny-moe")) as pipeline: pipeline.assembly.split.name
    'split by finish'
    """
    if plan is None:
        plan = str(try_plans(target, trial, bank=bank, **options).index[0]) if trial else "residual"
    return planned(target, plan, bank=bank, **options)


SYSTEMS: dict[str, Callable[..., Pipeline]] = {
    f.__name__: f
    for f in (
        on_demand, next_layer_gate, activation_aware, fiddler, speculative_on_demand, specmoeoff_b1, sp_moe, moe_speq, specter, lookahead,
        residual_lookahead, specter_plus, oracle,
    )
}  # fmt: skip
DRAFTLESS = frozenset({"on_demand", "next_layer_gate", "activation_aware", "fiddler"})
RIVALS = DRAFTLESS | {"speculative_on_demand", "specmoeoff_b1", "sp_moe", "moe_speq", "specter"}
"""The systems of the literature: what isn't ours, and no bound."""


def named(name: str) -> Callable[..., Pipeline]:
    """The system of that name; ``ValueError`` with the nearest names.

    >>> named("on_demand") is on_demand
    True
    """
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name, SYSTEMS, n=3)
        raise ValueError(
            f"A system is one of {', '.join(SYSTEMS)}; got {name!r}." + (f" Did you mean {' or '.join(near)}?" if near else "")
        )
    return SYSTEMS[name]
