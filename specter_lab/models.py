"""Open a transformers MoE: its geometry, its routers, and its experts moved to a host store.

Nothing here knows a model by name: layers and experts are read from the modules, widths and KV bytes from one
probe forward of a single token.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from specter_lab.bundled import bundled_model
from specter_lab.quantize import Dense, ExpertBank, format_named, narrowest_exact_dtype
from specter_lab.records import ExpertKey, Geometry
from specter_lab.seam import ExpertsSeam, experts_modules

BUNDLED = "tiny-moe"


def load_moe(
    name_or_path_or_model: str | Path | nn.Module,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    revision: str | None = None,
    tokenizer: Any = None,
) -> MoE:
    """Open a mixture-of-experts language model.

    ``name_or_path_or_model``: "tiny-moe" (bundled), a folder, a hub id, or a transformers model object.
    ``dtype``: as in ``from_pretrained``; "float32" gives tokens that are provably the model's own.
    Only safetensors are read and no remote code is run. A folder without a tokenizer opens, and takes token ids.

    Raises ``ValueError`` for a dense model, experts outside transformers' registry, a broken or incomplete checkpoint.

    >>> import specter_lab as sl
    >>> sl.load_moe("tiny-moe", dtype="float32").geometry.experts_per_token
    4
    """
    if isinstance(name_or_path_or_model, nn.Module):
        return MoE(name_or_path_or_model, tokenizer, str(getattr(name_or_path_or_model.config, "_name_or_path", "") or "a model object"))
    name = str(name_or_path_or_model)
    path = str(bundled_model()) if name == BUNDLED else name
    if path == name and (name.startswith((".", "/", "~")) or Path(name).exists()) and not Path(name, "config.json").is_file():
        raise ValueError(
            f"A model folder holds config.json and safetensors; {name!r} has no config.json. "
            f"Give such a folder, a hub id, or {BUNDLED!r} for the bundled model."
        )
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
    if tokenizer is None and (path != name or Path(path).is_dir() is False or any(Path(path).glob("tokenizer*"))):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    return MoE(model.eval(), tokenizer, name)


class MoE:
    """A transformers MoE that specter_lab can take apart, and put back exactly.

    ``attach`` moves the routed experts into ``store`` (host memory) and leaves ``meta`` parameters in the modules;
    ``detach`` restores the same parameter objects, values and configs. As a context manager it does both. A pipeline
    attaches by itself, and detaches when the last one is closed.

    >>> import specter_lab as sl
    >>> sl.load_moe("tiny-moe")
    MoE(tiny-moe: qwen3_moe, 8 MoE layers, 24 experts, 4 a token, bfloat16)
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        _refuse_unsupported(model, name)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.seam = ExpertsSeam(model)
        self.geometry = _geometry(model, self.seam)
        self._routers = [_router(model, path) for path in experts_modules(model)]
        self._parts: list[ExpertBank] = []
        self._store: ExpertBank | None = None
        self._leases = 0
        self._own_attach = False

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
            self._parts.append(ExpertBank.pack(_OneLayer(self, layer), Dense(dtype)))

        try:
            self.seam.attach(take)
            self._store = ExpertBank.join(self._parts)
        except BaseException:  # also an interrupt: never a model with half of its experts
            self._put_back()
            raise
        return self

    def detach(self) -> None:
        """Put every expert back. Idempotent; ``RuntimeError`` while a pipeline still needs them out."""
        if self._leases:
            raise RuntimeError(f"A model is detached after its pipelines are closed; {self._leases} are open. Call close() on each.")
        self._put_back()

    def route(self, layer: int, hidden: Tensor) -> Tensor:
        """(positions, hidden_size) -> (positions, experts_per_token): that MoE layer's own router on these states."""
        return next(out for out in self._routers[layer](hidden) if not out.is_floating_point())

    def quantize(self, format: str = "qint4", group_size: int | None = None) -> ExpertBank:
        """A low-bit bank of all routed experts, for a draft: "qint8", "qint4", "qint2" or "qfloat8"."""
        return ExpertBank.pack(self, format_named(format, group_size))

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
        self.detach()

    def _put_back(self) -> None:
        def stacked(layer: int, name: str) -> Tensor:
            part = self._parts[layer]
            return torch.stack([part.own_weights(ExpertKey(0, e))[name] for e in range(part.experts(0))])

        self.seam.detach(stacked)
        self._parts, self._store, self._own_attach = [], None, False

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


def _refuse_unsupported(model: Any, name: str) -> None:
    if not experts_modules(model):
        config = model.config.get_text_config()
        counts = [getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")]
        if any(isinstance(n, int) and n > 1 for n in counts):
            raise ValueError(
                f"Experts must be dispatched through transformers' experts registry; those of {config.model_type} ({name}) aren't, "
                f"so nothing can be put between router and experts. Use a model type whose experts class is decorated for it."
            )
        raise ValueError(
            f"specter_lab offloads routed experts; {config.model_type} ({name}) has none (a dense model). "
            f"Use a mixture-of-experts model, for instance {BUNDLED!r}."
        )
    if model.training:
        raise ValueError(f"Inference needs a model in evaluation mode; {name} is in training mode. Call model.eval() first.")


def _router(model: nn.Module, experts_path: str) -> nn.Module:
    parent = model.get_submodule(experts_path.rpartition(".")[0])
    found = [child for name, child in parent.named_children() if name in ("gate", "router")]
    if not found:
        raise ValueError(
            f"A router is a child named gate or router beside the experts; {type(parent).__name__} ({experts_path}) has "
            f"{[name for name, _ in parent.named_children()]}. This architecture isn't supported."
        )
    return found[0]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def _geometry(model: Any, seam: ExpertsSeam) -> Geometry:
    paths = list(experts_modules(model))
    picked: list[int] = []
    hooks = [m.register_forward_pre_hook(lambda _m, args: picked.append(args[1].shape[-1])) for m in seam.modules]
    cache: Any = DynamicCache(config=model.config)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), cache=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    config = model.config.get_text_config()
    parents = [model.get_submodule(path.rpartition(".")[0]) for path in paths]
    experts = [p for m in seam.modules for p in m.parameters()]
    every = [*model.parameters(), *model.buffers()]
    return Geometry(
        model_type=config.model_type,
        decoder_layers=tuple(int(next(part for part in path.split(".") if part.isdigit())) for path in paths),
        dense_layers=config.num_hidden_layers - len(paths),
        experts=tuple(seam.experts(layer) for layer in range(len(paths))),
        experts_per_token=max(picked),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        expert_bytes=tuple(_bytes(seam.tensors(ExpertKey(layer, 0)).values()) for layer in range(len(paths))),
        shared_expert_bytes=_bytes(p for parent in parents for n, p in parent.named_parameters() if "shared" in n),
        non_expert_bytes=_bytes(every) - _bytes(experts),
        kv_bytes_per_token=_bytes(t for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)),
    )
