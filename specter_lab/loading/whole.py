"""A model loaded by transformers itself, whole or not at all."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM


def load_whole(path: str, name: str, **options: Any) -> Any:
    """A causal language model in evaluation mode; ``ValueError`` unless every weight was there.

    >>> from specter_lab.bundled import bundled_model
    >>> load_whole(str(bundled_model()), "tiny-moe", dtype="float32").dtype
    torch.float32
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
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
    return model.eval()
