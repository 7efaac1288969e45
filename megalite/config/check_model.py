"""Contradictions in options of model and pipeline, and those without effect, that option_rules.txt cannot say."""

from collections.abc import Iterable, Iterator

from megalite.config.options import Config, ModelConfig, Problem, Say
from megalite.config.stage_layers import GIVEN, given_stages

# option -> its words, and those that are taken, but not proposed: of a dense model, too, as by Megatron-LM
WORDS = {
    "cp_comm_type": (("allgather", "a2a"), ("p2p",)),
    "moe_router_load_balancing_type": (("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"), ()),
    "recompute_modules": (("core_attn", "layernorm", "mlp"), ("moe", "shared_experts")),
}


def model_problems(m: ModelConfig, say: Say) -> Iterator[Problem]:
    heads = m.num_attention_heads
    if m.kv_channels is None and m.hidden_size % heads:
        unit = heads * (2 if m.position_embedding_type in ("rope", "yarn") else 1)  # channels turn in pairs
        text = "{=hidden_size} is not a multiple of {=num_attention_heads}: use {fit}, or set {--kv-channels}"
        yield say(text, fit=multiples(m.hidden_size, unit))
    elif m.position_embedding_type in ("rope", "yarn") and int(m.head_size * m.rotary_percent) % 2:
        yield say("{=rotary_percent} rotates an odd number of {size} channels; make it even", size=m.head_size)
    yield from _words(m, say)
    yield from _patterns(m, say)
    left, right = m.window_size if m.window_size is not None and len(m.window_size) == 2 else (-1, 0)
    if right not in (0, -1):
        text = "{=window_size} has {right} on the right, where a causal model sees nothing; use {left},0"
        yield say(text, left=left, right=right)
    if left == 0 or left < -1:
        why = "lets a token see only itself" if left == 0 else "is not a window"
        yield say("{=window_size} {why}; give at least 1,0, or -1,0 for no limit", why=why)
    kinds, coeffs = (m.moe_router_load_balancing_type, m.moe_aux_loss_coeff) if m.num_experts else ((), ())
    if len(set(kinds)) < len(kinds):
        yield say("{=moe_router_load_balancing_type} names one twice; give each once")
    for coeff in coeffs:
        if not 0 <= coeff < float("inf"):
            yield say("{=moe_aux_loss_coeff} is no finite number of 0 or more; give one", moe_aux_loss_coeff=coeff)


def _words(m: ModelConfig, say: Say) -> Iterator[Problem]:
    for name, (proposed, others) in WORDS.items():
        known = (*proposed, *others, *("moe_act",) * bool(m.num_experts))  # which is always so
        for word in dict.fromkeys(say.values[name]):
            if word not in known and (m.num_experts or not name.startswith("moe")):
                text = "{=option} is not available; use {known}"
                yield say(text, option=name, known=any_of(proposed), **{name: word})


def _patterns(m: ModelConfig, say: Say) -> Iterator[Problem]:
    limited = m.window_attn_skip_freq is not None and m.window_size is not None and m.window_size[0] != -1
    for name, property, given, what in (
        ("no_rope_freq", "rotary", False, ""),
        ("moe_layer_freq", "experts", m.num_experts, "with experts; drop {--num-experts}"),
        ("window_attn_skip_freq", "windows", limited, "with the window; drop {--window-size}"),
    ):
        try:
            if not any(getattr(m, property)) and given:
                yield say("{=option} leaves no layer " + what, "num_layers", option=name)
        except ValueError as error:
            yield say("{=option} {error}", "num_layers", option=name, error=error)


def model_effects(m: ModelConfig, say: Say) -> Iterator[Problem]:
    if m.window_size is not None and len(m.window_size) == 2 and 0 < m.seq_length <= m.window_size[0] + 1:
        yield say("{=window_size} has no effect on sequences of {length} tokens", "seq_length", length=m.seq_length)


def layout_problems(config: Config, say: Say) -> Iterator[Problem]:
    m, p = config.model, config.parallel
    pp = p.pipeline_model_parallel_size
    try:
        stages = given_stages(m.num_layers, p)
    except ValueError as error:
        yield Problem(str(error), GIVEN)
    else:
        chunks = p.num_virtual_stages_per_pipeline_rank or 1
        if stages is None and pp * chunks > m.num_layers:
            text = "{=pipeline_model_parallel_size} x {chunks} chunks is above {=num_layers}: use fewer"
            yield say(text, "num_virtual_stages_per_pipeline_rank", chunks=chunks)


def multiples(n: int, of: int) -> str:
    """The nearest multiples of `of`, in words: 96 or 108 for n=100 and of=12."""
    low = n // of * of
    return f"{low} or {low + of}" if low else str(of)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def any_of(numbers: Iterable[object]) -> str:
    """In words."""
    *some, last = map(str, numbers)
    return f"{', '.join(some)} or {last}" if some else last
