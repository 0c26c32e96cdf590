"""From a checkpoint to a prepared folder, with no more than a few experts in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import is_progress_bar_enabled

from specter_lab.bundled import bundled_model
from specter_lab.geometry import refuse_unsupported
from specter_lab.loading.experts import CheckpointExperts
from specter_lab.loading.prepared import write_prepared
from specter_lab.loading.streamed import StreamedModel
from specter_lab.quantize import ExpertBank, Format


def prepare_moe(
    name_or_path: str | Path,
    folder: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    drafts: Sequence[Format | str] = (),
    tokenizer: Any = None,
) -> None:
    """Write ``folder`` so that ``load_moe(folder)`` opens it without conversion, or ``load_moe(folder, mapped=True)`` without reading.

    Memory holds the skeleton, a few experts and one draft bank at a time. ``drafts``: formats of draft banks to keep beside
    the experts, such as "qint4". Arguments otherwise, and errors, as for ``load_moe``.

    >>> import specter_lab as sl, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sl.prepare_moe("tiny-moe", folder, drafts=["qint4"])
    ...     sl.load_moe(folder, mapped=True)
    MoE(tiny-moe: qwen3_moe, 8 MoE layers, 24 experts, 4 a token, bfloat16)
    """
    name = str(name_or_path)
    path = str(bundled_model()) if name == "tiny-moe" else name
    with StreamedModel(path, dtype=dtype, revision=revision) as streamed:
        refuse_unsupported(streamed.twin, name)
        unpacked = CheckpointExperts(streamed.checkpoint, streamed.twin, dequantize=True)
        write_prepared(
            folder,
            streamed.skeleton(),
            name=name,
            revision=revision,
            dtype=streamed.twin.dtype,
            experts=lambda data, mark: ExpertBank.pack_to(data, streamed.experts, streamed.experts.format, mark, is_progress_bar_enabled()),
            drafts=(ExpertBank.pack(unpacked, draft) for draft in drafts),
            tokenizer=tokenizer or load_tokenizer(path, revision),
        )


def load_tokenizer(path: str, revision: str | None = None) -> Any:
    """The tokenizer of a hub id or folder; None for a folder without one.

    >>> len(load_tokenizer(str(bundled_model())))
    2048
    """
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
