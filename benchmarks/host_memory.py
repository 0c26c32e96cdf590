"""Peak host memory of load_moe + attach, measured in child processes, against weights + slots.

The model is a random MoE of some hundred MB, saved to a temporary folder, so that the interpreter doesn't hide it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from benchmarks.common import conditions, write

CHILD = """
import json, resource, sys
import specter_lab as sl
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
moe = sl.load_moe(sys.argv[1], dtype="float32")
loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
weights = sum(p.numel() * p.element_size() for p in moe.model.parameters())
pipeline = sl.Pipeline(moe, slots=2, machine=sl.SimulatedMachine())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
sizes = {"weights": weights, "slots": pipeline.plan.device.slots, "store": moe.store.nbytes}
print(json.dumps({**sizes, "loaded": loaded - base, "peak": peak - base}))
"""


def main() -> None:
    """Run and write ``results/host_memory.json``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(
            "qwen3_moe", hidden_size=512, moe_intermediate_size=512, num_hidden_layers=8, num_experts=32, num_experts_per_tok=4,
            num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=4096, intermediate_size=1024,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        child = subprocess.run([sys.executable, "-c", CHILD, folder], stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(child.stdout.splitlines()[-1])
    allowed = measured["weights"] + measured["slots"]
    result = {
        "what": "peak resident memory above the imports, of load_moe and a pipeline, over weights + slots",
        "ratio": measured["peak"] / allowed,
        "bytes": measured,
        "conditions": conditions(model="random qwen3_moe, 8 layers x 32 experts of 512 x 512", dtype="float32"),
    }
    print(f"peak host memory: {result['ratio']:.3f}x of weights + slots ({measured['peak'] / 1e6:.0f} of {allowed / 1e6:.0f} MB)")
    print(write("host_memory", result))


if __name__ == "__main__":
    main()
