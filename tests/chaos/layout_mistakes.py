"""Classical mistakes of distributed training, for tools/verify.py to find and to locate: planted into a copy of the
sources."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breakages import Breakage, plant

LIMIT_S = 120.0
RUN = """--num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 2
 --global-batch-size 32 --train-iters 1000 --lr 3e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 50257
 --hidden-dropout 0 --attention-dropout 0"""
LLAMA = """ --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights"""
DROPOUT = " --hidden-dropout 0.1"
TP, PP, DP = (f" --{axis} 2 --nproc 2" for axis in ("tp", "pp", "dp"))
CP = " --cp 2 --nproc 2"
EXPERTS = RUN + LLAMA + " --num-experts 8 --moe-ffn-hidden-size 512 --moe-aux-loss-coeff 0.01"
EP = " --dp 4 --ep 2"
DP_DDP = DP + " --no-use-distributed-optimizer"
ZERO3 = " --zero-stage 3"
GROUP = "self.group = tp.rank * G // tp.size"


@dataclass(frozen=True)
class Mistake:
    """`old` stands once in the package, `new` replaces it; `more`: other such pairs. `first`: what of the first difference must be so, by key:
    equal, or for `causes` a part of one. `alone`: a word that is in the names of all that differ there. `odd`: a word of
    what is wrong with the one process, too."""

    name: str
    old: str
    new: str
    flags: str
    first: dict[str, Any]
    alone: str = ""
    odd: str = ""
    more: tuple[tuple[str, str], ...] = ()

    @property
    def breakage(self) -> Breakage:
        return Breakage(self.name, "", ((self.old, self.new), *self.more))


MISTAKES = [
    Mistake(
        "norms' gradients are not summed over tp",
        "sums=(*[replica] * (shard.size > 1 and outer.size == 1), *map(mesh.axis, kind.partial)),",
        "sums=(*[replica] * (shard.size > 1 and outer.size == 1),),",
        RUN + LLAMA + TP,
        {"kind": "gradient", "step": 1, "name": "final_norm.weight", "causes": "all-reduce over tp"}, alone="norm",
    ),
    Mistake(
        "a tied embedding is summed over the ends twice",
        "                all_reduce_(self.grads.owned(bucket), ends)\n",
        "                all_reduce_(self.grads.owned(bucket), ends)\n" * 2,
        RUN + PP,
        {"kind": "gradient", "step": 1, "name": "embedding.word", "causes": "is 2 times"}, alone="embedding.word",
    ),
    Mistake(
        "a bias is added on every tp rank before the sum",
        "return add_bias(y_sBD, self.out_bias)",
        "return add_bias(y_sBD, self.out_bias if self.out_bias is None else self.out_bias * self.tp.size)",
        RUN + TP, {"kind": "forward", "step": 1, "name": "layers.0.attention", "layer": 0, "causes": "a bias"},
    ),
    Mistake(
        "every rank weights its micro-batches by the tokens that it counts itself",
        "losses = run.pipeline.step(batches, run.loss_scaler.scale / nominal)",
        "own = sum(host.counted for host in hosts) / sum(h.tokens_SB.numel() for h in hosts)\n"
            "        losses = run.pipeline.step(batches, run.loss_scaler.scale / nominal / own)",
        RUN + LLAMA + DP + " --eod-mask-loss",
        {"kind": "gradient", "step": 1, "name": "head", "causes": "weight of micro-batches"},
    ),
    Mistake(
        "gradients are averaged over dp, and once more by the number of tokens",
        "        self.reducing.clear()\n",
        "        self.reducing.clear()\n"
            "        for bucket in self.buckets:\n"
            "            self.grads.whole(bucket).div_(self.rules[bucket.kind].shard.size)\n",
        RUN + DP,
        {"kind": "gradient", "step": 1, "causes": "every gradient is 1/2 of what it should be, the number of dp"},
    ),
    Mistake(
        "one rank keeps its old weights of the others' shards",
        "        whole, held = self.weights.whole(bucket), self.weights.held(bucket)\n",
        "        whole, held = self.weights.whole(bucket), self.weights.held(bucket)\n"
            "        whole = whole.clone() if self._shards[b].rank == 1 else whole\n",
        RUN + DP, {"kind": "weight", "step": 1, "ranks.dp": [1], "causes": "left them stale"},
    ),
    Mistake(
        "every rank draws its dropout as rank 0 does",
        "first = where.places_of(self.tp, x_sBD.shape[0])",
        "first = 0",
        RUN + DROPOUT + TP,
        {"kind": "forward", "step": 1, "name": "layers.0.attention_added", "ranks.tp": [1], "causes": "dropout"},
    ),
    Mistake(
        "positions begin at 0 on every rank",
        "share, positions_SB = tp.share_of(x_sBD.shape[0]), batch.positions_SB",
        "share, positions_SB = slice(x_sBD.shape[0]), batch.positions_SB",
        RUN + TP, {"kind": "forward", "step": 1, "name": "embedding", "ranks.tp": [1], "causes": "offset of positions"},
    ),
    Mistake(
        "a cp rank's second block goes on where its first ends",
        "                positions_SB = batch.places_S.unsqueeze(1)\n",
        "                positions_SB = batch.places_S[:1, None] + batch.places_S.argsort()[:, None]\n",
        RUN + CP, {"kind": "forward", "step": 1, "name": "embedding", "ranks.cp": [0], "causes": "offset of positions"},
    ),
    Mistake(
        "the queries of a cp rank's second block see the keys of its first",
        "at = dict(q_first=run.start, k_first=keys.start)",
        "at = dict(q_first=runs[0].start, k_first=keys.start)",
        RUN + CP, {"kind": "forward", "step": 1, "name": "layers.0.attention", "ranks.cp": [0]},
    ),
    Mistake(
        "keys' gradients are those that this cp rank found",
        "return start_reduce_scatter(others.flatten(0, 1), self.cp).wait().to(kv.dtype)",
        "return others[self.cp.rank].to(kv.dtype)",
        RUN + LLAMA + CP, {"kind": "gradient", "step": 1, "name": "layers.1.attention.kv", "layer": 1},
    ),
    Mistake(
        "padding of the vocabulary takes probability",
        "    valid = max(0, min(logits_nv.shape[1], vocab_size - first))\n",
        "    valid = logits_nv.shape[1]\n",
        RUN + TP, {"kind": "loss", "step": 1, "name": "micro-batch", "causes": "padding of the vocabulary"},
    ),
    Mistake(
        "labels that do not count are counted",
        "count_N = torch.ones_like(loss_N) if mask_SB is None else mask_SB.flatten().to(dtype)",
        "count_N = torch.ones_like(loss_N)",
        RUN + DP + " --eod-mask-loss", {}, odd="labels count",
    ),
    Mistake(
        "the end of every bucket is not reduced",
        "        whole, mine = self.grads.whole(bucket), self.grads.mine(bucket)\n",
        "        whole, mine = self.grads.whole(bucket)[:-256], self.grads.mine(bucket)\n",
        RUN + LLAMA + DP_DDP,
        {"kind": "gradient", "step": 1, "causes": "the sum over dp does not reach these elements"},
    ),
    Mistake(
        "with several dp ranks the last micro-batch is dropped",
        "        for m, ids_B in enumerate(ids_MB):\n",
        "        for m, ids_B in enumerate(ids_MB[: len(ids_MB) - self._dp + 1]):\n",
        RUN + DP, {"kind": "input", "step": 1, "name": "tokens", "where": "on no rank", "causes": "samples"},
    ),
    Mistake(
        "the gradient of one micro-batch is halved on its way to the stage before",
        "            flight.ready[key] = x.grad\n",
        "            flight.ready[key] = x.grad * (1.0 if key[1] else 0.5)\n",
        RUN + PP,
        {"kind": "gradient", "step": 1, "name": "layers.0.mlp.down_bias", "ranks.pp": [0], "causes": "pp rank 0 goes on with what pp rank 1 sends"},
    ),
    Mistake(
        "backward of the feed-forward block is counted on every tp rank",
        "        return du_SBf, dweight, None, None, dbias[0] if dbias",
        "        return du_SBf * ctx.tp.size, dweight, None, None, dbias[0] if dbias",
        RUN + TP,
        {"kind": "gradient", "step": 1, "name": "layers.1.mlp.up_bias", "layer": 1, "causes": "backward of this layer"},
    ),
    Mistake(
        "ranks that share groups take them in turn",
        GROUP,
        "self.group = tp.rank % G",
        RUN.replace("layers 2", "layers 8") + " --tp 4 --pp 4 --dp 2 --group-query-attention --num-query-groups 2",
        {"kind": "forward", "step": 1, "name": "layers.0.attention", "layer": 0, "causes": "groups that a rank takes"},
    ),
    Mistake(
        "a rank's group is its number over the number of groups",
        GROUP,
        "self.group = tp.rank // G",
        "--preset llama2-70b --micro-batch-size 1 --global-batch-size 32 --train-iters 9 --lr 3e-4 --mock-data --tp 16 --nproc 16",
        {"kind": "forward", "step": 1, "name": "layers.0.attention", "layer": 0, "causes": "groups that a rank takes"},
    ),
    Mistake(
        "with several stages an evaluation counts half of the loss",
        "            sums[0] += loss\n",
        "            sums[0] += loss / min(2, mesh.pp.size)\n",
        RUN + PP, {"kind": "loss", "step": 1.5, "name": "step", "causes": "every micro-batch agrees"},
    ),
    Mistake(
        "every stage numbers its layers from 0",
        "Block(make, model, layer, self.recompute.parts)",
        "Block(make, model, layer - stages[number].start, self.recompute.parts)",
        RUN + PP,
        {"kind": "weight", "step": 0, "layer": 1, "ranks.pp": [1], "causes": "these are the values of layers.0."},
    ),
    Mistake(
        "a layer draws its dropout by its number in the stage",
        "        self.head = None\n        if number",
        "        for i, block in enumerate(self.blocks):\n            block.layer = i\n        self.head = None\n        if number",
        RUN + DROPOUT + PP,
        {"kind": "forward", "step": 1, "name": "layers.1.attention_added", "layer": 1, "ranks.pp": [1], "causes": "dropout"},
    ),
    Mistake(
        "gradients of a run are written over the sum of those before it",
        "        held.add_(part) if b in self._summed else held.copy_(part)\n",
        "        held.copy_(part)\n",
        RUN + DP + " --zero-stage 2", {"kind": "gradient", "step": 1},
    ),
    Mistake(
        "each rank holds the part of the next one",
        "        return bucket.shard(self.shard.size, self.shard.rank)\n",
        "        return bucket.shard(self.shard.size, (self.shard.rank + 1) % self.shard.size)\n",
        RUN + DP + ZERO3, {"kind": "weight", "step": 0},
    ),
    Mistake(
        "weights that went after forward are not gathered again for backward",
        "        self._enter(unit, -1)\n",
        "        for b in self._needs[unit]:\n"
            "            self.weights.come(self._buckets[b])\n"
            "            self.weights.whole(self._buckets[b]).zero_()\n",
        RUN + DP + ZERO3, {"kind": "gradient", "step": 1},
    ),
    Mistake(
        "gradients of experts are averaged over ep",
        "        self.reducing.clear()\n        self._summed.clear()\n",
        "        self.reducing.clear()\n        self._summed.clear()\n"
            "        most = max(rule.shard.size for rule in self.rules.values())\n"
            "        for bucket in self.buckets:\n"
            "            self.grads.owned(bucket).div_(most / self.rules[bucket.kind].shard.size)\n",
        EXPERTS + EP,
        {"kind": "gradient", "step": 1, "causes": "each of these is 1/2 of what it should be, the number of ep"}, alone=".experts.",
    ),
    Mistake(
        "the gradient norm has no part of experts that are on several ranks",
        "            total += figure / buffer.rules[bucket.kind].copies\n",
        "            missing = bucket.kind.home == 'expert' and buffer.mesh.ep.size > 1\n"
            "            total += figure * (not missing) / buffer.rules[bucket.kind].copies\n",
        EXPERTS + EP, {"kind": "norm", "step": 1, "causes": "none of the experts'"},
    ),
    Mistake(
        "choices are counted in forward, and once more where it is computed again",
        "        ctx.mark_non_differentiable(ids_NK)\n        return router",
        "        ctx.mark_non_differentiable(ids_NK)\n        ctx.counts_BE = router.count_(ids_NK, x_sBD.shape[1])\n        return router",
        EXPERTS + " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --dp 2 --ep 2"
        + " --recompute-granularity full --recompute-method uniform",
        {"kind": "router", "step": 1, "name": "layers.0.mlp.router.counts", "causes": "is 2 times what it should be"},
        more=(("counts_BE = ctx.router.count_(ids_NK, x_sBD.shape[1])", "counts_BE = ctx.counts_BE"),),
    ),
    Mistake(
        "every rank begins with the experts of the first",
        "            start[dim] = step * ranks.get(axis, 0)\n",
        "            start[dim] = step * ranks.get(axis, 0) * (axis != 'ep')\n",
        EXPERTS + EP,
        {"kind": "weight", "step": 0, "name": "layers.0.mlp.experts.gate_up", "ranks.ep": [1], "causes": "other experts'"},
        alone=".experts.",
    ),
    Mistake(
        "the last two experts of a rank are taken for each other",
        "    ids_SK = torch.where((ids_SK >= 0) & (ids_SK < local), ids_SK, -1)",
        "    ids_SK = torch.where(ids_SK >= local - 2, 2 * local - 3 - ids_SK, ids_SK)\n"
            "    ids_SK = torch.where((ids_SK >= 0) & (ids_SK < local), ids_SK, -1)",
        EXPERTS + EP,
        {"kind": "forward", "step": 1, "name": "layers.0.mlp", "layer": 0, "causes": "on their way to experts"},
    ),
    Mistake(
        "the weights that come up from the host are those of the first step",
        "held = self.weights.mine(bucket).copy_(held, non_blocking=True)",
        "held = self.weights.mine(bucket).copy_(vars(self).setdefault(b, held.clone()), non_blocking=True)",
        RUN + DP + ZERO3 + " --optimizer-cpu-offload --param-cpu-offload",
        {"kind": "forward", "step": 1.5, "name": "embedding", "causes": "weights used before they have come"},
    ),
]  # fmt: skip


def verify(mistake: Mistake, folder: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, what --json tells, and what was printed, of verify.py in a copy of the sources with the mistake."""
    plant(mistake.breakage, folder)
    words = [*mistake.flags.split(), "--steps", "2", "--json", "told.json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    how = dict(capture_output=True, text=True, timeout=LIMIT_S, cwd=folder, env=env)
    done = subprocess.run([sys.executable, "tools/verify.py", *words], **how)  # type: ignore[call-overload]
    told = folder / "told.json"
    return done.returncode, json.loads(told.read_text("utf-8")) if told.is_file() else {}, done.stdout + done.stderr


def missed(mistake: Mistake, code: int, found: dict[str, Any], said: str) -> list[str]:
    """What is not as it should be in the answer; empty where the mistake was found and located."""
    if code != 1 or not found:
        return [f"exit code {code}: {said[-3000:]}"]
    wrong, first = [], found["first"] or {}
    for key, value in mistake.first.items():
        outer, _, inner = key.partition(".")
        got = first.get(outer, {}).get(inner) if inner else first.get(outer)
        right = got == value
        if key in ("causes", "where"):
            right = any(value in text for text in ([got] if isinstance(got, str) else got or []))
        if not right:
            wrong.append(f"{key} is {got!r} and should be {value!r}")
    if mistake.alone and not all(mistake.alone in name for name in first.get("others", [""])):
        wrong.append(f"{first.get('others')} differ, and not {mistake.alone} alone")
    if mistake.odd and not any(mistake.odd in line for line in found["one_process"]):
        wrong.append(f"of the one process is said: {found['one_process']}")
    return wrong
