"""Save and restore an interrupted training run: one safetensors file, replaced in one go, nothing pickled.

The file holds the weights (``weight.NAME``), AdamW's two moments and step count of each weight (``exp_avg.NAME``,
``exp_avg_sq.NAME``, ``adam_step.NAME``), torch's random state, and the rest of the data order (window starts). Its
header carries ``progress`` as JSON: step, clock, numpy's random state, unlogged losses and the run's settings.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "adam_step": "step"}


class WindowOrder:
    """Starts of the training windows in random order; each pass draws a new offset and a new shuffle.

    ``tokens`` is the length of the training text, ``window`` that of one sequence plus its last target. Raises
    ``ValueError`` if a batch does not fit.

    >>> order = WindowOrder(tokens=100, window=10, batch=4, seed=0)
    >>> order.next().shape
    (4,)
    """

    def __init__(self, tokens: int, window: int, batch: int, seed: int) -> None:
        if tokens < window * (batch + 1) + 1:
            raise ValueError(
                f"One batch needs {window * (batch + 1) + 1} training tokens; the corpus has {tokens}. "
                "Use a longer corpus, or a smaller --batch or --sequence."
            )
        self.tokens = tokens
        self.window = window
        self.batch = batch
        self.rng = np.random.default_rng(seed)
        self.starts = np.array([], dtype=np.int64)

    def next(self) -> np.ndarray:
        """Starts of the next batch, shape (batch,)."""
        if len(self.starts) < self.batch:
            offset = int(self.rng.integers(0, self.window))
            windows = (self.tokens - offset - 1) // self.window
            self.starts = self.rng.permutation(windows) * self.window + offset
        picked, self.starts = self.starts[: self.batch], self.starts[self.batch :]
        return picked


@dataclass
class Progress:
    """How far a run is: the clock counts training only, so a pause costs nothing of the schedule."""

    step: int = 0
    elapsed_s: float = 0.0
    fraction: float = 0.0
    next_log_s: float = 0.0
    unlogged_losses: list[list[float]] = field(default_factory=list)


def save_run(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, order: WindowOrder, progress: Progress, settings: dict
) -> None:
    """Write the run's whole state to ``path``; an interruption while writing leaves the old file."""
    tensors = {"torch_random_state": torch.get_rng_state(), "window_starts": torch.from_numpy(order.starts.copy())}
    for name, weight in model.named_parameters():
        tensors[f"weight.{name}"] = weight.detach().contiguous()
        for prefix, key in MOMENTS.items():
            tensors[f"{prefix}.{name}"] = optimizer.state[weight][key].contiguous()
    header = {**asdict(progress), "numpy_random_state": order.rng.bit_generator.state, "settings": settings, "tokens": order.tokens}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"progress": json.dumps(header)})
    os.replace(unfinished, path)


def load_run(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, order: WindowOrder, settings: dict) -> Progress:
    """Restore what ``save_run`` wrote into ``model``, ``optimizer`` and ``order``.

    Raises ``FileNotFoundError`` without such a file and ``ValueError`` if it comes from other settings or another corpus.
    """
    if not path.exists():
        raise FileNotFoundError(f"--resume needs the state of an interrupted run; there is no {path}. Start without --resume.")
    with safe_open(path, framework="pt") as saved:
        header = json.loads(saved.metadata()["progress"])
        now, then = {**settings, "tokens": order.tokens}, {**header.pop("settings"), "tokens": header.pop("tokens")}
        changed = {key: (then.get(key), value) for key, value in now.items() if then.get(key) != value}
        if changed:
            raise ValueError(
                f"A run resumes only with the settings and corpus it began with; (then, now) differ in {changed}. "
                "Give the old values, or start without --resume."
            )
        order.rng.bit_generator.state = header.pop("numpy_random_state")
        order.starts = saved.get_tensor("window_starts").numpy()
        torch.set_rng_state(saved.get_tensor("torch_random_state"))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(saved.get_tensor(f"weight.{name}"))
                optimizer.state[weight] = {key: saved.get_tensor(f"{prefix}.{name}") for prefix, key in MOMENTS.items()}
    return Progress(**header)
