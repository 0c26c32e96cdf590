"""One file for one bank: a safetensors file whose header also holds everything that isn't bytes.

One file instead of two, since replacing one file is atomic: a crash leaves the old bank or the new one, never a mix.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE = "bank.safetensors"
VERSION = 1
_KEY = "specter_lab"


def write_bank(folder: str | os.PathLike[str], header: Mapping[str, Any], layers: list[Tensor], fingerprint: Mapping[str, Any]) -> None:
    """Write ``folder``/bank.safetensors: ``layers`` (CPU, uint8) and a JSON header. An old file stays until the new one is whole.

    Raises TypeError if the fingerprint isn't JSON.

    >>> import tempfile
    >>> write_bank(tempfile.mkdtemp(), {}, [torch.zeros(1, 64, dtype=torch.uint8)], {})
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        text = json.dumps({"version": VERSION, "fingerprint": fingerprint, "crc32": [_checksum(rows) for rows in layers], **header})
    except TypeError as error:
        raise TypeError(f"A fingerprint must be JSON (strings, numbers, lists, dicts); {error}: turn it into a string") from error
    temporary = folder / f"{FILE}.{os.getpid()}.tmp"
    try:
        save_file(
            {f"layer.{i}": rows for i, rows in enumerate(layers)}, temporary, metadata={_KEY: text, "crc32": str(zlib.crc32(text.encode()))}
        )
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # else a power cut could leave the new name on bytes that never reached the disk
        os.replace(temporary, folder / FILE)
    finally:
        temporary.unlink(missing_ok=True)


def read_bank(folder: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], Iterator[Tensor]]:
    """The header of ``folder``/bank.safetensors, and its layers one after the other (their sizes aren't checked).

    ValueError names what is wrong: no such file, not whole, another version, another fingerprint (which entries),
    layers missing or too many, changed bytes (when that layer is read).

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> write_bank(folder, {"format": "qint8"}, [], {"model": "tiny-moe"})
    >>> read_bank(folder, {"model": "tiny-moe"})[0]["format"]
    'qint8'
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"A saved bank is a folder with {FILE}; there is none in {str(folder)!r}: save one with bank.save(folder)")
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
    return header, _layers(path, header["crc32"])


_AGAIN = "pack the bank again and save it anew"


def _layers(path: Path, checksums: list[int]) -> Iterator[Tensor]:
    with safe_open(path, framework="pt") as file:
        for i, checksum in enumerate(checksums):
            stored = file.get_tensor(f"layer.{i}")
            rows = torch.empty_like(stored).copy_(stored)  # the file's own bytes lie at any alignment
            if rows.dtype != torch.uint8 or _checksum(rows) != checksum:
                raise ValueError(f"{path} must hold the bytes that were saved; those of layer {i} have changed: {_AGAIN}")
            yield rows


def _checksum(rows: Tensor) -> int:
    return zlib.crc32(rows.numpy().data)


def _compare(path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    differing = [
        f"{name} (saved {saved.get(name, 'nothing')!r}, asked for {asked.get(name, 'nothing')!r})"
        for name in sorted({*saved, *asked})
        if saved.get(name, _MISSING) != asked.get(name, _MISSING)
    ]
    if differing:
        raise ValueError(f"A bank must fit the model it is loaded for; {path} differs in {'; '.join(differing)}: {_AGAIN}")


_MISSING = object()
