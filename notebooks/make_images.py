"""Draw the picture of the README again, from a new run: ``python notebooks/make_images.py`` (some seconds).

The run is measured on this computer, so the picture is never twice the same.
"""

from __future__ import annotations

from pathlib import Path

import torch

import specter_lab as sl
from specter_lab.plots.picture import save_timeline_svg

IMAGES = Path(__file__).resolve().parent / "images"


def make_timeline(path: Path, machine: sl.ThrottledMachine | sl.SimulatedMachine | None = None) -> Path:
    """Steps 1 to 3 of draft lookahead on the bundled model: 10 slots a layer, 4 drafted tokens a step, cold start.

    On the throttled machine with a link of 0.1 GB/s if no other is given.
    """
    moe = sl.load_moe("tiny-moe", dtype="float32")
    prompt = sl.load_prompts(kinds="dialogue", per_kind=1)[0].text
    machine = machine or sl.ThrottledMachine(link_gb_s=0.1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a core for compute, a core for the link
    try:
        with sl.baselines.lookahead(moe, draft_length=4, machine=machine, slots=10) as pipeline:
            pipeline.generate(prompt, max_new_tokens=4, do_sample=False)  # the first request also warms torch up
            run = pipeline.generate(prompt, max_new_tokens=20, do_sample=False)
    finally:
        torch.set_num_threads(threads)
    return save_timeline_svg(run.trace, path, steps=(1, 3))


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    print(make_timeline(IMAGES / "timeline.svg"))
