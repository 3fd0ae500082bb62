"""The matrix products of a language model, independent of any framework.

config.json ─► rlsys.planner.model_config ─► Architecture ─► Gemm lists ─► kernels, memory

Shape legend: h hidden width, a attention heads, kv key-value heads, d head width, f width of a
feed-forward network, E experts, V vocabulary. A Gemm (n, k) maps k inputs of a token to n outputs
and has n*k parameters. `split` says how tensor parallelism divides it: columns divides n, rows
divides k, none keeps the whole matrix on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from rlsys.errors import require

Split = Literal["columns", "rows", "none"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix of a layer: n outputs, k inputs."""

    name: str
    n: int
    k: int
    split: Split

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.n * self.k

    def local(self, tp: int) -> tuple[int, int]:
        """Return (n, k) of one rank of `tp`."""
        if self.split == "columns":
            return -(-self.n // tp), self.k
        if self.split == "rows":
            return self.n, -(-self.k // tp)
        return self.n, self.k


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes of a decoder-only language model.

    A layer has a mixer (attention, or a linear mixer such as Mamba) and a feed-forward network
    (dense or of experts). Models with layers of one part only count each part by itself.

    Attributes:
        name: Name for messages.
        hidden: Width of the residual stream (h).
        vocab: Rows of the embedding (V).
        embedding_width: Width of embedding and head, if matrices project it to and from h. 0
            otherwise.
        heads: Attention heads (a).
        kv_heads: Key-value heads (kv).
        head_dim: Width of queries and keys of a head (d).
        value_dim: Width of the values of a head.
        attention_layers: Layers with softmax attention.
        dense_layers: Layers with a dense feed-forward network.
        moe_layers: Layers with experts.
        linear_layers: Layers with a linear mixer.
        ffn: Width of the dense network (f). 0 if there is none.
        gated: Whether feed-forward networks have a gate (SwiGLU, GeGLU).
        tied: Whether the head shares the embedding's matrix.
        has_scalar_head: Whether the head has one output, as in a critic or a reward model, and a
            matrix of its own.
        experts: Experts of a layer (E). 0 for dense models.
        top_k: Experts of a token.
        expert_ffn: Width of one expert.
        expert_hidden: Width at which experts work, if it is not h (latent experts). 0 otherwise.
        shared_ffn: Width of all shared experts together.
        q_lora: Rank of the query's compression (MLA). 0 without.
        kv_lora: Rank of the keys' and values' compression (MLA). 0 without MLA.
        rope_dim: Width of the part of keys that all heads share (MLA).
        attention_gate: Whether attention has a gate as wide as its queries.
        qk_norm: Whether attention normalises queries and keys.
        window: Tokens that a layer with a window sees. 0 without windows.
        window_layers: Attention layers with the window.
        linear_gemms: (n, k) of a linear mixer's matrices.
        linear_state: State values of a linear mixer per token of its scan.
        max_context: Longest sequence.
        learned_positions: Rows of a position embedding.
        small_parameters: Parameters outside matrices: norms, biases, gates.
    """

    name: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    attention_layers: int
    embedding_width: int = 0
    dense_layers: int = 0
    moe_layers: int = 0
    linear_layers: int = 0
    ffn: int = 0
    gated: bool = True
    tied: bool = False
    has_scalar_head: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    expert_hidden: int = 0
    shared_ffn: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    attention_gate: bool = False
    qk_norm: bool = False
    window: int = 0
    window_layers: int = 0
    linear_gemms: tuple[tuple[int, int], ...] = ()
    linear_state: int = 0
    max_context: int = 1 << 20
    learned_positions: int = 0
    small_parameters: int = 0

    def __post_init__(self) -> None:
        positive = {"hidden", "vocab", "heads", "kv_heads", "head_dim", "value_dim", "layers"}
        positive |= {"ffn"} if self.dense_layers else set()
        positive |= {"expert_ffn"} if self.moe_layers else set()
        positive |= {"window"} if self.window_layers else set()
        counts = (field.name for field in fields(self) if type(getattr(self, field.name)) is int)
        for name in (*counts, "layers"):
            value = getattr(self, name)
            require(
                value > 0 if name in positive else value >= 0,
                f"model.{name}",
                value,
                rule="must be positive" if name in positive else "must be at least 0",
                fix="Correct the model's config.json.",
            )
        require(
            bool(self.kv_lora) or self.heads % self.kv_heads == 0,
            "model.kv_heads",
            self.kv_heads,
            rule=f"must divide {self.heads:,} attention heads",
            fix="Correct the model's config.json.",
        )
        require(
            self.window_layers <= self.attention_layers,
            "model.window_layers",
            self.window_layers,
            rule=f"must be at most {self.attention_layers} layers with attention",
            fix="Correct the model's config.json.",
        )
        require(
            not self.moe_layers or 0 < self.top_k <= self.experts,
            "model.top_k",
            self.top_k,
            rule=f"must be 1 to {self.experts} experts",
            fix="Correct the model's config.json.",
        )

    @property
    def is_moe(self) -> bool:
        """True if some layer has experts."""
        return self.moe_layers > 0

    @property
    def layers(self) -> int:
        """Number of layers as pipeline stages count them."""
        mixers = self.attention_layers + self.linear_layers
        return max(mixers, self.dense_layers + self.moe_layers)

    @cached_property
    def attention(self) -> tuple[Gemm, ...]:
        """Matrices of an attention layer."""
        h, a = self.hidden, self.heads
        output = Gemm("attention_output", h, a * self.value_dim, "rows")
        if not self.kv_lora:
            queries = (2 if self.attention_gate else 1) * a * self.head_dim
            width = queries + self.kv_heads * (self.head_dim + self.value_dim)
            return (Gemm("qkv", width, h, "columns"), output)
        no_rope = self.head_dim - self.rope_dim
        query = (
            (
                Gemm("query_down", self.q_lora, h, "none"),
                Gemm("query_up", a * self.head_dim, self.q_lora, "columns"),
            )
            if self.q_lora
            else (Gemm("query", a * self.head_dim, h, "columns"),)
        )
        return (
            *query,
            Gemm("kv_down", self.kv_lora + self.rope_dim, h, "none"),
            Gemm("kv_up", a * (no_rope + self.value_dim), self.kv_lora, "columns"),
            output,
        )

    @cached_property
    def linear(self) -> tuple[Gemm, ...]:
        """Matrices of a linear mixer."""
        return tuple(
            Gemm(f"linear_{number}", n, k, "columns" if k == self.hidden else "rows")
            for number, (n, k) in enumerate(self.linear_gemms)
        )

    @cached_property
    def attention_linear(self) -> tuple[tuple[str, int, int], ...]:
        """Linear layers of an attention layer as checkpoints name them: name, outputs, inputs."""
        h, a = self.hidden, self.heads
        if self.kv_lora:
            names = {
                "query": "q_proj",
                "query_down": "q_a_proj",
                "query_up": "q_b_proj",
                "kv_down": "kv_a_proj_with_mqa",
                "kv_up": "kv_b_proj",
                "attention_output": "o_proj",
            }
            return tuple((names[one.name], one.n, one.k) for one in self.attention)
        return (
            ("q_proj", (2 if self.attention_gate else 1) * a * self.head_dim, h),
            ("k_proj", self.kv_heads * self.head_dim, h),
            ("v_proj", self.kv_heads * self.value_dim, h),
            ("o_proj", h, a * self.value_dim),
        )

    @cached_property
    def dense_linear(self) -> tuple[tuple[str, int, int], ...]:
        """Linear layers of a dense network as checkpoints name them: name, outputs, inputs."""
        gate = (("gate_proj", self.ffn, self.hidden),) if self.gated else ()
        return (
            *gate,
            ("up_proj", self.ffn, self.hidden),
            ("down_proj", self.hidden, self.ffn),
        )

    def _network(self, prefix: str, width: int, hidden: int) -> tuple[Gemm, ...]:
        return (
            Gemm(f"{prefix}_up", (2 if self.gated else 1) * width, hidden, "columns"),
            Gemm(f"{prefix}_down", hidden, width, "rows"),
        )

    @cached_property
    def dense(self) -> tuple[Gemm, ...]:
        """Matrices of a dense feed-forward network."""
        return self._network("ffn", self.ffn, self.hidden) if self.dense_layers else ()

    @cached_property
    def expert(self) -> tuple[Gemm, ...]:
        """Matrices of one expert."""
        hidden = self.expert_hidden or self.hidden
        return self._network("expert", self.expert_ffn, hidden) if self.moe_layers else ()

    @cached_property
    def moe_common(self) -> tuple[Gemm, ...]:
        """Matrices of a layer of experts that every token passes: router and shared experts."""
        if not self.moe_layers:
            return ()
        latent = self.expert_hidden
        return (
            Gemm("router", self.experts, self.hidden, "none"),
            *(self._network("shared", self.shared_ffn, self.hidden) if self.shared_ffn else ()),
            *((Gemm("latent_down", latent, self.hidden, "none"),) if latent else ()),
            *((Gemm("latent_up", self.hidden, latent, "none"),) if latent else ()),
        )

    @property
    def outputs(self) -> int:
        """Outputs of the head: one for each token of the vocabulary, or a single one."""
        return 1 if self.has_scalar_head else self.vocab

    @property
    def head(self) -> Gemm:
        """The output embedding, or the scalar head."""
        split: Split = "none" if self.has_scalar_head else "columns"
        return Gemm("head", self.outputs, self.embedding_width or self.hidden, split)

    @property
    def projection_parameters(self) -> int:
        """Parameters of the two projections between the embedding's width and h."""
        return 2 * self.embedding_width * self.hidden

    @property
    def has_output_embedding(self) -> bool:
        """True if the head has a matrix of its own that is as large as the embedding."""
        return not (self.tied or self.has_scalar_head)

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of the matrices of one attention layer."""
        return sum(gemm.parameters for gemm in self.attention)

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts of one layer."""
        return self.experts * sum(gemm.parameters for gemm in self.expert)

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices, without embedding and head."""
        count = self.attention_layers * self.attention_parameters
        count += self.linear_layers * sum(gemm.parameters for gemm in self.linear)
        count += self.dense_layers * sum(gemm.parameters for gemm in self.dense)
        common = sum(gemm.parameters for gemm in self.moe_common)
        return count + self.moe_layers * (common + self.expert_parameters)

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of embedding, projections, positions and head. A tied head counts once."""
        rows = self.vocab
        if self.has_scalar_head or not self.tied:
            rows += self.outputs
        width = self.embedding_width or self.hidden
        return rows * width + self.learned_positions * self.hidden + self.projection_parameters

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        return self.layer_parameters + self.embedding_parameters + self.small_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters of the matrices that one token passes, with the head."""
        idle = self.experts - self.top_k
        skipped = self.moe_layers * idle * sum(gemm.parameters for gemm in self.expert)
        ends = self.head.parameters + self.projection_parameters
        return self.layer_parameters - skipped + ends

    def attended(self, length: float) -> float:
        """Return the pairs of tokens that attention compares in a causal row of `length` tokens.

        The mean over attention layers: a layer with a window compares fewer.
        """
        full = length * length / 2
        if not self.window_layers or length <= self.window:
            return full
        window = self.window * length - self.window * self.window / 2
        share = self.window_layers / max(self.attention_layers, 1)
        return share * window + (1 - share) * full

    def seen(self, context: float) -> float:
        """Return the mean over attention layers of the tokens that one new token attends to."""
        if not self.window_layers or context <= self.window:
            return context
        share = self.window_layers / max(self.attention_layers, 1)
        return share * self.window + (1 - share) * context

    def kv_bytes_per_token(self, bytes_per_value: float, tp: int = 1) -> float:
        """Return the bytes that one token occupies in the KV cache of one rank, over all layers.

        Heads that tp does not divide are replicated. MLA stores one compressed vector on each rank.
        """
        if self.kv_lora:
            values: float = self.kv_lora + self.rope_dim
        else:
            values = max(self.kv_heads / tp, 1) * (self.head_dim + self.value_dim)
        return self.attention_layers * values * bytes_per_value

    def model_flops(self, length: float, *, training: bool = True) -> float:
        """Return the operations per token of a causal row of `length` tokens.

        6 operations per active parameter and 12 d per head and pair (PaLM, 2204.02311, appendix B),
        counting only visible pairs. A third of both without the backward pass.
        """
        pairs = self.attended(length) / length
        width = self.heads * (self.head_dim + self.value_dim)
        forward = 2 * self.active_parameters + 2 * self.attention_layers * width * pairs
        return (3 if training else 1) * forward
