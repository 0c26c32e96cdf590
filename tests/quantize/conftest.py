"""Small sources of experts, and the formats that every test goes through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specter_lab.quantize import TensorSource

FORMATS = ["bfloat16", "float16", "float32", "qint8", "qfloat8", "qint4", "qint2"]
QUANTISED = FORMATS[3:]


@pytest.fixture(params=FORMATS)
def format_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=QUANTISED)
def quantised_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_source() -> Callable[..., TensorSource]:
    """Two layers of unlike experts, with one bias each. Half-integer weights up to 8, so that every dense dtype holds them."""

    def make(dtype: torch.dtype = torch.float32, transposed: bool = False, seed: int = 0) -> TensorSource:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            values = (torch.randn(*shape, generator=generator) * 4).round().clamp(-16, 16).div(2).to(dtype)
            return values.T.contiguous() if transposed and values.ndim == 2 else values

        def expert(hidden: int, inner: int) -> dict[str, torch.Tensor]:
            return {
                "gate_up_proj": weight(2 * inner, hidden),
                "down_proj": weight(hidden, inner),
                "down_proj_bias": weight(hidden),
            }

        return TensorSource([[expert(128, 64) for _ in range(3)], [expert(128, 48) for _ in range(2)]], transposed)

    return make
