"""The recorder keeps exactly what the routers picked, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from specter_lab.routing.recorder import RouterRecorder, RoutingLog

IDS = torch.tensor([[5, 7, 11, 2, 300]])


class Experts(nn.Module):
    """Looks like experts of transformers' registry: (rows, hidden), ids, weights -> (rows, hidden)."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(experts, 2, 2))
        self.is_transposed, self.has_gate = False, True

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return hidden


class Toy(nn.Module):
    """Hands each layer the ids and weights that a test prepared."""

    def __init__(self, counts: list[int], picks: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": Experts(count)}) for count in counts)
        self.picks = picks

    def forward(self, input_ids: Tensor) -> Tensor:
        for layer, (ids, weights) in zip(self.layers, self.picks, strict=False):
            layer["experts"](torch.zeros(len(ids), 2), ids, weights)
        return input_ids


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def routers_own(model: nn.Module, run: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """(token, layer, rank) ids and weights as the routers return them, taken by other hooks than the recorder's."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".mlp.router")):
            handles.append(
                module.register_forward_hook(
                    lambda m, args, out, name=name: seen.setdefault(name, []).append((out[2], out[1]))  # (logits, weights, ids)
                )
            )
    run()
    for handle in handles:
        handle.remove()
    ids, weights = (torch.stack([torch.cat([call[i] for call in calls]) for calls in seen.values()], 1) for i in (0, 1))
    return ids.cpu(), weights.float().cpu()


def test_it_records_what_the_routers_picked(fresh_tiny_model: Callable[[], PreTrainedModel], device: torch.device) -> None:
    model = fresh_tiny_model().to(device)
    with RouterRecorder(model) as recorder:
        ids, weights = routers_own(
            model, lambda: model.generate(IDS.to(device), attention_mask=torch.ones_like(IDS).to(device), max_new_tokens=4, do_sample=False)
        )
    log = recorder.log
    assert torch.equal(log.experts, ids) and torch.equal(log.weights, weights)
    assert log.tokens[:5].tolist() == IDS[0].tolist() and len(log) == 8  # the last token made is never fed in
    assert log.positions.tolist() == list(range(8))
    assert log.forwards.tolist() == [0] * 5 + [1, 2, 3]
    assert (log.expert_counts, log.decoder_layers, log.model_type) == ((24,) * 8, tuple(range(8)), "qwen3_moe")


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # the old name still works, so it is tested
@pytest.mark.parametrize("cache_name", ["cache", "past_key_values"])
def test_positions_follow_the_cache(tiny_model: PreTrainedModel, cache_name: str) -> None:
    cache = DynamicCache(config=tiny_model.config)
    with RouterRecorder(tiny_model) as recorder, torch.no_grad():
        tiny_model(IDS, cache=cache)
        cache.crop(-2)  # two tokens were rejected
        tiny_model(IDS[:, :2], **{cache_name: cache})
        tiny_model(IDS[:, :1])
    assert recorder.log.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 0]


@pytest.mark.parametrize(
    ("model_type", "options", "counts", "decoder_layers"),
    [
        (
            "deepseek_v2",
            {"first_k_dense_replace": 1, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
            (6, 6),
            (1, 2),
        ),
        ("gpt_oss", {"num_local_experts": 6, "layer_types": ["full_attention"] * 3}, (6, 6, 6), (0, 1, 2)),
    ],
)
def test_other_families(model_type: str, options: dict[str, object], counts: tuple[int, ...], decoder_layers: tuple[int, ...]) -> None:
    small = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small, **heads, **options)).eval()
    with RouterRecorder(model) as recorder, torch.no_grad():
        ids, weights = routers_own(model, lambda: model(IDS))
    log = recorder.log
    assert torch.equal(log.experts, ids) and torch.equal(log.weights, weights)
    assert (log.expert_counts, log.decoder_layers) == (counts, decoder_layers)


def test_layers_may_differ_skip_an_expert_or_weigh_all_of_them() -> None:
    every = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    toy = Toy(
        [4, 3],
        [(torch.tensor([[2, 0], [3, 1]]), every), (torch.tensor([[1], [3]]), torch.tensor([[0.5], [0.6]]))],  # 3 of 3: "no expert"
    )
    with RouterRecorder(toy) as recorder:
        toy(IDS[:, :2])
    log = recorder.log
    assert log.experts.tolist() == [[[2, 0], [1, -1]], [[3, 1], [-1, -1]]]
    assert torch.equal(log.weights, torch.tensor([[[0.3, 0.1], [0.5, 0.0]], [[0.1, 0.3], [0.0, 0.0]]]))
    assert len(log.frame()) == 5


def test_embeddings_and_a_wrapped_model(tiny_model: PreTrainedModel) -> None:
    class Wrapper:
        model = tiny_model

    with RouterRecorder(Wrapper()) as recorder, torch.no_grad():
        tiny_model(inputs_embeds=tiny_model.get_input_embeddings()(IDS))
    assert recorder.log.tokens.tolist() == [-1] * 5


def test_recorders_nest_and_remove_only_their_own_hooks(tiny_model: PreTrainedModel) -> None:
    before = hooks(tiny_model)
    with RouterRecorder(tiny_model) as outer, torch.no_grad():
        tiny_model(IDS)
        with RouterRecorder(tiny_model) as inner:
            tiny_model(IDS[:, :2])
        tiny_model(IDS[:, :1])
        with pytest.raises(RuntimeError, match="watches once at a time"), outer:
            pass
    assert (len(outer.log), len(inner.log)) == (8, 2)
    assert torch.equal(outer.log.experts[5:7], inner.log.experts)
    assert hooks(tiny_model) == before


def test_a_failed_forward_leaves_nothing(fresh_tiny_model: Callable[[], PreTrainedModel]) -> None:
    model = fresh_tiny_model()
    before = hooks(model)
    recorder = RouterRecorder(model)
    with pytest.raises(ZeroDivisionError), recorder, torch.no_grad():
        model(IDS)
        with pytest.raises(KeyError), _raises_in(model.model.layers[4], KeyError):
            model(IDS)
        model(IDS[:, :2])
        _ = 1 / 0
    assert recorder.log.forwards.tolist() == [0] * 5 + [1] * 2
    assert hooks(model) == before


class _raises_in:
    def __init__(self, module: nn.Module, error: type[Exception]) -> None:
        def fail(*_: object) -> None:
            raise error

        self.handle = module.register_forward_pre_hook(fail)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def test_recording_nothing_is_an_error(tiny_model: PreTrainedModel, fresh_tiny_model: Callable[[], PreTrainedModel]) -> None:
    other = fresh_tiny_model()
    before = hooks(tiny_model)
    with pytest.raises(RuntimeError, match="8 experts modules were watched through 0 forwards"), RouterRecorder(tiny_model) as recorder:
        assert len(recorder.log) == 0
        other(IDS)
    assert hooks(tiny_model) == before
    with pytest.raises(RuntimeError, match="1 experts modules were watched through 1 forwards"), RouterRecorder(bypassed := Toy([4], [])):
        bypassed(IDS)
    with pytest.raises(ZeroDivisionError), RouterRecorder(tiny_model):  # the first error wins
        _ = 1 / 0


def test_what_cannot_be_recorded_is_refused(tiny_model: PreTrainedModel) -> None:
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM has 0 such modules"):
        RouterRecorder(dense)
    with pytest.raises(TypeError, match="this is a str"):
        RouterRecorder("tiny-moe")
    with pytest.raises(ValueError, match="a batch of 2"), RouterRecorder(tiny_model):
        tiny_model(IDS.repeat(2, 1))
    with pytest.raises(RuntimeError, match="MoE layer 0 was called outside one"), RouterRecorder(tiny_model):
        tiny_model.model(IDS)
    one_row = Toy([4], [(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))])
    with pytest.raises(ValueError, match="got 1 rows for 5 tokens"), RouterRecorder(one_row):
        one_row(IDS)


def test_a_layer_that_runs_twice_has_the_picks_of_both() -> None:
    """Some models loop over their layers: a token then picks more experts there than the router picks at once."""
    looping = Toy([4], [(torch.tensor([[2]]), torch.tensor([[0.25]])), (torch.tensor([[3]]), torch.tensor([[0.75]]))])
    looping.layers.append(looping.layers[0])
    with RouterRecorder(looping) as recorder:
        looping(IDS[:, :1])
    assert recorder.log.experts.tolist() == [[[2, 3]]] and recorder.log.weights.tolist() == [[[0.25, 0.75]]]


def test_a_recorded_log_survives_the_disk(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    with RouterRecorder(tiny_model) as recorder, torch.no_grad():
        tiny_model(IDS)
    log, again = recorder.log, RoutingLog.load(recorder.log.save(tmp_path / "a.safetensors"))
    for name in ("experts", "weights", "tokens", "positions", "forwards"):
        assert torch.equal(getattr(again, name), getattr(log, name))
    assert repr(again) == repr(log) and again.decoder_layers == log.decoder_layers
