"""Open a transformers MoE: its geometry, its routers, and its experts moved to a host store.

Nothing here knows a model by name: layers and experts are read from the modules, the rest from a small probe forward.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specter_lab.accumulation import sum_dtypes
from specter_lab.bundled import bundled_model
from specter_lab.geometry import geometry_of, refuse_unsupported, routers_of
from specter_lab.loading.folder import is_prepared
from specter_lab.loading.host_memory import available_bytes
from specter_lab.loading.prepare import load_tokenizer
from specter_lab.loading.prepared import PreparedModel, write_prepared
from specter_lab.loading.streamed import StreamedModel, refuse_unpacking, should_stream
from specter_lab.probe import probe
from specter_lab.quantize import Dense, ExpertBank, Format, format_named, narrowest_exact_dtype
from specter_lab.quantize.residual import ResidualBank
from specter_lab.records import ExpertKey
from specter_lab.routers import Routers
from specter_lab.seam import ExpertsSeam

BUNDLED = "tiny-moe"


def load_moe(
    name_or_path_or_model: str | Path | nn.Module,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    revision: str | None = None,
    tokenizer: Any = None,
    stream: bool | None = None,
    mapped: bool = False,
    dequantize: bool = False,
) -> MoE:
    """Open a mixture-of-experts language model.

    ``name_or_path_or_model``: "tiny-moe" (bundled), a folder, a hub id, or a transformers model object.
    ``dtype``: as in ``from_pretrained``; "float32" gives tokens that are provably the model's own.
    Only safetensors are read and no remote code is run. A folder without a tokenizer opens, and takes token ids.

    ``stream``: the experts go from the checkpoint straight into the host store, and the model is attached from the
    start. By default so if the files take over half of the free host memory, or hold MXFP4: such experts stay packed,
    unless ``dequantize``. ``mapped``: the experts of a prepared folder (see ``prepare_moe``) stay on disk.

    Raises ``ValueError`` for a dense model, experts outside transformers' registry, a broken or incomplete checkpoint.

    >>> import specter_lab as sl
    >>> sl.load_moe("tiny-moe", dtype="float32").geometry.experts_per_token
    4
    """
    if isinstance(name_or_path_or_model, nn.Module):
        return MoE(name_or_path_or_model, tokenizer, str(getattr(name_or_path_or_model.config, "_name_or_path", "") or "a model object"))
    name = str(name_or_path_or_model)
    path = str(bundled_model()) if name == BUNDLED else name
    if is_prepared(path):
        prepared = PreparedModel(path, dtype=dtype, device_map=device_map, revision=revision)
        moe = MoE(prepared.model(), tokenizer or load_tokenizer(str(prepared.folder)), prepared.fingerprint["model"])
        return moe.adopt(prepared.store(mapped), prepared.drafts)
    if path == name and (name.startswith((".", "/", "~")) or Path(name).exists()) and not Path(name, "config.json").is_file():
        raise ValueError(
            f"A model folder holds config.json and safetensors; {name!r} has no config.json. "
            f"Give such a folder, a hub id, or {BUNDLED!r} for the bundled model."
        )
    if mapped:
        raise ValueError(
            f"Experts are mapped from a prepared folder; {name!r} is a checkpoint, where they don't lie in one piece. "
            "Call prepare_moe(name, folder) once, then load_moe(folder, mapped=True)."
        )
    if stream or (stream is None and should_stream(path, revision)):
        with StreamedModel(path, dtype=dtype, device_map=device_map, revision=revision, dequantize=dequantize) as streamed:
            refuse_unsupported(streamed.twin, name)
            streamed.refuse_if_too_large()
            moe = MoE(streamed.skeleton(), tokenizer or load_tokenizer(path, revision), name)
            return moe.adopt(streamed.store())
    if stream is False:
        refuse_unpacking(path, dtype, revision)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            device_map=device_map,
            revision=revision,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise ValueError(
            f"Weights must be whole safetensors files; those of {name!r} can't be read ({error}). Copy or download the checkpoint again."
        ) from error
    except RuntimeError as error:  # transformers couldn't turn the stored tensors into its own
        raise ValueError(
            f"A checkpoint must hold every weight of its model, in its shape; {name!r} doesn't: {error} Copy or download it again."
        ) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        raise ValueError(
            f"A checkpoint must hold every weight of its model; {name!r} lacks {len(missing)} ({', '.join(missing[:3])}, ...) and has "
            f"{len(info['mismatched_keys'])} of another shape. Copy or download it again; weights are never made up."
        )
    return MoE(model.eval(), tokenizer or load_tokenizer(path, revision), name)


class MoE:
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
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.seam, self.routers = ExpertsSeam(model), Routers(model, routers_of(model))
        seen = probe(model, self.seam, self.routers)
        self.geometry = geometry_of(model, self.seam, seen)
        self.routers.learn(seen.routers)
        self.seam.routers = self.routers
        self.seam.sum_dtypes = sum_dtypes(self.seam, seen.calls)
        self.rollback = seen.rollback
        self._parts: list[ExpertBank] = []
        self._store: ExpertBank | None = None
        self._leases = 0
        self._own_attach = False
        self._streamed = False
        self._drafts: Mapping[Format, Callable[[], ExpertBank]] = {}

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return self.geometry.layers

    @property
    def store(self) -> ExpertBank:
        """The host's full-precision experts; there while attached."""
        if self._store is None:
            raise RuntimeError(f"The host store exists while a model is attached; {self!r} isn't. Call attach(), or use it in a pipeline.")
        return self._store

    def attach(self) -> MoE:
        """Move the experts out of the model; ``RuntimeError`` if they are out already."""
        self.seam.refuse_second()
        dtype = narrowest_exact_dtype(self)

        def take(layer: int) -> None:
            part = ExpertBank.pack(_OneLayer(self, layer), Dense(dtype))
            self._parts.append(part.to("cpu").page_locked() if self.device.type == "cuda" else part)

        try:
            self.seam.attach(take)
            self._store = ExpertBank.join(self._parts)
        except BaseException:  # also an interrupt: never a model with half of its experts
            self._put_back()
            raise
        return self

    def adopt(self, store: ExpertBank, drafts: Mapping[Format, Callable[[], ExpertBank]] | None = None) -> MoE:
        """Attach with a store that is there already: for a model whose experts are on meta. ``drafts`` load saved draft banks."""
        self._parts = store.split()
        self.seam.attach(lambda layer: None)
        self._store, self._drafts, self._streamed = store, drafts or {}, True
        return self

    def detach(self) -> None:
        """Put every expert back. Idempotent; ``RuntimeError`` while a pipeline still needs them out, or for want of memory."""
        if self._leases:
            raise RuntimeError(f"A model is detached after its pipelines are closed; {self._leases} are open. Call close() on each.")
        needed, available = sum(map(operator.mul, self.geometry.experts, self.geometry.expert_bytes)), available_bytes()
        if self._streamed and needed > available:
            raise RuntimeError(
                f"Detaching puts all experts into the model, beside the store; that takes {needed:,} bytes here, {available:,} are free. "
                "Keep it attached: pipelines need no more than the store."
            )
        self._put_back()

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

    # The three methods that make a MoE a source of experts for ExpertBank.pack.
    def experts(self, layer: int) -> int:
        """Number of routed experts of that MoE layer."""
        return self.geometry.experts[layer]

    def tensors(self, key: ExpertKey) -> dict[str, Tensor]:
        """One expert's tensors, in the model's dtype."""
        if self._store is None:
            return self.seam.tensors(key)
        return {name: tensor.to(self.dtype) for name, tensor in self._store.own_weights(key).items()}

    def transposed(self, layer: int) -> bool:
        """Whether that layer's weights are (in, out)."""
        return bool(self.seam.modules[layer].is_transposed)

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

    def lease(self) -> None:
        """A pipeline begins to use the store: attached if it wasn't."""
        if not self.seam.attached:
            self.attach()
            self._own_attach = True
        self._leases += 1

    def release(self) -> None:
        """A pipeline is closed: the last one of an automatic attach detaches."""
        self._leases -= 1
        if not self._leases and self._own_attach:
            self.detach()

    def __enter__(self) -> MoE:
        return self if self.seam.attached else self.attach()

    def __exit__(self, *exception: object) -> None:
        if not self._streamed:  # such a model was never whole, and may not fit
            self.detach()

    def _put_back(self) -> None:
        def stacked(layer: int, name: str) -> Tensor:
            part = self._parts[layer]
            return torch.stack([part.own_weights(ExpertKey(0, e))[name] for e in range(part.experts(0))])

        self.seam.detach(stacked)
        self._parts, self._store, self._own_attach, self._streamed = [], None, False, False

    def __repr__(self) -> str:
        g = self.geometry
        experts = sorted(set(g.experts))
        return (
            f"MoE({self.name}: {g.model_type}, {g.layers} MoE layers, {'/'.join(map(str, experts))} experts, "
            f"{g.experts_per_token} a token, {str(self.dtype).removeprefix('torch.')})"
        )


class _OneLayer:
    """One layer of a MoE as a source of its own, so that packing can empty the model layer by layer."""

    layers = 1

    def __init__(self, moe: MoE, layer: int) -> None:
        self.moe, self.layer = moe, layer

    def experts(self, layer: int) -> int:
        return self.moe.seam.experts(self.layer)

    def tensors(self, key: ExpertKey) -> dict[str, Tensor]:
        return self.moe.seam.tensors(ExpertKey(self.layer, key.expert))

    def transposed(self, layer: int) -> bool:
        return self.moe.transposed(self.layer)
