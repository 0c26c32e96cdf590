"""What rebuilding an expert from its int4 code and its residual costs, beside a plain copy of its bfloat16 weights.

Paired: copy, plain torch, compiled C, copy, ...; one thread; medians. Wall time, and the thread's own time beside it:
on a shared computer the first holds what others do, too.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

from benchmarks.common import conditions, write
from specter_lab.quantize import ExpertBank, TensorSource
from specter_lab.quantize.compiled import rebuild_path
from specter_lab.quantize.residual import ResidualBank
from specter_lab.records import ExpertKey

KEY = ExpertKey(0, 0)
SIZES = {"tiny-moe": (128, 128), "OLMoE-1B-7B": (2048, 1024), "DeepSeek-V2-Lite": (2048, 1408)}
ROUNDS = 25


def timed(work) -> tuple[float, float]:
    """Wall and thread seconds."""
    wall, thread = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - wall, time.thread_time() - thread


def measured(hidden: int, inner: int) -> dict[str, object]:
    """ns a weight for one expert of that geometry, with Gaussian weights."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    source = TensorSource([[{"gate_up_proj": weight(2 * inner, hidden), "down_proj": weight(hidden, inner)}]])
    banks = {False: ResidualBank.build(source, ExpertBank.pack(source, "qint4"), compiled=False)}
    if not rebuild_path().startswith("plain"):
        banks[True] = ResidualBank.build(source, banks[False].codes, compiled=True)
    blob, out = banks[False].blob(KEY).clone(), torch.empty(banks[False].rebuilt_bytes(0), dtype=torch.uint8)
    dense, copied = torch.cat([tensor.flatten() for tensor in source.tensors(KEY).values()]), torch.empty(3 * hidden * inner).bfloat16()
    works = {"copy": lambda: copied.copy_(dense)}
    for compiled, bank in banks.items():
        works["compiled" if compiled else "torch"] = lambda bank=bank: bank.rebuild(KEY, blob, out)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(ROUNDS + 3):
        for name, work in works.items():
            times[name].append(timed(work))
    row: dict[str, object] = {"weights": dense.numel(), "bits_per_weight": round(banks[False].report().loc[0, "bits_per_weight"], 3)}
    for i, clock in enumerate(("wall", "thread")):
        for name, pairs in times.items():
            row[f"{name}_{clock}_ns"] = round(statistics.median(pair[i] for pair in pairs[3:]) * 1e9 / dense.numel(), 3)
            ratios = [pair[i] / copy[i] for pair, copy in zip(pairs[3:], times["copy"][3:], strict=True)]
            if name != "copy":
                row[f"{name}_over_copy_{clock}"] = round(statistics.median(ratios), 1)
    return row


def main() -> None:
    """Run and write ``results/residual.json``."""
    torch.set_num_threads(1)
    rows = {name: measured(*shape) for name, shape in SIZES.items()}
    print(f"{'expert of':18}{'weights':>10}{'bits':>7}   ns a weight, wall (thread): copy, plain torch, compiled")
    for name, row in rows.items():
        figures = "".join(
            f"{row.get(f'{work}_wall_ns', '-'):>9} ({row.get(f'{work}_thread_ns', '-')})" for work in ("copy", "torch", "compiled")
        )
        print(f"{name:18}{row['weights']:>10}{row['bits_per_weight']:>7}   {figures}")
    what = "ns a weight of rebuilding a bfloat16 expert from qint4 group 128 codes and its residual; medians of paired runs"
    where = conditions(rounds=ROUNDS, rebuild=rebuild_path(), load_average=round(os.getloadavg()[0], 1))
    print(write("residual", {"what": what, "experts": rows, "conditions": where}))


if __name__ == "__main__":
    main()
