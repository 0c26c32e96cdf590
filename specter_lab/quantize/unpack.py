"""quanto's ``unpack`` (qint4 and qint2 codes out of bytes) in plain torch, so that nothing needs a compiler.

quanto compiles a C++ extension at the first unpack: about 65 s once, and a RuntimeError without ninja and g++ (on CUDA,
without a fitting nvcc). The plain kernel gives the same values at nearly the same speed, so it is always used.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor


def unpack_path() -> str:
    """Which code turns packed qint4 and qint2 bytes into numbers in this process (for a doctor).

    It goes in with the first qint4 or qint2 tensor, for the whole process: quanto used on its own gets it too.

    >>> unpack_path().startswith("plain torch")
    True
    """
    installed = use_plain_unpack.cache_info().currsize > 0
    return "plain torch, in place of quanto's C++ extension" + ("" if installed else " (from the first qint4 or qint2 tensor on)")


@cache
def use_plain_unpack() -> torch.library.Library:
    """Put the plain kernel in place of quanto's compiled ones, once; the cache keeps it registered.

    >>> use_plain_unpack() is use_plain_unpack()
    True
    """
    import optimum.quanto  # noqa: F401  it defines the operator

    library = torch.library.Library("quanto", "IMPL")  # torch forgets the kernels as soon as this object dies
    with warnings.catch_warnings():
        # torch warns of every override; this one is meant
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel.*quanto::unpack")
        for device in ("CPU", "CUDA"):
            library.impl("unpack", _unpack, device, allow_override=True)
    return library


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """(rows, ...) uint8 bytes to (rows * 8 // bits, ...) uint8 codes: the low bits of all rows first, then the next ones."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)])
