"""Contradictions in the options of the model and of the ranks that share it, and options of these without effect, that
option_rules.txt cannot say."""

from collections.abc import Iterable, Iterator

from megalite.config.options import Config, ModelConfig
from megalite.config.pattern import read_pattern
from megalite.config.problem import Problem, Say
from megalite.config.stage_layers import GIVEN, given_stages

EXCHANGES = ("allgather", "a2a", "p2p")


def model_problems(m: ModelConfig, say: Say) -> Iterator[Problem]:
    heads = m.num_attention_heads
    if m.kv_channels is None and m.hidden_size % heads:
        unit = heads * (2 if m.position_embedding_type in ("rope", "yarn") else 1)  # channels turn in pairs
        text = "{=hidden_size} is not a multiple of {=num_attention_heads}: use {fit}, or set {--kv-channels}"
        yield say(text, fit=multiples(m.hidden_size, unit))
    elif m.position_embedding_type in ("rope", "yarn") and int(m.head_size * m.rotary_percent) % 2:
        yield say("{=rotary_percent} rotates an odd number of {size} channels; make it even", size=m.head_size)
    if m.no_rope_freq is not None:
        try:
            read_pattern(m.no_rope_freq, m.num_layers)
        except ValueError as error:
            yield say("{=no_rope_freq} {error}", "num_layers", error=error)
    yield from _window(m, say)


def model_effects(m: ModelConfig, say: Say) -> Iterator[Problem]:
    if m.window_size is not None and len(m.window_size) == 2 and 0 < m.seq_length <= m.window_size[0] + 1:
        yield say("{=window_size} has no effect on sequences of {length} tokens", "seq_length", length=m.seq_length)


def _window(m: ModelConfig, say: Say) -> Iterator[Problem]:
    size, pattern = m.window_size, m.window_attn_skip_freq
    if size is None:
        return
    if len(size) != 2:
        yield say("{=window_size} is not two numbers; give LEFT,RIGHT, as 4095,0")
        return
    left, right = size
    if right not in (0, -1):
        text = "{=window_size} has {right} on the right, where a causal model sees nothing; use {left},0"
        yield say(text, left=left, right=right)
    if left == 0 or left < -1:
        why = "lets a token see only itself" if left == 0 else "is not a window"
        yield say("{=window_size} {why}; give at least 1,0, or -1,0 for no limit", why=why)
    if left == -1 or pattern is None:
        return
    try:
        if not any(read_pattern(pattern, m.num_layers)):
            yield say("{=window_attn_skip_freq} leaves no layer with the window; drop {--window-size}", "num_layers")
    except ValueError as error:
        yield say("{=window_attn_skip_freq} {error}", "num_layers", error=error)


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


def context_problems(config: Config, say: Say) -> Iterator[Problem]:
    m, (cp, tp) = config.model, (config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size)
    names = ("context_parallel_size", "tensor_model_parallel_size")
    for word in dict.fromkeys(m.cp_comm_type):
        if word not in EXCHANGES:
            yield say("{=cp_comm_type} is not available; use allgather or a2a", cp_comm_type=word)
    if len(m.cp_comm_type) not in (1, m.num_layers):
        text = "{=cp_comm_type} has {n} values for {=num_layers}; give one, or one for each layer"
        yield say(text, n=len(m.cp_comm_type))
    if cp == 1:
        return
    if m.seq_length % (2 * cp * tp):
        text = "{=context_parallel_size} x 2{tp} does not divide {=seq_length}: use {fit}"
        yield say(text, names[1], tp=f" x tp {tp}" if tp > 1 else "", fit=multiples(m.seq_length, 2 * cp * tp))
    if "a2a" in m.cp_comm_type and m.num_attention_heads % (tp * cp):
        text = "{=cp_comm_type}: {=num_attention_heads} / tp {tp} is not a multiple of cp {cp}; use allgather"
        yield say(text, *names, cp_comm_type="a2a", tp=tp, cp=cp)


def multiples(n: int, of: int) -> str:
    """The nearest multiples of `of`, in words: 96 or 108 for n=100 and of=12."""
    low = n // of * of
    return f"{low} or {low + of}" if low else str(of)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def any_divisor(n: int) -> str:
    return any_of(divisors(n))


def any_of(numbers: Iterable[object]) -> str:
    """In words."""
    *some, last = map(str, numbers)
    return f"{', '.join(some)} or {last}" if some else last
