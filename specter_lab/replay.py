"""Replaying a text without weights: the same loop and pieces over recorded or synthetic routing.

Semantics. One call of a layer is one *event*: all experts that its rows need are judged together (hit, late, miss)
before any of them is admitted. Experts of a call are served residents first, then in the order of arrival; ties go to
the lower id everywhere, and ``Relabelled`` draws the ids by a seed, so that what ties do can be told apart. A rejected
draft's row is routed like a token that isn't in the text, and counts as needed. A replay starts cold unless ``warm``,
its prefill is step 0, and figures per token are of what follows, so warm-up and prompt don't leak into them.

Source: on what replay semantics change, arXiv 2608.07911.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specter_lab.loop import Committed
from specter_lab.offload.server import OffloadServer
from specter_lab.pieces import Machine
from specter_lab.records import DraftToken, ExpertKey, Geometry, LayerCall, Routing
from specter_lab.speculate.stream import LONGEST, Pieces


class ReplayWindow(Protocol):
    """One step of speculation on a text: ``draft`` (rows, layer, rank), ``needed`` (rows + 1, layer, rank), and how many hold."""

    draft: np.ndarray
    needed: np.ndarray
    accepted: int


class ReplayableText(Protocol):
    """Routing of a whole text and of what a draft would have done with it, for instance a ``SyntheticText``.

    ``experts`` (token, layer, rank): the target's routing; ``gate`` (token, layer, rank): what each layer's router says of
    the layer before's input (layer 0 is unused). ``window(start, length)`` drafts that many tokens from the one at ``start``.
    """

    experts: np.ndarray
    gate: np.ndarray

    def window(self, start: int, length: int) -> ReplayWindow:
        """The draft's and the target's routing of that step; rows after the accepted stand for wrong tokens."""


def longest_draft(text: ReplayableText) -> int:
    """Most tokens that ``text.window`` can draft: what its ``longest_draft`` says, or all that are left.

    >>> from types import SimpleNamespace
    >>> longest_draft(SimpleNamespace(experts=np.zeros((9, 2, 1))))
    9
    """
    return int(getattr(text, "longest_draft", len(text.experts)))


class Relabelled:
    """The same text with the experts of each layer renamed by a permutation drawn with ``seed``: it breaks all ties otherwise.

    ``counts``: experts of each layer. What doesn't depend on ties comes out the same for every seed.

    >>> from types import SimpleNamespace
    >>> text = SimpleNamespace(experts=np.array([[[0, 1]]]), gate=np.array([[[-1, -1]]]))
    >>> sorted(Relabelled(text, [2], seed=3).experts[0, 0].tolist())
    [0, 1]
    """

    def __init__(self, text: ReplayableText, counts: Sequence[int], *, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._names = np.full((len(counts), max(counts) + 1), -1)  # the last column is that of -1, which stays
        for layer, count in enumerate(counts):
            self._names[layer, :count] = rng.permutation(count)
        self.text, self.longest_draft = text, longest_draft(text)
        self.experts, self.gate = self._renamed(text.experts), self._renamed(text.gate)

    def window(self, start: int, length: int) -> ReplayWindow:
        """The text's own window, renamed."""
        window: Any = self.text.window(start, length)
        draft, needed = self._renamed(window.draft), self._renamed(window.needed)
        return SimpleNamespace(draft=draft, needed=needed, accepted=window.accepted)

    def _renamed(self, ids: np.ndarray) -> np.ndarray:
        return self._names[np.arange(ids.shape[1])[:, None], ids]


class ShapeStore:
    """Experts without bytes: ``sizes[layer]`` each, nothing is allocated or copied.

    >>> ShapeStore(experts=(8, 8), sizes=(1000, 1000)).blob_bytes(1)
    1000
    """

    def __init__(self, experts: Sequence[int], sizes: Sequence[int], name: str = "shapes only") -> None:
        self._experts, self._sizes, self.name = tuple(experts), tuple(sizes), name

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self._experts)

    @property
    def nbytes(self) -> int:
        """What all experts would take."""
        return sum(n * size for n, size in zip(self._experts, self._sizes, strict=True))

    def experts(self, layer: int) -> int:
        """Number of experts of that layer."""
        return self._experts[layer]

    def blob_bytes(self, layer: int) -> int:
        """Size of one expert."""
        return self._sizes[layer]

    def blob(self, key: ExpertKey) -> None:
        """No bytes."""

    def weights(self, layer: int, blob: Tensor | None) -> dict[str, Tensor]:
        """No tensors."""
        return {}

    def own_weights(self, key: ExpertKey) -> dict[str, Tensor]:
        """No tensors."""
        return {}


class ResidualShapes(ShapeStore):
    """Residual or compressed experts without bytes, ``rebuilt`` to so many each: rebuilding is charged, and gives nothing."""

    def __init__(self, experts: Sequence[int], sizes: Sequence[int], rebuilt: Sequence[int], name: str) -> None:
        super().__init__(experts, sizes, name)
        self._rebuilt = tuple(rebuilt)

    def rebuild(self, key: ExpertKey, blob: Tensor, out: Tensor | None = None) -> dict[str, Tensor]:
        """No tensors."""
        return {}

    def rebuilt_bytes(self, layer: int) -> int:
        """The full-precision expert."""
        return self._rebuilt[layer]


class ReplayTarget:
    """Stands for a model in a pipeline that replays: its shape, and routers that answer from the text at hand.

    ``geometry`` counts bytes in ``dtype``. ``store``: what the host holds, where it isn't that. ``bits`` a weight of draft
    formats, where they aren't optimum-quanto's: codes, and for each group of 128 (rows for 8 bits) a scale and a shift of 2 bytes.
    ``fingerprint``: of the model that it stands for, if of one; then a text recorded from another is refused.

    >>> import specter_lab as sl
    >>> geometry = sl.load_moe("tiny-moe").geometry
    >>> target = ReplayTarget(geometry)
    >>> target.quantize("qint4").nbytes < target.store.nbytes
    True
    """

    def __init__(
        self,
        geometry: Geometry,
        name: str = "",
        *,
        dtype: torch.dtype = torch.bfloat16,
        store: ShapeStore | None = None,
        bits: Mapping[str, float] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.fingerprint = fingerprint
        self.bits = {"qint8": 8.125, "qint4": 4.25, "qint2": 2.25, "qfloat8": 8.125, **(bits or {})}
        self.geometry, self.name = geometry, name or geometry.model_type
        self.layers = geometry.layers
        self.store = store or ShapeStore(geometry.experts, geometry.expert_bytes, f"{str(dtype).removeprefix('torch.')} (shapes only)")
        self.dtype, self.device = dtype, "meta"
        self._text: ReplayableText | None = None

    @property
    def text(self) -> ReplayableText | None:
        """What is being replayed; ``ValueError`` for a text of another model."""
        return self._text

    @text.setter
    def text(self, text: ReplayableText) -> None:
        refuse_other_model(text, self)
        self._text = text

    def quantize(self, format: str = "qint4") -> ShapeStore:
        """A draft bank's sizes."""
        if format not in self.bits:
            raise ValueError(f"A draft format is one of {', '.join(self.bits)}; got {format!r}. Give one of them.")
        return ShapeStore(self.geometry.experts, self._sizes(self.bits[format]), f"{format} (shapes only)")

    def residuals(self, bank: ShapeStore, bits: float = 8.6) -> ResidualShapes:
        """Residual sizes: 8.6 bits a weight by default, what the format takes beside qint4 codes on Gaussian weights, padded."""
        rebuilt = [self.store.blob_bytes(layer) for layer in range(self.layers)]
        return ResidualShapes(self.geometry.experts, self._sizes(bits), rebuilt, f"residual of {bank.name}")

    def compressed(self, bits: float = 11.25) -> ResidualShapes:
        """Sizes of experts compressed by themselves: 11.2 bits a weight on Gaussian weights (``CompressedBank``), padded."""
        rebuilt = [self.store.blob_bytes(layer) for layer in range(self.layers)]
        return ResidualShapes(self.geometry.experts, self._sizes(bits), rebuilt, f"{self.store.name} compressed")

    def _sizes(self, bits: float) -> list[int]:
        """Bytes of each layer's experts at so many bits a weight."""
        return [int(size / self.dtype.itemsize * bits / 8) for size in self.geometry.expert_bytes]

    def route(self, layer: int, hidden: Tensor) -> Tensor:
        """What that layer's router would have said one layer early; ``hidden`` holds the rows' places in the text.

        Nothing is known of a wrong token's row (place -1): its picks are -1, since the text has those of the right one.
        """
        assert self.text is not None
        picked = torch.from_numpy(self.text.gate[hidden.numpy(), layer].astype(np.int64))
        return torch.where((hidden < 0)[:, None], -1, picked)

    def lease(self) -> None:
        """Nothing to attach."""

    def release(self) -> None:
        """Nothing to put back."""


def refuse_other_model(recorded: Any, target: Any) -> None:
    """``ValueError`` for routing (a text or log with ``experts``) that isn't of the target's model: its layers, experts,
    ranks, model type or fingerprint differ, as far as both have them.

    >>> import specter_lab as sl; from types import SimpleNamespace
    >>> refuse_other_model(SimpleNamespace(experts=np.zeros((5, 8, 4))), sl.load_moe("tiny-moe"))
    """
    geometry, experts, wrong = target.geometry, recorded.experts, []
    kind = getattr(recorded, "model_type", geometry.model_type)
    if experts.shape[1] != geometry.layers or experts.shape[2] > geometry.experts_per_token:
        wrong.append(f"{experts.shape[1]} layers of {experts.shape[2]} a token, not {geometry.layers} of {geometry.experts_per_token}")
    elif len(experts) and experts.max() >= max(geometry.experts):
        wrong.append(f"expert {int(experts.max())}, where a layer has {max(geometry.experts)}")
    if kind != geometry.model_type and not kind.startswith("synthetic"):
        wrong.append(f"model type {kind!r}, not {geometry.model_type!r}")
    own, other = getattr(target, "fingerprint", ""), getattr(recorded, "fingerprint", "")
    if own and other and own != other:
        wrong.append(f"fingerprint {other}, not {own}")
    if wrong:
        raise ValueError(f"Recorded routing is used with its own model; this has {'; '.join(wrong)} of {target.name}. Record it again.")


class Replayed:
    """A ``Text`` that grows as recorded: ``prompt_tokens`` at once, then up to ``new_tokens``."""

    def __init__(self, text: ReplayableText, machine: Machine, *, prompt_tokens: int, new_tokens: int) -> None:
        most = len(text.experts) - prompt_tokens
        if prompt_tokens < 1 or not 1 <= new_tokens <= most:
            raise ValueError(
                f"A replay needs a prompt and between 1 and {max(most, 0)} new tokens from a text of {len(text.experts)}; "
                f"got {prompt_tokens} and {new_tokens}. Shorten them or sample a longer text."
            )
        self.text, self.machine = text, machine
        self.prompt_tokens, self.end = prompt_tokens, prompt_tokens + new_tokens
        self.committed = prompt_tokens
        self._begun, self._streams = self.position, False

    @property
    def position(self) -> int:
        """The last committed token's place."""
        return self.committed - 1

    def left(self) -> int:
        """How many tokens may still come."""
        return self.end - self.committed

    def prefill(self, server: OffloadServer) -> Committed:
        """The prompt's rows, then the first token."""
        self._pass(self.text.experts[: self.prompt_tokens], 0, server)
        self.committed += 1
        self._begun = self.position
        return Committed(1, 0, finished=self.left() == 0)

    @property
    def longest_draft(self) -> int:
        """Most tokens of a stream, as for a model, if the text knows as many."""
        return min(LONGEST, longest_draft(self.text))

    @property
    def last_token(self) -> int:
        """A text's tokens are its places: what a draft proposes wrongly is -1."""
        return self.position

    def draft(self, step: int, length: int) -> Iterator[DraftToken]:
        """One draft step a token, at the draft lane's cost."""
        return (piece for piece in self._pieces(lambda: step, length) if piece is not None)

    def stream(self, step: Callable[[], int]) -> Pieces:
        """The same on and on: what comes after a window that held is still far from where the draft began."""
        self._begun, self._streams = self.position, True
        return self._pieces(step, self.longest_draft)

    def _pieces(self, step: Callable[[], int], length: int) -> Pieces:
        begin, window = self.position, self.text.window(self.position, length)
        for horizon, row in enumerate(window.draft):
            experts = torch.from_numpy(row.astype(np.int64))
            for layer in range(experts.shape[0]):
                self.machine.compute("draft", "attention", step=step(), layer=layer, tokens=1)
                self.machine.compute("draft", "expert", step=step(), layer=layer, tokens=experts.shape[1], experts=experts.shape[1])
                yield None
            self.machine.compute("draft", "head", step=step(), tokens=1)
            place = begin + horizon
            token = place + 1 if horizon < window.accepted else -1
            yield DraftToken(token, place, routing=Routing(place, tuple(experts[:, None].unbind()), ()))

    def verify(self, step: int, drafted: Sequence[DraftToken], server: OffloadServer) -> Committed:
        """One pass over the window, which may lie behind others of the same draft; what holds is committed."""
        before = self.position - self._begun
        window = self.text.window(self._begun, before + len(drafted))
        accepted = window.accepted - before
        self._pass(window.needed[before:], self.position, server, known=accepted + 1)
        kept = min(accepted + 1, self.left())
        self.committed += kept
        if not self._streams:
            self._begun = self.position
        return Committed(kept, accepted, finished=self.left() == 0)

    def _pass(self, rows: np.ndarray, begin: int, server: OffloadServer, known: int | None = None) -> None:
        """(positions, layers, experts_per_token): one call a layer. Rows from ``known`` on are wrong tokens: their place is -1."""
        places = torch.arange(begin, begin + len(rows)).clamp_max(len(self.text.experts) - 1)
        if known is not None:
            places[known:] = -1
        for layer in range(rows.shape[1]):
            picked = np.ascontiguousarray(rows[:, layer], dtype=np.int64)
            needed, counts = np.unique(picked, return_counts=True)
            call = LayerCall(layer, torch.from_numpy(picked), None, places, tuple(needed.tolist()), tuple(counts.tolist()))
            server.serve(call, lambda expert, tensors: None)
        self.machine.compute("target", "head", step=server.step, tokens=len(rows))
