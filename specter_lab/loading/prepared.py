"""Prepared models: a skeleton, its experts as a bank, draft banks and the tokenizer in one folder, opened without conversion."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from specter_lab.loading.folder import read_manifest, replace_content
from specter_lab.loading.host_memory import available_bytes
from specter_lab.loading.skeleton import build_skeleton, meta_twin
from specter_lab.loading.streamed import single_device
from specter_lab.quantize import ExpertBank, Format, format_named
from specter_lab.seam import experts_modules

_SKELETON = "skeleton.safetensors"
_VERSION = 1
_AGAIN = "Prepare the model again."


def write_prepared(
    folder: str | os.PathLike[str],
    model: Any,
    *,
    name: str,
    revision: str | None,
    dtype: torch.dtype,
    experts: Callable[[Path, Mapping[str, Any]], None],
    drafts: Iterable[ExpertBank] = (),
    tokenizer: Any = None,
) -> None:
    """Write everything but the experts of ``model``; ``experts(folder, fingerprint)`` writes those.

    An older prepared model in ``folder`` is replaced at once or not at all. ``ValueError`` if ``model`` isn't what its
    config makes, or isn't in memory.

    >>> import specter_lab as sl, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sl.load_moe("tiny-moe").save_prepared(folder)
    ...     sl.load_moe(folder).store.name
    'bfloat16'
    """
    config = model.config
    twin = meta_twin(config, dtype)
    _refuse_other_layout(f"{name!r} as its config makes it", _layout(twin), _layout(model), "Save a model that wasn't changed by hand.")
    tensors, aliases = _skeleton_of(model)
    fingerprint = {
        "model": name,
        "revision": revision or getattr(config, "_commit_hash", None),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": _digest(_layout(twin)),
        "transformers": _transformers(),
    }

    def write(data: Path) -> dict[str, Any]:
        config.save_pretrained(data)
        model.generation_config.save_pretrained(data)
        if tokenizer is not None:
            tokenizer.save_pretrained(data)
        save_file(tensors, data / _SKELETON, metadata={"format": "pt"})
        experts(data / "experts", fingerprint)
        formats = []
        for i, bank in enumerate(drafts):
            bank.save(data / f"draft-{i}", fingerprint)
            formats.append({"name": bank.format.name, "group_size": getattr(bank.format, "group_size", None)})
        attention = config._attn_implementation  # not part of a saved config, and another one rounds otherwise
        return {"version": _VERSION, "fingerprint": fingerprint, "aliases": aliases, "drafts": formats, "attention": attention}

    replace_content(folder, write)


class PreparedModel:
    """A prepared folder, checked against what is asked for and installed: ``model``, ``store`` and ``drafts`` are read on call.

    ``dtype`` and ``revision`` must be those it was prepared with, unless "auto" and None. ``ValueError`` names what
    differs, or what is missing.

    >>> import specter_lab as sl, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sl.load_moe("tiny-moe").save_prepared(folder)
    ...     PreparedModel(folder).fingerprint["model"]
    'tiny-moe'
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, dtype: str | torch.dtype = "auto", device_map: Any = None, revision: str | None = None
    ) -> None:
        self.folder, self._manifest = read_manifest(folder)
        self.device = single_device(device_map)
        if self._manifest.get("version") != _VERSION:
            raise ValueError(
                f"A prepared folder must have version {_VERSION}; {str(folder)!r} has {self._manifest.get('version')}. {_AGAIN}"
            )
        self.fingerprint: dict[str, Any] = self._manifest["fingerprint"]
        self._config: Any = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        self._config._attn_implementation = self._manifest["attention"]
        self._twin = meta_twin(self._config, getattr(torch, self.fingerprint["dtype"]))
        here = {"transformers": _transformers(), "layout": _digest(_layout(self._twin))}
        here |= {} if dtype == "auto" else {"dtype": str(dtype).removeprefix("torch.")}
        here |= {} if revision is None else {"revision": revision}
        differing = [
            f"{key} (prepared {self.fingerprint[key]!r}, here {value!r})" for key, value in here.items() if self.fingerprint[key] != value
        ]
        if differing:
            raise ValueError(
                f"A prepared model must be used as it was prepared; {str(folder)!r} differs in {'; '.join(differing)}. {_AGAIN}"
            )

    def model(self) -> Any:
        """In evaluation mode, with experts on meta."""
        model = build_skeleton(self._config, self._twin, self.device)
        experts, aliases = _expert_names(model), self._manifest["aliases"]
        path = self.folder / _SKELETON
        try:
            with safe_open(path, framework="pt", device=str(self.device), backend="pread") as file:
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"A prepared folder must hold a whole {_SKELETON}; {path} can't be read ({error}). {_AGAIN}") from error
        want = {name: shape for name, shape in _layout(model).items() if name not in experts and name not in aliases}
        _refuse_other_layout(str(path), want, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, _AGAIN)
        model.load_state_dict(tensors, strict=False, assign=True)
        for alias, name in aliases.items():
            _set(model, alias, _get(model, name))
        model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model

    def store(self, mapped: bool = False) -> ExpertBank:
        """The experts, in memory or left in their file. ``ValueError`` if memory can't hold them."""
        needed, available = sum(file.stat().st_size for file in (self.folder / "experts").glob("*")), available_bytes()
        if not mapped and needed > available:
            raise ValueError(
                f"A store must fit in free host memory; that of {str(self.folder)!r} takes {needed:,} bytes, {available:,} are free. "
                "Leave the experts on disk: load_moe(folder, mapped=True)."
            )
        return ExpertBank.load(self.folder / "experts", self.fingerprint, mapped=mapped)

    @property
    def drafts(self) -> dict[Format, Callable[[], ExpertBank]]:
        """Each draft bank's format, and what loads it."""
        formats = [format_named(**said) for said in self._manifest["drafts"]]
        return {form: partial(ExpertBank.load, self.folder / f"draft-{i}", self.fingerprint) for i, form in enumerate(formats)}


def _expert_names(model: Any) -> set[str]:
    return {f"{path}.{name}" for path, module in experts_modules(model).items() for name in module._parameters}


def _layout(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _digest(layout: Mapping[str, tuple[int, ...]]) -> str:
    return hashlib.sha256(repr(sorted(layout.items())).encode()).hexdigest()[:16]


def _transformers() -> str:
    return ".".join(version("transformers").split(".")[:2])  # layouts don't change in a patch release


def _refuse_other_layout(what: str, want: Mapping[str, tuple[int, ...]], got: Mapping[str, tuple[int, ...]], way_out: str) -> None:
    missing, extra = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
    shapes = sorted(name for name in want.keys() & got.keys() if want[name] != got[name])
    if missing or extra or shapes:
        parts = [
            f"{label}: {', '.join(names)}"
            for label, names in (("missing", missing), ("extra", extra), ("of another shape", shapes))
            if names
        ]
        raise ValueError(f"A prepared model must have the tensors of {what}; {'; '.join(parts)}. {way_out}")


def _skeleton_of(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors but the experts', each once, and the other names that some of them have."""
    experts = _expert_names(model)
    name_of: dict[int, str] = {}  # by object: tensors on meta all have the same address
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in experts:
            continue
        if id(tensor) in name_of:
            aliases[name] = name_of[id(tensor)]
            continue
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
            raise ValueError(
                f"A prepared skeleton is made of plain tensors in memory; {name} is a {type(tensor).__name__} on {tensor.device}. "
                "Load the model without quantisation, and without offloading parts of it."
            )
        name_of[id(tensor)] = name
        tensors[name] = tensor.detach().cpu().contiguous()
    return tensors, aliases


def _get(model: Any, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def _set(model: Any, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)
