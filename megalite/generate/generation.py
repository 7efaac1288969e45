"""Text from a checkpoint or a Hugging Face directory, under any tp x pp.

    prompts [B, S] --stage 0 .. pp-1--> logits of each one's last token --choose--> a token of each, to all ranks
    then the new tokens alone, [tp, B]: sequence parallelism needs a multiple of tp, so all but the first are padding

Each rank keeps the keys and values of its layers and heads. The stages work one after the other, since a token depends
on the one before it: a pipeline is for models that do not fit otherwise.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.manager import loader
from megalite.checkpoint.manager.collective import run_on_all_ranks
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.location import Location, parse_location
from megalite.config.options import ConfigError, ModelConfig, ParallelConfig, build
from megalite.config.plugins import no_exit
from megalite.config.validation import find_problems
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.huggingface_tokenizer import find_tokenizer_in
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.interop.huggingface.model_files import open_model, stop_ids
from megalite.interop.tensor_mapping import load_external_weights
from megalite.kernels.attention import attention
from megalite.kernels.cached_attention import cached_attention
from megalite.kernels.dropout import fold_in
from megalite.kernels.matmul import matmul
from megalite.models.gpt import Block, LMHead, Stage
from megalite.models.specs import model_specs
from megalite.nn.micro_batch import Batch
from megalite.nn.parameter import model_shards
from megalite.parallel.comm import broadcast_, start_all_gather
from megalite.parallel.mesh import Mesh
from megalite.planning.run_plan import RunPlan
from megalite.training.checkpointing.named_tokenizer import announce, fitting
from megalite.training.checkpointing.resume import checkpoint_config, tokenizer_differences
from megalite.training.datasets import TOKENIZER_OPTIONS, open_tokenizer
from megalite.training.setup import SetupError


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token: the likeliest, or one drawn with temperature, top-k and top-p (arXiv:1904.09751).

        p = softmax(logits / temperature);  the k likeliest;  of these the fewest whose sum reaches top_p

    A draw is a function of (seed, number of the prompt, position): given equal logits it is the same under every
    layout, and for a prompt alone or among others. temperature 0: always the likeliest. top_k 0 and top_p 1: no limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        """Raises ConfigError with every number that is out of range."""
        problems = [
            f"{name}={value!r} is not {what}; give one"
            for name, value, fits, what in (
                ("temperature", self.temperature, _is_number(self.temperature, 0), "a number of 0 or more"),
                ("top_k", self.top_k, _is_whole(self.top_k, 0), "a whole number of 0 or more"),
                ("top_p", self.top_p, _is_number(self.top_p, 0) and 0 < self.top_p <= 1, "a number in (0, 1]"),
                ("seed", self.seed, _is_whole(self.seed), "a whole number"),
            )
            if not fits
        ]
        if problems:
            raise ConfigError(problems)


def _is_whole(value: object, least: float = float("-inf")) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_number(value: object, least: float = float("-inf")) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and least <= float(value) < float("inf")
    except OverflowError:  # a whole number beyond them
        return False


def uniform_at(seed: int, prompt: int, position: int) -> float:
    """A number in (0, 1), with 32 bits.

    >>> 0 < uniform(1, 2, 3) < 1 and uniform(1, 2, 3) != uniform(1, 3, 2)
    True
    """
    return (fold_in(seed, prompt, position) + 0.5) / 2**32


def sampling_probs(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(probabilities [B, V] in fp64, descending; their tokens). Needs a temperature above 0."""
    values_BV, order_BV = (logits_BV.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        values_BV[:, sampling.top_k :] = float("-inf")
    p_BV = values_BV.softmax(-1)
    if sampling.top_p < 1:
        p_BV = p_BV.masked_fill(p_BV.cumsum(-1) - p_BV >= sampling.top_p, 0.0)
    return p_BV / p_BV.sum(-1, keepdim=True), order_BV


def sample(logits_BV: Tensor, sampling: Sampling, coordinates: Sequence[tuple[int, int]]) -> Tensor:
    """The next token of each sample, [B] int64; of equal logits the lowest token. `places`: (prompt, position)."""
    if sampling.temperature < 1e-6:  # too small to divide by
        return logits_BV.argmax(-1)
    p_BV, order_BV = sampling_probs(logits_BV, sampling)
    drawn_B1 = torch.tensor([[uniform_at(sampling.seed, *place)] for place in coordinates], dtype=torch.float64)
    below_B1 = (p_BV.cumsum(-1) <= drawn_B1).sum(-1, keepdim=True)
    most_B1 = (p_BV > 0).sum(-1, keepdim=True) - 1  # the sum may end below 1 by rounding
    return order_BV.gather(-1, below_B1.minimum(most_B1)).squeeze(-1)


class KVCache:
    """Keys and values of earlier positions, so that each is computed once. `length`: T, places per sample.

    The first forward pass has the prompts, padded at their end to one length; each later one a few tokens, at places
    that differ between samples. Before each `go_to` says which. Padding after a sample's last token is never seen: its
    places are written again before a query comes that far. Bytes: 2 T B g K times the size of an element for each layer
    of this rank; of a layer with a window only the keys that some query can see are read.
    """

    def __init__(self, length: int):
        self.length = length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def set_positions(self, cache_positions_SB: Tensor, device: torch.device) -> None:
        """Set the places of the tokens in the next forward pass; on the CPU, so that nothing waits for a card."""
        self.min_position, self.places_SB = int(cache_positions_SB.min()), cache_positions_SB.to(device)

    @contextlib.contextmanager
    def installed_in(self, stage: Stage) -> Iterator[None]:
        """Within the block the layers of `stage` attend to this cache."""
        layers = [block for block in stage.blocks if isinstance(block, Block)]
        for block in layers:
            block.attention.core_attention = partial(self.attend, block.layer)
        try:
            yield
        finally:
            for block in layers:
                block.attention.core_attention = attention

    def attend(
        self,
        layer: int,
        q_SBhK: Tensor,
        k_SBgK: Tensor,
        v_SBgK: Tensor,
        *,
        scale: float,
        window: int | None,
        sink_H: Tensor | None,
        **_: Any,
    ) -> Tensor:
        """Store the new keys and values of `layer`, and attend to all up to each query's place, or the last `window` of
        these: o_SBhK. Further arguments of kernels/attention.py are for training."""
        first = layer not in self._layers
        if first:
            model_config = (self.length, *k_SBgK.shape[1:])
            self._layers[layer] = (k_SBgK.new_zeros(model_config), v_SBgK.new_zeros(model_config))
        k_TBgK, v_TBgK = self._layers[layer]
        samples_B = torch.arange(k_SBgK.shape[1], device=k_SBgK.device)
        k_TBgK[self.places_SB, samples_B] = k_SBgK
        v_TBgK[self.places_SB, samples_B] = v_SBgK
        if first:  # nothing came before: the training path, which makes no mask
            return attention(q_SBhK, k_SBgK, v_SBgK, scale=scale, window=window, sink_H=sink_H)
        low = 0 if window is None else max(0, self.min_position - window + 1)
        num_cached = (k_TBgK[low:], v_TBgK[low:], self.places_SB - low)
        return cached_attention(q_SBhK, *num_cached, scale=scale, window=window, sink_H=sink_H)


@dataclass(frozen=True)
class TextGenerator:
    """This rank's stage of a model. `stops`: tokens that end a text; `step`: of the training that made it, or 0."""

    stage: Stage
    mesh: Mesh
    model_config: ModelConfig
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    step: int

    def __repr__(self) -> str:
        """A line of facts; `stage` has the layers."""
        m, weights = self.model_config, {id(weight): weight for weight in self.stage.parameters()}.values()
        experts = f", {m.num_experts} experts, {m.moe_router_topk} for a token" if m.num_experts else ""
        where = f", {self.mesh.describe()} of {self.mesh.world.size}" if self.mesh.world.size > 1 else ""
        return (
            f"Generator({sum(weight.numel() for weight in weights):,} parameters: {m.num_layers} layers of "
            f"{m.hidden_size}, {m.num_attention_heads} heads, {m.num_kv_groups} of keys and values{experts}, {m.max_positions:,} "
            f"positions; {self.tokenizer.name}, {self.tokenizer.vocab_size:,} tokens; step {self.step}; "
            f"{str(next(iter(weights)).dtype)[6:]} on {self.mesh.device}{where})"
        )

    @no_exit()
    @torch.no_grad()
    def logits(self, tokens_SB: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """[S, B, V] in fp32, on the model's device, of tokens [S, B]: position first, then sample; a position sees
        those up to it. V: the vocabulary, without padding. Of a whole model on one rank. Raises ConfigError."""
        assert self.stage.head is not None and self.mesh.world.size == 1
        rows, max_new_tokens = self.stage.head.vocab_size, self.model_config.max_positions
        wanted = f"ids below {rows}, [S, B] with S up to {max_new_tokens}; give those"
        try:
            ids_SB = torch.as_tensor(tokens_SB, device=self.mesh.device)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError([f"tokens cannot be a tensor ({' '.join(str(error).split())}) of {wanted}"]) from None
        model_config, dtype = [*ids_SB.shape], ids_SB.dtype
        whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        ids_SB = ids_SB.long()
        wrong = not whole or len(model_config) != 2 or model_config[0] > max_new_tokens or not ids_SB.numel()
        if wrong or ids_SB.min() < 0 or ids_SB.max() >= rows:
            raise ConfigError([f"tokens {model_config} of {str(dtype)[6:]} are not {wanted}"])
        return self.stage(None, Batch(ids_SB, None, None, torch.zeros_like(ids_SB[0]), 0))[..., :rows].float()

    @no_exit()
    def generate(
        self, prompts: Sequence[str], max_new_tokens: int = 60, *, temperature: float = 0.8, top_k: int = 40,
        top_p: float = 1.0, seed: int = 1234, batch_size: int = 16,
    ) -> list[str]:  # fmt: skip
        """What follows each prompt, as megalite generate draws it; temperature 0: always the likeliest token. Raises
        ConfigError for arguments out of range, and a prompt that fills all positions."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        problems = [
            f"{name}={value!r} is not a whole number of 1 or more; give one"
            for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size))
            if not _is_whole(value, 1)
        ]
        if not (isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)):
            problems.append(f"prompts of type {type(prompts).__name__} are not a text or a list of texts; give one")
        else:
            odd = [number for number, text in enumerate(texts) if text != text.encode("utf-8", "replace").decode()]
            problems += [f"prompt {number} has characters that UTF-8 has not; remove them" for number in odd[:1]]
        try:
            sampling = Sampling(temperature, top_k, top_p, seed)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if problems:
            raise ConfigError(problems)
        try:
            found = [*generate_batches(self, texts, max_new_tokens, sampling, batch_size)]
        except SetupError as error:
            raise ConfigError([str(error)]) from None
        return [self.tokenizer.decode(text.ids[text.prompt_length :]) for text in found]


@dataclass(frozen=True)
class Completion:
    """`ids`: the prompt and, from `begin` on, the generated ones; `stop`: "eod" (then the last id) or "length"."""

    ids: list[int]
    prompt_length: int
    finish_reason: str


def load_model(directory: str | Path, mesh: Mesh, dtype: torch.dtype = torch.float32) -> TextGenerator:
    """The newest checkpoint in `directory`, or the Hugging Face model there; collective over mesh.pp and mesh.tp.
    Raises SetupError, CheckpointError, DataError."""
    folder = Path(directory)
    if (folder / "config.json").is_file() and not storage.steps_in(folder):
        return _from_hugging_face(folder, mesh, dtype)
    generators: list[TextGenerator] = []  # one for each checkpoint that was tried

    def select_checkpoint(folder: Location, manifest: Manifest) -> loader.LoadPlan:
        config = checkpoint_config(manifest, folder)
        if mesh.world.is_first:
            announce({name: getattr(config.data, name) for name in TOKENIZER_OPTIONS}, parse_location(directory))
        tokenizer = open_tokenizer(config.data)
        if tokenizer is None:
            raise SetupError(f"{folder} was trained without a tokenizer, so it has a loss but no text")
        if differences := tokenizer_differences(tokenizer, manifest):
            raise SetupError(f"{folder}: {differences[0]}; put back the tokenizer that it was trained with")
        rows = int(manifest.state.get("vocab_size", tokenizer.vocab_size))
        stage, step = _build_stage(config.model, mesh, rows, dtype), int(manifest.state["progress"]["step"])
        generators[:] = [TextGenerator(stage, mesh, config.model, tokenizer, frozenset([tokenizer.eod]), step)]
        return loader.LoadPlan(model_shards(stage, mesh))

    if loader.load_newest(directory, mesh, select_checkpoint) is None:
        raise SetupError(f"load={str(directory)!r} holds no checkpoint; give the --save directory of a run")
    return generators[0]


def _from_hugging_face(folder: Path, mesh: Mesh, dtype: torch.dtype) -> TextGenerator:
    hf_model = run_on_all_ranks(mesh, lambda: open_model(folder), f"reading {folder}")
    options, why = fitting(lambda: find_tokenizer_in(hf_model.folder), hf_model.rows)
    if not options:
        reason = f" ({why})" if why else ""
        raise SetupError(f"{hf_model.folder} has no tokenizer that fits{reason}; put its tokenizer.json there")
    stage, specs = _build_stage(hf_model.model, mesh, hf_model.rows, dtype), model_specs(hf_model.model, hf_model.rows)
    fill = lambda: load_external_weights(hf_model.tensors, model_shards(stage, mesh), specs, str(folder), False)  # noqa: E731
    run_on_all_ranks(mesh, fill, f"reading the weights of {folder}")
    tokenizer = build_tokenizer(**options)
    return TextGenerator(
        stage, mesh, hf_model.model, tokenizer, frozenset([tokenizer.eod, *stop_ids(hf_model.folder)]), 0
    )


def _build_stage(model: ModelConfig, mesh: Mesh, rows: int, dtype: torch.dtype) -> Stage:
    """This rank's stage, to be filled. Raises SetupError where the model cannot be divided like that."""
    tp, pp = mesh.tp.size, mesh.pp.size
    layout = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    bare = replace(build({"micro_batch_size": 1, "lr": 1.0}), parallel=layout)
    length = model.max_positions  # a run's seq_length must divide by tp; a text need not
    model_config = replace(model, seq_length=-(-length // tp) * tp, max_position_embeddings=length + tp)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    if wrong := [problem for problem in find_problems(replace(bare, model=model_config)) if problem.mentions(sizes)]:
        raise SetupError("\n".join(wrong))
    (stage,) = RunPlan(replace(bare, model=model), tp * pp, rows).build_stages(mesh, dtype)
    return stage.eval()


@torch.no_grad()
def generate_tokens(
    model: TextGenerator, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, first: int = 0
) -> list[Completion]:
    """Up to `most` new tokens for each prompt, as positions allow; the same on all ranks; collective. `first`: number
    of the first prompt, a coordinate of the draws. Raises SetupError for one that is empty or too long."""
    tp, limit = model.mesh.tp.size, model.model_config.max_positions
    for number, prompt in enumerate(prompts, first):
        if not 0 < len(prompt) < limit:
            raise SetupError(f"prompt {number} has {len(prompt)} tokens, the model {limit} positions; shorten it")
    rows = [list(prompt) for prompt in prompts]
    ends = [min(len(prompt) + max_new_tokens, limit) for prompt in prompts]
    active, num_cached = set(range(len(rows))), [0] * len(rows)  # `seen`: tokens that the cache has
    cache = KVCache(max(ends) + tp)
    while active:
        new_tokens = [row[n:] for row, n in zip(rows, num_cached, strict=True)]
        longest = -(-max(map(len, new_tokens)) // tp) * tp
        tokens_SB = torch.tensor([row + [0] * (longest - len(row)) for row in new_tokens]).T
        cache_positions_SB = torch.tensor(num_cached) + torch.arange(longest).unsqueeze(1)
        last_index_B = torch.tensor([len(row) - 1 for row in new_tokens])
        logits_BV = _next_logits(model, cache, tokens_SB, cache_positions_SB, last_index_B)
        new_B = torch.zeros(len(rows), dtype=torch.int64, device=model.mesh.device)
        if logits_BV is not None:
            new_B.copy_(sample(logits_BV, sampling, [(first + b, len(row)) for b, row in enumerate(rows)]))
        new = broadcast_(new_B, model.mesh.pp, model.mesh.pp.size - 1).tolist()
        for b in sorted(active):
            rows[b].append(new[b])
            if new[b] in model.stop_ids or len(rows[b]) == ends[b]:
                active.remove(b)
        num_cached = [len(row) - 1 for row in rows]
    return [
        Completion(row, len(prompt), "eod" if row[-1] in model.stop_ids else "length")
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def generate_batches(
    model: TextGenerator, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling, size: int
) -> Iterator[Completion]:
    """As `continue_texts`, `size` prompts at once. An empty one is the end of a document, after which one begins.
    An end that the tokenizer itself puts behind a text is left out: the prompt goes on."""
    tokenizer, ids = model.tokenizer, list[list[int]]()
    ends = tokenizer.ends_texts
    for prompt in prompts:
        tokens = tokenizer.encode(prompt)
        ids.append((tokens[:-1] if ends else tokens) or [tokenizer.eod])
    for first in range(0, len(ids), size):
        yield from generate_tokens(model, ids[first : first + size], max_new_tokens, sampling, first)


def _next_logits(
    model: TextGenerator, cache: KVCache, tokens_SB: Tensor, cache_positions_SB: Tensor, last_index_B: Tensor
) -> Tensor | None:
    """Logits [B, V] of the chosen positions, in fp32 on the CPU, on the ranks of the last stage; None elsewhere."""
    mesh, (S, B) = model.mesh, tokens_SB.shape
    cache.set_positions(cache_positions_SB, mesh.device)
    tokens_SB, cache_positions_SB, last_index_B = (
        x.to(mesh.device) for x in (tokens_SB, cache.places_SB, last_index_B)
    )
    positions_SB = cache_positions_SB.clamp(
        max=model.model_config.max_positions - 1
    )  # padding may be after the last one
    batch = Batch(tokens_SB, None, None, torch.zeros_like(last_index_B), 0, positions_SB)
    x_sBD = None
    if not mesh.pp.is_first:
        dtype = next(model.stage.parameters()).dtype
        x_sBD = torch.empty(S // mesh.tp.size, B, model.model_config.hidden_size, dtype=dtype, device=mesh.device)
        dist.recv(x_sBD, mesh.pp.ranks[mesh.pp.rank - 1], group=mesh.pp.group)
    with cache.installed_in(model.stage):
        x_sBD = model.stage.forward_hidden(x_sBD, batch)
    if model.stage.head is None:
        dist.send(x_sBD.contiguous(), mesh.pp.ranks[mesh.pp.rank + 1], group=mesh.pp.group)
        return None
    logits_VB = start_all_gather(last_token_logits(model.stage.head, x_sBD, last_index_B).T, mesh.tp).wait()
    return logits_VB[: model.tokenizer.vocab_size].T.float().cpu()  # rows without a token have no text


def last_token_logits(head: LMHead, x_sBD: Tensor, last_index_B: Tensor) -> Tensor:
    """Logits [B, v] of one position of each sample, over this rank's part of the vocabulary."""
    h_SBD = start_all_gather(head.norm(x_sBD), head.tp).wait()
    samples_B = torch.arange(h_SBD.shape[1], device=h_SBD.device)
    h_1BD = h_SBD[last_index_B, samples_B].unsqueeze(0)
    return matmul(h_1BD, head.weight.T)[0]
