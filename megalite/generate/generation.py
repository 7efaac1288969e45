"""Text generation from a checkpoint or a Hugging Face directory, under any tp x pp.

    prompts [B, S] --stage 0 .. pp-1--> logits of the last token of each --sample--> a token of each, to all ranks
    then the new tokens alone, [tp, B]: sequence parallelism needs a multiple of tp, so all but the first are padding

Each rank keeps the keys and values of its layers and heads. The stages work one after the other, because a token
depends on the previous one: pipeline parallelism is for models that do not fit otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.manager import loader
from megalite.checkpoint.manager.collective import run_on_all_ranks
from megalite.checkpoint.storage import storage
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
from megalite.kernels.softcap import soft_cap
from megalite.models.gpt import LMHead, Stage
from megalite.models.specs import checkpoint_specs
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import model_shards
from megalite.parallel.comm import broadcast_, start_all_gather
from megalite.parallel.mesh import Mesh
from megalite.planning.run_shape import RunShape
from megalite.planning.stage_balance import StageBalance
from megalite.training.checkpointing.compatibility import checkpoint_config, tokenizer_differences
from megalite.training.checkpointing.named_tokenizer import find_usable_tokenizer, print_external_paths
from megalite.training.datasets import TOKENIZER_OPTIONS, open_tokenizer
from megalite.training.setup import SetupError


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token: the likeliest, or one drawn with temperature, top-k and top-p (arXiv:1904.09751).

        p = softmax(logits / temperature);  keep the k likeliest;  keep the fewest of these whose sum reaches top_p

    A draw is a function of (seed, number of the prompt, position). Given equal logits, it is the same under every
    layout, and for a prompt alone or in a batch.

    Attributes:
        temperature: 0 always chooses the likeliest token.
        top_k: 0 means no limit.
        top_p: 1 means no limit.
        seed: The random seed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        """Raise ConfigError with every number that is out of range."""
        problems = [
            f"{name}={value!r} is not {description}; give one"
            for name, value, is_valid, description in (
                ("temperature", self.temperature, _is_number(self.temperature, 0), "a number of 0 or more"),
                ("top_k", self.top_k, _is_integer(self.top_k, 0), "a whole number of 0 or more"),
                ("top_p", self.top_p, _is_number(self.top_p, 0) and 0 < self.top_p <= 1, "a number in (0, 1]"),
                ("seed", self.seed, _is_integer(self.seed), "a whole number"),
            )
            if not is_valid
        ]
        if problems:
            raise ConfigError(problems)


def _is_integer(value: object, minimum: float = float("-inf")) -> bool:
    """Return True if `value` is an integer of at least `minimum`, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def _is_number(value: object, minimum: float = float("-inf")) -> bool:
    """Return True if `value` is a finite number of at least `minimum`, and not a bool."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and minimum <= float(value) < float("inf")
    except OverflowError:  # an integer above the range of floats
        return False


def uniform_at(seed: int, prompt: int, position: int) -> float:
    """Return the random number of a position, in (0, 1), with 32 bits.

    >>> 0 < uniform_at(1, 2, 3) < 1 and uniform_at(1, 2, 3) != uniform_at(1, 3, 2)
    True
    """
    return (fold_in(seed, prompt, position) + 0.5) / 2**32


def sampling_probs(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return (probabilities [B, V] in fp64, descending; their tokens [B, V]).

    The temperature must be above 0.
    """
    values_BV, order_BV = (logits_BV.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        values_BV[:, sampling.top_k :] = float("-inf")
    p_BV = values_BV.softmax(-1)
    if sampling.top_p < 1:
        p_BV = p_BV.masked_fill(p_BV.cumsum(-1) - p_BV >= sampling.top_p, 0.0)
    return p_BV / p_BV.sum(-1, keepdim=True), order_BV


def sample(logits_BV: Tensor, sampling: Sampling, coordinates: Sequence[tuple[int, int]]) -> Tensor:
    """Return the next token of each sample, [B] int64. Of equal logits, the lowest token is chosen.

    `coordinates` has (number of the prompt, position) for each sample.
    """
    if sampling.temperature < 1e-6:  # too small to divide by
        return logits_BV.argmax(-1)
    p_BV, order_BV = sampling_probs(logits_BV, sampling)
    drawn_B1 = torch.tensor(
        [[uniform_at(sampling.seed, *coordinate)] for coordinate in coordinates], dtype=torch.float64
    )
    below_B1 = (p_BV.cumsum(-1) <= drawn_B1).sum(-1, keepdim=True)
    last_B1 = (p_BV > 0).sum(-1, keepdim=True) - 1  # the sum may be below 1 due to rounding
    return order_BV.gather(-1, below_B1.minimum(last_B1)).squeeze(-1)


class KVCache:
    """The keys and values of earlier positions, so that each is computed once, and the states of other mixers.

    `length` is T, the number of positions per sample. The first forward pass has the prompts, padded at the end to one
    length. Each later one has a few tokens, at positions that differ between samples. Call `set_positions` before each.
    Padding after a sample's last token is never seen: its positions are overwritten before a query gets that far.

    Memory per layer of this rank: 2 T B g K elements, or T B (L + R) with multi-latent attention, where every tp rank
    has the latents of all heads. In a layer with a window, only the keys that some query can see are read.
    """

    def __init__(self, length: int):
        self.length = length
        self.states: dict[int, Any] = {}

    def set_positions(self, cache_positions_SB: Tensor, device: torch.device, num_new_B: Tensor | None = None) -> None:
        """Set the positions [S, B] of the tokens in the next forward pass, and how many of them are no padding.

        They must be on the CPU, so that nothing waits for a GPU. By default there is no padding.
        """
        length, samples = cache_positions_SB.shape
        self.min_position = int(cache_positions_SB.min())
        self.positions_SB = cache_positions_SB.to(device)
        self._num_new_B = torch.full((samples,), length) if num_new_B is None else num_new_B

    @property
    def num_new_B(self) -> Tensor:
        """The number of tokens of each sample in this pass; copied to the device only for the mixers that ask."""
        return self._num_new_B.to(self.positions_SB.device)

    def append(self, layer: int, *new: Tensor) -> tuple[bool, tuple[Tensor, ...]]:
        """Store tensors [S, B, ...] of the new tokens of `layer`.

        Returns whether it is the first pass, and the tensors [T, B, ...] of all positions.
        """
        is_first_pass = layer not in self.states
        if is_first_pass:
            self.states[layer] = tuple(x.new_zeros(self.length, *x.shape[1:]) for x in new)
        samples_B = torch.arange(new[0].shape[1], device=new[0].device)
        for stored, x in zip(self.states[layer], new, strict=True):
            stored[self.positions_SB, samples_B] = x
        return is_first_pass, self.states[layer]

    def first_visible(self, window: int | None) -> int:
        """Return the first position that a query of this pass sees."""
        return 0 if window is None else max(0, self.min_position - window + 1)

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
        softcap: float | None,
        **_: Any,
    ) -> Tensor:
        """Store the new keys and values of `layer`, and return the attention over all of them, o_SBhK.

        A query sees the keys up to its own position, or the last `window` of these. Other arguments of
        kernels/attention.py are only for training.
        """
        is_first_pass, (k_TBgK, v_TBgK) = self.append(layer, k_SBgK, v_SBgK)
        kwargs: dict[str, Any] = dict(scale=scale, window=window, sink_H=sink_H, softcap=softcap)
        if is_first_pass:  # there are no earlier keys: use the kernel of training, which builds no mask
            return attention(q_SBhK, k_SBgK, v_SBgK, **kwargs)
        start = self.first_visible(window)
        return cached_attention(q_SBhK, k_TBgK[start:], v_TBgK[start:], self.positions_SB - start, **kwargs)


@dataclass(frozen=True)
class TextGenerator:
    """This rank's stage of a model, with its tokenizer.

    Attributes:
        stage: The stage.
        mesh: The mesh.
        model_config: The configuration of the model.
        tokenizer: The tokenizer.
        stop_ids: The tokens that end a text.
        step: The training step of the checkpoint, or 0.
    """

    stage: Stage
    mesh: Mesh
    model_config: ModelConfig
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    step: int

    def __repr__(self) -> str:
        """Return the main facts on one line; `stage` has the layers."""
        model = self.model_config
        weights = {id(weight): weight for weight in self.stage.parameters()}.values()
        num_parameters = sum(weight.numel() for weight in weights)
        experts = f", {model.num_experts} experts, {model.moe_router_topk} for a token" if model.num_experts else ""
        rank = f", {self.mesh.describe()} of {self.mesh.world.size}" if self.mesh.world.size > 1 else ""
        return (
            f"Generator({num_parameters:,} parameters: {model.num_layers} layers of {model.hidden_size}, "
            f"{model.num_attention_heads} heads, {model.num_kv_groups} of keys and values{experts}, "
            f"{model.max_positions:,} positions; {self.tokenizer.name}, {self.tokenizer.vocab_size:,} tokens; "
            f"step {self.step}; {str(next(iter(weights)).dtype).removeprefix('torch.')} on {self.mesh.device}{rank})"
        )

    @no_exit()
    @torch.no_grad()
    def logits(self, tokens_SB: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [S, B, V] of tokens [S, B], in fp32 on the model's device.

        A position sees the tokens up to it. V is the size of the vocabulary without padding. This needs the full model
        on one rank. Raises ConfigError for invalid tokens.
        """
        assert self.stage.head is not None and self.mesh.world.size == 1
        vocab_size = self.stage.head.vocab_size
        max_positions = self.model_config.max_positions
        expected = f"ids below {vocab_size}, [S, B] with S up to {max_positions}; give those"
        try:
            ids_SB = torch.as_tensor(tokens_SB, device=self.mesh.device)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError([f"tokens cannot be a tensor ({' '.join(str(error).split())}) of {expected}"]) from None
        shape, dtype = [*ids_SB.shape], ids_SB.dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        ids_SB = ids_SB.long()
        is_invalid = not is_integer or len(shape) != 2 or shape[0] > max_positions or not ids_SB.numel()
        if is_invalid or ids_SB.min() < 0 or ids_SB.max() >= vocab_size:
            raise ConfigError([f"tokens {shape} of {str(dtype).removeprefix('torch.')} are not {expected}"])
        batch = Batch(ids_SB, None, None, sample_ids_B=torch.zeros_like(ids_SB[0]))
        return self.stage(None, batch, ForwardContext())[..., :vocab_size].float()

    @no_exit()
    def generate(
        self, prompts: Sequence[str], max_new_tokens: int = 60, *, temperature: float = 0.8, top_k: int = 40,
        top_p: float = 1.0, seed: int = 1234, batch_size: int = 16,
    ) -> list[str]:  # fmt: skip
        """Return the continuation of each prompt, as `megalite generate` would draw it.

        A temperature of 0 always chooses the likeliest token. Raises ConfigError for arguments out of range, and for a
        prompt that fills all positions.
        """
        prompt_list = [prompts] if isinstance(prompts, str) else prompts
        problems = [
            f"{name}={value!r} is not a whole number of 1 or more; give one"
            for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size))
            if not _is_integer(value, 1)
        ]
        if not (isinstance(prompt_list, list | tuple) and all(isinstance(text, str) for text in prompt_list)):
            problems.append(f"prompts of type {type(prompts).__name__} are not a text or a list of texts; give one")
        else:
            invalid = [
                number for number, text in enumerate(prompt_list) if text != text.encode("utf-8", "replace").decode()
            ]
            problems += [
                f"prompt {number} has characters that UTF-8 cannot encode; remove them" for number in invalid[:1]
            ]
        try:
            sampling = Sampling(temperature, top_k, top_p, seed)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if problems:
            raise ConfigError(problems)
        try:
            completions = [*generate_batches(self, prompt_list, max_new_tokens, sampling, batch_size)]
        except SetupError as error:
            raise ConfigError([str(error)]) from None
        return [self.tokenizer.decode(completion.ids[completion.prompt_length :]) for completion in completions]


@dataclass(frozen=True)
class Completion:
    """A prompt and its continuation.

    Attributes:
        ids: The tokens of the prompt, then the generated ones.
        prompt_length: The number of tokens of the prompt.
        finish_reason: "eod" if the last id ends the text, "stop" if a stop text does, otherwise "length".
    """

    ids: list[int]
    prompt_length: int
    finish_reason: str


def load_model(directory: str | Path, mesh: Mesh, dtype: torch.dtype = torch.float32) -> TextGenerator:
    """Load the newest checkpoint in `directory`, or the Hugging Face model there.

    Collective over mesh.pp and mesh.tp. Raises SetupError, CheckpointError, DataError.
    """
    path = Path(directory)
    if (path / "config.json").is_file() and not storage.steps_in(path):
        return _from_hugging_face(path, mesh, dtype)
    generators: list[TextGenerator] = []  # one for each checkpoint that was tried

    def select_checkpoint(checkpoint: Location, manifest: Manifest) -> loader.LoadPlan:
        config = checkpoint_config(manifest, checkpoint)
        if mesh.world.is_first:
            print_external_paths(
                {name: getattr(config.data, name) for name in TOKENIZER_OPTIONS}, parse_location(directory)
            )
        tokenizer = open_tokenizer(config.data)
        if tokenizer is None:
            raise SetupError(f"{checkpoint} was trained without a tokenizer, so it has a loss but no text")
        if differences := tokenizer_differences(tokenizer, manifest):
            raise SetupError(f"{checkpoint}: {differences[0]}; restore the tokenizer that it was trained with")
        vocab_size = int(manifest.state.get("vocab_size", tokenizer.vocab_size))
        stage = _build_stage(config.model, mesh, vocab_size, dtype)
        step = int(manifest.state["progress"]["step"])
        generators[:] = [TextGenerator(stage, mesh, config.model, tokenizer, frozenset([tokenizer.eod]), step)]
        return loader.LoadPlan(model_shards(stage, mesh))

    if loader.load_newest(directory, mesh, select_checkpoint) is None:
        raise SetupError(f"load={str(directory)!r} holds no checkpoint; give the --save directory of a run")
    return generators[0]


def _from_hugging_face(directory: Path, mesh: Mesh, dtype: torch.dtype) -> TextGenerator:
    """Load a Hugging Face model with its tokenizer. Raises SetupError, CheckpointError."""
    hf_model = run_on_all_ranks(mesh, lambda: open_model(directory), f"reading {directory}")
    options, reason = find_usable_tokenizer(lambda: find_tokenizer_in(hf_model.directory), hf_model.rows)
    if not options:
        reason_text = f" ({reason})" if reason else ""
        raise SetupError(f"{hf_model.directory} has no tokenizer that fits{reason_text}; put its tokenizer.json there")
    stage = _build_stage(hf_model.model, mesh, hf_model.rows, dtype)
    specs = checkpoint_specs(hf_model.model, hf_model.rows)

    def load_weights() -> None:
        load_external_weights(hf_model.tensors, model_shards(stage, mesh), specs, str(directory), False)

    run_on_all_ranks(mesh, load_weights, f"reading the weights of {directory}")
    tokenizer = build_tokenizer(**options)
    stops = frozenset([tokenizer.eod, *stop_ids(hf_model.directory)])
    return TextGenerator(stage, mesh, hf_model.model, tokenizer, stops, step=0)


def _build_stage(model: ModelConfig, mesh: Mesh, vocab_size: int, dtype: torch.dtype) -> Stage:
    """Return this rank's stage, whose weights are to be loaded.

    Raises SetupError if the model cannot be divided over this tp and pp.
    """
    tp, pp = mesh.tp.size, mesh.pp.size
    layout = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    base_config = replace(build({"micro_batch_size": 1, "lr": 1.0}), parallel=layout)
    max_positions = model.max_positions
    # The seq_length of a run must be a multiple of tp, but the length of a text need not be.
    padded_model = replace(model, seq_length=-(-max_positions // tp) * tp, max_position_embeddings=max_positions + tp)
    options = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    if problems := [
        problem for problem in find_problems(replace(base_config, model=padded_model)) if problem.mentions(options)
    ]:
        raise SetupError("\n".join(problems))
    (stage,) = StageBalance(RunShape(replace(base_config, model=model), tp * pp, vocab_size)).build_stages(mesh, dtype)
    return stage.eval()


@torch.no_grad()
def generate_tokens(
    model: TextGenerator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    first: int = 0,
    stop_texts: Sequence[str] = (),
) -> list[Completion]:
    """Return a completion of each prompt, the same on all ranks. Collective over mesh.pp and mesh.tp.

    Args:
        model: The model.
        prompts: The tokens of each prompt.
        max_new_tokens: The maximum number of new tokens. Texts also end at the model's last position.
        sampling: How to choose the tokens.
        first: The number of the first prompt, a coordinate of the random draws.
        stop_texts: Texts after which a continuation ends; they are part of it.

    Raises:
        SetupError: A prompt is empty or too long.
    """
    tp, max_positions = model.mesh.tp.size, model.model_config.max_positions
    for number, prompt in enumerate(prompts, first):
        if not 0 < len(prompt) < max_positions:
            raise SetupError(
                f"prompt {number} has {len(prompt)} tokens, the model {max_positions} positions; shorten it"
            )
    texts = [list(prompt) for prompt in prompts]
    max_lengths = [min(len(prompt) + max_new_tokens, max_positions) for prompt in prompts]
    finish_reasons = ["length"] * len(texts)
    active = set(range(len(texts)))
    num_cached = [0] * len(texts)  # tokens of each text that are in the cache
    cache = KVCache(max(max_lengths) + tp)
    while active:
        new_tokens = [text[n:] for text, n in zip(texts, num_cached, strict=True)]
        padded_length = -(-max(map(len, new_tokens)) // tp) * tp
        tokens_SB = torch.tensor([text + [0] * (padded_length - len(text)) for text in new_tokens]).T
        cache_positions_SB = torch.tensor(num_cached) + torch.arange(padded_length).unsqueeze(1)
        last_index_B = torch.tensor([len(text) - 1 for text in new_tokens])
        num_new_B = torch.tensor([len(text) if b in active else 0 for b, text in enumerate(new_tokens)])
        cache.set_positions(cache_positions_SB, model.mesh.device, num_new_B)
        logits_BV = _next_logits(model, cache, tokens_SB, last_index_B)
        new_B = torch.zeros(len(texts), dtype=torch.int64, device=model.mesh.device)
        if logits_BV is not None:
            new_B.copy_(sample(logits_BV, sampling, [(first + b, len(text)) for b, text in enumerate(texts)]))
        next_tokens = broadcast_(new_B, model.mesh.pp, model.mesh.pp.size - 1).tolist()
        for b in sorted(active):
            texts[b].append(next_tokens[b])
            if next_tokens[b] in model.stop_ids:
                finish_reasons[b] = "eod"
            elif stop_texts:
                new_text = model.tokenizer.decode(texts[b][len(prompts[b]) :])
                if any(stop_text in new_text for stop_text in stop_texts):
                    finish_reasons[b] = "stop"
            if finish_reasons[b] != "length" or len(texts[b]) == max_lengths[b]:
                active.remove(b)
        num_cached = [len(text) - 1 for text in texts]
    return [
        Completion(text, len(prompt), reason)
        for text, prompt, reason in zip(texts, prompts, finish_reasons, strict=True)
    ]


def generate_batches(
    model: TextGenerator, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling, size: int
) -> Iterator[Completion]:
    """Yield a completion of each prompt, generated by `generate_tokens` in batches of `size`.

    An empty prompt becomes the end of a document, after which a new document starts. An end token that the tokenizer
    itself appends to a text is removed, because the prompt is continued.
    """
    tokenizer = model.tokenizer
    ids: list[list[int]] = []
    for prompt in prompts:
        tokens = tokenizer.encode(prompt)
        if tokenizer.ends_texts:
            tokens = tokens[:-1]
        ids.append(tokens or [tokenizer.eod])
    for first in range(0, len(ids), size):
        yield from generate_tokens(model, ids[first : first + size], max_new_tokens, sampling, first)


def _next_logits(model: TextGenerator, cache: KVCache, tokens_SB: Tensor, last_index_B: Tensor) -> Tensor | None:
    """Return the logits [B, V] of the last tokens, in fp32 on the CPU.

    Returns None on ranks that do not have the last stage.
    """
    mesh = model.mesh
    tokens_SB, last_index_B = tokens_SB.to(mesh.device), last_index_B.to(mesh.device)
    # padding may be beyond the last position
    positions_SB = cache.positions_SB.clamp(max=model.model_config.max_positions - 1)
    batch = Batch(tokens_SB, None, None, torch.zeros_like(last_index_B), positions_SB)
    h_sBD = forward_stages(model, batch, ForwardContext(cache=cache))
    if h_sBD is None:
        return None
    assert model.stage.head is not None
    logits_BV = last_token_logits(model.stage.head, h_sBD, last_index_B)
    return logits_BV[:, : model.tokenizer.vocab_size].float().cpu()  # rows of the padding have no token


def forward_stages(model: TextGenerator, batch: Batch, ctx: ForwardContext) -> Tensor | None:
    """Return the hidden states h_sBD after the final norm on the last stage, and None on the others.

    Collective over mesh.pp and mesh.tp.
    """
    mesh, stage = model.mesh, model.stage
    x_sBD = None
    if not mesh.pp.is_first:
        S, B = batch.tokens_SB.shape
        dtype = next(stage.parameters()).dtype
        x_sBD = torch.empty(S // mesh.tp.size, B, model.model_config.hidden_size, dtype=dtype, device=mesh.device)
        dist.recv(x_sBD, mesh.pp.ranks[mesh.pp.rank - 1], group=mesh.pp.group)
    x_sBD = stage.forward_hidden(x_sBD, batch, ctx)
    if stage.head is None:
        dist.send(x_sBD.contiguous(), mesh.pp.ranks[mesh.pp.rank + 1], group=mesh.pp.group)
        return None
    assert stage.final_norm is not None
    return stage.final_norm(x_sBD)


def last_token_logits(head: LMHead, h_sBD: Tensor, last_index_B: Tensor) -> Tensor:
    """Return the logits [B, V] of one position of each sample, with those of the padding. Collective over tp.

    `h_sBD`: the hidden states after the final norm.
    """
    h_SBD = gather_positions(head, h_sBD)
    return logits_at(head, h_SBD, last_index_B, torch.arange(h_SBD.shape[1], device=h_SBD.device))


def gather_positions(head: LMHead, h_sBD: Tensor) -> Tensor:
    """Return the hidden states h_SBD of all positions. Collective over tp."""
    return start_all_gather(h_sBD, head.tp).wait()


def logits_at(head: LMHead, h_SBD: Tensor, positions_N: Tensor, samples_N: Tensor) -> Tensor:
    """Return the logits [N, V] at N positions, each of one sample, with those of the padding. Collective over tp.

    `h_SBD`: the hidden states after the final norm, of all positions.
    """
    h_1ND = h_SBD[positions_N, samples_N].unsqueeze(0)
    logits_Nv = soft_cap(matmul(h_1ND, head.weight.T)[0], head.softcap)
    return start_all_gather(logits_Nv.T, head.tp).wait().T
