"""The scale symmetries of small models, worked out by hand from their forward passes.

A family lists its members; a member is the power of every scale that takes part in it. A scale is
(parameter, axis, entry). The sizes are as small as tells everything apart: width 8, feed-forward
width 6, 4 query heads of 4 channels that share 2 key and value heads, 17 tokens.
"""

from dataclasses import dataclass

Scale = tuple[str, str, int]
Member = dict[Scale, int]

TOKENS, WIDTH, HIDDEN = 17, 8, 6
_SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
_SSM = {
    "mamba_d_ssm": 8,
    "mamba_n_heads": 2,
    "mamba_d_head": 4,
    "mamba_d_state": 3,
    "mamba_chunk_size": 4,
    "mamba_d_conv": 2,
}
SIZES = {
    "llama": _SIZES,
    "qwen3": _SIZES,
    "gemma2": _SIZES,
    "gemma3": _SIZES,
    "gpt2": {"vocab_size": TOKENS, "n_embd": WIDTH, "n_head": 2, "n_inner": 6, "n_positions": 10},
    "falcon-h1": {**_SIZES, **_SSM},
    "falcon-h1-inner-norm": {**_SIZES, **_SSM},
    "mamba2": {
        "vocab_size": TOKENS,
        "hidden_size": 4,
        "state_size": 3,
        "num_heads": 2,
        "head_dim": 4,
        "chunk_size": 4,
        "conv_kernel": 2,
    },
    "mixtral": {**_SIZES, "num_local_experts": 3, "num_experts_per_tok": 2},
}

# How many independent rescalings there are with one layer: no plan, full, symmetry-aware, scalar.
NULLITY = {
    "llama": (52, 43, 6, 6),
    "qwen3": (56, 47, 8, 9),
    "gemma2": (45, 44, 5, 8),
    "gemma3": (49, 48, 7, 11),
    "gpt2": (39, 38, 6, 5),
    "falcon-h1": (68, 59, 7, 9),
    "falcon-h1-inner-norm": (76, 67, 7, 10),
    "mamba2": (35, 30, 4, 6),
    "mixtral": (68, 50, 7, 7),
}
# What one more layer adds: everything but what belongs to embedding, head and residual stream.
PER_LAYER = {
    "llama": (41, 41, 4, 5),
    "falcon-h1": (57, 57, 5, 8),
    "gpt2": (36, 36, 4, 4),
}
PLACEMENTS = (None, "full", "symmetry-aware", "scalar")

# Rotary embeddings turn channels i and i + 2 of a head of 4 into each other: they scale as one.
# Query heads 0 and 1 read key and value head 0, heads 2 and 3 the other.
KEY_PAIRS = [[0, 2], [1, 3], [4, 6], [5, 7]]
QUERY_PAIRS = [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
QUERY_HEADS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
KEY_HEADS = [[0, 1, 2, 3], [4, 5, 6, 7]]
NORM_PAIRS = [[0, 2], [1, 3]]
# Columns of attention-out that read each of the 8 rows of the values.
READERS_OF_VALUES = [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
# Rows of a Mamba in_proj: z 0-7, x 8-15, B 16-18, C 19-21, dt 22-23; conv1d has x, B and C.
Z_AND_DT = [0, 1, 2, 3, 4, 5, 6, 7, 22, 23]
CONVOLVED = [[row] for row in range(8, 22)]
X_B_C = [list(range(8)), [8, 9, 10], [11, 12, 13]]
# Rows of gate_up of 3 experts: 6 of the gate, then 6 of up.
UP_ROWS = [[row] for row in (*range(6, 12), *range(18, 24), *range(30, 36))]
# The rows that a scalar stands for, where it is not all of them.
SCALAR_ROWS = {
    "in_proj.weight": [range(8), range(8, 16), range(16, 19), range(19, 22), range(22, 24)],
    "c_attn.weight": [range(8), range(8, 16), range(16, 24)],
    "gate_up_proj": [range(6 * block, 6 * block + 6) for block in range(6)],
    "experts.down_proj": [range(8 * expert, 8 * expert + 8) for expert in range(3)],
}


@dataclass(frozen=True)
class Family:
    """Symmetries that are alike."""

    kind: str
    members: tuple[Member, ...]
    exact: bool = True
    """Not exact: other families may be added to it, and it is as simple to tell."""


def each(count: int) -> list[list[int]]:
    """One entry for each member."""
    return [[entry] for entry in range(count)]


def whole(count: int) -> list[list[int]]:
    """All entries of an axis in one member."""
    return [list(range(count))]


def family(kind: str, *terms: tuple[str, str, int, list[list[int]]], exact: bool = True) -> Family:
    """A family from its terms: parameter, axis, power, and the entries of each member."""
    members: list[Member] = [{} for _ in terms[0][3]]
    for name, axis, power, sets in terms:
        for member, entries in zip(members, sets, strict=True):
            member |= {(name, axis, entry): power for entry in entries}
    return Family(kind, tuple(members), exact)


def exchange(name: str, rows: int, cols: int) -> Family:
    return family("exchange", (name, "row", 1, whole(rows)), (name, "col", -1, whole(cols)))


def pair(one: str, axis: str, sets, other: str, other_axis: str, other_sets) -> Family:
    return family("multiplicative", (one, axis, 1, sets), (other, other_axis, -1, other_sets))


def free(name: str, axis: str, sets) -> Family:
    """Scales that a norm takes away."""
    return family("normalization", (name, axis, 1, sets))


def table(architecture: str, placement: str | None, layers: int = 1) -> list[Family]:
    """Every symmetry of a model."""
    if architecture == "gpt2":
        return _gpt2(placement, layers)
    if architecture == "mamba2":
        return _mamba2(placement)
    return _decoder(architecture, placement, layers)


def _decoder(architecture: str, placement: str | None, layers: int) -> list[Family]:
    tied = architecture.startswith("gemma")
    axis = "one-plus" if tied else "vector"
    final = "model.final_layernorm" if "falcon" in architecture else "model.norm"
    final, embedding = f"{final}.weight", "model.embed_tokens.weight"
    families = []
    # Everything that writes to the residual stream scales as one: norms read it everywhere.
    if tied:
        # The head is the embedding, and the final norm makes up for it.
        side, count = {None: ("row", TOKENS), "scalar": ("scalar", 1)}.get(placement, ("col", 8))
        residual = [(embedding, side, 1, whole(count)), (final, axis, -1, whole(8))]
    else:
        side, count = ("scalar", 1) if placement == "scalar" else ("row", TOKENS)
        residual = [(embedding, side, 1, whole(count))]
    if placement is None or (not tied and placement != "scalar"):
        families.append(exchange(embedding, TOKENS, WIDTH))
    if placement is None and not tied:
        families.append(exchange("lm_head.weight", TOKENS, WIDTH))
        families.append(pair(final, axis, each(8), "lm_head.weight", "col", each(8)))
    for number in range(layers):
        layer = f"model.layers.{number}"
        written = ("scalar", 1) if placement == "scalar" else ("row", 8)
        families += _attention(architecture, placement, layer)
        if tied:
            families += _mlp(placement, f"{layer}.mlp", f"{layer}.pre_feedforward_layernorm", True)
            writers = [f"{layer}.post_{block}_layernorm" for block in ("attention", "feedforward")]
            residual += [(f"{writer}.weight", axis, 1, whole(8)) for writer in writers]
            continue
        residual.append((f"{layer}.self_attn.o_proj.weight", written[0], 1, whole(written[1])))
        if architecture == "mixtral":
            families += _experts(placement, layer)
            down, count = f"{layer}.mlp.experts.down_proj", 3 * written[1]
        elif "falcon" in architecture:
            families += _mlp(placement, f"{layer}.feed_forward", f"{layer}.pre_ff_layernorm", False)
            families += _mamba(placement, f"{layer}.mamba", 8, 8, "inner-norm" in architecture)
            down, count = f"{layer}.feed_forward.down_proj.weight", written[1]
            residual.append((f"{layer}.mamba.out_proj.weight", written[0], 1, whole(written[1])))
        else:
            families += _mlp(placement, f"{layer}.mlp", f"{layer}.post_attention_layernorm", False)
            down, count = f"{layer}.mlp.down_proj.weight", written[1]
        residual.append((down, written[0], 1, whole(count)))
    exact = tied or placement != "scalar"
    return [*families, family("normalization", *residual, exact=exact)]


def _attention(architecture: str, placement: str | None, layer: str) -> list[Family]:
    q, k, v, o = (f"{layer}.self_attn.{leaf}_proj.weight" for leaf in "qkvo")
    norm, q_norm, k_norm = (
        f"{layer}.{leaf}.weight"
        for leaf in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    )
    axis = "one-plus" if architecture.startswith("gemma") else "vector"
    mamba = f"{layer}.mamba" if "falcon" in architecture else None
    in_proj, conv = f"{mamba}.in_proj.weight", f"{mamba}.conv1d.weight"
    qk_norm = architecture in ("qwen3", "gemma3")
    out_norm = architecture.startswith("gemma")
    shared = [pair(q_norm, axis, NORM_PAIRS, k_norm, axis, NORM_PAIRS)] if qk_norm else []

    if placement in (None, "full"):
        readers = (q, k, v, in_proj) if mamba else (q, k, v)
        cols = [(reader, "col", -1, each(8)) for reader in readers]
        return [
            *(exchange(name, rows, 8) for name, rows in ((q, 16), (k, 8), (v, 8))),
            exchange(o, 8, 16),
            family("multiplicative", (norm, axis, 1, each(8)), *cols),
            pair(v, "row", each(8), o, "col", READERS_OF_VALUES),
            *(
                [*shared, free(q, "row", QUERY_HEADS), free(k, "row", KEY_HEADS)]
                if qk_norm
                else [pair(k, "row", KEY_PAIRS, q, "row", QUERY_PAIRS)]
            ),
            *([free(o, "row", whole(8))] if out_norm else []),
        ]

    if placement == "symmetry-aware":
        # The norm as a whole: queries and keys both grow with it, and only queries have rows.
        norm_whole, q_whole = (norm, axis, 1, whole(8)), (q, "row", -2, whole(16))
        o_whole = (o, "row", -1, whole(8))
        if qk_norm and out_norm:
            return [*shared, free(norm, axis, whole(8)), free(o, "col", whole(16))]
        if out_norm:
            return [family("normalization", norm_whole, q_whole), free(o, "col", whole(16))]
        if qk_norm:
            return [*shared, exchange(o, 8, 16), family("normalization", norm_whole, o_whole)]
        ssm = [(in_proj, "row", -1, [Z_AND_DT]), (conv, "row", -1, whole(14))] if mamba else []
        return [exchange(o, 8, 16), family("multiplicative", norm_whole, q_whole, o_whole, *ssm)]

    one = whole(1)
    norm_whole = (norm, axis, 1, whole(8))
    q_k, v_o = pair(q, "scalar", one, k, "scalar", one), pair(v, "scalar", one, o, "scalar", one)
    down = [(name, "scalar", -1, one) for name in (q, k, v)]
    if qk_norm and out_norm:
        alone = [free(name, "scalar", one) for name in (q, k, v, o)]
        return [*shared, *alone, free(norm, axis, whole(8))]
    if out_norm:
        loose = family("normalization", norm_whole, *down[:2], exact=False)
        return [q_k, free(v, "scalar", one), free(o, "scalar", one), loose]
    if qk_norm:
        loose = family("normalization", norm_whole, down[2], exact=False)
        return [*shared, free(q, "scalar", one), free(k, "scalar", one), v_o, loose]
    ssm = [(in_proj, "scalar", -1, whole(5))] if mamba else []
    return [q_k, v_o, family("multiplicative", norm_whole, *down, *ssm, exact=False)]


def _mlp(placement: str | None, mlp: str, norm: str, out_norm: bool) -> list[Family]:
    norm, axis = f"{norm}.weight", "one-plus" if out_norm else "vector"
    gate, up, down = (f"{mlp}.{leaf}_proj.weight" for leaf in ("gate", "up", "down"))
    norm_whole = (norm, axis, 1, whole(8))
    if placement in (None, "full"):
        cols = [(name, "col", -1, each(8)) for name in (gate, up)]
        return [
            exchange(gate, 6, 8),
            exchange(up, 6, 8),
            exchange(down, 8, 6),
            family("multiplicative", (norm, axis, 1, each(8)), *cols),
            pair(up, "row", each(6), down, "col", each(6)),
            *([free(down, "row", whole(8))] if out_norm else []),
        ]
    if placement == "symmetry-aware":
        gate_whole, down_whole = (gate, "row", -1, whole(6)), (down, "row", -1, whole(8))
        if out_norm:
            return [family("normalization", norm_whole, gate_whole), free(down, "col", whole(6))]
        together = family("multiplicative", norm_whole, gate_whole, down_whole)
        return [exchange(down, 8, 6), together]
    one = whole(1)
    gate_one = (gate, "scalar", -1, one)
    if out_norm:
        alone = [free(up, "scalar", one), free(down, "scalar", one)]
        return [*alone, family("normalization", norm_whole, gate_one)]
    return [
        pair(up, "scalar", one, down, "scalar", one),
        family("multiplicative", norm_whole, gate_one, (up, "scalar", -1, one), exact=False),
    ]


def _mamba(
    placement: str | None, mamba: str, width: int, inner: int, has_norm: bool
) -> list[Family]:
    """What a mixer has for itself; its columns trade with a norm that others may read too."""
    in_proj, conv, norm, out = (
        f"{mamba}.{leaf}.weight" for leaf in ("in_proj", "conv1d", "norm", "out_proj")
    )
    inner_whole = (norm, "vector", 1, whole(inner))
    if placement in (None, "full"):
        return [
            exchange(in_proj, 24, width),
            exchange(out, width, inner),
            pair(conv, "row", each(14), in_proj, "row", CONVOLVED),
            *([pair(norm, "vector", each(inner), out, "col", each(inner))] if has_norm else []),
        ]
    if placement == "symmetry-aware":
        if has_norm:
            return [family("multiplicative", inner_whole, (out, "row", -1, whole(width)))]
        return [exchange(out, width, inner)]
    # One scalar each for z, x, B, C and dt: 1, 2 and 3 are convolved.
    of_norm = family("multiplicative", inner_whole, (out, "scalar", -1, whole(1)))
    return [
        pair(conv, "row", X_B_C, in_proj, "scalar", [[1], [2], [3]]),
        *([of_norm] if has_norm else []),
    ]


def _experts(placement: str | None, layer: str) -> list[Family]:
    norm, router = f"{layer}.post_attention_layernorm.weight", f"{layer}.mlp.gate.weight"
    gate_up, down = f"{layer}.mlp.experts.gate_up_proj", f"{layer}.mlp.experts.down_proj"

    def exchanges(name: str, rows: int, cols: int) -> Family:
        row_sets = [list(range(rows * expert, rows * (expert + 1))) for expert in range(3)]
        col_sets = [list(range(cols * expert, cols * (expert + 1))) for expert in range(3)]
        return family("exchange", (name, "row", 1, row_sets), (name, "col", -1, col_sets))

    # The router reads the norm too: without columns of its own it holds the norm in place.
    reads = family(
        "multiplicative",
        (norm, "vector", 1, each(8)),
        (router, "col", -1, each(8)),
        (gate_up, "col", -1, [[col, 8 + col, 16 + col] for col in range(8)]),
    )
    if placement in (None, "full"):
        return [
            exchanges(gate_up, 12, 8),
            exchanges(down, 8, 6),
            pair(gate_up, "row", UP_ROWS, down, "col", each(18)),
            *([reads, exchange(router, 3, 8)] if placement is None else []),
        ]
    if placement == "symmetry-aware":
        return [exchanges(down, 8, 6)]
    return [pair(gate_up, "scalar", [[1], [3], [5]], down, "scalar", each(3))]


def _mamba2(placement: str | None) -> list[Family]:
    embedding, head, final = (
        "backbone.embeddings.weight",
        "lm_head.weight",
        "backbone.norm_f.weight",
    )
    mixer, norm = "backbone.layers.0.mixer", "backbone.layers.0.norm.weight"
    in_proj, out, conv = (f"{mixer}.{leaf}.weight" for leaf in ("in_proj", "out_proj", "conv1d"))
    families = _mamba(placement, mixer, 4, 8, has_norm=True)
    if placement != "scalar":
        families.append(exchange(embedding, TOKENS, 4))
    if placement is None:
        families.append(exchange(head, TOKENS, 4))
        families.append(pair(final, "vector", each(4), head, "col", each(4)))
    norm_whole = (norm, "vector", 1, whole(4))
    if placement in (None, "full"):
        families.append(pair(norm, "vector", each(4), in_proj, "col", each(4)))
    elif placement == "symmetry-aware":
        ssm = [(in_proj, "row", -1, [Z_AND_DT]), (conv, "row", -1, whole(14))]
        families.append(family("multiplicative", norm_whole, *ssm))
    else:
        ssm = [(in_proj, "scalar", -1, whole(5))]
        families.append(family("multiplicative", norm_whole, *ssm, exact=False))
    axis, counts = ("scalar", (1, 1)) if placement == "scalar" else ("row", (TOKENS, 4))
    residual = [(embedding, axis, 1, whole(counts[0])), (out, axis, 1, whole(counts[1]))]
    return [*families, family("normalization", *residual, exact=placement != "scalar")]


def _gpt2(placement: str | None, layers: int) -> list[Family]:
    tokens, positions = "transformer.wte.weight", "transformer.wpe.weight"
    scalar = placement == "scalar"
    # One matrix for queries (rows 0-7), keys (8-15) and values (16-23), and one vector of their
    # biases. A bias of the keys shifts all scores of a query alike, so softmax does not see it.
    queries, keys, values = ([[start + i] for i in range(8)] for start in (0, 8, 16))
    all_queries, all_values = [list(range(8))], [list(range(16, 24))]
    families = [] if scalar else [exchange(positions, 10, 8)]
    if placement is None:
        families.append(exchange(tokens, TOKENS, 8))
    tied = {None: ("row", TOKENS), "scalar": ("scalar", 1)}.get(placement, ("col", 8))
    rows = ("scalar", 1) if scalar else ("row", 10)
    residual = [
        (tokens, tied[0], 1, whole(tied[1])),
        (positions, rows[0], 1, whole(rows[1])),
        ("transformer.ln_f.weight", "vector", -1, whole(8)),
        ("transformer.ln_f.bias", "vector", -1, whole(8)),
    ]
    for number in range(layers):
        layer = f"transformer.h.{number}"
        qkv, out = f"{layer}.attn.c_attn.weight", f"{layer}.attn.c_proj.weight"
        bias = f"{layer}.attn.c_attn.bias"
        up, down = f"{layer}.mlp.c_fc.weight", f"{layer}.mlp.c_proj.weight"
        writers = ("scalar", 1) if scalar else ("row", 8)
        for writer in (out, down):
            residual.append((writer, writers[0], 1, whole(writers[1])))
            residual.append((writer.replace("weight", "bias"), "vector", 1, whole(8)))
        norms = [
            [(f"{layer}.{norm}.{leaf}", "vector", 1) for leaf in ("weight", "bias")]
            for norm in ("ln_1", "ln_2")
        ]
        wholes = [[(*term, whole(8)) for term in norm] for norm in norms]
        channels = [[(*term, each(8)) for term in norm] for norm in norms]
        if placement in (None, "full"):
            families += [
                exchange(qkv, 24, 8),
                exchange(out, 8, 8),
                exchange(up, 6, 8),
                exchange(down, 8, 6),
                family("multiplicative", *channels[0], (qkv, "col", -1, each(8))),
                family("multiplicative", *channels[1], (up, "col", -1, each(8))),
                family(
                    "multiplicative",
                    (qkv, "row", 1, queries),
                    (bias, "vector", 1, queries),
                    (qkv, "row", -1, keys),
                ),
                family(
                    "multiplicative",
                    (qkv, "row", 1, values),
                    (bias, "vector", 1, values),
                    (out, "col", -1, each(8)),
                ),
            ]
        elif placement == "symmetry-aware":
            # Keys and values grow with the norm; queries must shrink twice as fast, their biases
            # as fast, and the biases of the values grow along.
            families += [
                exchange(out, 8, 8),
                exchange(down, 8, 6),
                family(
                    "multiplicative",
                    *wholes[0],
                    (qkv, "row", -2, all_queries),
                    (bias, "vector", -1, all_queries),
                    (bias, "vector", 1, all_values),
                    (out, "row", -1, whole(8)),
                ),
                family("multiplicative", *wholes[1], (up, "row", -1, whole(6))),
            ]
        else:
            q, k, v = ([[block]] for block in range(3))
            families += [
                family(
                    "multiplicative",
                    (qkv, "scalar", 1, q),
                    (bias, "vector", 1, all_queries),
                    (qkv, "scalar", -1, k),
                ),
                family(
                    "multiplicative",
                    (qkv, "scalar", 1, v),
                    (bias, "vector", 1, all_values),
                    (out, "scalar", -1, whole(1)),
                ),
                family("multiplicative", *wholes[0], (qkv, "scalar", -1, whole(3)), exact=False),
                family("multiplicative", *wholes[1], (up, "scalar", -1, whole(1))),
            ]
    return [*families, family("normalization", *residual, exact=not scalar)]
