"""Every system as a named assembly of the pieces, one screen each.

Each function takes a target and the options of ``Pipeline`` (machine, memory, ...) and returns a pipeline.

>>> import specter_lab as sl
>>> sorted(sl.baselines.SYSTEMS)
['lookahead', 'next_layer_gate', 'on_demand', 'speculative_on_demand']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specter_lab.models import MoE
from specter_lab.pieces import ExpertStore
from specter_lab.pipeline import Pipeline
from specter_lab.routing.predictors import DraftLookahead, NextLayerGate
from specter_lab.speculate.drafters import SelfDrafter


def on_demand(target: MoE, **options: Any) -> Pipeline:
    """LRU slots in each layer; an expert is fetched when the router asks; no draft.

    Source: mixtral-offloading (arXiv 2312.17238), without its speculative loading. Unlike it, an evicted expert is
    forgotten instead of copied back, and experts stay in full precision.

    >>> import specter_lab as sl
    >>> with sl.baselines.on_demand(sl.load_moe("tiny-moe")) as pipeline: pipeline.predictor.name
    'none'
    """
    return Pipeline(target, **options)


def next_layer_gate(target: MoE, **options: Any) -> Pipeline:
    """``on_demand``, and the next layer's router on this layer's input says what to prefetch.

    Source: mixtral-offloading (arXiv 2312.17238), section 3.2; AdapMoE (arXiv 2408.10284).

    >>> import specter_lab as sl
    >>> with sl.baselines.next_layer_gate(sl.load_moe("tiny-moe")) as pipeline: pipeline.predictor.name
    'next-layer gate'
    """
    return Pipeline(target, predictor=NextLayerGate(target), **options)


def speculative_on_demand(target: MoE, *, bank: ExpertStore | None = None, **options: Any) -> Pipeline:
    """A quantized self-draft whose routing is ignored: what speculation alone gives. ``bank``: qint4 if not given.

    >>> import specter_lab as sl
    >>> with sl.baselines.speculative_on_demand(sl.load_moe("tiny-moe")) as pipeline: pipeline.drafter.name
    'self-draft (qint4 group 128)'
    """
    return Pipeline(target, drafter=SelfDrafter(bank or target.quantize("qint4")), **options)


def lookahead(target: MoE, *, bank: ExpertStore | None = None, **options: Any) -> Pipeline:
    """A quantized self-draft whose routing is prefetched as it appears, streaming on through verification.

    Specter's idea with our own schedule: no observation phase and no barrier before verification.

    >>> import specter_lab as sl
    >>> with sl.baselines.lookahead(sl.load_moe("tiny-moe")) as pipeline: pipeline.predictor.name
    'draft lookahead'
    """
    return Pipeline(target, drafter=SelfDrafter(bank or target.quantize("qint4")), predictor=DraftLookahead(), **options)


SYSTEMS: dict[str, Callable[..., Pipeline]] = {f.__name__: f for f in (on_demand, next_layer_gate, speculative_on_demand, lookahead)}
LOOKS_AHEAD = frozenset({"lookahead"})
