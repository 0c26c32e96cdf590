"""A transformers MoE taken apart: its geometry, its routers, and its experts moved to a host store.

Nothing here knows a model by name: layers and experts are read from the modules, the rest from a small probe forward.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specter_lab.accumulation import sum_dtypes
from specter_lab.geometry import geometry_of, refuse_absent, refuse_unsupported, routers_of
from specter_lab.hosting import HostedExperts
from specter_lab.loading.prepared import write_prepared
from specter_lab.probe import probe
from specter_lab.quantize import Dense, ExpertBank, format_named, narrowest_exact_dtype
from specter_lab.quantize.compressed import CompressedBank
from specter_lab.quantize.residual import ResidualBank
from specter_lab.routers import Routers
from specter_lab.seam import ExpertsSeam


class MoE(HostedExperts):
    """A transformers MoE that specter_lab can take apart, and put back exactly.

    ``attach`` moves the routed experts into ``store`` (host memory) and leaves ``meta`` parameters in the modules;
    ``detach`` restores the same parameter objects, values and configs. As a context manager it does both. A pipeline
    attaches by itself, and detaches when the last one is closed. ``rollback`` is empty if drafts can be taken back from the
    model's cache, and else says why not: such a model decodes without a drafter only.

    >>> import specter_lab as sl
    >>> sl.load_moe("tiny-moe")
    MoE(tiny-moe: qwen3_moe, 8 MoE layers, 24 experts, 4 a token, bfloat16)
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        refuse_unsupported(model, name)
        refuse_absent(model, name, experts=False)
        super().__init__(model, ExpertsSeam(model))
        self.tokenizer, self.name = tokenizer, name
        self.routers = Routers(model, routers_of(model))
        seen = probe(model, self.seam, self.routers)
        self.geometry = geometry_of(model, self.seam, seen)
        self.routers.learn(seen.routers)
        self.seam.routers = self.routers
        self.seam.sum_dtypes = sum_dtypes(self.seam, seen.calls)
        self.rollback, self.cache_copied = seen.rollback, seen.copied

    def route(self, layer: int, hidden: Tensor) -> Tensor:
        """(positions, hidden_size) -> (positions, experts_per_token): that MoE layer's own router on these states."""
        return self.routers.pick(layer, hidden)

    def quantize(self, format: str = "qint4", group_size: int | None = None) -> ExpertBank:
        """A low-bit bank of all routed experts, for a draft: "qint8", "qint4", "qint2" or "qfloat8"."""
        wanted = format_named(format, group_size)
        bank = self._drafts[wanted]() if wanted in self._drafts else ExpertBank.pack(self, wanted)
        return bank.to(self.device) if self.device.type == "cuda" else bank

    def residuals(self, bank: ExpertBank) -> ResidualBank:
        """What is missing beside ``bank``'s codes (qint4 or qint8) to rebuild every expert bit for bit; while attached."""
        return ResidualBank.build(self.store, bank)

    def compressed(self) -> CompressedBank:
        """Every expert losslessly compressed, for a pipeline without codes (bfloat16 experts); while attached."""
        return CompressedBank(self.store)

    def save_prepared(self, folder: str | os.PathLike[str], drafts: Iterable[ExpertBank] = ()) -> None:
        """Write the model, its experts and these draft banks to ``folder``, for ``load_moe(folder)``; an older one there is
        replaced at once or not at all. ``ValueError`` for a model that its config doesn't describe."""

        def experts(data: Path, fingerprint: Mapping[str, Any]) -> None:
            if self._store is not None:
                self._store.save(data, fingerprint)
            else:
                ExpertBank.pack_to(data, self, Dense(narrowest_exact_dtype(self)), fingerprint)

        write_prepared(
            folder, self.model, name=self.name, revision=None, dtype=self.dtype, experts=experts, drafts=drafts, tokenizer=self.tokenizer
        )

    def own_generate(self, ids: Tensor, **options: Any) -> Tensor:
        """The model's own ``generate`` with eager experts on (1, tokens) ids: the reference for losslessness."""
        if self.seam.attached:
            raise RuntimeError(
                f"The model's own generate needs its experts in place; {self!r} is attached. Close its pipelines or detach() first."
            )
        before = self.model.config._experts_implementation
        self.model.set_experts_implementation("eager")
        try:
            return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        finally:
            self.model.set_experts_implementation(before)

    def __repr__(self) -> str:
        g = self.geometry
        experts = sorted(set(g.experts))
        return (
            f"MoE({self.name}: {g.model_type}, {g.layers} MoE layers, {'/'.join(map(str, experts))} experts, "
            f"{g.experts_per_token} a token, {str(self.dtype).removeprefix('torch.')})"
        )
