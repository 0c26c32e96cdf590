from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specter_lab.quantize import ExpertBank, Quanto, TensorSource, format_named
from specter_lab.quantize import compiled as compiling
from specter_lab.quantize.compiled import CompiledRebuild, rebuild_path
from specter_lab.quantize.residual import FILE, ResidualBank
from specter_lab.quantize.residual_format import HEADER_BYTES, Header
from specter_lab.quantize.tinygemm import portable
from specter_lab.records import ExpertKey

KEY = ExpertKey(0, 0)
CODES = [("qint4", 128), ("qint4", 64), ("qint4", 16), ("qint8", None)]
DTYPES = [torch.bfloat16, torch.float16]
PATHS = [False, pytest.param(True, marks=pytest.mark.skipif(CompiledRebuild.load("auto") is None, reason=rebuild_path()))]


@pytest.fixture(params=PATHS, ids=["torch", "C"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return request.param


def weights(kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator) * 0.02
    if kind == "heavy-tailed":
        normal = normal / (torch.rand(shape, generator=generator) + 1e-4)
    elif kind == "sparse":
        normal = normal * (torch.rand(shape, generator=generator) < 0.3)  # -0.0 among them
    elif kind == "denormal":
        normal = normal * (2.0**-126 if dtype == torch.bfloat16 else 2.0**-14)
    elif kind == "zero groups":
        normal[:, ::3] = 0
        normal[::2] = 0
    elif kind == "huge":  # intervals that reach beyond the largest number
        normal = normal * (5e39 if dtype == torch.bfloat16 else 1e6)
    elif kind == "far from zero":
        normal = normal + 3
    elif kind == "equal":
        normal = torch.full(shape, 0.1)
    elif kind == "some not finite":
        broken = torch.rand(shape, generator=generator) < 0.05
        payloads = torch.randint(-(2**15), 2**15, shape, generator=generator).short() | 0x7F80  # inf and NaN in both dtypes
        return torch.where(broken, (payloads | 0x7C00).view(dtype), normal.to(dtype))
    elif kind == "any bits":
        return torch.randint(-(2**15), 2**15, shape, generator=generator).short().view(dtype)
    return normal.to(dtype)


KINDS = ["normal", "heavy-tailed", "sparse", "denormal", "zero groups", "huge", "far from zero", "equal", "some not finite", "any bits"]


def mapped(source: TensorSource, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorSource:
    experts = [[source.tensors(ExpertKey(i, e)) for e in range(source.experts(i))] for i in range(source.layers)]
    return TensorSource([[{n: change(t) for n, t in expert.items()} for expert in layer] for layer in experts], source.transposed(0))


def finite(source: TensorSource) -> TensorSource:
    """What a code bank can be packed from: the same with 0 for what quanto refuses."""
    return mapped(source, lambda tensor: torch.nan_to_num(tensor.float(), 0, 0, 0))


def banks(source: TensorSource, code: str = "qint4", group: int | None = None, compiled: bool | str = False) -> ResidualBank:
    return ResidualBank.build(source, ExpertBank.pack(finite(source), format_named(code, group)), compiled)


def assert_same_bits(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert {n: (t.dtype, t.shape) for n, t in got.items()} == {n: (t.dtype, t.shape) for n, t in wanted.items()}
    for name, tensor in wanted.items():
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    code=st.sampled_from(CODES),
    dtype=st.sampled_from(DTYPES),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=3),
    transposed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_bit_comes_back(
    compiled: bool, kind: str, code: tuple[str, int | None], dtype: torch.dtype, shapes: list, transposed: bool, seed: int
) -> None:
    columns = code[1] or 48
    expert = {f"w{i}": weights(kind, (rows, n * columns), dtype, seed + i) for i, (rows, n) in enumerate(shapes)}
    if transposed:
        expert = {name: tensor.T.contiguous() for name, tensor in expert.items()}
    bank = banks(TensorSource([[expert]], transposed), *code, compiled)
    assert bank.transposed(0) == transposed
    assert_same_bits(bank.own_weights(KEY), expert)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_there_is(compiled: bool, dtype: torch.dtype) -> None:
    """Also -128, which the quantiser doesn't make and which is its own opposite in 8 bits."""
    every = torch.arange(-128, 128).expand(32, 256)
    source = TensorSource([[{"w": (0.01 * every + weights("normal", (32, 256), torch.float32, 5) / 10).to(dtype)}]])
    codes = ExpertBank.pack(source, "qint8")
    codes.own_weights(KEY)["w"]._data.copy_(every)
    bank = ResidualBank.build(source, codes, compiled)
    assert bank.report().loc[0, "raw_experts"] == 0
    assert_same_bits(bank.own_weights(KEY), source.tensors(KEY))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_of_many_tiles(compiled: bool, code: tuple[str, int | None], dtype: torch.dtype) -> None:
    """More than one chunk of plain torch's tiles, and a short tile at the end."""
    expert = {"up": weights("normal", (1200, 512), dtype, 1), "down": weights("heavy-tailed", (512, 640), dtype, 2)}
    bank = banks(TensorSource([[expert]]), *code, compiled)
    assert_same_bits(bank.own_weights(KEY), expert)


def test_the_written_format_is_the_format() -> None:
    """A decoder made from the text of residual_format.py alone, one weight at a time."""
    expert = {"w": torch.cat([weights("normal", (20, 64), torch.bfloat16, 3), weights("sparse", (12, 64), torch.bfloat16, 4)])}
    bank = banks(TensorSource([[expert]]), "qint4", 64)
    header, blob = Header.of(bank.blob(KEY)), bank.blob(KEY).numpy()
    packed = portable(bank.codes.own_weights(KEY)["w"])
    codes = packed._data.unpack().flatten().tolist()
    scales = packed._scale.float().flatten().numpy()
    middles = (8 * packed._scale.float() - packed._shift.float()).bfloat16().float().flatten().numpy()
    n, lanes = len(codes), len(codes) // 16
    plane = blob[HEADER_BYTES : HEADER_BYTES + n * 7 // 8].reshape(7, 2 * lanes)
    registers = np.frombuffer(blob[HEADER_BYTES + n * 7 // 8 :][: n // 8].tobytes(), "<i2").tolist()
    start = math.ceil((HEADER_BYTES + n) / 64) * 64
    gaps, values = blob[start:][: header.entries].tolist(), blob[start + header.entries :][: header.entries].tolist()
    missing, at = [0] * n, 0
    for gap, value in zip(gaps, values, strict=True):
        at += gap
        missing[at] += value * 128 if value < 128 else (value - 128) * 512
    assert n == expert["w"].numel() and header.entries > 50 and max(gaps) > 50

    def round_to_bfloat16(value: np.float32) -> int:
        return torch.tensor(value).bfloat16().view(torch.int16).item() & 0xFFFF

    out, read = [0] * n, [0] * lanes
    for w, code in enumerate(codes):
        scale, middle, step, lane = scales[w // 64], middles[w // 64], w // lanes, w % lanes
        offset = np.float32(8) - middle / scale
        turn, zero = (min(max(int(f(offset)), -100), 100) for f in (np.ceil, np.rint))
        base = np.float32(middle + np.float32((turn - 7.5) * scale))
        k = code - turn - (code < turn)
        e = (
            plane[step // 2, step % 2 * lanes + lane] & 127
            if step < 14
            else sum((plane[i, (step - 14) * lanes + lane] >> 7) << i for i in range(7))
        )
        distance = abs(code - zero)
        width = 3 if distance == 0 else 1 if distance <= 1 else 0
        x = registers[lane] >> read[lane] & (1 << width) - 1
        read[lane] += width
        e = int(e) + ((x & 3) << 7) + (x >> 2 << 15) + missing[w]
        out[w] = (round_to_bfloat16(np.float32(base + np.float32(k * scale))) - e) & 0xFFFF
    assert out == [bits & 0xFFFF for bits in expert["w"].view(torch.int16).flatten().tolist()]


@pytest.fixture(scope="module")
def gaussian() -> dict[str, torch.Tensor]:
    return {"w": weights("normal", (1024, 1024), torch.bfloat16, 0)}


@pytest.mark.parametrize(
    ("code", "group", "dtype", "most"),
    [
        ("qint4", 128, torch.bfloat16, 8.6),
        ("qint4", 64, torch.bfloat16, 8.5),
        ("qint8", None, torch.bfloat16, 5.6),
        ("qint4", 128, torch.float16, 11.6),
    ],
)
def test_gaussian_weights_take_few_bits(gaussian: dict, code: str, group: int, dtype: torch.dtype, most: float) -> None:
    bank = banks(TensorSource([[{"w": (gaussian["w"].float()).to(dtype)}]]), code, group)
    row = bank.report().loc[0]
    assert row["bits_per_weight"] < most and row["raw_experts"] == 0
    assert row["padded_bits_per_weight"] * row["weights"] == 8 * bank.blob_bytes(0) == 8 * bank.nbytes
    assert 0 < 8 * (bank.nbytes - Header.of(bank.blob(KEY)).used) < 8 * 64


def test_the_bundled_model_takes_few_bits_and_comes_back(tiny_folder: Path) -> None:
    with safe_open(tiny_folder / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys() if ".experts." in name}  # noqa: SIM118

    def expert(layer: int, number: int) -> dict[str, torch.Tensor]:
        name = f"model.layers.{layer}.mlp.experts.{number}."
        gate, up, down = (stored[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return {"gate_up_proj": torch.cat([gate, up]), "down_proj": down}

    source = TensorSource([[expert(layer, number) for number in range(24)] for layer in range(8)])
    bank = ResidualBank.build(source, ExpertBank.pack(source, "qint4"))
    report = bank.report()
    assert report["bits_per_weight"].max() < 8.6 and report["padded_bits_per_weight"].max() < 8.7
    for layer in range(8):
        for number in range(24):
            assert_same_bits(bank.own_weights(ExpertKey(layer, number)), source.tensors(ExpertKey(layer, number)))


@pytest.fixture
def source(make_source: Callable[..., TensorSource]) -> TensorSource:
    return make_source(torch.bfloat16)


@pytest.fixture
def bank(source: TensorSource) -> ResidualBank:
    return ResidualBank.build(source, ExpertBank.pack(source, "qint4"), compiled=False)


def test_it_is_a_store_of_equal_blobs(bank: ResidualBank, source: TensorSource) -> None:
    assert (bank.layers, bank.experts(0), bank.experts(1)) == (2, 3, 2)
    assert bank.name == "bfloat16 residual of qint4 group 128/64/16" and repr(bank).startswith("ResidualBank(bfloat16 residual of qint4")
    assert bank.nbytes == 3 * bank.blob_bytes(0) + 2 * bank.blob_bytes(1) == sum(bank.blobs(layer).numel() for layer in range(2))
    for layer in range(2):
        assert bank.blob_bytes(layer) % 64 == 0
        for expert in range(bank.experts(layer)):
            key = ExpertKey(layer, expert)
            blob = bank.blob(key)
            assert blob.shape == (bank.blob_bytes(layer),) and blob.data_ptr() == bank.blobs(layer)[expert].data_ptr()
            assert blob.storage_offset() % 64 == 0
            assert_same_bits(bank.own_weights(key), source.tensors(key))  # biases too
            bank.verify(key)


def test_rebuilding_into_given_memory(bank: ResidualBank, source: TensorSource, compiled: bool) -> None:
    bank = ResidualBank(bank.codes, bank._layers, compiled)
    slot, out = torch.empty(bank.blob_bytes(0), dtype=torch.uint8), torch.empty(bank.rebuilt_bytes(0), dtype=torch.uint8)
    with torch.inference_mode():
        for expert in (2, 0, 1):
            key = ExpertKey(0, expert)
            found = bank.rebuild(key, slot.copy_(bank.blob(key)), out)
            assert_same_bits(found, source.tensors(key))
            assert all(out.data_ptr() <= t.data_ptr() < out.data_ptr() + len(out) for t in found.values())
            bank.verify(key, slot)
    with pytest.raises(ValueError, match=r"For layer 0, blob must be contiguous uint8 of shape \(\d+,\) on cpu .*rebuilt_bytes"):
        bank.rebuild(KEY, slot[:-64], out)
    with pytest.raises(ValueError, match=r"For layer 0, out must be .* got torch.float32"):
        bank.rebuild(KEY, slot, out.float())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_flipped_bit_is_detected(bank: ResidualBank, place: float) -> None:
    blob = bank.blob(KEY).clone()
    bit = int(place * 8 * len(blob))
    blob[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"must (be as it was built|start with magic)"):
        bank.verify(KEY, blob)


def test_another_experts_blob_and_other_codes_are_detected(bank: ResidualBank, source: TensorSource) -> None:
    with pytest.raises(ValueError, match="layer 0 expert 0 must be as it was built"):
        bank.verify(KEY, bank.blob(ExpertKey(0, 1)))
    other = ExpertBank.pack(source, "qint4")
    other.blob(KEY)[3] ^= 1
    with pytest.raises(ValueError, match=r"need the codes they were built with; those of layer 0 expert 0 give"):
        ResidualBank(other, bank._layers, False).verify(KEY)


def test_codes_in_a_portable_class_serve_as_well(bank: ResidualBank, source: TensorSource, compiled: bool) -> None:
    """A bank that another computer loads has other classes and byte orders, but the same codes."""
    plain = ExpertBank(bank.codes.format, [layer.mapped(portable) for layer in bank.codes._layers])
    kinds = {type(w).__name__ for b in (plain, bank.codes) for w in b.own_weights(KEY).values() if w.ndim == 2}
    assert kinds == {"PlainQBitsTensor", "TinyGemmWeightQBitsTensor"}
    assert_same_bits(ResidualBank(plain, bank._layers, compiled).own_weights(KEY), source.tensors(KEY))


def test_save_and_load(bank: ResidualBank, source: TensorSource, tmp_path: Path) -> None:
    bank.codes.save(tmp_path)
    bank.save(tmp_path, {"model": "made up"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bank.safetensors", FILE]
    again = ResidualBank.load(tmp_path, ExpertBank.load(tmp_path), {"model": "made up"})
    assert (again.name, again.nbytes, again.report().to_dict()) == (bank.name, bank.nbytes, bank.report().to_dict())
    for key in (KEY, ExpertKey(1, 1)):
        assert torch.equal(again.blob(key), bank.blob(key))
        assert_same_bits(again.own_weights(key), source.tensors(key))
    with pytest.raises(ValueError, match=r"differs in model \(saved 'made up', asked for 'other'\)"):
        ResidualBank.load(tmp_path, bank.codes, {"model": "other"})


def test_loading_is_strict(bank: ResidualBank, source: TensorSource, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is none"):
        ResidualBank.load(tmp_path, bank.codes)
    bank.save(tmp_path)
    for other in (ExpertBank.pack(source, "qint8"), ExpertBank.pack(source, "bfloat16"), bank.codes.split()[1]):
        with pytest.raises(ValueError, match=r"need the codes they were built with; layer \d of ExpertBank\("):
            ResidualBank.load(tmp_path, other)
    changed = ExpertBank.pack(
        TensorSource([[{n: 2 * t for n, t in source.tensors(ExpertKey(i, e)).items()} for e in range(3 - i)] for i in (0, 1)]), "qint4"
    )
    with pytest.raises(ValueError, match="need the codes they were built with; those of layer 0 expert 0"):
        ResidualBank.load(tmp_path, changed)
    path = tmp_path / FILE
    whole = path.read_bytes()
    for place in range(5, 100, 19):
        data = bytearray(whole)
        data[len(data) * place // 100] ^= 1
        path.write_bytes(bytes(data))
        with pytest.raises(ValueError, match=rf"{FILE} must"):
            ResidualBank.load(tmp_path, bank.codes)
    path.write_bytes(whole)
    with safe_open(path, framework="pt") as file:
        text = json.dumps({**json.loads(file.metadata()["specter_lab"]), "residual_version": 2})
    save_file(load_file(path), path, metadata={"specter_lab": text, "crc32": str(zlib.crc32(text.encode()))})
    with pytest.raises(ValueError, match="must have residual version 1; it has 2"):
        ResidualBank.load(tmp_path, bank.codes)


def test_incompressible_weights_are_stored_raw(compiled: bool) -> None:
    expert = {"w": weights("any bits", (64, 128), torch.bfloat16, 0), "b": torch.arange(7)}
    tame = {"w": weights("normal", (64, 128), torch.bfloat16, 0), "b": torch.arange(7)}
    bank = banks(TensorSource([[expert, tame]]), compiled=compiled)
    assert bank.report().loc[0, "raw_experts"] == 1
    assert bank.blob_bytes(0) == math.ceil((64 + 2 * 64 * 128 + 56) / 64) * 64
    for number, wanted in enumerate((expert, tame)):
        assert_same_bits(bank.own_weights(ExpertKey(0, number)), wanted)


class SomeLeftOut(Quanto):
    """qint4 where quanto takes the shape, otherwise the weight as it is."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return super().pack(weight) if weight.shape[1] % 16 == 0 else weight


def test_what_is_not_quantised_is_stored_raw() -> None:
    expert = {
        "odd": weights("normal", (5, 7), torch.bfloat16, 0),
        "w": weights("normal", (16, 32), torch.bfloat16, 1),
        "bias": torch.randn(3),
    }
    source = TensorSource([[expert]])
    bank = ResidualBank.build(source, ExpertBank.pack(source, SomeLeftOut("qint4")))
    assert bank._layers[0].frame.coded == ("w",)
    assert_same_bits(bank.own_weights(KEY), expert)


def test_what_can_not_be_built_is_refused(source: TensorSource) -> None:
    codes = ExpertBank.pack(source, "qint4")
    wide = mapped(source, torch.Tensor.float)
    with pytest.raises(ValueError, match=r"bfloat16 or float16 weights .*torch.float32 weights gate_up_proj.* keep the dense bank"):
        ResidualBank.build(wide, codes)
    with pytest.raises(ValueError, match="Tensor, WeightQBytesTensor codes"):
        ResidualBank.build(source, ExpertBank.pack(source, "qfloat8"))
    with pytest.raises(ValueError, match="the source has 2 layers and the codes 1"):
        ResidualBank.build(source, codes.split()[0])
    other = TensorSource([[{"w": torch.ones(16, 32).bfloat16()}]])
    with pytest.raises(ValueError, match=r"Codes must have their weight's shape; 'w' is \(16, 32\) and its code \(32, 32\)"):
        ResidualBank.build(other, ExpertBank.pack(TensorSource([[{"w": torch.ones(32, 32)}]]), "qint4"))
    unlike = TensorSource([[{"w": torch.ones(16, 32).bfloat16()}, {"w": torch.ones(16, 32).half()}]])
    with pytest.raises(ValueError, match="Experts of one layer must be alike"):
        ResidualBank.build(unlike, ExpertBank.pack(unlike, "qint4"))


@pytest.fixture
def forget() -> Any:
    for cached in (compiling.library, compiling._build, compiling._warn_once):
        cached.cache_clear()
    yield
    for cached in (compiling.library, compiling._build, compiling._warn_once):
        cached.cache_clear()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, forget: None, source: TensorSource) -> None:
    monkeypatch.setenv("PATH", "")
    codes = ExpertBank.pack(source, "qint4")
    assert_same_bits(ResidualBank.build(source, codes).own_weights(KEY), source.tensors(KEY))  # and no warning
    with pytest.warns(UserWarning, match=r"can't be had here \(no C compiler") as caught:
        ResidualBank.build(source, codes, compiled=True)
        ResidualBank.build(source, codes, compiled=True)
    assert len(caught) == 1
    assert rebuild_path() == "plain torch: no C compiler (cc, gcc, clang) is on the PATH"
    with pytest.raises(ValueError, match="compiled must be True, False or 'auto'; got 'yes'"):
        ResidualBank.build(source, codes, compiled="yes")


@pytest.mark.parametrize(("script", "reason"), [("echo no memory >&2; exit 1", "no memory"), ("exit 0", "OSError")])
def test_a_broken_compiler_means_plain_torch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, forget: None, tmp_path: Path, source: TensorSource, script: str, reason: str
) -> None:
    (tmp_path / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match=f"can't be had here .*{reason}"):
        bank = ResidualBank.build(source, ExpertBank.pack(source, "qint4"))
    assert_same_bits(bank.own_weights(KEY), source.tensors(KEY))


def test_c_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch, forget: None, tmp_path: Path) -> None:
    if compiling._compiler() is None:
        pytest.skip("no compiler")
    wrong = tmp_path / "rebuild.c"
    wrong.write_text(compiling._SOURCE.read_text().replace("0x7fff", "0x8000"))  # rounds halves up
    monkeypatch.setattr(compiling, "_SOURCE", wrong)
    assert rebuild_path() == "plain torch: RuntimeError: its code gives other torch.bfloat16 bits than plain torch for qint4"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_rebuilds_the_same_bits(code: tuple[str, int | None], dtype: torch.dtype) -> None:
    expert = {"up": weights("normal", (256, 128), dtype, 1), "down": weights("some not finite", (128, 128), dtype, 2)}
    bank = banks(TensorSource([[expert]]), *code)
    moved = ResidualBank(bank.codes.to("cuda"), bank._layers)
    assert_same_bits({n: t.cpu() for n, t in moved.own_weights(KEY).items()}, expert)
    moved.verify(KEY, bank.blob(KEY).cuda())
