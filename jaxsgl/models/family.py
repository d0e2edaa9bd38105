"""`Family`: what the name of an architecture may imply beyond its config.json.

Owns the differences between families that there are, a field for each. Never knows which family has which
(`families`), nor how a difference is computed. Read by `arch_file` and `layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jaxsgl.models.encoder import Classifier, Restarts
from jaxsgl.models.towers.family import HearingFamily, VisionFamily
from jaxsgl.requests.outputs import PoolingKind
from pallas_kernels.routing import Score

# Which norms a layer has: before mixer and MLP; after them, before the sum; both; before them, and after a mixture of
# experts; or after them where it attends, and before them where it keeps a state.
NormPlaces: TypeAlias = Literal["pre", "post", "sandwich", "pre and mixtures", "post of attention"]
# Over what queries and keys are normalized before rope: each head, all heads at once, or each head less its mean, by
# scales of its own.
QkNorm: TypeAlias = Literal["head", "all", "centred head"]
# What an MLP reads that runs next to the layer's mixer, where the updates of both are added at once: what the mixer
# reads, or the same stream by a norm of its own.
Parallel: TypeAlias = Literal["shared norm", "own norm"]
# What attention's output has gates for: each query head, or each number of one.
OutputGate: TypeAlias = Literal["head", "number"]
GateFunction: TypeAlias = Literal["sigmoid", "softplus"]


@dataclass(frozen=True)
class MoeFamily:
    """How a family mixes experts, and what its config.json calls their numbers.

    Attributes:
      count_keys: names of the number of experts; checkpoints have one of them, or several with the same value.
      ffn_key: the key of an expert's F.
      score, choice_bias, router_bias, expert_bias: see `Router` and `MoeMlp`.
      score_key: the key that says which score it is, of the chosen experts alone; None: `score`.
      choice_bias_key: the key that says whether `choice_bias` holds; None: it does.
      renormalize: whether shares add up to 1; None: as `norm_topk_prob` says.
      margin_key: the key of `Router.margin`; None: the score has none.
      grouped: `n_group`, `topk_group` and `scale_key` hold.
      scale_key: the key of the factor on all shares.
      shared_key: the key of the number of shared experts; None: there are none, or `shared_ffn_key` says their size.
      shared_ffn_key: the key of F of the shared experts, taken together; all of a layer's MLP where a family that has
        this key has no others.
      shared_mean_key: the key that says whether the results of the shared experts and of the others are added ("sum")
        or their mean taken ("average"); None: they are added.
      latent_key: the key of `MoeMlp.latent_size`; None: experts read x.
      identities_key: the key of `MoeMlp.num_identities`; None: there are none.
      shared_gate, scales_inputs: see `MoeMlp`.
      clamped: `swiglu_limit` holds: for gpt-oss's unit, with `swiglu_alpha`, or for silu(gate) * up, of shared experts,
        too; None: it doesn't.
      top_k_key: the key of the number of chosen experts.
      switch: the key that says whether there are experts, which stand next to each layer's MLP; None: there are, in the
        place of MLPs.
      expert_factors: see `MoeMlp`.
      dense_layers: which layers have a plain MLP. "steps": all but every `decoder_sparse_step`th, and
        `mlp_only_layers`. "periods": all but every `expert_layer_period`th from `expert_layer_offset` on. "first": the
        first ones, as many as `first_dense_key` says. "outside": all but every `moe_layer_interval`th from
        `moe_layer_start_index` to `moe_layer_end_index`. "unlisted": all but `moe_layers`, or without these but every
        `interleave_moe_layer_step`th.
      first_dense_key: the key of the number of such first layers.
      dense_ffn_key: the key of F of plain MLPs where it is set; None: `intermediate_size` is.
    """

    count_keys: tuple[str, ...]
    ffn_key: str = "moe_intermediate_size"
    score: Score = "softmax"
    renormalize: bool | None = None
    margin_key: str | None = None
    choice_bias: bool = False
    score_key: str | None = None
    choice_bias_key: str | None = None
    router_bias: bool = False
    expert_bias: bool = False
    grouped: bool = False
    scale_key: str = "routed_scaling_factor"
    shared_key: str | None = None
    shared_ffn_key: str | None = None
    shared_mean_key: str | None = None
    shared_gate: bool = False
    scales_inputs: bool = False
    latent_key: str | None = None
    identities_key: str | None = None
    clamped: Literal["gpt-oss", "silu"] | None = None
    top_k_key: str = "num_experts_per_tok"
    switch: str | None = None
    expert_factors: bool = False
    dense_layers: Literal["none", "steps", "periods", "first", "outside", "unlisted"] = "none"
    first_dense_key: str = "first_k_dense_replace"
    dense_ffn_key: str | None = None


@dataclass(frozen=True)
class EncoderFamily:
    """How a family's models differ from decoders that see what came before.

    Attributes:
      pooling: how prompts are pooled where the folder doesn't say it.
      key: the key that says whether it is an encoder; None: it is one.
      restarts, classifier: see `Encoder`.
      pooling_key: the key of how a classification head pools, "cls" or "mean"; None: as `pooling` says.
      has_biases: see `Encoder`.
      has_types: embeddings of `type_vocab_size` types of tokens are added.
      counts_rows_before: `max_position_embeddings` counts the rows before that of the first position.
    """

    pooling: PoolingKind
    key: str | None = None
    restarts: Restarts = "nowhere"
    classifier: Classifier = "tanh"
    pooling_key: str | None = None
    has_types: bool = False
    has_biases: bool = False
    counts_rows_before: bool = False


@dataclass(frozen=True)
class Family:
    """What the name of an architecture implies.

    Attributes:
      norms: places of the norms.
      norms_key: the key that says whether `norms` are "sandwich"; else they are "pre". None: they are as told here.
      norm_eps_key: the key of what is added to mean squares.
      centred: norms take the mean of a row away first (LayerNorm); else they don't (RMSNorm).
      root_norm_key: the key of what RMSNorm adds to mean squares. Where config.json sets it, norms are RMSNorm,
        whatever `centred` is. None: the family has no such key.
      norm_bias: norms add a bias.
      parallel: see `ModelArch`.
      parallel_key: the key that says whether `parallel` holds; None: it does.
      grouped_key: the key that says whether there are several kv heads; else there is one. None: there may be.
      parallel_norms_key: the key of the number of norms of a layer whose MLP is next to its mixer, without which models
        with several kv heads have two, and others one; None: as told by `parallel`.
      norm_offset: added to the norms' scales when they are loaded: 1 where a checkpoint holds w for 1 + w.
      qk_norm: whether and over what every q and k is normalized (RMSNorm).
      qk_norm_key: the key that says whether `qk_norm` holds; None: it does.
      unit_heads_key: the key that says whether `LayerSpec.unit_heads` holds in layers with a rope; None: in none.
      rotates_first: norms of heads come after the rope; else before it.
      limits_qkv: `clip_qkv` holds.
      qkv_bias: whether q, k and v have biases; None: as config.json says.
      qkv_bias_key: the key that says it.
      attention_out_bias: whether the output projection has one; None: as config.json says.
      attention_out_bias_key: the key that says it.
      mlp_bias: whether the MLP has biases; None: as config.json says.
      mlp_bias_key: the key that says it.
      down_bias: see `ModelArch`.
      scales_embedding: embeddings are multiplied by the square root of the hidden size.
      scales_embedding_key: the key that says whether they are; None: they are.
      rounds_embedding_scale: that root is rounded to the weights' dtype first.
      multipliers: "each": `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`
        hold. "by part": `embedding_multiplier`, `lm_head_multiplier`, `key_multiplier`, and those of what mixers and
        MLPs read and make. "by size": embeddings are multiplied by `scale_emb`, what blocks add by `scale_depth` over
        the root of the number of layers, and logits divided by hidden sizes for each `dim_model_base`. None: there are
        none.
      scales_logits: logits are multiplied by `logit_scale`.
      normalizes_embedding: see `ModelArch`.
      head_bias: the output head has a bias.
      head_bias_key: the key that says whether it has; None: it has.
      rows_before_positions: learned positions are added to embeddings, by a table with so many rows before that of the
        first position; None: there is none.
      context_key: the key of the longest sequence where it is there; else `max_position_embeddings` says it.
      activation_key: the key of the MLP's activation.
      gated: see `ModelArch`.
      ffn_factor: an MLP's F is so many times D where no key says it; None: a key does.
      cut_ffn: an MLP's F is two thirds of the number told, if `block_auto_adjust_ff_dim`.
      activations: words for it that mean another one in this family.
      windows: "none": attention is full. "always": `sliding_window` holds. "flag": it holds if `use_sliding_window`,
        without `layer_types` from the layer `max_window_layers` on. "even by flag": likewise, but in layers 0, 2, 4
        ... before that one. "all by flag": it holds in all layers if `use_sliding_window`. "late": without
        `layer_types`, it holds from the layer `max_window_layers` on. "listed": it holds in none but those of
        `layer_types`. "chunks": attention is in chunks (`attention_chunk_size`) where `layer_types` says so, without
        them where layers have a rope.
      full_every: without `layer_types`, every layer of so many has no window; None: the family has another rule.
      full_first: that is the first of so many; else the last one.
      full_begins: the first layer has no window, either.
      window_before_key: the key of the window without the token itself, which holds if it is there.
      window_heads_key: the key of the number of kv heads of layers with windows, without which these have twice as many
        as others; None: all have equally many.
      heads_of_layers: `num_attention_heads_per_layer` holds.
      narrow_values: `v_head_dim` holds (`ModelArch.value_dim`).
      scales_values: `attention_value_scale` holds.
      partial_rope: `partial_rotary_factor` says which part of a head is turned.
      interleaved_rope: a checkpoint turns dimensions 2 i and 2 i + 1 together; else i and i + R / 2 of R turned ones.
      turns_backwards: a checkpoint turns heads the other way round.
      sliding_theta: layers with windows have a rope of their own, and this is its theta, or the theta's key, without
        `rope_parameters` by kind of layer; None: one rope for all.
      layer_thetas: where `layer_rope_theta` is set, it is the theta of each layer's rope, or 0 where a layer has none.
      alpha_stretches: `alpha` of a dynamic rope holds; else it means nothing.
      grows_queries: `llama_4_scaling_beta` of the rope holds.
      grows_unturned: queries of layers without a rope grow, if `attn_temperature_tuning`, as `attn_scale` and
        `floor_scale` say.
      turned_layers: which layers have a rope. "told": as `no_rope_layers` says. "windows": those with windows; all, if
        none has one. "windows alone": those with windows. "windows or dense": those, and those without experts. "type":
        all if `position_embedding_type` is "rope", else none. "theta": all, unless `rope_theta` is null. "none": none.
      caps: scores and logits have soft caps, and queries are scaled by `query_pre_attn_scalar`.
      caps_logits: logits alone may have a soft cap.
      attention_scale: factor on scores where no key says one; None: 1 / sqrt(H).
      normalizes_values: see `ModelArch`.
      layer_factors: see `ModelArch`.
      own_parts: layers have embeddings of their own, or others' keys; or "all", kv heads and MLPs of their own, too
        (`own_parts_config`). None: they are alike.
      several_streams: `altup_num_inputs`, `laurel_rank` and `activation_sparsity_pattern` hold (`models/streams.py`).
      sinks: query heads have an attention sink, a score that joins the softmax's denominator and has no value: those
        of all layers, or of layers with windows. None: no head has one.
      section: the object of config.json that describes the decoder, if it is a part of a larger model; None: the file.
      may_be_flat: the file itself may describe the decoder instead, or repeat what the object says.
      tied_keys: the keys that say whether the embedding is the head, of which the first one holds that is there.
      ties_whole: where the larger model doesn't say whether the head is tied, it is, whatever `section` says.
      ties_either: it is also if `section` says so, whatever the larger model says.
      moe: of families with mixtures of experts.
      latent: layers attend over a latent, whose sizes config.json has.
      scales_latents: what queries are made of and latents are multiplied by the root of D over their sizes.
      halves: a layer of config.json is two, with attention and an MLP each; the first has a `LayerSpec.shortcut`.
      index: an index chooses the tokens that they attend to, and of its keys numbers turn together that are half of
        them apart, or pairs of neighbours; None: they attend to all.
      grouped_tokens: layers attend to windows and groups of tokens, by several residual streams, and the first ones
        have experts by token (`grouped_config`).
      recurrence: what layers may be in the place of attention, as `layer_types`, `full_attention_interval`,
        `attn_layer_indices` or `full_attn_idxs` says; None: none is anything else.
      wide_delta: delta-nets whose sizes config.json leaves out have as many heads as attention, keys of three quarters
        of D together, and values twice as wide; `linear_allow_neg_eigval` holds; what is read is normalized with 1e-5.
      side_by_side: all layers keep a state, and attend to what it reads, too; what both make is added.
      mamba_keys: what keys of Mamba-2 are called, if not as in Granite 4.0, by their names there.
      blocks: a layer is a mixer or an MLP alone, as `layers_block_type` or `hybrid_override_pattern` says.
      output_gate, gate_function: see `ModelArch`.
      output_gate_key: the key that says whether there is one, or which; None: there is.
      next_layers_key: the key of the number of layers after the last one that predict further tokens; None: there are
        none, or they are left out.
      draft_head: the first of these is called `mtp`, not as a layer (`weights/stored_names.py`).
      vision: config.json describes a vision tower, too, and tokens have three positions (`mrope_section`); None: it
        doesn't, or the tower is left out.
      keys: what keys are called, if not as in Llama, by their names there; where a file has none of that name, Llama's
        counts.
      required: what keys must say, where they are there, since nothing else is built; a text is another key, with whose
        value it must agree.
      defaults: values of keys that config.json may leave out, as it calls them.
      hearing: config.json describes a tower that hears; None: it doesn't, or the tower is left out.
      encoder: each token sees its whole prompt, and no tokens are generated; None: it is a decoder.
      ignored: keys that the family's reference code ignores, too.
    """

    norms: NormPlaces = "pre"
    norms_key: str | None = None
    norm_eps_key: str = "rms_norm_eps"
    centred: bool = False
    root_norm_key: str | None = None
    norm_bias: bool = False
    parallel: Parallel | None = None
    parallel_key: str | None = None
    grouped_key: str | None = None
    parallel_norms_key: str | None = None
    norm_offset: int = 0
    qk_norm: QkNorm | None = None
    qk_norm_key: str | None = None
    unit_heads_key: str | None = None
    rotates_first: bool = False
    limits_qkv: bool = False
    qkv_bias: bool | None = None
    qkv_bias_key: str = "attention_bias"
    attention_out_bias: bool | None = None
    attention_out_bias_key: str = "attention_bias"
    mlp_bias: bool | None = False
    mlp_bias_key: str = "mlp_bias"
    down_bias: bool = False
    scales_embedding: bool = False
    scales_embedding_key: str | None = None
    rounds_embedding_scale: bool = False
    multipliers: Literal["each", "by size", "by part"] | None = None
    scales_logits: bool = False
    normalizes_embedding: bool = False
    head_bias: bool = False
    head_bias_key: str | None = None
    rows_before_positions: int | None = None
    context_key: str | None = None
    activation_key: str = "hidden_act"
    gated: bool = True
    ffn_factor: int | None = None
    cut_ffn: bool = False
    activations: Mapping[str, str] = field(default_factory=dict)
    windows: Literal["none", "always", "flag", "even by flag", "all by flag", "late", "listed", "chunks"] = "none"
    full_every: int | None = None
    full_first: bool = False
    full_begins: bool = False
    window_before_key: str | None = None
    window_heads_key: str | None = None
    heads_of_layers: bool = False
    narrow_values: bool = False
    scales_values: bool = False
    partial_rope: bool = False
    interleaved_rope: bool = False
    turns_backwards: bool = False
    sliding_theta: str | float | None = None
    layer_thetas: bool = False
    alpha_stretches: bool = False
    grows_queries: bool = False
    grows_unturned: bool = False
    turned_layers: Literal["all", "told", "windows", "windows alone", "windows or dense", "type", "theta", "none"] = (
        "all"
    )
    caps: bool = False
    caps_logits: bool = False
    attention_scale: float | None = None
    normalizes_values: bool = False
    layer_factors: bool = False
    own_parts: Literal["embeddings and keys", "all"] | None = None
    several_streams: bool = False
    section: str | None = None
    may_be_flat: bool = False
    tied_keys: tuple[str, ...] = ("tie_word_embeddings",)
    ties_whole: bool = False
    ties_either: bool = False
    sinks: Literal["all", "windows"] | None = None
    moe: MoeFamily | None = None
    latent: bool = False
    scales_latents: bool = False
    halves: bool = False
    index: Literal["halves", "pairs"] | None = None
    grouped_tokens: bool = False
    recurrence: Literal["delta-net", "channel-delta-net", "mamba", "selective", "short-conv"] | None = None
    wide_delta: bool = False
    side_by_side: bool = False
    mamba_keys: Mapping[str, str] = field(default_factory=dict)
    blocks: bool = False
    output_gate: OutputGate | None = None
    gate_function: GateFunction = "sigmoid"
    output_gate_key: str | None = None
    next_layers_key: str | None = None
    draft_head: bool = False
    vision: VisionFamily | None = None
    hearing: HearingFamily | None = None
    encoder: EncoderFamily | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, bool | float | str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
