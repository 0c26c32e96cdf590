"""A draft from another model, with weights and a KV cache of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specter_lab.bundled import bundled_model
from specter_lab.loading.prepare import load_tokenizer
from specter_lab.loading.whole import load_whole
from specter_lab.pieces import DraftContext
from specter_lab.probe import roll_back
from specter_lab.records import DraftToken
from specter_lab.speculate.follower import Follower
from specter_lab.speculate.vocabulary import SharedTokens, Words, match

if TYPE_CHECKING:
    from specter_lab.models import MoE
    from specter_lab.replay import ReplayTarget


class SeparateDrafter:
    """A causal language model of transformers, dense or not, that drafts for ``target``.

    ``draft``: "tiny-moe", a folder, a hub id, or a model object. ``dtype``, ``device`` (the target's by default) and
    ``revision`` are for a draft that is loaded here; ``tokenizer`` is the draft's, if it doesn't come with one. On its own
    KV cache the draft reads the prompt in the first step, then what was committed; what was rejected is cropped.

    Both must cut text into the same tokens; ids may differ, and so may padding and added tokens: one that the draft doesn't have
    has probability 0 in it and isn't read by it, one that the target doesn't have isn't proposed. With no tokenizer on one
    side, equal ids count as equal tokens. Verification makes tokens the target's own in any case.

    Tokens carry routing if the draft is of the target's model type, with as many experts in as many MoE layers; otherwise
    ``no_routing`` says why not, and predictors that read it are refused. On the target's kind of device, weights and cache count
    as device memory. On a simulated machine each decoder layer of a dense draft costs an attention segment of the draft's lane.
    With a ``ReplayTarget`` the draft is only counted.

    Raises ``ValueError`` for another tokenizer, for a cache that can't be rolled back, and for the target itself.

    Source: Leviathan et al. (arXiv 2211.17192), section 2.1.

    >>> import specter_lab as sl
    >>> sl.SeparateDrafter("tiny-moe", sl.load_moe("tiny-moe"), dtype="float32").name
    'separate draft (tiny-moe, float32)'
    """

    def __init__(
        self,
        draft: str | Path | nn.Module,
        target: MoE | ReplayTarget,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        revision: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        model: Any
        here = torch.device("cpu" if target.device == "meta" else target.device)  # a replay has no device
        if isinstance(draft, nn.Module):
            given = {name: value for name, value in (("dtype", dtype), ("device", device), ("revision", revision)) if value is not None}
            if given:
                raise TypeError(
                    f"dtype, device and revision are for a draft that is loaded; got {given} with a {type(draft).__name__}. "
                    "Leave them out, or convert the model with .to()."
                )
            model, name = draft, str(getattr(draft.config, "_name_or_path", "") or type(draft).__name__)
        else:
            name = str(draft)
            path = str(bundled_model()) if name == "tiny-moe" else name
            model = load_whole(path, name, dtype=dtype or "auto", revision=revision).to(device or here)
            tokenizer = tokenizer or load_tokenizer(path, revision)
        _refuse_model(model, name, target)
        self.target: Any = target
        self.name = f"separate draft ({name}, {str(model.dtype).removeprefix('torch.')})"
        vocabulary, kv_bytes = _tried(model, name)
        ids = match(Words(target.name, getattr(target, "tokenizer", None), target.geometry.vocab_size), Words(name, tokenizer, vocabulary))
        self.tokens = SharedTokens(ids.to(model.device))
        self.follower: Any = Follower(model)
        self.no_routing = self._other_experts(name)
        self.most_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        beside = model.device.type == here.type
        weights = {id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
        self.weight_bytes = sum(weights.values()) if beside else 0
        self.kv_bytes_per_token = kv_bytes if beside else 0

    def new_request(self) -> None:
        """An empty cache."""
        self.follower.forget()

    def draft(self, context: DraftContext, length: int) -> Iterator[DraftToken]:
        """One forward a token, up to what the draft's positions allow; stops after an end-of-sequence token."""
        text = self.tokens.read(context.ids[0].tolist())
        if self.most_positions is not None:
            length = min(length, self.most_positions - len(text) + 1)
        if not text or length < 1:
            return
        self.follower.rewind(text)
        unread = text[len(self.follower.read) :]
        prefix: list[int] = []
        for _ in range(length):
            position = context.ids.shape[1] - 1 + len(prefix)
            logits, routing = self.follower.advance(unread, context, position)
            token, probs = context.choose(self.tokens.logits(logits).to(context.ids.device), prefix)
            prefix.append(token)
            yield DraftToken(token, position, probs=probs, routing=None if self.no_routing else routing)
            unread = self.tokens.read([token])
            if token in context.end_tokens or not unread:
                return

    def learn(self, drafted: Sequence[DraftToken], accepted: int) -> None:
        """Nothing to learn: the next step compares what it read with what was committed."""

    def close(self) -> None:
        """Give up the cache. Idempotent; the drafter can be used again."""
        self.follower.forget()

    def _other_experts(self, name: str) -> str:
        """How the draft's experts differ from the target's; empty if they don't."""
        kind, geometry = self.follower.model.config.get_text_config().model_type, self.target.geometry
        if not self.follower.counts:
            return f"{name} ({kind}) is dense"
        if (kind, tuple(self.follower.counts)) == (geometry.model_type, geometry.experts):
            return ""
        return (
            f"{name} ({kind}, {len(self.follower.counts)} MoE layers of {max(self.follower.counts)} experts) is of another family "
            f"than {self.target.name} ({geometry.model_type}, {geometry.layers} of {max(geometry.experts)})"
        )


def _refuse_model(model: Any, name: str, target: Any) -> None:
    """``ValueError`` for a model that can't run beside the target."""
    if model is getattr(target, "model", None):
        raise ValueError(
            f"A separate draft has weights of its own; {name} is the target itself. Use SelfDrafter(target.quantize('qint4'))."
        )
    absent = sum(p.is_meta for p in model.parameters())
    if absent:
        raise ValueError(
            f"A draft holds all its weights; {absent} tensors of {name} are on the meta device. Load it, or detach() it, first."
        )
    if model.training:
        raise ValueError(f"Drafting needs a model in evaluation mode; {name} is in training mode. Call model.eval() first.")


def _tried(model: Any, name: str) -> tuple[int, int]:
    """The ids it can read and score, and what a token adds to its cache; ``ValueError`` if the cache can't roll back."""
    ids = torch.tensor([[0, 1]], device=model.device)
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache = getattr(out, "cache", None)
        grown, why = roll_back(model, cache, ids) if cache is not None else (0, "it has none")
    if why:
        raise ValueError(
            f"Rejected drafts are taken back from the draft's cache; that of {name} can't be rolled back: {why}. "
            "Use a draft whose layers are all attention, or PromptLookupDrafter."
        )
    return min(int(out.logits.shape[-1]), int(model.get_input_embeddings().weight.shape[0])), grown
