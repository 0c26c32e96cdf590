"""MoE-Infinity's prediction: which recorded request does this one's expert activation resemble?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specter_lab.records import ExpertKey, LayerCall, Prediction
from specter_lab.routing.predictors import NoPrediction


class RecordedRequest(Protocol):
    """A routing log of one earlier request: ``experts`` (tokens, layers, ranks), -1 where unused."""

    experts: Tensor


def activation_matrix(experts: Tensor, count: int) -> np.ndarray:
    """(tokens, layers, ranks) expert ids -> (layers, count) shares of each layer's activations.

    >>> activation_matrix(torch.tensor([[[0, 1]], [[0, 2]]]), count=3).tolist()
    [[0.5, 0.25, 0.25]]
    """
    layers = experts.shape[1]
    flat = experts.permute(1, 0, 2).reshape(layers, -1)
    counts = torch.stack([row[row >= 0].bincount(minlength=count) for row in flat]).double()
    return (counts / counts.sum(-1, keepdim=True).clamp_min(1)).numpy()


class ActivationAware(NoPrediction):
    """Matches the running request's activation matrix to recorded ones and prefetches what the best match used.

    At layer i, experts of the following layers l get the matched share of their layer times the nearness
    1 - (l - i) / layers; the ``most`` experts a layer above ``threshold`` times the even share are predicted.

    Source: MoE-Infinity (arXiv 2401.14361), sections 4-5. Differs: cosine over whole matrices of single requests, without
    the clustering that the paper uses to keep its collection small.

    >>> from types import SimpleNamespace
    >>> ActivationAware([SimpleNamespace(experts=torch.tensor([[[0, 1], [2, 3]]]))], experts=4).name
    'activation matching'
    """

    name = "activation matching"

    def __init__(
        self, library: Sequence[RecordedRequest], experts: int, *, most: int = 8, layers_ahead: int = 3, threshold: float = 1.0
    ) -> None:
        if not library:
            raise ValueError("Activation matching needs at least one recorded request; got none. Record some with RouterRecorder.")
        self.library = np.stack([activation_matrix(log.experts, experts) for log in library])
        self._flat = self.library.reshape(len(self.library), -1)
        self._norms = np.linalg.norm(self._flat, axis=1)
        self.most, self.layers_ahead, self.threshold = most, layers_ahead, threshold
        self.new_request()

    def new_request(self) -> None:
        """Forget the running request's matrix."""
        self._running = np.zeros(self.library.shape[1:])

    def layer_called(self, step: int, position: int, call: LayerCall) -> Iterable[Prediction]:
        """The likely experts of the next ``layers_ahead`` layers, the nearest first."""
        layers, experts = self.library.shape[1:]
        self._running[call.layer] += np.bincount(call.experts.flatten().numpy(), minlength=experts)[:experts]
        weights = self._running / np.maximum(self._running.sum(-1, keepdims=True), 1)
        norms = self._norms * max(np.linalg.norm(weights), 1e-9)
        match = self.library[int((self._flat @ weights.ravel() / np.maximum(norms, 1e-9)).argmax())]
        out = []
        for layer in range(call.layer + 1, min(layers, call.layer + 1 + self.layers_ahead)):
            odds = match[layer] * (1 - (layer - call.layer) / layers)
            for expert in np.argsort(-odds, kind="stable")[: self.most].tolist():
                if odds[expert] * experts > self.threshold:
                    out.append(Prediction(step, position, ExpertKey(layer, expert), float(min(1.0, odds[expert] * experts / 4)), 0))
        return out
