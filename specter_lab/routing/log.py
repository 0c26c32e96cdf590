"""The routing log: which experts the routers picked, token by token, and what can be counted from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "specter_lab routing log 1"


@dataclass(frozen=True, eq=False)
class RoutingLog:
    """Recorded router choices, one row for each token that was fed in.

    ``experts`` (token, layer, rank) int64 ids, -1 where a layer picks fewer experts or skipped one; ``weights``
    (token, layer, rank) float32, what the experts' outputs were multiplied with (the router's own, so already
    normalised if it normalises), 0 where the id is -1. ``tokens``, ``positions``, ``forwards`` (token,) int64: the
    token id fed in (-1 if embeddings were), its place in the sequence, the forward it came in. ``expert_counts`` and
    ``decoder_layers`` have one entry for each MoE layer: its experts, and its number among all decoder layers.

    Raises ``ValueError`` when shapes, dtypes or ids don't fit together.

    >>> ids = torch.tensor([[[0, 2]], [[2, 3]]])
    >>> RoutingLog(ids, torch.ones(2, 1, 2), torch.tensor([7, 9]), torch.arange(2), torch.zeros(2, dtype=torch.int64), (4,), (0,), "toy")
    RoutingLog(toy: 2 tokens, 1 forward, 1 MoE layer, 4 experts, up to 2 a token)
    """

    experts: Tensor
    weights: Tensor
    tokens: Tensor
    positions: Tensor
    forwards: Tensor
    expert_counts: tuple[int, ...]
    decoder_layers: tuple[int, ...]
    model_type: str

    def __post_init__(self) -> None:
        shape, rows = tuple(self.experts.shape), (self.experts.shape[0],) if self.experts.ndim else ()
        wrong = []
        for name, dtype, want in (
            ("experts", torch.int64, shape if len(shape) == 3 else ("token", "layer", "rank")),
            ("weights", torch.float32, shape),
            ("tokens", torch.int64, rows),
            ("positions", torch.int64, rows),
            ("forwards", torch.int64, rows),
        ):
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tuple(tensor.shape) != want:
                wrong.append(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {want}")
        layers = shape[1] if len(shape) == 3 else 0
        for name in ("expert_counts", "decoder_layers"):
            if len(getattr(self, name)) != layers:
                wrong.append(f"{name} has {len(getattr(self, name))} entries for {layers} layers")
        if not wrong and len(self):
            counts = torch.tensor(self.expert_counts)[None, :, None]
            outside = (self.experts < -1) | (self.experts >= counts)
            if outside.any():
                wrong.append(f"{int(outside.sum())} expert ids lie outside -1 .. {self.expert_counts}")
        if wrong:
            raise ValueError(
                "A routing log needs tensors of one length that agree with its layers: "
                + "; ".join(wrong)
                + ". Let RouterRecorder build it, or make them fit."
            )

    def __len__(self) -> int:
        return int(self.experts.shape[0])

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.expert_counts)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file (ids as int32) that ``load`` reads back; returns its path."""
        about = {"model_type": self.model_type, "expert_counts": self.expert_counts, "decoder_layers": self.decoder_layers}
        tensors = {name: getattr(self, name).contiguous() for name in ("weights", "tokens", "positions", "forwards")}
        save_file({"experts": self.experts.to(torch.int32), **tensors}, path, metadata={"format": FORMAT, "about": json.dumps(about)})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> RoutingLog:
        """Read what ``save`` wrote. ``ValueError`` when the file is cut off, foreign or inconsistent."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
                tensors = {name: file.get_tensor(name) for name in ("experts", "weights", "tokens", "positions", "forwards")}
            about = json.loads(metadata["about"])
            counts, layers = (tuple(int(n) for n in about[name]) for name in ("expert_counts", "decoder_layers"))
            if tensors["experts"].dtype == torch.int32:  # any other dtype is for the check of the record to refuse
                tensors["experts"] = tensors["experts"].to(torch.int64)
            return cls(**tensors, expert_counts=counts, decoder_layers=layers, model_type=str(about["model_type"]))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"A routing log is one complete file written by RoutingLog.save: {path} is not ({error}). "
                "Record it again, or fetch the file again."
            ) from error

    def frame(self) -> pd.DataFrame:
        """Long form, a row for each pick: token (row of the log), position, forward, layer, rank, expert, weight, token_id."""
        token, layer, rank = torch.nonzero(self.experts >= 0, as_tuple=True)
        columns = {
            "token": token,
            "position": self.positions[token],
            "forward": self.forwards[token],
            "layer": layer,
            "rank": rank,
            "expert": self.experts[token, layer, rank],
            "weight": self.weights[token, layer, rank],
            "token_id": self.tokens[token],
        }
        return pd.DataFrame({name: column.numpy() for name, column in columns.items()})

    def reuse(self) -> pd.DataFrame:
        """How probably an expert used at one token is used at the next: layer, pairs (of tokens), reuse, chance.

        ``chance`` is what independent uniform routing would give. Only tokens that follow each other in their
        sequence make a pair; without any, ``reuse`` is NaN.
        """
        runs = _runs(self.positions)
        follows = runs[1:] == runs[:-1]
        rows = []
        for layer, used in enumerate(self._used()):
            now, then = used[:-1][follows], used[1:][follows]
            picks = int(now.sum())
            expected = float((now.sum(1) * then.sum(1)).sum()) / self.expert_counts[layer]
            again = int((now & then).sum())
            rows.append((layer, int(follows.sum()), *((again / picks, expected / picks) if picks else (float("nan"), float("nan")))))
        return pd.DataFrame.from_records(rows, columns=["layer", "pairs", "reuse", "chance"])

    def union_growth(self, windows: Sequence[int] = (1, 2, 4, 8, 16)) -> pd.DataFrame:
        """How many distinct experts a window of consecutive tokens needs: layer, window, samples, experts, chance.

        ``experts`` is the mean over all ``samples`` windows inside unbroken sequences, NaN if none is that long;
        ``chance`` is E (1 - (1 - k/E)^window), with k the layer's mean picks a token. ``ValueError`` for a window
        below 1.
        """
        if any(window < 1 for window in windows):
            raise ValueError(f"A window has at least one token; windows is {tuple(windows)}. Leave out what is below 1.")
        runs = _runs(self.positions)
        rows = []
        for layer, used in enumerate(self._used()):
            count = self.expert_counts[layer]
            picks = float(used.sum()) / max(1, len(self))
            union, width = used, 1
            for window in sorted(set(windows)):
                while width < window and union.shape[0]:  # one shifted OR for each further token
                    union, width = union[:-1] | used[width:], width + 1
                whole = runs[window - 1 :] == runs[: max(0, len(self) - window + 1)]
                sizes = union[whole].sum(1) if window <= len(self) else union.new_zeros(0)
                mean = float(sizes.double().mean()) if len(sizes) else float("nan")
                rows.append((layer, window, len(sizes), mean, count * (1 - (1 - picks / count) ** window)))
        return pd.DataFrame.from_records(rows, columns=["layer", "window", "samples", "experts", "chance"])

    def _used(self) -> Iterator[Tensor]:
        """For each layer (token, expert) bool: does the token use the expert?"""
        for layer, count in enumerate(self.expert_counts):
            ids = self.experts[:, layer]
            used = torch.zeros(len(self), count + 1, dtype=torch.bool)
            yield used.scatter_(1, torch.where(ids < 0, count, ids), True)[:, :count]  # the last column takes the padding

    def _summary(self) -> dict[str, str]:
        forwards = len(torch.unique(self.forwards))
        low, high = min(self.expert_counts, default=0), max(self.expert_counts, default=0)
        return {
            "tokens": str(len(self)),
            "forwards": str(forwards),
            "MoE layers": str(self.layers),
            "experts a layer": str(high) if low == high else f"{low} to {high}",
            "experts a token": f"up to {self.experts.shape[2]}",
        }

    def __repr__(self) -> str:
        tokens, forwards, layers, experts, picks = self._summary().values()
        names = [f"{n} {word}{'' if n == '1' else 's'}" for n, word in ((tokens, "token"), (forwards, "forward"), (layers, "MoE layer"))]
        return f"RoutingLog({self.model_type}: {', '.join(names)}, {experts} experts, {picks} a token)"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self._summary().items())
        return f"<table><caption>Routing log of {escape(self.model_type)}</caption>{rows}</table>"


def _runs(positions: Tensor) -> Tensor:
    """(token,) the number of the unbroken stretch of positions that each row belongs to."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), (positions.diff() != 1).cumsum(0)])[: len(positions)]
