"""The semantics of a replay, on traces that can be checked by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

import specter_lab as sl
from specter_lab.machines.simulated import CostTable, LaneCosts, SimulatedMachine
from specter_lab.records import Geometry
from specter_lab.replay import Relabelled
from tests.toy import log

COSTS = CostTable(LaneCosts(attention_us=10, expert_us=5, head_us=3), LaneCosts(attention_us=4, expert_us=1, head_us=2))


class Text:
    """Routing written out: ``rows[token][layer]`` experts; ``wrong[start]``: what is drafted and needed from there on, and accepted."""

    def __init__(self, rows, windows=None):
        self.experts = np.array(rows)
        self.gate = self.experts
        self.windows = windows or {}

    def window(self, start, length):
        if start in self.windows:
            draft, needed, accepted = self.windows[start]
            return SimpleNamespace(draft=np.array(draft), needed=np.array(needed), accepted=accepted)
        length = min(length, len(self.experts) - 1 - start)
        return SimpleNamespace(draft=self.experts[start : start + length], needed=self.experts[start : start + length + 1], accepted=length)


def target(layers, experts, width):
    return sl.ReplayTarget(Geometry("toy", tuple(range(layers)), 0, (experts,) * layers, width, 8, 100, 64, (2000,) * layers, 0, 0, 0))


def machine(copy_us=20):
    return SimulatedMachine(2000 / (copy_us * 1e3), latency_us=0, costs=COSTS)


def needs(trace, step):
    rows = trace.of_kind("need").query(f"step == {step}")
    return list(zip(rows["layer"], rows["expert"], rows["outcome"], rows["tokens"], strict=True))


def test_conformance():
    """One layer, two slots, two experts a token. The prompt {0, 1}, then {1, 2}, {0, 3}, {1, 2}.

    All experts of a call are judged before any is admitted: at {0, 3} both 0 and 3 miss, though 3 could only be had by
    forgetting one that 0 could have used. Residents are served first: 1 at 63, before 2 has arrived. LRU: 2's copy forgets 0,
    the older. Figures per token are of what follows the first token.
    """
    text = Text([[[0, 1]], [[1, 2]], [[0, 3]], [[1, 2]], [[0, 0]]])
    with sl.Pipeline(target(1, 4, 2), machine=machine(), slots=2) as pipeline:
        run = pipeline.replay(text, prompt_tokens=1, max_new_tokens=4)
    assert log(run.trace) == [
        ("target", "attention", 0, 10),
        ("link", "transfer 0.0", 10, 30),  # of two misses the lower id first
        ("target", "stall 0.0", 10, 30),
        ("link", "transfer 0.1", 30, 50),
        ("target", "expert 0.0", 30, 35),
        ("target", "stall 0.1", 35, 50),
        ("target", "expert 0.1", 50, 55),
        ("target", "head", 55, 58),  # the first token: step 0 is over
        ("target", "attention", 58, 68),
        ("link", "transfer 0.2", 68, 88),
        ("target", "expert 0.1", 68, 73),
        ("target", "stall 0.2", 73, 88),
        ("target", "expert 0.2", 88, 93),
        ("target", "head", 93, 96),
        ("target", "attention", 96, 106),
        ("link", "transfer 0.0", 106, 126),
        ("target", "stall 0.0", 106, 126),
        ("link", "transfer 0.3", 126, 146),
        ("target", "expert 0.0", 126, 131),
        ("target", "stall 0.3", 131, 146),
        ("target", "expert 0.3", 146, 151),
        ("target", "head", 151, 154),
        ("target", "attention", 154, 164),
        ("link", "transfer 0.1", 164, 184),
        ("target", "stall 0.1", 164, 184),
        ("link", "transfer 0.2", 184, 204),
        ("target", "expert 0.1", 184, 189),
        ("target", "stall 0.2", 189, 204),
        ("target", "expert 0.2", 204, 209),
        ("target", "head", 209, 212),
    ]
    assert [needs(run.trace, step) for step in (1, 2, 3)] == [
        [(0, 1, "hit", 1), (0, 2, "miss", 1)],
        [(0, 0, "miss", 1), (0, 3, "miss", 1)],
        [(0, 1, "miss", 1), (0, 2, "miss", 1)],
    ]
    assert run.trace.of_kind("evict")["expert"].tolist() == [0, 1, 2, 0, 3]
    assert (
        run.metrics["hit_rate"] == 1 / 6
        and run.metrics["ttft_ms"] == 0.058
        and run.metrics["tpot_ms"] == pytest.approx((0.212 - 0.058) / 3)
    )


def test_a_rejected_row_is_needed_and_marked():
    """From token 1 on two tokens are drafted, of which the second is wrong: its row needs 3, which nobody will want again."""
    window = ([[[1]], [[2]]], [[[1]], [[2]], [[3]]], 1)
    text = Text([[[0]], [[1]], [[2]], [[0]], [[0]]], {1: window})
    with sl.baselines.speculative_on_demand(target(1, 4, 1), machine=machine(), slots=4, draft_length=2) as pipeline:
        run = pipeline.replay(text, prompt_tokens=1, max_new_tokens=4)
    assert needs(run.trace, 1) == [(0, 1, "miss", 1), (0, 2, "miss", 1), (0, 3, "miss", 1)]
    routes = run.trace.of_kind("route").query("step == 1")
    assert list(zip(routes["position"], routes["expert"], routes["outcome"], strict=True)) == [
        (1, 1, "accepted"), (2, 2, "accepted"), (3, 3, "rejected"),
    ]  # fmt: skip
    assert run.trace.of_kind("commit").query("step == 1")["tokens"].item() == 2
    assert needs(run.trace, 2)[0] == (0, 0, "hit", 1)  # token 3 is fed in again, routed as the text says


def test_both_recalls_are_reported():
    """The draft knows where the accepted rows go, and not where the last token and the rejected one go: 2 of 2, and 2 of 3."""
    window = ([[[1]], [[2]]], [[[1]], [[2]], [[3]]], 1)
    text = Text([[[0]], [[1]], [[2]], [[0]], [[0]]], {1: window})
    with sl.baselines.lookahead(target(1, 4, 1), machine=machine(), slots=4, draft_length=2) as pipeline:
        run = pipeline.replay(text, prompt_tokens=1, max_new_tokens=3)
    assert run.metrics["recall"] == 2 / 3 and run.metrics["recall_accepted"] == 1.0


def test_cold_and_warm_are_told_apart():
    """Cold, every expert misses once; warm, the second time over the same text, none does."""
    text = Text([[[0]], [[1]], [[2]], [[1]], [[0]]])
    pieces = {"machine": machine(), "slots": 3}
    for warm, rates in ((False, [2 / 3, 2 / 3]), (True, [2 / 3, 0.0])):
        with sl.Pipeline(target(1, 4, 1), warm=warm, **pieces) as pipeline:
            runs = [pipeline.replay(text, prompt_tokens=1, max_new_tokens=4) for _ in range(2)]
        assert [run.metrics["miss_rate"] for run in runs] == rates
        assert {run.conditions["start"] for run in runs} == {"warm" if warm else "cold"}
    with sl.Pipeline(target(1, 4, 1), warm=True, **pieces) as warm, sl.Pipeline(target(1, 4, 1), **pieces) as cold:
        done = sl.compare({"warm": warm, "cold": cold}, [text, text], prompt_tokens=1, max_new_tokens=4)
    assert done.table["start"].to_dict() == {"warm": "warm", "cold": "cold"}
    assert done.table["miss_rate"].to_dict() == {"warm": pytest.approx(1 / 3), "cold": pytest.approx(2 / 3)}


def test_ties_go_to_the_lower_id_and_can_be_seeded():
    """Two slots; {0, 1} arrived together, then one of them must go for 2: who it is, is a tie that order of service decides."""
    text = Text([[[0, 1]], [[2, 2]], [[0, 0]], [[3, 3]], [[1, 1]], [[0, 0]]])
    geometry = target(1, 4, 2)

    def hits(replayed):
        with sl.Pipeline(geometry, machine=machine(), slots=2) as pipeline:
            return pipeline.replay(replayed, prompt_tokens=1, max_new_tokens=5).metrics["hit_rate"]

    assert hits(text) == hits(text) == 0.0  # 0 was served first, so it goes first: then 0 misses
    by_seed = [hits(Relabelled(text, (4,), seed=seed)) for seed in range(8)]
    assert by_seed == [hits(Relabelled(text, (4,), seed=seed)) for seed in range(8)]
    assert set(by_seed) == {0.0, 0.25}  # in the others 1 goes first, and 0 is there
    renamed = Relabelled(text, (4,), seed=1)
    assert sorted(np.unique(renamed.experts)) == [0, 1, 2, 3] and renamed.window(0, 2).needed.shape == (3, 1, 2)


# --- Specter's schedule, step by step ------------------------------------------------------------------------------------

STEPS = (0, 1, 0, 2, 1, 1, 0, 0)  # the expert of layer 0 that each of 8 draft steps goes to, and the target with it; in layer 1 always 3
BEGIN, STEP = 113, 14  # the prompt: two layers of 10 + 2 copies of 20 + 5, and the head; a draft step: two layers of 4 + 2, and 2
END = BEGIN + 8 * STEP
SCHEDULES = {
    # planned copies (start, layer, expert), what each of them evicts, and which experts of layer 0 are hits
    "adaptive": ([(127, 0, 0), (147, 0, 1), (167, 1, 3)], [(0, 2), (0, 3), (1, 0)], [0, 1]),
    "early": ([(127, 0, 0), (147, 1, 3)], [(0, 2), (1, 0)], [0]),
    "late": ([(225, 0, 0), (245, 0, 1), (265, 1, 3)], [(0, 2), (0, 3), (1, 0)], [0, 1]),
    "none": ([], [], [2]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_specter_with_eight_drafts(schedule):
    """Two layers of six experts, two slots each; the prompt leaves 2, 3 in layer 0 and 0, 1 in layer 1.

    Counts after step 1: {0: 2} and {3: 2}; after 2: {0: 2, 1: 2} and {3: 4}; after 8: {0: 8, 1: 6, 2: 2} and {3: 16}.

    * adaptive: b0 = max(1, floor(1.6)) = 1: 0 and 3 are planned; the plan of layer 1 never fills its 2 slots, and the next chunk is one
      step later (4000 bytes at thousands of bytes a us). At step 2 (141 us) 1 joins, before layer 1's turn: copies go in layer order.
    * early: the plan of step 1 alone. late: the plan of step 8. none: no plan.

    A copy forgets what its layer used longest ago. Verification begins when drafting is over and all planned copies have arrived.
    """
    copies, evicted, hits = SCHEDULES[schedule]
    text = Text([[[2, 3], [0, 1]], *[[[expert] * 2, [3, 3]] for expert in STEPS], [[0, 0], [3, 3]], [[0, 0], [3, 3]]])
    with sl.baselines.specter(target(2, 6, 2), machine=machine(), slots=2, draft_length=8, schedule=schedule) as pipeline:
        trace = pipeline.replay(text, prompt_tokens=1, max_new_tokens=10).trace
    drafting = trace.events.query("lane == 'draft' and step == 1")
    assert (drafting["start_us"].min(), drafting["end_us"].max()) == (BEGIN, END)
    planned = trace.of_kind("transfer").query("reason == 'prefetch'")
    assert list(zip(planned["start_us"], planned["layer"], planned["expert"], strict=True)) == copies
    forgotten = trace.of_kind("evict").query("reason == 'prefetch'")
    assert list(zip(forgotten["layer"], forgotten["expert"], strict=True)) == evicted
    verified = trace.of_kind("attention").query("lane == 'target' and step == 1")["start_us"].min()
    assert verified == max([END, *planned["end_us"]])
    needed = trace.of_kind("need").query("step == 1 and layer == 0")
    assert needed["expert"].tolist() == [0, 1, 2] and needed.query("outcome == 'hit'")["expert"].tolist() == hits
