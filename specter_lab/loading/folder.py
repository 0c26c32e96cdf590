"""A folder whose content is replaced as a whole: a crash at any moment leaves the old content or the new."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "prepared.json"


def replace_content(folder: str | os.PathLike[str], write: Callable[[Path], Mapping[str, Any]]) -> None:
    """``write`` fills an empty folder and returns what to say about it (JSON); only then does it count.

    ``folder``/prepared.json names the subfolder that holds the content. Replacing that one small file is the only step
    that matters, and the system does it at once. ``ValueError`` if ``folder`` has files of another kind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_content(folder, lambda data: {"answer": 42})
    ...     read_manifest(folder)[1]["answer"]
    42
    """
    folder = Path(folder)
    if folder.exists() and not is_prepared(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"A prepared model is written to a new or empty folder, or over an older one; {str(folder)!r} holds something else."
        )
    data = folder / f"data-{secrets.token_hex(4)}"
    data.mkdir(parents=True)
    temporary = folder / f"{data.name}.json"
    try:
        manifest = {"data": data.name, **write(data)}
        temporary.write_text(json.dumps(manifest, indent=1), "utf-8")
        for path in [temporary, *data.rglob("*"), data, folder]:
            _sync(path)  # else a power cut could keep the new manifest and lose what it names
        os.replace(temporary, folder / MANIFEST)
        _sync(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        shutil.rmtree(data)
        raise
    for other in folder.glob("data-*"):  # the old content, and what a crash may have left
        if other.is_dir() and other != data:
            shutil.rmtree(other)


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Whether ``replace_content`` wrote it.

    >>> is_prepared("/")
    False
    """
    return (Path(folder) / MANIFEST).is_file()


def read_manifest(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The subfolder with the content, and what was said about it. ``ValueError`` if either is gone or broken.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_content(folder, lambda data: {"answer": 42})
    ...     read_manifest(folder)[0].parent == Path(folder)
    True
    """
    try:
        manifest = json.loads((Path(folder) / MANIFEST).read_text("utf-8"))
        data = Path(folder) / manifest["data"]
        if not data.is_dir():
            raise ValueError(f"no folder {manifest['data']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"A prepared folder must have its {MANIFEST} and the data that it names; {str(folder)!r} doesn't ({error}). Prepare it again."
        ) from error
    return data, manifest


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows has no such thing for folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
