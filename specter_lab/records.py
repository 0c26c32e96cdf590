"""What flows: one frozen record for each thing that one piece hands to another.

Units stand in field names (``_us``, ``_bytes``, ``_gb_s``; 1 GB = 10**9 bytes). ``layer`` always counts the
*MoE* layers from 0, without dense ones; ``Geometry.decoder_layers`` translates it to the decoder's own count.
No record has behaviour beyond itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class ExpertKey(NamedTuple):
    """The unit of transfer and residency: one routed expert of one MoE layer.

    >>> ExpertKey(layer=3, expert=17)
    ExpertKey(layer=3, expert=17)
    """

    layer: int
    expert: int


@dataclass(frozen=True)
class Geometry:
    """The shape of a MoE model, read from its modules.

    Sequences have one entry for each MoE layer; ``*_bytes`` are of the loaded dtype.

    >>> import specter_lab as sl
    >>> sl.load_moe("tiny-moe").geometry.experts[0]
    24
    """

    model_type: str
    decoder_layers: tuple[int, ...]
    dense_layers: int
    experts: tuple[int, ...]
    experts_per_token: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    expert_bytes: tuple[int, ...]
    shared_expert_bytes: int
    non_expert_bytes: int
    kv_bytes_per_token: int

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.experts)


@dataclass(frozen=True)
class Routing:
    """Which experts the routers picked in one forward (``weights`` is empty in a replay).

    ``experts[layer]`` and ``weights[layer]`` have shape (positions, experts_per_token); ``position`` is the
    place in the sequence of their first row.

    >>> import torch
    >>> Routing(0, (torch.tensor([[3, 1]]),), (torch.tensor([[0.7, 0.3]]),)).positions
    1
    """

    position: int
    experts: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]

    @property
    def positions(self) -> int:
        """Number of rows (tokens) of this forward."""
        return self.experts[0].shape[0] if self.experts else 0


@dataclass(frozen=True)
class DraftToken:
    """One proposed token, handed on as soon as it exists.

    ``position`` is the place of the *input* token whose routing this is, so ``token`` itself goes to
    ``position + 1``. ``probs`` (vocabulary,) is what the token was drawn from: None when it was the arg-max or
    came from no model. ``routing`` is None for a drafter without experts.

    >>> DraftToken(token=7, position=12).token
    7
    """

    token: int
    position: int
    probs: Tensor | None = None
    routing: Routing | None = None


@dataclass(frozen=True)
class Prediction:
    """A guess that the pass of ``step`` needs ``key`` for the token at ``position`` (-1: for any of it), with its probability.

    ``horizon`` counts tokens between the last committed position and ``position`` (0 = the token at hand).

    >>> Prediction(step=1, position=20, key=ExpertKey(0, 3), probability=0.9, horizon=2).horizon
    2
    """

    step: int
    position: int
    key: ExpertKey
    probability: float
    horizon: int = 0


@dataclass(frozen=True)
class Transfer:
    """One expert on its way over the link: ``source`` bytes go to ``destination``, a slot of the device.

    ``reason`` is "demand" (the router asked), "prefetch" (a prediction did) or "fill" (for a free slot). Both tensors are flat uint8 of
    ``bytes`` elements, or None in a replay without weights. ``mapped``: the source lies in a file, and is read from the
    disk or the system's cache of it when it is touched.

    >>> Transfer(request_id=0, key=ExpertKey(0, 3), bytes=64, reason="demand", step=0, slot=1).reason
    'demand'
    """

    request_id: int
    key: ExpertKey
    bytes: int
    reason: str
    step: int
    slot: int
    position: int = -1
    source: Tensor | None = field(default=None, repr=False, compare=False)
    destination: Tensor | None = field(default=None, repr=False, compare=False)
    mapped: bool = False


@dataclass(frozen=True)
class LayerCall:
    """What one MoE layer asks for in one forward.

    ``experts``: (positions, experts_per_token) ids, ``weights`` likewise (None in a replay), ``hidden``: (positions, hidden_size)
    the input of router and experts (in a replay (positions,) places in the text). ``needed``: the distinct experts in id
    order, and ``rows`` how many positions use each of them.

    >>> import torch
    >>> LayerCall(0, torch.tensor([[2, 5]]), torch.ones(1, 2), torch.zeros(1, 8), needed=(2, 5), rows=(1, 1)).needed
    (2, 5)
    """

    layer: int
    experts: Tensor
    weights: Tensor | None
    hidden: Tensor
    needed: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Verification:
    """The outcome of one verification pass: how many drafts hold, and all tokens that may be committed.

    ``tokens`` = the accepted drafts and then one token of the target's own.

    >>> Verification(accepted=2, tokens=(5, 9, 4)).tokens[-1]
    4
    """

    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class DeviceBytes:
    """Who holds how many bytes of device memory; the sum is what "equal memory" compares.

    >>> DeviceBytes(non_expert=10, draft=5, slots=20, buffers=1, kv=4).total
    40
    """

    non_expert: int
    draft: int
    slots: int
    buffers: int
    kv: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.non_expert + self.draft + self.slots + self.buffers + self.kv

    def as_dict(self) -> dict[str, int]:
        """The parts and their total, by name."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Conditions:
    """Everything a figure depends on: it stands beside each result.

    >>> Conditions(values={"machine": "simulated"})["machine"]
    'simulated'
    """

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.values.items())

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(str(name))}</th><td style='text-align:left'>{escape(str(value))}</td></tr>"
            for name, value in self.values.items()
        )
        return f"<table><caption>Conditions</caption>{rows}</table>"
