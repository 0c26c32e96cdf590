"""The safetensors of one model: what tensors there are, and any one of them or a part of it, without the rest."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import dot_natural_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """A tensor in a file: its first byte there, what its header says."""

    file: BinaryIO
    start: int
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The weights of a folder or hub id, in one file or sharded, open for reading; ``keys`` are in natural order.

    What is read is a copy: nothing of the file counts as this process's memory. Raises ``OSError`` if there are no
    safetensors, ``ValueError`` for a broken or missing file.

    >>> from specter_lab.bundled import bundled_model
    >>> with Checkpoint(bundled_model()) as checkpoint: checkpoint.shape("model.norm.weight"), checkpoint.dtype("model.norm.weight")
    ((128,), torch.bfloat16)
    """

    def __init__(self, name: str | Path, revision: str | None = None) -> None:
        self.name = str(name)
        self.files = _resolve(self.name, revision)
        self.nbytes = sum(file.stat().st_size for file in self.files)
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}
        with ExitStack() as stack:
            for path in self.files:
                self._places |= _places(self.name, path, stack.enter_context(open(path, "rb", buffering=0)))
            self._stack = stack.pop_all()
        self.keys = sorted(self._places, key=dot_natural_key)

    def read(self, key: str, row: int | None = None) -> Tensor:
        """The tensor, or ``[row : row + 1]`` of its first dimension."""
        shape = self.shape(key)
        if row is None:
            return self._read([(key, 0)], shape)
        return self._read([(key, row * math.prod(shape[1:]))], (1, *shape[1:]))

    def read_joined(self, keys: Sequence[str]) -> Tensor:
        """Tensors of one dtype that differ in their first dimension at most, one below the other: as if concatenated."""
        shapes = [self.shape(key) for key in keys]
        if len({(self.dtype(key), *shape[1:]) for key, shape in zip(keys, shapes, strict=True)}) > 1:
            return torch.cat([self.read(key) for key in keys])  # which says what doesn't fit, or finds the common dtype
        return self._read([(key, 0) for key in keys], (sum(shape[0] for shape in shapes), *shapes[0][1:]))

    def _read(self, starts: Sequence[tuple[str, int]], shape: tuple[int, ...]) -> Tensor:
        """From each (key, element) on as much as there is, until ``shape`` is full."""
        dtype = self.dtype(starts[0][0])
        if dtype is None:
            key = starts[0][0]
            raise ValueError(
                f"Weights are read as plain numbers; {key} of {self.name!r} is in {self._places[key].dtype}. "
                "Take a checkpoint that isn't quantised."
            )
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        memory = _memory(math.prod(shape) * dtype.itemsize)
        view, done = memory.numpy().data, 0
        for key, element in starts:
            place = self._places[key]
            end = min(len(view), done + (math.prod(place.shape) - element) * dtype.itemsize)
            with self._lock:  # transformers reads with several threads
                place.file.seek(place.start + element * dtype.itemsize)
                while done < end:
                    got = place.file.readinto(view[done:end])  # type: ignore[attr-defined]
                    if not got:
                        raise OSError(f"A checkpoint must stay as it is while it is read; {self.name!r} became shorter. Load it again.")
                    done += got
        return memory.view(dtype).view(shape)

    def lazy(self, key: str) -> Any:
        """Something that reads the tensor when it is indexed, as safetensors' own slices do."""
        return _Lazy(self, key)

    def shape(self, key: str) -> tuple[int, ...]:
        """From the header alone."""
        return self._places[key].shape

    def dtype(self, key: str) -> torch.dtype | None:
        """From the header alone; None for what isn't plain numbers, such as eight-bit floats."""
        return _DTYPES.get(self._places[key].dtype)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Lazy:
    checkpoint: Checkpoint
    key: str

    def __getitem__(self, index: Any) -> Tensor:
        return self.checkpoint.read(self.key)[index]


def _memory(size: int) -> Tensor:
    """So many bytes. Large ones are pages of their own: the C library would keep several of them back when they are freed."""
    if size < 2**20 or os.name == "nt":
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _places(name: str, path: Path, file: BinaryIO) -> dict[str, _Place]:
    try:
        with safe_open(path, framework="pt", backend="pread"):
            pass  # it checks the header, and that the file is as long as it says
    except SafetensorError as error:
        raise ValueError(
            f"Weights must be whole safetensors files; those of {name!r} can't be read ({path.name}: {error}). "
            "Copy or download the checkpoint again."
        ) from error
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {key: _Place(file, 8 + length + said["data_offsets"][0], said["dtype"], tuple(said["shape"])) for key, said in header.items()}


def _resolve(name: str, revision: str | None) -> list[Path]:
    """Paths of all weight files, downloaded if ``name`` is a hub id."""

    def find(file: str) -> Path | None:
        found = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    whole = find(SAFE_WEIGHTS_NAME)
    if whole is not None:
        return [whole]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise OSError(
            f"Weights are read from safetensors; {name!r} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}. "
            "Take a checkpoint that has, or save it with save_pretrained."
        )
    files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    paths = {file: find(file) for file in files}
    missing = [file for file, path in paths.items() if path is None]
    if missing:
        raise ValueError(
            f"A sharded checkpoint holds every file of its index; {name!r} lacks {len(missing)} of {len(files)} "
            f"({', '.join(missing[:3])}). Copy or download it again."
        )
    return [path for path in paths.values() if path is not None]
