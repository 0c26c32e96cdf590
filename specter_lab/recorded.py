"""A model's own text, recorded once with what a draft would have done in it, and replayed as often as asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from specter_lab.machines.simulated import SimulatedMachine
from specter_lab.models import MoE
from specter_lab.offload.server import ResidentServer
from specter_lab.pieces import Compute, ExpertStore
from specter_lab.records import LayerCall

FORMAT = "specter_lab recorded text 1"


@dataclass(frozen=True, eq=False)
class RecordedText:
    """A replayable text: int16 ids ``experts``, ``draft``, ``gate`` (token, layer, rank), -1 where there is none.

    ``accepted`` (token,): is what the draft proposes after reading that token right? ``run`` (token,): the run of wrong tokens
    that a wrong proposal starts in that token's place, -1 where none is; ``strayed``, ``strayed_draft`` (run, row, layer,
    rank): where target and draft were routed on it. ``ids``: the text, of which the first ``prompt_tokens`` were given.
    ``fingerprint``: of the model, see ``fingerprint_of``.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: len(sl.record_text(moe, moe.quantize("qint4"), [5, 6], new_tokens=4))
    6
    """

    experts: np.ndarray
    draft: np.ndarray
    gate: np.ndarray
    accepted: np.ndarray
    run: np.ndarray
    strayed: np.ndarray
    strayed_draft: np.ndarray
    ids: np.ndarray
    prompt_tokens: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def longest_draft(self) -> int:
        """Most tokens of a window."""
        return int(self.strayed.shape[1])

    def window(self, start: int, length: int) -> Any:
        """Draft ``length`` tokens from the one at ``start``; fewer at the end. ``ValueError`` for what wasn't recorded: longer
        drafts, and those inside the prompt."""
        if start < self.prompt_tokens - 1:
            raise ValueError(
                f"Drafts were recorded after the prompt of {self.prompt_tokens} tokens; this one begins at token {start}. "
                f"Replay with prompt_tokens={self.prompt_tokens}."
            )
        if length > self.strayed.shape[1]:
            raise ValueError(
                f"Runs of {self.strayed.shape[1]} wrong tokens were recorded; a window drafts {length}. Record with longest_draft={length}."
            )
        length = min(length, len(self) - 1 - start)
        draft, needed = self.draft[start : start + length], self.experts[start : start + length + 1]
        right = self.accepted[start : start + length]
        if right.all():
            return SimpleNamespace(draft=draft, needed=needed, accepted=length)
        accepted = int(right.argmin())
        run, wrong = self.run[start + accepted + 1], length - accepted
        needed = np.concatenate([needed[: accepted + 1], self.strayed[run, :wrong]])
        draft = np.concatenate([draft[: accepted + 1], self.strayed_draft[run, : wrong - 1]])
        return SimpleNamespace(draft=draft, needed=needed, accepted=accepted)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file that ``load`` reads back."""
        arrays = {f.name: np.ascontiguousarray(getattr(self, f.name)) for f in fields(self) if f.type == "np.ndarray"}
        about = {"prompt_tokens": self.prompt_tokens, "fingerprint": self.fingerprint}
        save_file(arrays, path, metadata={"format": FORMAT, "about": json.dumps(about)})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> RecordedText:
        """Read what ``save`` wrote; ``ValueError`` for anything else, also of another version."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
                return cls(**{name: file.get_tensor(name) for name in file.keys()}, **json.loads(metadata["about"]))  # noqa: SIM118
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"A recorded text is one file written by RecordedText.save: {path} is not ({error}). Record it again."
            ) from error


def fingerprint_of(moe: MoE) -> str:
    """Changes with the model's shape, and with any of its weights outside the experts.

    >>> import specter_lab as sl
    >>> fingerprint_of(sl.load_moe("tiny-moe")) == fingerprint_of(sl.load_moe("tiny-moe"))
    True
    """
    digest = hashlib.sha256(json.dumps([moe.geometry.model_type, moe.geometry.experts, moe.geometry.hidden_size]).encode())
    for name, tensor in sorted(moe.model.state_dict().items()):
        if not tensor.is_meta and "experts." not in name:
            digest.update(name.encode() + tensor.detach().float().sum(dtype=torch.float64).numpy(force=True).tobytes())
    return digest.hexdigest()[:16]


def record_text(moe: MoE, bank: ExpertStore, prompt: str | Sequence[int], *, new_tokens: int, longest_draft: int = 16) -> RecordedText:
    """Decode ``new_tokens`` greedily from all experts, and record routing and proposals of target and draft (``bank``) on it.

    Differs from a real run: the draft reads keys and values of its own all the way, not the target's; its proposals and
    routing are those of one forward over the text, but for runs of wrong tokens, which are decoded.

    >>> import specter_lab as sl
    >>> with sl.load_moe("tiny-moe") as moe: text = record_text(moe, moe.quantize("qint4"), "Once upon", new_tokens=8)
    >>> with sl.Pipeline(sl.ReplayTarget(moe.geometry), machine=sl.SimulatedMachine()) as p:
    ...     p.replay(text, prompt_tokens=text.prompt_tokens, max_new_tokens=8).metrics["tokens"]
    8
    """
    moe.lease()
    try:
        given = moe.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        own = _Reader(moe, moe.store, guess=True)
        logits = own.read(given)
        ids = list(given)
        for _ in range(new_tokens):
            ids.append(int(logits[-1].argmax()))
            logits = own.read(ids[-1:])
        other = _Reader(moe, bank)
        proposed = other.read(ids).argmax(-1)
        accepted = np.append((proposed[:-1] == torch.tensor(ids[1:])).numpy(), True)
        accepted[: len(given) - 1] = True  # nothing is drafted inside the prompt
        experts, draft = own.routing(), other.routing()
        gate = np.full_like(experts, -1)
        for layer in range(1, moe.layers):
            gate[:, layer] = torch.cat(own.guesses[layer]).numpy()
        run = np.full(len(ids), -1)
        strays: list[tuple[np.ndarray, np.ndarray]] = []
        for place in reversed(np.flatnonzero(~accepted).tolist()):
            run[place + 1] = len(strays)
            strays.append(_stray(own, other, place + 1, int(proposed[place]), longest_draft))
        empty = np.zeros((0, longest_draft, *experts.shape[1:]), dtype=np.int16)
        strayed, strayed_draft = (np.stack(side) if side else empty for side in (list(zip(*strays, strict=True)) or [(), ()]))
    finally:
        moe.release()
    return RecordedText(
        experts, draft, gate, accepted, run, strayed, strayed_draft, np.array(ids), len(given), fingerprint_of(moe)
    )  # fmt: skip


def _stray(own: _Reader, other: _Reader, place: int, token: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The run of ``rows`` tokens that the wrong ``token`` starts at ``place``: (row, layer, rank) of target and draft."""
    for reader in (own, other):
        reader.rewind(place)
    tokens = [token]
    for _ in range(rows):
        tokens.append(int(other.read(tokens[-1:])[-1].argmax()))
    own.read(tokens[:rows])
    return own.routing(), other.routing()


class _Reader(ResidentServer):
    """A model with the experts of one bank, its cache, and the layer calls since the last rewind.

    ``guess``: also ask each layer's router about the input of the layer before, and keep that in ``guesses``.
    """

    def __init__(self, moe: MoE, bank: ExpertStore, guess: bool = False) -> None:
        super().__init__(bank, SimulatedMachine(), "target", 0)
        self.moe, self.guess = moe, guess
        self.cache: Any = None
        self.calls: list[Any] = []
        self.guesses: list[list[Tensor]] = [[] for _ in range(moe.layers)]

    def serve(self, call: LayerCall, compute: Compute) -> None:
        """As a bank that is all there; asked ahead, where that is wanted."""
        if self.guess and call.layer + 1 < self.moe.layers:
            self.guesses[call.layer + 1].append(self.moe.route(call.layer + 1, call.hidden).cpu())
        super().serve(call, compute)

    def read(self, ids: Sequence[int]) -> Tensor:
        """(tokens, vocabulary) logits."""
        with torch.no_grad(), self.moe.seam.serving(self) as calls:
            out = self.moe.model(input_ids=torch.tensor([list(ids)], device=self.moe.device), cache=self.cache, use_cache=True)
        self.cache = out.cache
        self.calls += calls
        return out.logits[0].float().cpu()

    def rewind(self, length: int) -> None:
        """Forget what was read after ``length`` tokens."""
        if length < self.cache.get_seq_length():
            self.cache.crop(length - self.cache.get_seq_length())
        self.calls, self.guess = [], False

    def routing(self) -> np.ndarray:
        """(token, layer, rank) int16 of the calls so far."""
        layers = [torch.cat([call.experts.cpu() for call in self.calls if call.layer == layer]) for layer in range(self.moe.layers)]
        return torch.stack(layers, dim=1).numpy().astype(np.int16)
