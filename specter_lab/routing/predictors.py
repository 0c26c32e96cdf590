"""Predictors: which experts the coming pass of the target will need.

Each answers the hooks it cares about; ``specter_lab.prediction_scores`` compares what it said with what was needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from specter_lab.pieces import DeviceView
from specter_lab.records import DraftToken, ExpertKey, LayerCall, Prediction, Routing


class NoPrediction:
    """Predicts nothing: every expert is fetched when the router asks.

    >>> list(NoPrediction().step_begins(step=1, position=5, length=4))
    []
    """

    name = "none"

    def step_begins(self, step: int, position: int, length: int) -> Iterable[Prediction]:
        """Nothing."""
        return ()

    def drafted(self, step: int, token: DraftToken, horizon: int) -> Iterable[Prediction]:
        """Nothing."""
        return ()

    def layer_called(self, step: int, position: int, call: LayerCall) -> Iterable[Prediction]:
        """Nothing."""
        return ()

    def learn(self, step: int, predicted: Mapping[ExpertKey, Prediction], needed: Mapping[ExpertKey, int]) -> None:
        """Nothing."""


def routing_of(token: DraftToken) -> Routing:
    """The routing a draft token carries; ``ValueError`` for a drafter that has none."""
    if token.routing is None:
        raise ValueError(
            "Draft lookahead reads the draft's routing; this draft token carries none. "
            "Use a drafter with experts (SelfDrafter), or another predictor (NextLayerGate, NoPrediction)."
        )
    return token.routing


class DraftLookahead(NoPrediction):
    """Multi-step lookahead: where the draft went, at each drafted token and in every layer, the target will go.

    The probability of a prediction is the share of this predictor's own earlier predictions at the same horizon that
    came true, counted from ``prior`` with the weight of ``prior_weight`` observations.

    Source: Specter, multi-step lookahead (identity map: draft expert (l, e) -> target expert (l, e)).

    >>> import torch; from specter_lab.records import Routing
    >>> token = DraftToken(5, position=9, routing=Routing(9, (torch.tensor([[3, 1]]),), (torch.ones(1, 2),)))
    >>> [p.key.expert for p in DraftLookahead().drafted(step=1, token=token, horizon=1)]
    [3, 1]
    """

    name = "draft lookahead"
    reads_routing = looks_past = True

    def __init__(self, prior: float = 0.9, prior_weight: float = 8.0) -> None:
        if not 0 < prior <= 1 or prior_weight <= 0:
            raise ValueError(
                f"A prior is a probability with a positive weight; got {prior} with weight {prior_weight}; 0.9 and 8.0 are usual."
            )
        self.prior, self.prior_weight = prior, prior_weight
        self.new_request()

    def new_request(self) -> None:
        """No prediction has been judged."""
        self._tried: dict[int, int] = defaultdict(int)
        self._came_true: dict[int, int] = defaultdict(int)

    def probability(self, horizon: int) -> float:
        """How often a prediction that far ahead has come true."""
        return (self.prior * self.prior_weight + self._came_true[horizon]) / (self.prior_weight + self._tried[horizon])

    def drafted(self, step: int, token: DraftToken, horizon: int) -> Iterable[Prediction]:
        """The draft's experts of every layer, for the token's own position."""
        odds = self.probability(horizon)
        return [
            Prediction(step, token.position, ExpertKey(layer, expert), odds, horizon)
            for layer, experts in enumerate(routing_of(token).experts)
            for expert in experts[0].tolist()
        ]

    def learn(self, step: int, predicted: Mapping[ExpertKey, Prediction], needed: Mapping[ExpertKey, int]) -> None:
        """Count which predictions came true, by horizon."""
        for key, prediction in predicted.items():
            self._tried[prediction.horizon] += 1
            self._came_true[prediction.horizon] += key in needed


class CutoffLookahead(DraftLookahead):
    """Draft lookahead for the first layers only: as many as the link can fetch while the draft computes.

    The largest L with L x experts_per_token x copy time <= time of a draft step, at least 1 (the memory bound of the paper is
    the slots'). A self-draft's own routing of layer l *is* the target's gate l applied to the draft's attention output,
    since both share router and attention.

    Source: SP-MoE (arXiv 2510.10302), cutoff layer. Differs: the time of a draft step is a moving average.

    >>> CutoffLookahead().name
    'cutoff lookahead'
    """

    looks_past = False

    name = "cutoff lookahead"

    def __init__(self, first_draft_us: float = 1000.0) -> None:
        self.first_draft_us = first_draft_us
        super().__init__()
        self.view: DeviceView | None = None

    def new_request(self) -> None:
        """Nothing has been judged or timed."""
        super().new_request()
        self.draft_us = self.first_draft_us

    def bind(self, view: DeviceView) -> None:
        """Given by the pipeline: the link's rate and the time."""
        self.view = view

    def step_begins(self, step: int, position: int, length: int) -> Iterable[Prediction]:
        """Nothing is predicted before drafting."""
        assert self.view is not None, "a pipeline binds its pieces"
        self._last_us = self.view.now_us()
        return ()

    def drafted(self, step: int, token: DraftToken, horizon: int) -> Iterable[Prediction]:
        """The draft's experts of the layers before the cutoff."""
        assert self.view is not None
        now = self.view.now_us()
        self.draft_us, self._last_us = 0.75 * self.draft_us + 0.25 * (now - self._last_us), now
        width = routing_of(token).experts[0].shape[1]
        cutoff = max(1, int(self.draft_us * self.view.link_rate() / (width * self.view.blob_bytes(0))))
        return [p for p in super().drafted(step, token, horizon) if p.key.layer < cutoff]


class Routers(Protocol):
    """What the next-layer gate needs of a model."""

    @property
    def layers(self) -> int:
        """Number of MoE layers."""

    def route(self, layer: int, hidden: Tensor) -> Tensor:
        """(positions, hidden_size) -> (positions, experts_per_token): that layer's own router on these states."""


class NextLayerGate(NoPrediction):
    """Applies the next layer's own router to this layer's input: one layer of lookahead, no draft.

    Source: Eliseev and Mazur (arXiv 2312.17238), section 3.2; AdapMoE (arXiv 2408.10284).

    >>> import specter_lab as sl
    >>> NextLayerGate(sl.load_moe("tiny-moe")).name
    'next-layer gate'
    """

    name = "next-layer gate"

    def __init__(self, routers: Routers, probability: float = 0.75) -> None:
        self.routers, self.odds = routers, probability

    def layer_called(self, step: int, position: int, call: LayerCall) -> Iterable[Prediction]:
        """The next layer's choice for every row of this pass."""
        following = call.layer + 1
        if following >= self.routers.layers:
            return ()
        experts = self.routers.route(following, call.hidden)
        return [
            Prediction(step, position + row, ExpertKey(following, expert), self.odds, row)
            for row, picked in enumerate(experts.tolist())
            for expert in picked
            if expert >= 0
        ]


class RecordedRouting(Protocol):
    """What the oracle needs of a routing log."""

    experts: Tensor


class Oracle(NoPrediction):
    """Knows the routing of the whole text beforehand, from a log of the same text: a bound, not a method.

    ``log.experts``: (tokens, layers, ranks), -1 where a rank is unused. It can't know the routing of tokens that are
    drafted and then rejected.

    >>> import torch; from types import SimpleNamespace
    >>> log = SimpleNamespace(experts=torch.tensor([[[4, 2]], [[1, 2]]]))
    >>> [p.key.expert for p in Oracle(log).step_begins(step=1, position=1, length=0)]
    [1, 2]
    """

    name = "oracle"

    def __init__(self, log: RecordedRouting) -> None:
        self._experts = log.experts.tolist()

    def step_begins(self, step: int, position: int, length: int) -> Iterable[Prediction]:
        """The recorded experts of every position of the coming pass, in every layer."""
        return [
            Prediction(step, position + row, ExpertKey(layer, expert), 1.0, row)
            for row in range(length + 1)
            if position + row < len(self._experts)
            for layer, picked in enumerate(self._experts[position + row])
            for expert in picked
            if expert >= 0
        ]
