"""The measurement families of Specter's artifact, each one call that returns a table and its figure.

| family | call |
| --- | --- |
| routing | ``routing``: what drafts and target go to, by group of prompts |
| working set | ``working_set``: experts a pass needs, and its price, by draft length |
| sensitivity | ``sensitivity``: by kind of text, length and temperature |
| cache policies | ``cache_policies``: adaptive chunks, no prefetch, early, late |
| ablation | ``ablate``: each mechanism removed, and alone |
| latency | ``latency``: where the time of a token goes |
| memory | ``memory``: sharing weights and KV with the draft, against copies; ``memory_sweep``: by budget |
| fidelity | ``fidelity``: draft against target on identical inputs |
| oracle replay | ``oracle_replay``: perfect predictions, but for a share of the identities |
| depth | ``draft_depth``: by draft length |
| prompt length | ``prompt_length`` |

Each takes a system (a name of ``baselines``, a function like those, or a pipeline), prompts, and what ``compare`` takes: ``target``,
``machine``, ``memory`` and ``context_length`` where the system is no pipeline, and options of the request. All work on the throttled and
the simulated machine, and on a ``ReplayTarget`` where nothing else is said. Functions return; notebooks show.

>>> import specter_lab as sl
>>> kw = dict(target=sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine(), memory="12MB", max_new_tokens=4)
>>> sl.experiments.draft_depth("lookahead", ["Once"], lengths=(1, 2), **kw).table.index.tolist()
[1, 2]
"""

from specter_lab.experiments.ablation import MECHANISMS, Mechanism, ablate
from specter_lab.experiments.experiment import Experiment, sweep
from specter_lab.experiments.oracles import oracle_replay
from specter_lab.experiments.prices import latency, memory
from specter_lab.experiments.recipe import Recipe
from specter_lab.experiments.routes import fidelity, routing, working_set
from specter_lab.experiments.sweeps import cache_policies, draft_depth, memory_sweep, prompt_length, sensitivity

__all__ = [
    "MECHANISMS",
    "Experiment",
    "Mechanism",
    "Recipe",
    "ablate",
    "cache_policies",
    "draft_depth",
    "fidelity",
    "latency",
    "memory",
    "memory_sweep",
    "oracle_replay",
    "prompt_length",
    "routing",
    "sensitivity",
    "sweep",
    "working_set",
]
