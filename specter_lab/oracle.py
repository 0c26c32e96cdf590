"""What perfect knowledge of the text would give in this loop, on this machine: a bound, not a method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specter_lab.generation import Generation
from specter_lab.machines.simulated import SimulatedMachine
from specter_lab.observe.trace import Trace
from specter_lab.offload.eviction import ClairvoyantEviction
from specter_lab.pieces import DraftContext, ExpertStore
from specter_lab.pipeline import Pipeline
from specter_lab.records import DraftToken
from specter_lab.replay import ReplayableText, longest_draft
from specter_lab.routing.predictors import Oracle


class PerfectDrafter:
    """Proposes what will be accepted, at the cost of a self-draft: ``bank`` computes, ``ids`` (the whole text) are proposed.

    >>> PerfectDrafter(None).name
    'perfect draft'
    """

    name = "perfect draft"

    def __init__(self, bank: ExpertStore | None) -> None:
        self.bank = bank
        self.ids: Sequence[int] = ()

    def draft(self, context: DraftContext, length: int) -> Iterator[DraftToken]:
        """The next tokens of the text, each after a forward whose own choice is ignored."""
        assert self.bank is not None
        token, done = int(context.ids[0, -1]), context.ids.shape[1]
        for known in self.ids[done : done + length]:
            _, unchosen = context.forward(token, self.bank)
            token = known
            yield replace(unchosen, token=token)
            if token in context.end_tokens:
                return

    def learn(self, drafted: Sequence[DraftToken], accepted: int) -> None:
        """There is nothing left to learn."""


class PerfectText:
    """A replayable text whose drafts are all accepted, and routed as the target is."""

    def __init__(self, text: ReplayableText) -> None:
        self.experts, self.gate, self.longest_draft = text.experts, text.gate, longest_draft(text)

    def window(self, start: int, length: int) -> Any:
        """``length`` drafts, fewer at the end of the text, all of them right."""
        length = min(length, len(self.experts) - 1 - start)
        rows = self.experts[start : start + length + 1]
        return SimpleNamespace(draft=rows[:length], needed=rows, accepted=length)


class OraclePipeline(Pipeline):
    """A pipeline that knows each greedy request before it begins, from a rehearsal that isn't measured.

    Its predictor knows the experts of every row of the coming pass, but that a share ``replaced`` of the identities are
    wrong: other experts of the layer, drawn with ``seed``. A ``PerfectDrafter`` knows the tokens; then the slots' eviction
    is clairvoyant too, since it is known which tokens each pass verifies. Other pieces stay as they are.
    """

    def __init__(self, target: Any, *, replaced: float = 0.0, seed: int = 0, **pieces: Any) -> None:
        if not 0 <= replaced <= 1:
            raise ValueError(f"A share of identities lies between 0 and 1; got replaced={replaced}. Give for instance 0.25.")
        self.replaced, self.seed = replaced, seed
        super().__init__(target, **{**pieces, "predictor": Oracle(SimpleNamespace(experts=torch.zeros(0, 1, 1)))})

    def generate(self, prompt: Any = None, *, seed: int | None = None, streamer: Any = None, **options: Any) -> Generation:
        """Rehearse the request token by token on a virtual clock, then run it. ``ValueError`` for sampling."""
        context = self.plan.context_length
        with Pipeline(self.target, machine=SimulatedMachine(), context_length=context) as rehearsal:
            known = rehearsal.generate(prompt, **options)
        if known.conditions["sampling"]:
            raise ValueError("An oracle knows greedy texts; this request samples. Give do_sample=False, or leave the oracle out.")
        prompt_tokens = known.conditions["prompt_tokens"]
        routing = text_routing(known.trace, prompt_tokens, self.target.geometry.experts_per_token)
        first = known.trace.of_kind("need").query("step == 0").groupby("layer")["expert"].agg(set).tolist()
        self._foresee(torch.from_numpy(routing), first, prompt_tokens, len(known.new_ids), known.ids)
        return super().generate(prompt, streamer=streamer, **options)

    def replay(self, text: ReplayableText, *, prompt_tokens: int, max_new_tokens: int) -> Generation:
        """Replay the text, known beforehand."""
        if isinstance(self.drafter, PerfectDrafter):
            text = PerfectText(text)
        experts = torch.from_numpy(np.asarray(text.experts, dtype=np.int64))
        first = [set(layer.unique().tolist()) for layer in experts[:prompt_tokens].unbind(1)]
        self._foresee(experts, first, prompt_tokens, max_new_tokens, ())
        return super().replay(text, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens)

    def _foresee(self, experts: Tensor, first: list[set[int]], prompt_tokens: int, new_tokens: int, ids: Sequence[int]) -> None:
        """Tell the pieces: ``experts`` (token, layer, rank), what each layer's prefill needs, and the ids."""
        blurred = replace_identities(experts, self.target.geometry.experts, self.replaced, self.seed)
        self.predictor = self.assembly.predictor = Oracle(SimpleNamespace(experts=blurred))
        if isinstance(self.drafter, PerfectDrafter):
            self.drafter.ids = ids
            calls, position, end = [[needed] for needed in first], prompt_tokens, prompt_tokens + new_tokens
            for step in range(1, new_tokens):
                rows = 1 + self.draft_length.choose(step, end - position - 2)
                for layer, rest in enumerate(calls):
                    rest.append(set(experts[position : position + rows, layer].unique().tolist()) - {-1})
                position += rows
                if position >= end - 1:
                    break
            self.assembly.eviction = self.residency.eviction = ClairvoyantEviction(calls)


def text_routing(trace: Trace, prompt_tokens: int, width: int) -> np.ndarray:
    """(token, layer, rank) ids of a finished run's committed tokens, -1 for the prompt's and for unused ranks.

    ``width`` experts a token. The last committed token isn't fed in, so there is no row for it.

    >>> import specter_lab as sl
    >>> with sl.Pipeline("tiny-moe", machine=sl.SimulatedMachine()) as p: run = p.generate("Once", max_new_tokens=3)
    >>> text_routing(run.trace, len(run.ids) - 3, 4).shape[1:]
    (8, 4)
    """
    routes, commits = trace.of_kind("route"), trace.of_kind("commit")
    end = prompt_tokens + int(commits["tokens"].sum()) - 1
    routes = routes[routes["position"] < end]
    last = routes.groupby(["position", "layer"])["step"].transform("max")  # a rejected row is fed in again, rightly
    routes = routes[routes["step"] == last]
    rank = routes.groupby(["position", "layer"]).cumcount()
    layers = int(trace.of_kind("need")["layer"].max()) + 1
    table = np.full((end, layers, width), -1, dtype=np.int64)
    table[routes["position"], routes["layer"], rank] = routes["expert"]
    return table


def replace_identities(experts: Tensor, counts: Sequence[int], share: float, seed: int = 0) -> Tensor:
    """(token, layer, rank) ids, of which ``share`` are replaced by experts of the same layer that the token doesn't use.

    ``counts``: experts of each layer. Raises ``ValueError`` where a layer has no others.

    >>> replace_identities(torch.tensor([[[0, 1]]]), [4], 1.0).sort().values.tolist()
    [[[2, 3]]]
    """
    if share == 0:
        return experts
    width = experts.shape[2]
    if min(counts) < 2 * width:
        raise ValueError(
            f"Replaced identities are other experts than a token's own {width}; the smallest layer has {min(counts)}. Use replaced=0."
        )
    generator = torch.Generator().manual_seed(seed)
    blurred = experts.clone()
    for layer, count in enumerate(counts):
        own = experts[:, layer]
        keys = torch.rand(len(own), count, generator=generator)
        keys.scatter_(1, own.clamp_min(0), -1.0)  # a token's own come last
        others = keys.argsort(1, descending=True)[:, :width]
        wrong = (torch.rand(own.shape, generator=generator) < share) & (own >= 0)
        blurred[:, layer] = torch.where(wrong, others, own)
    return blurred


def oracle(target: Any, *, bank: ExpertStore | None = None, **options: Any) -> Pipeline:
    """The upper end of the bracket, run rather than computed: perfect drafts at the self-draft's cost and memory, perfect
    predictions from the first moment of each step, clairvoyant eviction.

    It is this loop with perfect knowledge, not the best schedule: no bypass of the slots, one fixed draft length, nothing
    fetched for the pass after the next. ``oracle_bound`` is below it. ``bank``, ``draft_length`` as for the other
    systems; ``replaced``: the share of predicted identities that are wrong. Each request is rehearsed first, so greedy only.

    >>> import specter_lab as sl
    >>> with sl.baselines.oracle(sl.load_moe("tiny-moe"), machine=sl.SimulatedMachine()) as pipeline:
    ...     pipeline.generate("Once", max_new_tokens=12, do_sample=False).metrics["acceptance_rate"]
    1.0
    """
    return OraclePipeline(target, **{"drafter": PerfectDrafter(bank or target.quantize("qint4")), **options})
