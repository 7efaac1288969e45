"""The kinds of layers of a model, and the bill of each: of one block, or of several that are recomputed together."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.config.options import ModelConfig
from megalite.models.gpt import Block, Head
from megalite.nn.activation_offload import Offload
from megalite.nn.embedding import Embedding, vocabulary_spec
from megalite.nn.later import Later
from megalite.nn.micro_batch import Batch
from megalite.nn.parameter import Maker, run_unit
from megalite.nn.places import Places, place
from megalite.nn.recompute import recompute
from megalite.plan.bill import Bill, Recorder
from megalite.plan.meta import META

Kind = ModelConfig  # a model of one layer; two layers are of one kind if theirs are equal


@functools.lru_cache(maxsize=64)
def kinds_of(model: ModelConfig) -> tuple[Kind, ...]:
    """The kind of every layer; layers of one kind share one object."""

    @functools.cache
    def kind(window: int | None, rotary: bool, exchange: str, experts: bool) -> Kind:
        alike = dict(num_layers=1, window_attn_skip_freq=None, no_rope_freq=None, moe_layer_freq="1")
        positions, number = model.position_embedding_type if rotary else "none", model.num_experts if experts else None
        size = None if window is None else (window - 1, 0)
        kind = replace(model, **alike, window_size=size, position_embedding_type=positions, num_experts=number)
        return replace(kind, cp_comm_type=(exchange,))

    return tuple(map(kind, model.windows, model.rotary, model.exchanges, model.experts))


@dataclass(frozen=True)
class Setting:
    """The facts of a rank that a bill depends on. `again`: the parts of a block that are computed again in backward;
    `split`: weight gradients wait. `places`: how ranks share the tokens; None: they do not. `ep`, `etp`: of experts,
    which all tokens choose alike (nn/token_exchange.py: even_routing)."""

    tp: int
    micro_batch: int
    dtype: torch.dtype
    split: bool = False
    again: tuple[str, ...] = ()
    places: Places | None = None
    ep: int = 1
    etp: int = 1

    @property
    def cp(self) -> int:
        return len(self.places.blocks) if self.places else 1

    def maker(self, recorder: Recorder, window: int | None = None) -> Maker:
        """For the rank of cp that receives most in a layer with `window`."""
        busiest = self.places.busiest(window) if self.places else 0
        return Maker(recorder.mesh(self.tp, self.cp, self.ep, self.etp, cp_rank=busiest), self.dtype, 0, meta=True)

    def hidden(self, model: ModelConfig) -> Tensor:
        """x_sBD."""
        shape = model.seq_length // self.cp // self.tp, self.micro_batch, model.hidden_size
        return torch.empty(shape, dtype=self.dtype, device=META)

    def tokens(self, model: ModelConfig) -> Tensor:
        """tokens_SB."""
        return torch.empty(model.seq_length // self.cp, self.micro_batch, dtype=torch.int64, device=META)


@functools.lru_cache(maxsize=64)
def cut(model: ModelConfig, cp: int) -> Places | None:
    """How samples of one document are cut over cp; it depends on the windows of all layers."""
    return place(model.seq_length, cp, model.windows) if cp > 1 else None


@functools.lru_cache(maxsize=4096)
def layers_bill(
    kinds: tuple[Kind, ...], setting: Setting, whole: bool = False, least: int | None = None, begins: bool = False
) -> Bill:
    """The bill of consecutive layers. `whole`: only the first one's input stays until backward, which computes all of
    them again. `least`: of one layer that offloads storages of so many elements or more; where it `begins` a stage its
    input stays."""
    recorder, (first, *_) = Recorder(), kinds
    make = setting.maker(recorder, first.windows[0])
    blocks = [recorder.own(Block(make, kind, 0, setting.again)) for kind in kinds]
    later = Later() if setting.split else None
    tokens, rope = setting.tokens(first), None
    if any(first.rotary):
        shape = len(tokens), int(first.head_size * first.rotary_percent) // 2
        rope = torch.empty(shape, device=META), torch.empty(shape, device=META)
    where = Batch(tokens, None, None, tokens[0], 0, later=later, rope=rope, again=whole, loss_weight=1.0)
    if setting.places is not None:
        where = replace(where, places=setting.places, places_S=tokens[:, 0])

    offload = Offload(int(least is not None), least or 0, META)

    def run(x: Tensor) -> Tensor:
        x = x if least is None else x.clone()  # the graph keeps its leaves
        use = offload(run_unit, 1, [*(where.rope or ()), *[x] * begins])
        for block in blocks:
            x = use(block, x, where)
        return x

    with recorder:
        forward = (lambda x: recompute(run, x)) if whole else run
        bill = recorder.read(forward, [setting.hidden(first)], torch.empty_like, later)
    if least is None:
        return bill
    plain = layers_bill(kinds, setting)
    return replace(plain, away=plain.saved - bill.saved + setting.hidden(first).nbytes, sent=offload.sent)


@functools.lru_cache(maxsize=256)
def head_bill(model: ModelConfig, setting: Setting, vocab_size: int, padded: int, z_loss: float) -> Bill:
    """The bill of final norm, output projection and loss, whose gradients are computed in forward."""
    recorder = Recorder()
    spec = vocabulary_spec("head", padded, vocab_size, model.hidden_size, 0.0, False)
    head = recorder.own(Head(setting.maker(recorder), model, spec, None, z_loss))
    tokens = setting.tokens(model)
    batch = Batch(tokens, tokens, None, tokens[0], 0, loss_weight=1.0)
    with recorder:
        return recorder.read(lambda x: head(x, batch), [setting.hidden(model)], torch.ones_like)


@functools.lru_cache(maxsize=256)
def embedding_bill(model: ModelConfig, setting: Setting, vocab_size: int, padded: int) -> Bill:
    recorder = Recorder()
    spec = vocabulary_spec("embedding.word", padded, vocab_size, model.hidden_size, 0.0, False)
    module = recorder.own(Embedding(setting.maker(recorder), spec, model))
    tokens = setting.tokens(model)
    with recorder:
        return recorder.read(lambda: module(Batch(tokens, None, None, tokens[0], 0)), [], torch.empty_like)


@functools.lru_cache(maxsize=256)
def model_flops(model: ModelConfig, padded_vocab_size: int) -> float:
    """FLOPs of forward and backward per token, with a multiply-add counted as 2: three times the layers' forward on one
    rank without recompute, and the head's forward, which has its backward in it. Scores that the causal mask or a
    window hides do not count; scores across documents do."""
    alone = Setting(1, 1, torch.bfloat16)
    layers = sum(3 * layers_bill((kind,), alone).flops[0] for kind in kinds_of(model))
    head = sum(head_bill(model, alone, padded_vocab_size, padded_vocab_size, 0.0).flops)
    return (layers + head) / model.seq_length
