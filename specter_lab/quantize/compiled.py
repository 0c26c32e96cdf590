"""The rebuild in C, compiled where a compiler is: several times as fast as plain torch, with the same bits.

torch.compile was tried first: its CPU code does not vectorise 16-bit integers (torch 2.13: 5-18 ns a weight after 16-50 s
of compiling; this takes under 1 ns and half a second). Nothing needs the compiler: without one plain torch does the work.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from optimum.quanto import WeightQBytesTensor
from optimum.quanto.tensor.weights.tinygemm import TinyGemmWeightQBitsTensor
from torch import Tensor

from specter_lab.quantize.codes import tinygemm_block_rows
from specter_lab.quantize.formats import format_named
from specter_lab.quantize.frame import Frame
from specter_lab.quantize.rebuild import rebuild
from specter_lab.quantize.residual_format import TILE, WIDTHS

_SOURCE = Path(__file__).with_name("rebuild.c")
_ROWS = 64  # that rebuild.c unpacks at once
_FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off")


class PackedTensor(ctypes.Structure):
    """``tensor`` in rebuild.c: where a packed weight's inner tensors lie.

    >>> [name for name, _ in PackedTensor._fields_][:3]
    ['data', 'scale', 'shift']
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "scale", "shift")),
        *((name, ctypes.c_int64) for name in ("kind", "rows", "columns", "group", "first", "stride")),
    ]


class CompiledRebuild:
    """``frame.units`` and ``rebuild`` in one call of C, for an expert whose codes and residual are in host memory.

    >>> CompiledRebuild.load(False) is None
    True
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        function.restype = None
        function.argtypes = [ctypes.c_void_p] * 8

    @staticmethod
    def load(compiled: bool | str = "auto") -> CompiledRebuild | None:
        """The compiled rebuild; None for False, and where it can't be had.

        That is no news for "auto" without a compiler; otherwise one UserWarning says why.
        """
        if compiled not in (True, False, "auto"):
            raise ValueError(f"compiled must be True, False or 'auto'; got {compiled!r}: leave it out")
        if compiled is False:
            return None
        function, reason = _build()
        if function is None and (compiled is True or _compiler() is not None):
            _warn_once(reason)
        return None if function is None else CompiledRebuild(function)

    @staticmethod
    def describe(frame: Frame, packed: Mapping[str, Any], entries: int) -> tuple[ctypes.Array[Any], ...]:
        """Where an expert's codes and residual lie. It stays true while the tensors of ``packed`` keep their memory."""
        tensors = (PackedTensor * len(frame.coded))(*(_describe(packed[name], frame.leaf(name).offset // 2) for name in frame.coded))
        widths = (ctypes.c_int64 * 4)(*vars(frame.widths).values())
        plane, registers, _, gaps, values = (start for start, _ in frame.places(entries))
        sizes = (
            frame.weights,
            frame.unit,
            len(tensors),
            entries,
            frame.centre,
            frame.dtype == torch.float16,
            plane,
            registers,
            gaps,
            values,
        )
        return tensors, widths, (ctypes.c_int64 * len(sizes))(*sizes)

    def __call__(self, frame: Frame, described: tuple[ctypes.Array[Any], ...], blob: Tensor, out: Tensor) -> None:
        """Write the expert's stream into ``out``: (rebuilt bytes,) uint8. What ``describe`` was told must fit: nothing is checked."""
        units, widest = frame.weights // frame.unit, max(tensor.columns for tensor in described[0])
        room = min(TILE, frame.weights) + (_ROWS + 1) * widest
        scratch = (torch.zeros if frame.padded else torch.empty)(8 * units + room, dtype=torch.uint8)
        scale = scratch.data_ptr()
        middle = scale + 4 * units
        self._function(*described, blob.data_ptr(), middle + 4 * units, scale, middle, out.data_ptr())


def rebuild_path() -> str:
    """What rebuilds experts in host memory here: compiled C, or plain torch and why (for a doctor).

    >>> rebuild_path().split(" (")[0].split(":")[0] in ("compiled C", "plain torch")
    True
    """
    function, reason = _build()
    return f"compiled C ({_compiler()})" if function is not None else f"plain torch: {reason}"


def _describe(weight: Any, first: int) -> PackedTensor:
    rows, columns = weight.shape
    if isinstance(weight, WeightQBytesTensor):
        many = weight._scale.numel() > 1
        return PackedTensor(weight._data.data_ptr(), weight._scale.data_ptr(), 0, 0, rows, columns, columns, first, many)
    codes, group = weight._data._data.data_ptr(), weight._group_size
    if isinstance(weight, TinyGemmWeightQBitsTensor):
        return PackedTensor(codes, weight._scale_shift.data_ptr(), 0, 2, rows, columns, group, first, tinygemm_block_rows())
    exact = weight._shift.dtype == torch.float32
    return PackedTensor(codes, weight._scale.data_ptr(), weight._shift.data_ptr(), 1, rows, columns, group, first, exact)


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """rebuild.c, compiled; or None and why not. In a folder of this process alone: no stale code, nobody else's.

    >>> (library()[0] is None) == bool(library()[1])
    True
    """
    compiler = _compiler()
    if compiler is None:
        return None, "no C compiler (cc, gcc, clang) is on the PATH"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        target = str(Path(folder) / "rebuild.so")
        for native in (["-march=native"], []):
            command = [compiler, *_FLAGS, *native, str(_SOURCE), "-o", target, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        else:
            return None, f"{compiler} fails: {(done.stderr.strip() or 'it says nothing').splitlines()[0]}"
        try:
            return ctypes.CDLL(target), ""  # it stays loaded when its file is gone
        except OSError as error:
            return None, f"{type(error).__name__}: {error}"


@cache
def _build() -> tuple[Any, str]:
    """The C function, tried out; or None and why not."""
    compiled, reason = library()
    if compiled is None:
        return None, reason
    if not tinygemm_block_rows():
        return None, "torch's int4 layout on this CPU is not one that rebuild.c reads"
    try:
        function = compiled.rebuild
        _try_out(CompiledRebuild(function))
    except Exception as error:  # whatever this computer does differently: plain torch computes the same, only slower
        return None, f"{type(error).__name__}: {error}"
    return function, ""


def _try_out(compiled: CompiledRebuild) -> None:
    """Raise unless C and torch give the same bits for random residuals."""
    generator = torch.Generator().manual_seed(0)
    for code, dtype in WIDTHS:
        for rows in (176, 24):  # tinygemm with whole blocks and a rest; the plain class
            dense = {"w": torch.randn(rows, 96, generator=generator).to(dtype)}
            packed = {"w": format_named(code).pack(dense["w"])}
            frame = Frame.of(dense, packed, dtype, transposed=False)
            blob = torch.randint(0, 256, (frame.used_bytes(20),), generator=generator, dtype=torch.uint8)
            plane, registers, _, gaps, values = frame.parts(blob, 20)
            gaps >>= 2  # else they could lead out of the stream
            wanted, got = torch.empty(2, frame.layout.nbytes, dtype=torch.uint8)
            parts = (plane, registers, gaps, values)
            rebuild(*frame.units(packed), frame.centre, frame.widths, parts, frame.stream(wanted), dtype)
            compiled(frame, compiled.describe(frame, packed, 20), blob, got)
            if not torch.equal(frame.stream(wanted), frame.stream(got)):
                raise RuntimeError(f"its code gives other {dtype} bits than plain torch for {code}")


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"The compiled rebuild can't be had here ({reason}); plain torch does the work: the same bits, slower", stacklevel=4)
