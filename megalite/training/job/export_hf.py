"""--export-hf: write a Hugging Face model directory at the end of a run.

After the last step the ranks write their shards, as for every checkpoint. Rank 0 then assembles one tensor at a time
from the files, so no process ever has the full model in memory.
"""

import json
import os
import shutil
from pathlib import Path

import torch

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.manager import saver
from megalite.checkpoint.manager.collective import run_on_all_ranks
from megalite.checkpoint.offline import Checkpoint
from megalite.checkpoint.storage import storage
from megalite.common.safe_open import remove
from megalite.config.options import Config, DataConfig
from megalite.config.run_options import SENTENCEPIECE
from megalite.data.errors import DataError
from megalite.data.tokenizers.huggingface_tokenizer import export_tokenizer_json
from megalite.interop.fold_mup import fold_mup
from megalite.interop.huggingface import model_files as hugging_face
from megalite.interop.huggingface.config_json import choose_family
from megalite.interop.huggingface.model_files import write_model
from megalite.interop.name_mapping import FAMILIES
from megalite.interop.tensor_mapping import ExportSource, norm_offsets
from megalite.parallel.comm import broadcast_int
from megalite.training.checkpointing.initial_state import named_external_dir
from megalite.training.checkpointing.save import shards_to_save
from megalite.training.datasets import open_tokenizer
from megalite.training.state import Run


def read_model_type(directory: Path | None) -> str | None:
    """Return the model_type of a model directory; None if `directory` is not a model directory."""
    if directory is None or not (directory / "config.json").is_file():
        return None
    model_type = hugging_face.read_json(directory / "config.json").get("model_type")
    return model_type if isinstance(model_type, str) else None


def tokenizer_source_dir(data: DataConfig) -> Path | None:
    """Return the model directory of the run's tokenizer, from which an export copies auxiliary files and token ids.

    Returns None for a tokenizer file with a non-standard name, which may be in any directory.
    """
    name = data.tokenizer_model or data.vocab_file
    if name is None:
        return None
    path = Path(name)
    if path.is_dir():
        return path
    return path.parent if path.name in hugging_face.AUXILIARY_FILES else None


def tokenizer_files(data: DataConfig, eod: int | None) -> tuple[dict[str, Path | str], str | None]:
    """Return (files of the tokenizer in an export by name, a note if transformers cannot load them without more).

    Only files that open as a tokenizer are copied, because an untrusted checkpoint may name any path.
    """
    try:
        tokenizer = open_tokenizer(data)
    except DataError as error:
        return {}, f"the tokenizer is left out: {error}"
    files = hugging_face.auxiliary_files(tokenizer_source_dir(data))
    if data.tokenizer_model is not None and Path(data.tokenizer_model).is_file():
        if data.tokenizer_type == "HuggingFaceTokenizer":
            files["tokenizer.json"] = Path(data.tokenizer_model)
        elif data.tokenizer_type in SENTENCEPIECE:
            files["tokenizer.model"] = Path(data.tokenizer_model)
    if data.vocab_file is not None and data.merge_file is not None:
        files |= {"vocab.json": Path(data.vocab_file), "merges.txt": Path(data.merge_file)}
    source = files.get("tokenizer.json")
    if isinstance(source, Path) and "tokenizer_config.json" not in files:  # without it transformers would guess
        added_tokens = hugging_face.read_json(source).get("added_tokens") or []
        eos_tokens = [
            token.get("content") for token in added_tokens if isinstance(token, dict) and token.get("id") == eod
        ]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_tokens[0] if eos_tokens else None}
        files["tokenizer_config.json"] = json.dumps(settings) + "\n"
    if source is not None or data.tokenizer_type in (None, "NullTokenizer"):
        return files, None
    assert tokenizer is not None
    try:
        return files | export_tokenizer_json(tokenizer), None
    except DataError as error:
        remedy = "transformers does not load this kind: give it another tokenizer's files"
        if "tokenizer.model" in files:
            remedy = "for transformers to load tokenizer.model, pip install sentencepiece protobuf"
        return files, f"no tokenizer.json is written: {error}; {remedy}"


def export_family(config: Config) -> str:
    """Return the model family to export as; the family of the initial weights or of the tokenizer is preferred.

    Raises:
        CheckpointError: if no family fits the model, or the factors of muP do not fit its weights.
    """
    preferred = read_model_type(named_external_dir(config)) or read_model_type(tokenizer_source_dir(config.data))
    folded = fold_mup(config.model)
    family = choose_family(folded.model, None, preferred)
    precision = config.precision
    dtype = torch.float16 if precision.fp16 else torch.bfloat16 if precision.bf16 else torch.float32
    folded.check(FAMILIES.get(family).zero_centered_norms, dtype)
    return family


def export_problems(config: Config) -> list[str]:
    """Return why --export-hf cannot work: no family has this model, or its target is not empty or not writable."""
    if config.checkpoint.export_hf is None:
        return []
    target = Path(config.checkpoint.export_hf)
    existing_parent = next(directory for directory in target.absolute().parents if directory.exists())
    problem = ""
    try:
        export_family(config)
    except CheckpointError as error:
        problem = f": {error}"
    if not problem and target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = " is not empty; give a new directory"
    elif not problem and not (existing_parent.is_dir() and os.access(existing_parent, os.W_OK | os.X_OK)):
        problem = f": nothing can be written in {existing_parent}; give another directory"
    return [f"export_hf={str(target)!r}{problem}"] if problem else []


def export(run: Run, config: Config, eod: int | None) -> str | None:
    """Write the directory of --export-hf and return lines about it on rank 0, None elsewhere.

    Uses the last checkpoint of --save if it is complete, otherwise a temporary one with weights only. Collective until
    the weights are in these files.

    Raises:
        CheckpointError: if reading or writing fails.
    """
    mesh = run.mesh
    checkpoint = config.checkpoint
    if checkpoint.export_hf is None:
        return None
    family, target = export_family(config), Path(checkpoint.export_hf)
    folded = fold_mup(config.model)
    directory = None if checkpoint.save is None else storage.checkpoint_dir(checkpoint.save, run.progress.step)
    is_saved = directory is not None and "COMPLETE" in storage.storage_of(directory).list_files(directory)
    temporary = target.with_name(f".{target.name}.weights")

    def remove_temporary() -> None:
        if mesh.world.is_first:
            remove(temporary)

    try:
        if directory is None or not broadcast_int(is_saved, mesh):
            run_on_all_ranks(mesh, remove_temporary, f"creating {temporary}")
            directory = saver.save(temporary, run.progress.step, shards_to_save(run, optimizer=False), {}, mesh)
        if not mesh.world.is_first:
            return None
        external_dir = named_external_dir(config)
        token_ids = {
            "eos_token_id": eod,
            **hugging_face.special_token_ids(tokenizer_source_dir(config.data) or external_dir),
        }
        if config.data.tokenizer_type is not None:
            files, note = tokenizer_files(config.data, eod)
        else:
            files, note = hugging_face.auxiliary_files(external_dir), None
        source = ExportSource(
            Checkpoint(directory, manifests.load_manifest(directory)),
            offsets=norm_offsets(config.model, FAMILIES.get(family).zero_centered_norms),
            factors=folded.factors,
        )
        written = write_model(target, source, folded.model, family, run.vocab_size, tokens=token_ids, files=files)
    finally:
        if mesh.world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    line = f"exported to {target}: {family}, {len(written.tensors)} tensors, vocabulary {run.vocab_size}"
    return line if note is None else f"{line}\nnote: {note}"
