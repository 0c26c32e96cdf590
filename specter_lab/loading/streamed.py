"""A checkpoint opened to be taken apart: the skeleton from it into memory, the experts from it wherever they are to go."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.utils.logging import is_progress_bar_enabled

from specter_lab.loading.checkpoint import Checkpoint
from specter_lab.loading.experts import CheckpointExperts
from specter_lab.loading.host_memory import available_bytes
from specter_lab.loading.skeleton import build_skeleton, fill_skeleton, meta_twin
from specter_lab.quantize import ExpertBank

_ON_DISK = "Keep the experts on disk: specter_lab.prepare_moe(name, folder) once, then load_moe(folder, mapped=True)."


class StreamedModel:
    """A model that is still on disk: ``config``, ``twin`` (all of it on meta), ``checkpoint`` and ``experts``.

    Arguments as in ``load_moe``. Raises ``ValueError`` for a checkpoint that is broken, incomplete, or in a quantised
    format other than MXFP4.

    >>> from specter_lab.bundled import bundled_model
    >>> with StreamedModel(bundled_model()) as streamed: streamed.experts.layers, streamed.experts.format.name
    (8, 'bfloat16')
    """

    def __init__(
        self,
        name: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        revision: str | None = None,
        dequantize: bool = False,
    ) -> None:
        self.name, self.revision, self.device = str(name), revision, single_device(device_map)
        self.config: Any = AutoConfig.from_pretrained(self.name, revision=revision, trust_remote_code=False)
        self.config.name_or_path = self.name
        method = quantization_method(self.config)
        if method not in (None, "mxfp4"):
            raise ValueError(
                f"Streaming reads plain float weights and MXFP4; {self.name!r} is quantised with {method!r}. "
                "Take a checkpoint that isn't, or load it whole with stream=False."
            )
        if method is not None:
            del self.config.quantization_config  # what leaves here is not quantised as transformers understands it
        self.checkpoint = Checkpoint(self.name, revision)
        try:
            self.twin = meta_twin(self.config, self._dtype(dtype))
            self.experts = CheckpointExperts(self.checkpoint, self.twin, dequantize)
        except BaseException:
            self.checkpoint.close()
            raise

    @property
    def skeleton_bytes(self) -> int:
        """Host bytes of everything but the experts."""
        skip = self.experts.names | set(self.twin.all_tied_weights_keys)
        tensors = [t for name, t in self.twin.state_dict().items() if name not in skip]
        return sum(t.numel() * t.element_size() for t in tensors) if self.device.type == "cpu" else 0

    def refuse_if_too_large(self, experts_bytes: int | None = None, how: str = "", way_out: str = _ON_DISK) -> None:
        """``ValueError`` if skeleton and experts don't fit in the host memory that is free now: call it before reading them.

        The experts as ``store`` holds them, or ``experts_bytes``, held ``how``.
        """
        if experts_bytes is None:
            experts_bytes, how = self.experts.nbytes(), f"as {self.experts.format.name}"
        needed, available = self.skeleton_bytes + experts_bytes, available_bytes()
        if needed > available:
            raise ValueError(
                f"A model must fit in free host memory; {self.name!r} takes {needed:,} bytes ({experts_bytes:,} for its experts, {how}, "
                f"{self.skeleton_bytes:,} for the rest), {available:,} are free. {way_out}"
            )

    def skeleton(self) -> Any:
        """The model in evaluation mode, its experts on meta, everything else read."""
        model = build_skeleton(self.config, self.twin, self.device)
        fill_skeleton(model, self.checkpoint, self.experts.names, self.experts.keys, self.device)
        with contextlib.suppress(OSError):  # there is none: the model has made one of its config
            model.generation_config = GenerationConfig.from_pretrained(self.name, revision=self.revision or "main")
        return model

    def store(self) -> ExpertBank:
        """The experts in memory, in the narrowest format that loses nothing."""
        return ExpertBank.pack(self.experts, self.experts.format, progress=is_progress_bar_enabled())

    def close(self) -> None:
        """Close the checkpoint. Idempotent."""
        self.checkpoint.close()

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _dtype(self, asked: str | torch.dtype) -> torch.dtype:
        if isinstance(asked, torch.dtype):
            return asked
        if asked == "auto":
            stored = [
                dtype for key in self.checkpoint.keys if (dtype := self.checkpoint.dtype(key)) is not None and dtype.is_floating_point
            ]
            return self.config.dtype or (stored[0] if stored else torch.get_default_dtype())
        dtype = getattr(torch, asked, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"A dtype is 'auto' or a torch dtype's name; got {asked!r}. Give for instance 'float32' or 'bfloat16'.")
        return dtype


def quantization_method(config: Any) -> str | None:
    """How a config says its checkpoint is quantised, if it is.

    >>> from transformers import MixtralConfig
    >>> quantization_method(MixtralConfig(quantization_config={"quant_method": "mxfp4"}))
    'mxfp4'
    """
    said = getattr(config, "quantization_config", None)
    method = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def should_stream(name: str, revision: str | None = None) -> bool:
    """Whether loading ``name`` whole is unwise: its files take over half of the free host memory, or hold MXFP4.

    False too if they can't be looked at; loading then says why.

    >>> from specter_lab.bundled import bundled_model
    >>> should_stream(str(bundled_model()))
    False
    """
    try:
        if quantization_method(AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)) == "mxfp4":
            return True
        with Checkpoint(name, revision) as checkpoint:
            return 2 * checkpoint.nbytes > available_bytes()
    except (OSError, ValueError, KeyError):
        return False


def refuse_unpacking(name: str, dtype: str | torch.dtype = "auto", revision: str | None = None) -> None:
    """``ValueError`` if ``name`` holds MXFP4 and transformers' way of loading it, all unpacked, doesn't fit in memory.

    >>> from specter_lab.bundled import bundled_model
    >>> refuse_unpacking(str(bundled_model()))
    """
    if quantization_method(AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)) != "mxfp4":
        return
    with StreamedModel(name, dtype=dtype, revision=revision) as streamed:
        wide = streamed.experts.nbytes(streamed.twin.dtype)
        how = f"unpacked from {streamed.experts.nbytes():,} of MXFP4"
        streamed.refuse_if_too_large(wide, how, "Leave stream=False out: the experts then stay packed.")


def single_device(device_map: Any) -> torch.device:
    """The one device that a ``device_map`` names; "auto" is the first GPU if there is one.

    >>> single_device({"": "cpu"})
    device(type='cpu')
    """
    places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
    if len(places) != 1:
        raise ValueError(
            f"Apart from its experts, a streamed model lies on one device; the device_map names {len(places)}: {sorted(map(str, places))}. "
            "Give one, such as 'cpu' or 'cuda', or load the model whole with stream=False."
        )
    (place,) = places
    if place is None or place == "auto":
        place = "cuda" if place == "auto" and torch.cuda.is_available() else "cpu"
    return torch.device(place)
