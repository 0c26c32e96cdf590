"""What the pipeline costs when nothing is offloaded: decoding with all experts resident against the model's own.

Paired: own, pipeline, own, pipeline, ...; one thread; the median of the ratios is quoted. Also a very fast link: against the same
run without a link (the simulated machine, which copies the same bytes at once and counts virtual time), and against no
transfers at all.
"""

from __future__ import annotations

import statistics
import time

import torch

import specter_lab as sl
from benchmarks.common import conditions, write

NEW, PAIRS = 64, 11


def timed(work):
    start = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - start) * 1e3


def main() -> None:
    """Run and write ``results/overhead.json``."""
    torch.set_num_threads(1)
    own, offloaded = (sl.load_moe("tiny-moe", dtype="float32") for _ in range(2))
    ids = own.tokenizer(sl.load_prompts("prose")[0].text, return_tensors="pt").input_ids
    options = {"max_new_tokens": NEW, "do_sample": False}
    with (
        sl.Pipeline(offloaded, machine=sl.ThrottledMachine(1000), slots=24, warm=True) as resident,
        sl.Pipeline(offloaded, machine=sl.ThrottledMachine(1000), slots=12) as fast_link,
        sl.Pipeline(offloaded, machine=sl.SimulatedMachine(1000), slots=12) as no_link,
    ):
        resident.generate(ids, **options)
        rows, parts, fast, linked = [], [], [], []
        for _ in range(PAIRS):
            tokens, own_ms = timed(lambda: own.own_generate(ids, **options))
            run, pipeline_ms = timed(lambda: resident.generate(ids, **options))
            assert tuple(tokens[0, ids.shape[1] :].tolist()) == run.new_ids and run.metrics["moved_mb_per_token"] == 0
            rows.append(pipeline_ms / own_ms)
            segments = run.trace.events[run.trace.events["step"] >= 1]
            parts.append(segments.groupby("kind")[["start_us", "end_us"]].sum().diff(axis=1)["end_us"] / 1e3 / NEW)
            moving, fast_ms = timed(lambda: fast_link.generate(ids, **options))
            same, no_link_ms = timed(lambda: no_link.generate(ids, **options))
            assert same.metrics["moved_mb_per_token"] > 0 and same.new_ids == moving.new_ids
            linked.append(fast_ms / no_link_ms)
            assert moving.metrics["moved_mb_per_token"] > 0
            fast.append(moving.metrics["tpot_ms"] / run.metrics["tpot_ms"])
    breakdown = {
        kind: round(float(statistics.median(part.get(kind, 0.0) for part in parts)), 3) for kind in ("attention", "expert", "head", "plan")
    }
    result = {
        "what": "ms of generate() with all experts resident and no draft / the model's own generate() with eager experts",
        "ratio": {"median": statistics.median(rows), "min": min(rows), "max": max(rows)},
        "fast_link_over_resident_tpot": {"median": statistics.median(fast), "min": min(fast), "max": max(fast)},
        "fast_link_over_no_link": {"median": statistics.median(linked), "min": min(linked), "max": max(linked)},
        "ms_per_token_by_kind": breakdown,
        "conditions": conditions(new_tokens=NEW, pairs=PAIRS, model="tiny-moe", dtype="float32"),
    }
    print(f"overhead: {result['ratio']['median']:.3f}x of eager (median of {PAIRS} pairs); {breakdown} ms a token")
    print(f"fast link over no link: {result['fast_link_over_no_link']['median']:.3f}x")
    print(f"fast link over resident: {result['fast_link_over_resident_tpot']['median']:.3f}x")
    print(write("overhead", result))


if __name__ == "__main__":
    main()
