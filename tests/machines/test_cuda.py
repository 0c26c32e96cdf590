"""The GPU machine: exact tokens, real overlap, no use before arrival. Needs a GPU; elsewhere only its refusal is tested."""

import pytest
import torch

import specter_lab as sl
from specter_lab.machines.cuda import CudaMachine

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(RuntimeError, match="torch finds none here"):
        CudaMachine()


@gpu
def test_a_slot_reused_at_once_never_shows_old_or_torn_bytes():
    """Case 23. Large copies into the same two slots, each read by a long kernel right after: every sum is the source's."""
    from tests.toy import ToyRun, ToyStore, call

    class Large(ToyStore):
        def blob(self, key):
            return super().blob(key).pin_memory()

    size = 8 << 20
    run = ToyRun(Large(1, 8, size), [2], CudaMachine(), device="cuda")
    for step in range(40):
        run.run_pass(step, [call(0, [step % 8, (3 * step + 1) % 8])])
    trace = run.finish()
    assert len(run.served) >= 40 and len(trace.of_kind("transfer")) > 20


@gpu
@pytest.mark.parametrize("system", ["on_demand", "next_layer_gate", "specter", "lookahead"])
def test_tokens_are_the_models_own(system):
    moe = sl.load_moe("tiny-moe", dtype="float32", device_map="cuda")
    ids = moe.tokenizer(sl.load_prompts("prose")[0].text, return_tensors="pt").input_ids.cuda()
    own = tuple(moe.own_generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist())
    with sl.baselines.named(system)(moe, machine=CudaMachine(), slots=6, poison=True) as pipeline:
        run = pipeline.generate(ids, max_new_tokens=24, do_sample=False)
    assert run.new_ids == own
    assert run.trace.machine.startswith("measured on") and len(run.trace.of_kind("transfer"))
    bars = run.trace.events[run.trace.events["lane"] == "link"].sort_values("start_us")
    assert (bars["start_us"].to_numpy()[1:] - bars["end_us"].to_numpy()[:-1] >= -1e-3 * 1e3).all()
