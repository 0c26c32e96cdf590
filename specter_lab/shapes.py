"""What follows from a model's published sizes: weights, bytes, cache."""

from __future__ import annotations

from dataclasses import dataclass

from specter_lab.records import Geometry


@dataclass(frozen=True)
class ModelShape:
    """A published model's sizes, from which bytes follow; biases and norms, below 0.1 %, are left out.

    ``moe_layers`` come after ``dense_layers``. ``latent_size`` and ``rotary_size`` are of latent attention (0: none), where
    ``qk_head_size`` includes the rotary part. ``routing`` names statistics for ``SyntheticRouting``.

    >>> from specter_lab.hardware import hardware
    >>> round(hardware().models["mixtral_8x7b"].expert_bytes() / 1e6, 1)
    352.3
    """

    name: str
    hidden_size: int
    expert_size: int
    moe_layers: int
    dense_layers: int
    dense_size: int
    experts: int
    experts_per_token: int
    shared_size: int
    heads: int
    kv_heads: int
    qk_head_size: int
    v_head_size: int
    latent_size: int
    rotary_size: int
    vocab_size: int
    routing: str
    source: str

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return self.moe_layers

    @property
    def expert_weights(self) -> int:
        """Of one routed expert: gate, up and down projection."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def attention_weights(self) -> int:
        """Of one layer: query, key, value and output projections."""
        query, out = self.heads * self.qk_head_size, self.heads * self.v_head_size
        if self.latent_size:
            down = self.latent_size + self.rotary_size
            up = self.latent_size * self.heads * (self.qk_head_size - self.rotary_size + self.v_head_size)
            return self.hidden_size * (query + down + out) + up
        return self.hidden_size * (query + self.kv_heads * (self.qk_head_size + self.v_head_size) + out)

    @property
    def skeleton_weights(self) -> int:
        """Of one MoE layer without its routed experts: attention, router, shared experts."""
        return self.attention_weights + self.hidden_size * (self.experts + 3 * self.shared_size)

    @property
    def head_weights(self) -> int:
        """What a pass reads outside the MoE layers: the dense layers and the output head."""
        return self.dense_layers * (self.attention_weights + 3 * self.hidden_size * self.dense_size) + self.hidden_size * self.vocab_size

    def expert_bytes(self, bits: float = 16) -> int:
        """One routed expert at so many bits a weight (MXFP4: 4.25)."""
        return round(self.expert_weights * bits / 8)

    @property
    def int4_expert_bytes(self) -> int:
        """One routed expert in INT4: half a byte a weight and a 2-byte scale for each group of 128."""
        return self.expert_bytes(4 + 16 / 128)

    @property
    def non_expert_bytes(self) -> int:
        """Everything else in bfloat16, with the embedding."""
        return 2 * (self.moe_layers * self.skeleton_weights + self.head_weights + self.hidden_size * self.vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values in bfloat16 as transformers caches them: also with latent attention for each head, not as latents."""
        return 2 * (self.moe_layers + self.dense_layers) * self.kv_heads * (self.qk_head_size + self.v_head_size)

    @property
    def geometry(self) -> Geometry:
        """The same as a ``Geometry`` in bfloat16, for a replay; positions as far as anybody drafts, 4096."""
        layers = range(self.dense_layers, self.dense_layers + self.moe_layers)
        return Geometry(
            model_type=self.name,
            decoder_layers=tuple(layers),
            dense_layers=self.dense_layers,
            experts=(self.experts,) * self.moe_layers,
            experts_per_token=self.experts_per_token,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=4096,
            expert_bytes=(self.expert_bytes(),) * self.moe_layers,
            shared_expert_bytes=2 * self.moe_layers * 3 * self.hidden_size * self.shared_size,
            non_expert_bytes=self.non_expert_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )
