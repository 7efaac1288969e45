"""Whether a checkpoint fits a run: the tensor that each piece is read from, or a few lines that say why not.

The answer is about whole tensors, so all ranks find the same without communication.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.storage.location import Location
from megalite.config.options import ModelConfig
from megalite.models.specs import specs_of
from megalite.parallel.spec import Piece

MOST = 3  # options that are named
MAIN = "optimizer.main"


def across_precisions(pieces: Sequence[Piece], kinds: Mapping[str, str], there: Mapping[str, str]) -> list[Piece]:
    """The pieces under the names that they are read from, where a run continues in another precision: the fp32 weights,
    which are the main weights, or in fp32 the model's, are read bit for bit, and weights in half precision are made of
    them. `kinds`: of this run, `there`: of the checkpoint, KIND of KIND/NAME -> dtype."""
    if kinds["model"] == there.get("model"):
        return list(pieces)
    if MAIN in kinds:
        source = MAIN if MAIN in there else "model"
        kept = [piece for piece in pieces if not piece.name.startswith("model/")]
        return [replace(p, name=p.name.replace(f"{MAIN}/", f"{source}/", 1)) for p in kept]
    return [replace(p, name=p.name.replace("model/", f"{MAIN}/", 1)) for p in pieces] if MAIN in there else list(pieces)


def kinds_of(manifest: Manifest) -> dict[str, str]:
    """KIND of the names KIND/NAME -> dtype."""
    return {name.partition("/")[0]: whole.dtype for name, whole in manifest.tensors.items()}


def misfit(
    folder: Location,
    manifest: Manifest,
    model: ModelConfig,
    vocab_size: int,
    options: Sequence[str],
    tokenizer: Sequence[str],
    states: Mapping[str, str],
) -> list[str]:
    """Why the checkpoint does not fit and what to do, in at most eight lines; [] where it fits. `options`, `tokenizer`:
    their differences, a line each. `states`: the optimizer states that are wanted -> their dtype."""
    own = {f"model/{name}": spec.stored_shape for name, spec in specs_of(model, vocab_size).items()}
    saved = {name: whole.shape for name, whole in manifest.tensors.items() if name.startswith("model/")}
    wrong = [name for name in sorted({*own, *saved}) if own.get(name) != saved.get(name)]
    saved_states = {kind: dtype for kind, dtype in kinds_of(manifest).items() if kind not in ("model", MAIN)}
    other = states and saved_states != states
    if not (options or tokenizer or wrong or other):
        return []
    lines = [f"{folder} does not fit this run:", *options[:MOST], *tokenizer]
    if (unnamed := len(options) - MOST) > 0:
        lines.append(f"and {unnamed} more option{'s' * (unnamed > 1)}")
    if wrong:
        shapes = [str(shapes.get(wrong[0], "nothing")) for shapes in (own, saved)]
        lines.append(f"{len(wrong)} tensors, as {wrong[0][6:]}: {shapes[0]} here, {shapes[1]} in the checkpoint")
    if other:
        named = [", ".join(f"{k.partition('.')[2]} {v}" for k, v in kinds.items()) for kinds in (states, saved_states)]
        lines.append(f"optimizer: {named[0]} here, {named[1]} in the checkpoint")
    remedies = []
    if options:
        remedies.append("give its options (--use-checkpoint-args takes them over)")
        if not wrong:
            remedies.append("--finetune to begin afresh with its weights")
    elif wrong:
        remedies.append("give the options of its model, or another --load")
    if tokenizer:
        remedies.append("its tokenizer, or --finetune")
    if other:
        remedies.append("its optimizer, or --no-load-optim to continue without that state")
    return [lines[0], *(f"  {line}" for line in lines[1:]), "; ".join(remedies)]
