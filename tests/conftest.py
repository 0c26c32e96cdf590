"""What tests share: the bundled tiny model, the devices of this computer, one torch thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: no test may ask a hub

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """More threads are slower on tiny tensors, and the order of sums would depend on the computer."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """The bundled mixture-of-experts model: 8 layers, 24 experts, 4 a token."""
    return ROOT / "data" / "tiny-moe"


@pytest.fixture(scope="session")
def fresh_tiny_model(tiny_folder: Path) -> Callable[[], PreTrainedModel]:
    """Loads the tiny model in float32 with eager experts: for a test that changes it."""

    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, experts_implementation="eager").eval()

    return load


@pytest.fixture(scope="session")
def tiny_model(fresh_tiny_model: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """The tiny model in float32 with eager experts, shared by all tests: leave it as it is."""
    return fresh_tiny_model()


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each kind of device that this computer has."""
    return torch.device(request.param)
