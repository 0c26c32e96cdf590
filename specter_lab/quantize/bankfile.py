"""One file for one bank: a safetensors file whose header also holds everything that isn't bytes.

One file instead of two, since replacing one file is atomic: a crash leaves the old bank or the new one, never a mix.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FILE = "bank.safetensors"
VERSION = 1
_KEY = "specter_lab"
_PAGE = 4096  # the bytes of the layers start on a page: mapped, they are as aligned as in memory


def write_bank(
    folder: str | os.PathLike[str],
    header: Mapping[str, Any],
    layers: Sequence[tuple[tuple[int, int], Iterable[Tensor]]],
    fingerprint: Mapping[str, Any],
    name: str = FILE,
) -> None:
    """Write ``folder``/``name``: a JSON header and layers. An old file stays until the new one is whole.

    A layer is its shape (experts, bytes) and pieces (CPU, uint8) that fill it one after the other: they are asked for
    one by one, so the bank needn't be in memory. Raises TypeError if the fingerprint isn't JSON.

    >>> import tempfile
    >>> write_bank(tempfile.mkdtemp(), {}, [((2, 64), [torch.zeros(64, dtype=torch.uint8)] * 2)], {})
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = [shape for shape, _ in layers]
    try:
        room = len(_file_header(header, fingerprint, shapes, [2**32 - 1] * len(layers)))  # sums have at most these digits
    except TypeError as error:
        raise TypeError(f"A fingerprint must be JSON (strings, numbers, lists, dicts); {error}: turn it into a string") from error
    room += -room % _PAGE
    temporary = folder / f"{name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(bytes(room))
            sums = [_write_pieces(file, math.prod(shape), pieces) for shape, pieces in layers]
            file.seek(0)
            file.write(_file_header(header, fingerprint, shapes, sums, room))
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the new name on bytes that never reached the disk
        os.replace(temporary, folder / name)
    finally:
        temporary.unlink(missing_ok=True)


def _file_header(
    header: Mapping[str, Any], fingerprint: Mapping[str, Any], shapes: Sequence[tuple[int, int]], sums: list[int], room: int = 0
) -> bytes:
    """The start of a safetensors file, spaces up to ``room`` bytes included."""
    text = json.dumps({"version": VERSION, "fingerprint": fingerprint, "crc32": sums, **header})
    entries: dict[str, Any] = {"__metadata__": {_KEY: text, "crc32": str(zlib.crc32(text.encode()))}}
    ends = [0, *itertools.accumulate(math.prod(shape) for shape in shapes)]
    for i, shape in enumerate(shapes):
        entries[f"layer.{i}"] = {"dtype": "U8", "shape": list(shape), "data_offsets": ends[i : i + 2]}
    data = json.dumps(entries).encode().ljust(room - 8)
    return struct.pack("<Q", len(data)) + data


def _write_pieces(file: BinaryIO, size: int, pieces: Iterable[Tensor]) -> int:
    """Their checksum, once they are written."""
    written = checksum = 0
    for piece in pieces:
        data = piece.numpy().data
        written, checksum = written + file.write(data), zlib.crc32(data, checksum)
    if written != size:
        raise ValueError(f"A layer's pieces must fill it; {written} bytes came for {size}: give each expert once")
    return checksum


def read_bank(
    folder: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None, *, mapped: bool = False, name: str = FILE
) -> tuple[dict[str, Any], Iterator[Tensor]]:
    """The header of ``folder``/``name``, and its layers one after the other (their sizes aren't checked).

    ``mapped`` layers stay in the file: a byte is read when it is touched, is never checked, and can't be written.
    ValueError names what is wrong: no such file, not whole, another version, another fingerprint (which entries),
    layers missing or too many, changed bytes (when that layer is read).

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> write_bank(folder, {"format": "qint8"}, [], {"model": "tiny-moe"})
    >>> read_bank(folder, {"model": "tiny-moe"})[0]["format"]
    'qint8'
    """
    path = Path(folder) / name
    if not path.is_file():
        raise ValueError(f"A saved bank is a folder with {name}; there is none in {str(folder)!r}: save one with bank.save(folder)")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            header = json.loads(metadata[_KEY])
            if str(zlib.crc32(metadata[_KEY].encode())) != metadata["crc32"]:
                raise ValueError("its header has changed")
            names = set(file.keys())
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} must be a whole bank file; it can't be read ({type(error).__name__}: {error}): {_AGAIN}") from error
    if header.get("version") != VERSION:
        raise ValueError(f"A bank file must have version {VERSION}; {path} has {header.get('version')}: {_AGAIN}")
    if fingerprint is not None:
        _compare(path, header["fingerprint"], json.loads(json.dumps(fingerprint)))
    wanted = {f"layer.{i}" for i in range(len(header["crc32"]))}
    if names != wanted:
        missing, extra = ", ".join(sorted(wanted - names)) or "none", ", ".join(sorted(names - wanted)) or "none"
        raise ValueError(f"{path} must hold one tensor a layer; missing: {missing}; extra: {extra}: {_AGAIN}")
    return header, _mapped(path, len(wanted)) if mapped else _layers(path, header["crc32"])


_AGAIN = "pack the bank again and save it anew"


def _layers(path: Path, checksums: list[int]) -> Iterator[Tensor]:
    with open(path, "rb", buffering=0) as file:  # not mapped: its pages would count as memory beside the copy
        places = _places(file)
        for i, checksum in enumerate(checksums):
            start, shape, dtype = places[f"layer.{i}"]
            rows = torch.empty(shape, dtype=torch.uint8)
            file.seek(start)
            view, done = rows.view(-1).numpy().data, 0
            while done < len(view) and (got := file.readinto(view[done:])):
                done += got
            if dtype != "U8" or zlib.crc32(view) != checksum:
                raise ValueError(f"{path} must hold the bytes that were saved; those of layer {i} have changed: {_AGAIN}")
            yield rows


def _mapped(path: Path, count: int) -> Iterator[Tensor]:
    with open(path, "rb") as file:
        places = _places(file)
        # read-only: a private writable mapping would be charged as memory, and refused for a file larger than it
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*buffer is not writable")  # nobody writes to a store
        whole = torch.frombuffer(memory, dtype=torch.uint8)
    for i in range(count):
        start, shape, _ = places[f"layer.{i}"]
        yield whole[start : start + math.prod(shape)].view(shape)


def _places(file: Any) -> dict[str, tuple[int, list[int], str]]:
    """First byte, shape and dtype of each tensor of a safetensors file."""
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    return {name: (8 + length + e["data_offsets"][0], e["shape"], e["dtype"]) for name, e in header.items() if name != "__metadata__"}


def _compare(path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    differing = [
        f"{name} (saved {saved.get(name, 'nothing')!r}, asked for {asked.get(name, 'nothing')!r})"
        for name in sorted({*saved, *asked})
        if saved.get(name, _MISSING) != asked.get(name, _MISSING)
    ]
    if differing:
        raise ValueError(f"A bank must fit the model it is loaded for; {path} differs in {'; '.join(differing)}: {_AGAIN}")


_MISSING = object()
