"""What predictions want on the device: the table that the link, eviction and draft length look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specter_lab.records import ExpertKey, Prediction


@dataclass
class Intent:
    """A wanted expert and the predictions (by position) that want it; the request is None until a copy is needed.

    >>> Intent(None, step=1, position=9, odds={9: 0.9, 10: 0.6}).value
    1.5
    """

    request_id: int | None
    step: int
    position: int
    odds: dict[int, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Expected number of positions that use it."""
        return sum(self.odds.values())


class Intents:
    """Intents by layer and expert, and which of them are absent from the device. ``state`` tells where an expert is.

    A layer's intents are of the pass that runs it next. What is wanted for the pass after that waits until ``drop``.

    >>> intents = Intents(2, lambda key: "absent")
    >>> _ = intents.want(Prediction(1, 9, ExpertKey(0, 3), 0.9)), intents.want(Prediction(1, 9, ExpertKey(1, 5), 0.9))
    >>> list(intents.urgent(host_share=0.0))
    [ExpertKey(layer=0, expert=3), ExpertKey(layer=1, expert=5)]
    """

    def __init__(self, layers: int, state: Callable[[ExpertKey], str]) -> None:
        self._state = state
        self._by_layer: list[dict[int, Intent]] = [{} for _ in range(layers)]
        self._later: list[list[Prediction]] = [[] for _ in range(layers)]
        self._missing: list[set[int]] = [set() for _ in range(layers)]

    def __bool__(self) -> bool:
        return any(self._by_layer)

    def __contains__(self, key: ExpertKey) -> bool:
        return key.expert in self._by_layer[key.layer]

    def __getitem__(self, key: ExpertKey) -> Intent:
        return self._by_layer[key.layer][key.expert]

    def wanted(self, layer: int) -> list[ExpertKey]:
        """Everything that predictions want of that layer, wherever it is."""
        return [ExpertKey(layer, expert) for expert in self._by_layer[layer]]

    def value(self, key: ExpertKey) -> float:
        """Expected uses of ``key`` by what is predicted, 0 if nothing is."""
        intent = self._by_layer[key.layer].get(key.expert)
        return 0.0 if intent is None else intent.value

    def missing(self, layer: int) -> int:
        """How many wanted experts of that layer are absent."""
        return len(self._missing[layer])

    def step(self, layer: int) -> int:
        """The pass that this layer's intents (there must be some) are for."""
        return next(iter(self._by_layer[layer].values())).step

    def want(self, prediction: Prediction) -> Intent | None:
        """The intent that this prediction makes or strengthens; None of one that waits for an earlier pass of that layer."""
        key = prediction.key
        if self._by_layer[key.layer] and self.step(key.layer) < prediction.step:
            self._later[key.layer].append(prediction)
            return None
        intent = self._by_layer[key.layer].setdefault(key.expert, Intent(None, prediction.step, prediction.position))
        intent.odds[prediction.position] = max(prediction.probability, intent.odds.get(prediction.position, 0.0))
        self.moved(key)
        return intent

    def moved(self, key: ExpertKey) -> None:
        """``key`` came to the device or left it."""
        if key in self and self._state(key) == "absent":
            self._missing[key.layer].add(key.expert)
        else:
            self._missing[key.layer].discard(key.expert)

    def drop(self, layer: int, up_to_step: int) -> dict[int, Intent]:
        """Take out that layer's intents of steps up to this one; what waited behind them takes their place."""
        if not self._by_layer[layer]:
            return {}
        dropped = {expert: intent for expert, intent in self._by_layer[layer].items() if intent.step <= up_to_step}
        for expert in dropped:
            del self._by_layer[layer][expert]
            self._missing[layer].discard(expert)
        later, self._later[layer] = self._later[layer], []
        for prediction in later:
            if prediction.step > up_to_step:
                self.want(prediction)
        return dropped

    def urgent(self, host_share: float) -> Iterator[ExpertKey]:
        """Absent experts in the order that the link should bring them: by pass, then by layer, in a layer by expected uses.

        With a host that computes ``host_share`` of the misses, every layer keeps as many for it, of the fewest uses, until
        all layers of the pass are down to that: otherwise the link would empty the first layers, where the host would have
        nothing to do, and leave the last ones to both.
        """
        waiting = [layer for layer, missing in enumerate(self._missing) if missing]
        if not waiting:
            return
        coming = min(map(self.step, waiting))
        soon, later = [w for w in waiting if self.step(w) == coming], [w for w in waiting if self.step(w) > coming]
        ahead = sum(bool(intents) and self.step(layer) == coming for layer, intents in enumerate(self._by_layer))
        spared = host_share * sum(map(self.missing, soon)) / ahead
        for layer in [w for w in soon if self.missing(w) > spared] + [w for w in soon if self.missing(w) <= spared] + later:
            intents = self._by_layer[layer]
            yield ExpertKey(layer, min(self._missing[layer], key=lambda e: (intents[e].step, -intents[e].value, e)))
