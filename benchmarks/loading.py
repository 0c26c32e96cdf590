"""Peak host memory of a streamed load, in a child process, against store + skeleton + two experts.

The checkpoint is random: 2 GB of bfloat16, saved in shards to a temporary folder and deleted afterwards. ``load_moe``
without streaming, preparing on disk, and a mapped start are measured beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import conditions, write

SHAPE = {
    "hidden_size": 2048, "moe_intermediate_size": 2560, "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 8192, "intermediate_size": 2048,
}  # fmt: skip
# The peak is the system's own count of the process's pages; anonymous memory apart, since pages of a mapped file are lent.
CHILD = """
import json, sys, threading, time
import torch, specter_lab as sl
from pathlib import Path
def status(name):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
sl.load_moe("tiny-moe", stream=True)  # what first use allocates is not the checkpoint's
Path("/proc/self/clear_refs").write_text("5")
base, base_anonymous = status("VmRSS"), status("RssAnon")
peak_anonymous, done = 0, False
def watch():
    global peak_anonymous
    while not done:
        peak_anonymous = max(peak_anonymous, status("RssAnon"))
        time.sleep(0.002)
watcher = threading.Thread(target=watch); watcher.start()
begin = time.perf_counter()
how, source, folder = sys.argv[1:]
if how == "prepare":
    sl.prepare_moe(source, folder)
else:
    moe = sl.load_moe(source, **{"streamed": {"stream": True}, "whole": {"stream": False}, "prepared": {}, "mapped": {"mapped": True}}[how])
    if how == "whole":
        moe.attach()
took = time.perf_counter() - begin
done = True; watcher.join()
result = {"seconds": took, "peak": status("VmHWM") - base, "peak_anonymous": peak_anonymous - base_anonymous}
if how == "streamed":
    experts = sum(n * b for n, b in zip(moe.geometry.experts, moe.geometry.expert_bytes))
    result |= {"store": moe.store.nbytes, "skeleton": moe.geometry.non_expert_bytes, "expert": moe.geometry.expert_bytes[0]}
print(json.dumps(result))
"""


def measure(how: str, source: str, folder: str) -> dict[str, float]:
    """One child; sizes in bytes."""
    command = [sys.executable, "-c", CHILD, how, source, folder]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    """Run and write ``results/loading.json``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        source, prepared = str(Path(folder, "checkpoint")), str(Path(folder, "prepared"))
        begin = time.perf_counter()
        config = AutoConfig.for_model("qwen3_moe", **SHAPE)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source, max_shard_size="500MB")
        size = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
        print(f"a checkpoint of {size / 1e9:.2f} GB in {time.perf_counter() - begin:.0f} s")
        measured = {how: measure(how, prepared if how in ("prepared", "mapped") else source, prepared) for how in HOWS}
    streamed = measured["streamed"]
    allowed = streamed["store"] + streamed["skeleton"] + 2 * streamed["expert"]
    result = {
        "what": "peak resident memory above the imports, over store + skeleton + two experts",
        "ratio": streamed["peak"] / allowed,
        "allowed": allowed,
        "experts_over_store_and_skeleton": (streamed["peak"] - streamed["store"] - streamed["skeleton"]) / streamed["expert"],
        "measured": measured,
        "conditions": conditions(
            model=f"random qwen3_moe, {SHAPE}", dtype="bfloat16", checkpoint_bytes=size, load_average=os.getloadavg()[0]
        ),
    }
    for how, figures in measured.items():
        peak, own = figures["peak"] / 1e6, figures["peak_anonymous"] / 1e6
        print(f"{how:9} {peak:6.0f} MB peak, {own:6.0f} MB of its own, {figures['seconds']:5.1f} s")
    print(f"streamed: {result['ratio']:.3f}x of store + skeleton + two experts ({allowed / 1e6:.0f} MB)")
    print(write("loading", result))


HOWS = ("streamed", "whole", "prepare", "prepared", "mapped")

if __name__ == "__main__":
    main()
