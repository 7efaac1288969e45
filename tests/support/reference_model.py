"""The definition that training is compared with: a decoder-only transformer and its training loop in plain torch.

    x = E[token] (+ P[position]);  x = x + attention(norm(x));  x = x + mlp(norm(x));  logits = norm(x) @ head^T

This file imports nothing from megalite. A model is a dictionary of fp64 tensors with megalite's parameter names.
Activations are batch first, [B, S, D]; attention is an explicit softmax under a mask; rotary positions are complex
numbers; gradients come from autograd, the update from torch.optim and the clipping from torch.nn.utils. The code follows
the papers and is written for clarity alone: a batch is one tensor, whatever the micro-batches of the run are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
# (site, layer, x) -> x after dropout. The sites are embedding (layer -1), attention (x is its weights [B, H, S, T]), and
# after_attention and after_mlp, where a block's output is added to the residual stream.
DropoutFn = Callable[[str, int, Tensor], Tensor]


@dataclass(frozen=True)
class Yarn:
    """The scaling of rotary positions of arXiv:2309.00071.

    Attributes:
        factor: s.
        original_max_positions: L.
        beta_fast: beta.
        beta_slow: alpha.
        truncate: both ends of the ramp are integer channels, as in the authors' program.
        mscale: m of the numerator 0.1 m ln s + 1 of the magnitude.
        mscale_all_dim: m of its denominator.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def frequency(self, j: int, R: int, base: float) -> float:
        ramp = [
            R / 2 * math.log(self.original_max_positions / (turns * 2 * math.pi), base)
            for turns in (self.beta_fast, self.beta_slow)
        ]
        if self.truncate:
            ramp = [math.floor(ramp[0]), math.ceil(ramp[1])]
        first, last = max(ramp[0], 0), min(ramp[1], R - 1)
        if first == last:
            last += 0.001
        gamma = 1 - min(max((j - first) / (last - first), 0.0), 1.0)  # sec. 3.2
        return base ** (-2 * j / R) * ((1 - gamma) / self.factor + gamma)

    @property
    def magnitude(self) -> float:
        if self.factor <= 1:
            return 1.0
        return (0.1 * self.mscale * math.log(self.factor) + 1) / (0.1 * self.mscale_all_dim * math.log(self.factor) + 1)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (arXiv:2104.09864): channel pair j of R = fraction * K turns by position * base^(-2j/R).

    Attributes:
        scaling_factor: the stretch of Llama 3.1 (arXiv:2407.21783) of a model that was trained on 8192 positions.
        yarn: a scaling that replaces this stretch.
        interpolation: the divisor of the positions (arXiv:2306.15595).
        interleaved: a pair is 2j and 2j + 1, otherwise j and j + R/2.
        layers_without_rope: the layers without rotary positions.
    """

    base: float = 10000.0
    fraction: float = 1.0
    scaling_factor: float | None = None
    yarn: Yarn | None = None
    interpolation: float = 1.0
    interleaved: bool = False
    layers_without_rope: tuple[int, ...] = ()


@dataclass(frozen=True)
class Model:
    """The shape of a model.

    Attributes:
        vocab_size: the size of the vocabulary without padding.
        padded_vocab_size: the size of the vocabulary in the tensors.
        bias: the linear layers that have a bias: "all", "qkv" or "none".
        sink: the sink of each head's softmax: "vanilla" is none, "learnable" a parameter, "off-by-one" a logit of 0.
        attention_cap, logit_cap: the bounds of the scores of attention and of the logits (arXiv:2408.00118).
        sandwich_norm: norms of the outputs of attention and feed-forward, before they are added.
        input_norm: norms of the inputs of attention and feed-forward.
        embedding_multiplier: the factor of the word embedding where a token is looked up.
        softmax_scale: the factor of attention scores; None for 1 / sqrt(head_size).
        embedding_sum_multiplier, logit_multiplier: the factors of the sum of all embeddings, and of the logits, in the
            maximal update parametrization (arXiv:2203.03466).
        windows: for each layer, the number of keys that a query sees, its own included, or None for all; () for none.
        local_rotary: the rotary positions of layers with a window, if they are others.
    """

    num_layers: int
    width: int
    num_heads: int
    head_size: int
    num_kv_groups: int
    ffn: int
    vocab_size: int
    padded_vocab_size: int
    max_positions: int
    norm: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False
    activation: str = "gelu"
    bias: str = "all"
    qk_norm: bool = False
    sink: str = "vanilla"
    attention_cap: float | None = None
    logit_cap: float | None = None
    rotary: Rotary | None = None
    learned_positions: bool = True
    tie_embeddings: bool = True
    sandwich_norm: bool = False
    embedding_multiplier: float = 1.0
    softmax_scale: float | None = None
    embedding_sum_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    windows: tuple[int | None, ...] = ()
    local_rotary: Rotary | None = None
    input_norm: bool = True

    @property
    def is_gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")


@dataclass(frozen=True)
class Documents:
    """The effects of an end-of-document token: on the loss, on positions and on attention."""

    eod: int
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False


@dataclass(frozen=True)
class Training:
    """The optimizer and its schedule.

    Attributes:
        learning_rates: the learning rate of each step.
        vocab_learning_rates: the learning rate of embedding and head in each step, if it is a different one.
        weight_decays: the weight decay of each step, instead of `weight_decay`.
        matrix_rate, other_rate: the factors of the learning rates of the matrices of layers and of all other parameters
            in the maximal update parametrization; not of `vocab_learning_rates`. Weight decay does not have them.
        qk_norms_decay: True if the norms of query and key have weight decay, too.
        max_grad_norm: the maximum gradient norm; 0 does not clip.
        momentum: the momentum of SGD; None for AdamW.
    """

    learning_rates: tuple[float, ...]
    vocab_learning_rates: tuple[float, ...] | None = None
    matrix_rate: float = 1.0
    other_rate: float = 1.0
    weight_decay: float = 0.01
    weight_decays: tuple[float, ...] | None = None
    qk_norms_decay: bool = False
    max_grad_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float | None = None


@dataclass(frozen=True)
class TrainResult:
    losses: list[float]
    grad_norms: list[float]
    weights: Weights


def shapes(m: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by name."""
    lead = (2, m.ffn) if m.is_gated else (m.ffn,)
    up, q, kv = "gate_up" if m.is_gated else "up", m.num_heads * m.head_size, m.num_kv_groups * m.head_size
    parameters: dict[str, tuple[int, ...]] = {"embedding.word": (m.padded_vocab_size, m.width)}

    def norm(name: str, size: int) -> None:
        parameters[f"{name}.weight"] = (size,)
        if m.norm == "LayerNorm":
            parameters[f"{name}.bias"] = (size,)

    if m.learned_positions:
        parameters["embedding.position"] = (m.max_positions, m.width)
    for i in range(m.num_layers):
        a, f = f"layers.{i}.attention", f"layers.{i}.mlp"
        if m.input_norm:
            norm(f"{a}.norm", m.width)
            norm(f"{f}.norm", m.width)
        if m.sandwich_norm:
            norm(f"{a}.post_norm", m.width)
            norm(f"{f}.post_norm", m.width)
        parameters |= {f"{a}.q": (q, m.width), f"{a}.kv": (2, kv, m.width), f"{a}.out": (m.width, q)}
        parameters |= {f"{f}.{up}": (*lead, m.width), f"{f}.down": (m.width, m.ffn)}
        if m.bias != "none":
            parameters |= {f"{a}.q_bias": (q,), f"{a}.kv_bias": (2, kv)}
        if m.bias == "all":
            parameters |= {f"{a}.out_bias": (m.width,), f"{f}.{up}_bias": lead, f"{f}.down_bias": (m.width,)}
        if m.sink == "learnable":
            parameters[f"{a}.sink"] = (m.num_heads,)
        if m.qk_norm:
            norm(f"{a}.q_norm", m.head_size)
            norm(f"{a}.k_norm", m.head_size)
    norm("final_norm", m.width)
    if not m.tie_embeddings:
        parameters["head"] = (m.padded_vocab_size, m.width)
    return parameters


def is_matrix(name: str) -> bool:
    """Return True for a weight that decays: not of a norm, no bias and no sink."""
    return "norm." not in name and not name.endswith(("bias", ".sink"))


def normalize(w: Weights, name: str, x: Tensor, m: Model) -> Tensor:
    weight = w[f"{name}.weight"] + (1 if m.zero_centered_gamma else 0)
    if m.norm == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + m.eps).sqrt()
    return x * weight + (w[f"{name}.bias"] if m.norm == "LayerNorm" else 0)


def rotate(x_BSHK: Tensor, positions_BS: Tensor, rotary: Rotary) -> Tensor:
    """Multiply each pair of channels, as a complex number, by exp(i * angle)."""
    R = int(x_BSHK.shape[-1] * rotary.fraction)
    frequencies = []
    for j in range(R // 2):
        frequency = rotary.base ** (-2 * j / R)
        if rotary.scaling_factor is not None:
            # within the original context; a pair with 4 or more turns is not stretched
            turns = 8192 * frequency / (2 * math.pi)
            smooth = min(max((turns - 1) / (4 - 1), 0.0), 1.0)
            frequency *= smooth + (1 - smooth) / rotary.scaling_factor
        frequencies.append(frequency if rotary.yarn is None else rotary.yarn.frequency(j, R, rotary.base))
    angles = positions_BS[..., None].double() / rotary.interpolation * torch.tensor(frequencies, dtype=torch.float64)
    rotation = torch.exp(1j * angles)[:, :, None] * (1 if rotary.yarn is None else rotary.yarn.magnitude)
    if rotary.interleaved:
        rotated = torch.complex(x_BSHK[..., 0:R:2], x_BSHK[..., 1:R:2]) * rotation
        return torch.cat([torch.view_as_real(rotated).flatten(-2), x_BSHK[..., R:]], -1)
    rotated = torch.complex(x_BSHK[..., : R // 2], x_BSHK[..., R // 2 : R]) * rotation
    return torch.cat([rotated.real, rotated.imag, x_BSHK[..., R:]], -1)


def activate(w: Weights, name: str, x: Tensor, m: Model) -> Tensor:
    up = "gate_up" if m.is_gated else "up"
    u = torch.einsum("bsd,...fd->bs...f", x, w[f"{name}.{up}"])
    if m.bias == "all":
        u = u + w[f"{name}.{up}_bias"]
    if m.is_gated:  # arXiv:2002.05202
        gate, value = u.unbind(-2)
        return (gate * torch.sigmoid(gate) if m.activation == "swiglu" else gelu_tanh(gate)) * value
    if m.activation == "squared_relu":  # arXiv:2109.08668
        return torch.where(u > 0, u * u, torch.zeros_like(u))
    if m.activation == "gelu_erf":  # arXiv:1606.08415: x times the cumulative distribution of the normal distribution
        return u * torch.special.ndtr(u)
    return gelu_tanh(u)


def gelu_tanh(u: Tensor) -> Tensor:
    """Return the approximation of gelu with tanh."""
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def bound(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def attend(
    w: Weights, layer: int, x: Tensor, position_BS: Tensor, visible_BST: Tensor, m: Model, dropout: DropoutFn
) -> Tensor:
    name = f"layers.{layer}.attention"
    q, k, v = x @ w[f"{name}.q"].T, x @ w[f"{name}.kv"][0].T, x @ w[f"{name}.kv"][1].T
    if m.bias != "none":
        k_bias, v_bias = w[f"{name}.kv_bias"]
        q, k, v = q + w[f"{name}.q_bias"], k + k_bias, v + v_bias
    q, k, v = (t.unflatten(-1, (-1, m.head_size)) for t in (q, k, v))
    if m.qk_norm:
        q, k = normalize(w, f"{name}.q_norm", q, m), normalize(w, f"{name}.k_norm", k, m)
    window = m.windows[layer] if m.windows else None
    rotary = m.local_rotary if window is not None and m.local_rotary is not None else m.rotary
    if rotary is not None and layer not in rotary.layers_without_rope:
        q, k = rotate(q, position_BS, rotary), rotate(k, position_BS, rotary)
    if window is not None:
        distances_ST = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        visible_BST = visible_BST & (distances_ST < window)
    group_of = [h * m.num_kv_groups // m.num_heads for h in range(m.num_heads)]  # consecutive heads share a group
    scale = 1 / math.sqrt(m.head_size) if m.softmax_scale is None else m.softmax_scale
    scores_BHST = torch.einsum("bshk,bthk->bhst", q, k[:, :, group_of]) * scale
    scores_BHST = bound(scores_BHST, m.attention_cap)
    e_BHST = scores_BHST.masked_fill(~visible_BST[:, None], -math.inf).exp()
    total = e_BHST.sum(-1, keepdim=True)
    if m.sink != "vanilla":
        total = total + (w[f"{name}.sink"].exp().view(-1, 1, 1) if m.sink == "learnable" else 1)
    weights_BHST = dropout("attention", layer, e_BHST / total)
    y = torch.einsum("bhst,bthk->bshk", weights_BHST, v[:, :, group_of]).flatten(2) @ w[f"{name}.out"].T
    return y + w[f"{name}.out_bias"] if m.bias == "all" else y


def no_dropout(site: str, layer: int, x: Tensor) -> Tensor:
    return x


def logits(
    w: Weights, tokens_BS: Tensor, m: Model, documents: Documents | None, dropout: DropoutFn = no_dropout
) -> Tensor:
    """Return the logits over the vocabulary without padding, [B, S, vocab_size]."""
    S = tokens_BS.shape[1]
    position_BS = torch.arange(S).expand_as(tokens_BS)
    visible_BST = (position_BS[:, :, None] >= position_BS[:, None, :]).clone()
    if documents is not None:
        ends = (tokens_BS == documents.eod).long()
        number_BS = ends.cumsum(1) - ends  # an end belongs to the document that it ends
        same_BST = number_BS[:, :, None] == number_BS[:, None, :]
        if documents.reset_attention:
            visible_BST &= same_BST
        if documents.reset_positions:
            position_BS = (same_BST & (position_BS[:, :, None] > position_BS[:, None, :])).sum(-1)
    x = w["embedding.word"][tokens_BS] * m.embedding_multiplier
    if m.learned_positions:
        x = x + w["embedding.position"][position_BS]
    x = x * m.embedding_sum_multiplier
    x = dropout("embedding", -1, x)
    for i in range(m.num_layers):
        a, f = f"layers.{i}.attention", f"layers.{i}.mlp"
        y = normalize(w, f"{a}.norm", x, m) if m.input_norm else x
        y = attend(w, i, y, position_BS, visible_BST, m, dropout)
        y = normalize(w, f"{a}.post_norm", y, m) if m.sandwich_norm else y
        x = x + dropout("after_attention", i, y)
        y = normalize(w, f"{f}.norm", x, m) if m.input_norm else x
        y = activate(w, f, y, m) @ w[f"{f}.down"].T
        y = y + w[f"{f}.down_bias"] if m.bias == "all" else y
        y = normalize(w, f"{f}.post_norm", y, m) if m.sandwich_norm else y
        x = x + dropout("after_mlp", i, y)
    head = w["embedding.word"] if m.tie_embeddings else w["head"]
    return bound(normalize(w, "final_norm", x, m) @ head[: m.vocab_size].T * m.logit_multiplier, m.logit_cap)


def loss_of(
    w: Weights, tokens_BT: Tensor, m: Model, documents: Documents | None = None, dropout: DropoutFn = no_dropout
) -> Tensor:
    """Return the mean loss in nats over the tokens that are not masked. tokens_BT has S + 1 columns."""
    inputs, labels = tokens_BT[:, :-1], tokens_BT[:, 1:]
    losses = F.cross_entropy(logits(w, inputs, m, documents, dropout).flatten(0, 1), labels.flatten(), reduction="none")
    if documents is None or not documents.mask_loss:
        return losses.mean()
    return losses[inputs.flatten() != documents.eod].mean()


def train(
    initial: Weights,
    batches: Sequence[Tensor],
    m: Model,
    training: Training,
    documents: Documents | None = None,
    dropouts: Sequence[DropoutFn] | None = None,
) -> TrainResult:
    """Run one step per batch [B, S + 1], with its element of `dropouts`, if any. `initial` is not modified."""
    w = {name: value.clone().requires_grad_() for name, value in initial.items()}
    groups = [{"params": [value], "name": name} for name, value in w.items()]
    decays = training.weight_decays or (training.weight_decay,) * len(batches)
    if training.momentum is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=training.betas, eps=training.eps)
    else:
        optimizer = torch.optim.SGD(groups, momentum=training.momentum)
    losses, grad_norms = [], []
    dropouts = dropouts or [no_dropout] * len(batches)
    vocab_learning_rates = training.vocab_learning_rates or [
        rate * training.other_rate for rate in training.learning_rates
    ]
    steps = zip(batches, training.learning_rates, vocab_learning_rates, decays, dropouts, strict=True)
    for tokens, rate, vocab_learning_rate, decay, dropout in steps:
        for group in optimizer.param_groups:
            name = group["name"]
            has_decay = is_matrix(name) or (training.qk_norms_decay and (".q_norm." in name or ".k_norm." in name))
            factor = training.matrix_rate if name.startswith("layers.") and is_matrix(name) else training.other_rate
            group["lr"] = rate * factor
            if name in ("embedding.word", "head"):
                group["lr"] = vocab_learning_rate
                factor = 1.0 if training.vocab_learning_rates else training.other_rate
            group["weight_decay"] = decay / factor if has_decay else 0.0
        optimizer.zero_grad()
        loss = loss_of(w, tokens, m, documents, dropout)
        loss.backward()
        limit = training.max_grad_norm or math.inf
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(w.values(), limit)))
        losses.append(loss.item())
        optimizer.step()
    return TrainResult(losses, grad_norms, {name: value.detach() for name, value in w.items()})
