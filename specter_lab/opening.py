"""Opening a mixture-of-experts model, wherever it is: bundled, a folder, a hub id, or a model object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from specter_lab.bundled import bundled_model
from specter_lab.geometry import refuse_unsupported
from specter_lab.loading.folder import is_prepared
from specter_lab.loading.prepare import load_tokenizer
from specter_lab.loading.prepared import PreparedModel
from specter_lab.loading.streamed import StreamedModel, refuse_unpacking, should_stream
from specter_lab.loading.whole import load_whole
from specter_lab.models import MoE

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
    ``dtype``: as in ``from_pretrained``. In "float32", greedy tokens are the model's own (tested, not proved); in half
    precision a run may leave them where two tokens are as near as rounding is large: ``divergence`` says where.
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
    model = load_whole(path, name, dtype=dtype, device_map=device_map, revision=revision)
    return MoE(model, tokenizer or load_tokenizer(path, revision), name)
