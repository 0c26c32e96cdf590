"""Without a compiler: everything here runs in one fresh process with an empty PATH and warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from optimum.quanto.tensor.packed import PackedTensor

from specter_lab.quantize import ExpertBank, TensorSource, unpack_path
from specter_lab.quantize.unpack import use_plain_unpack
from specter_lab.records import ExpertKey

SCRIPT = """
import os, sys, torch
import torch.nn.functional as F
from specter_lab.quantize import ExpertBank, TensorSource, unpack_path
from specter_lab.records import ExpertKey
from optimum.quanto.library.extensions.extension import Extension
del Extension.lib  # one that was built earlier must not be used either
print(unpack_path())
# a bank that was packed elsewhere comes first: loading alone must bring the plain unpack
weight = ExpertBank.load(sys.argv[1]).own_weights(ExpertKey(0, 0))["down_proj"]
print(torch.nn.functional.linear(torch.ones(1, 64).bfloat16(), weight).float().sum().item())
print(unpack_path())
weight = torch.randn(24, 48)  # neither group nor rows for the fast kernel, so qint4 unpacks too
for name in ("qint8", "qfloat8", "qint4", "qint2"):
    bank = ExpertBank.pack(TensorSource([[{"up_proj": weight}]]), name)
    assert F.linear(torch.ones(1, 48).bfloat16(), bank.own_weights(ExpertKey(0, 0))["up_proj"]).isfinite().all()
    print(bank.name, flush=True)
os.replace = lambda *names: os._exit(9)  # as if killed while saving
bank.save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bank")


@pytest.fixture
def saved(folder: Path, make_source: Callable[..., TensorSource]) -> ExpertBank:
    bank = ExpertBank.pack(make_source(), "qint2")
    bank.save(folder)
    return bank


def test_a_fresh_process_without_a_compiler(folder: Path, saved: ExpertBank) -> None:
    """Case 6."""
    env = {**os.environ, "PATH": "", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT, str(folder)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    assert done.stderr == ""
    before, total, after, *names = done.stdout.splitlines()
    assert before == after + " (from the first qint4 or qint2 tensor on)"
    assert after == "plain torch, in place of quanto's C++ extension" == unpack_path()
    assert names == ["qint8", "qfloat8", "qint4 group 16", "qint2 group 16"]
    weight = saved.own_weights(ExpertKey(0, 0))["down_proj"]
    assert float(total) == F.linear(torch.ones(1, 64).bfloat16(), weight).float().sum().item()

    # and what was saved before is still whole, though that process died in the middle of saving
    assert torch.equal(ExpertBank.load(folder).blobs(0), saved.blobs(0))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4]), st.integers(1, 20), st.integers(1, 5), st.integers(0, 2**32))
def test_unpack_undoes_pack(bits: int, rows: int, columns: int, seed: int) -> None:
    use_plain_unpack()
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(PackedTensor.pack(codes, bits).unpack(), codes)
