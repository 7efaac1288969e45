"""--export-hf: a Hugging Face directory at the end of a run.

After the last step the ranks write their parts, as for every checkpoint, and the first one assembles tensor after
tensor from the files, so that no process ever holds the whole model.
"""

import json
import os
import shutil
from pathlib import Path

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.manager import saver
from megalite.checkpoint.manager.collective import run_on_all_ranks
from megalite.checkpoint.offline import Checkpoint
from megalite.checkpoint.storage import storage as storage
from megalite.common.safe_open import remove
from megalite.config.options import Config, DataConfig
from megalite.config.run_options import SENTENCEPIECE
from megalite.data.errors import DataError
from megalite.data.tokenizers.huggingface_tokenizer import export_tokenizer_json
from megalite.interop.huggingface import model_files as hugging_face
from megalite.interop.huggingface.config_json import choose_family
from megalite.interop.huggingface.model_files import write_model
from megalite.interop.tensor_mapping import ExportSource
from megalite.models.specs import model_specs
from megalite.parallel.comm import broadcast_int
from megalite.training.checkpointing.initial_state import named_external_dir
from megalite.training.checkpointing.resume import pieces_to_save
from megalite.training.datasets import open_tokenizer
from megalite.training.state import Run


def read_model_type(folder: Path | None) -> str | None:
    """The model_type of a model directory; None if `folder` is not one."""
    if folder is None or not (folder / "config.json").is_file():
        return None
    family = hugging_face.read_json(folder / "config.json").get("model_type")
    return family if isinstance(family, str) else None


def tokenizer_source_dir(data: DataConfig) -> Path | None:
    """The model directory of the run's tokenizer, whose other files and token ids an export takes over. None for a
    tokenizer file with a name of its own, which may be in any directory."""
    if (name := data.tokenizer_model or data.vocab_file) is None:
        return None
    path = Path(name)
    return path if path.is_dir() else path.parent if path.name in hugging_face.AUXILIARY_FILES else None


def tokenizer_files(data: DataConfig, eod: int | None) -> tuple[dict[str, Path | str], str | None]:
    """(the tokenizer's files in an export, by name; a note where transformers cannot load it by itself). Files that are
    no tokenizer are not copied: a checkpoint of others may name any."""
    try:
        tokenizer = open_tokenizer(data)
    except DataError as error:
        return {}, f"the tokenizer is left out: {error}"
    files = hugging_face.auxiliary_files(tokenizer_source_dir(data))
    if data.tokenizer_model is not None and Path(data.tokenizer_model).is_file():
        name = {"HuggingFaceTokenizer": "tokenizer.json"}.get(data.tokenizer_type or "", "tokenizer.model")
        if data.tokenizer_type in ("HuggingFaceTokenizer", *SENTENCEPIECE):
            files[name] = Path(data.tokenizer_model)
    if data.vocab_file is not None and data.merge_file is not None:
        files |= {"vocab.json": Path(data.vocab_file), "merges.txt": Path(data.merge_file)}
    source = files.get("tokenizer.json")
    if isinstance(source, Path) and "tokenizer_config.json" not in files:  # without it transformers would guess
        added = hugging_face.read_json(source).get("added_tokens") or []
        ends = [token.get("content") for token in added if isinstance(token, dict) and token.get("id") == eod]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0] if ends else None}
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
    """The family to export as: if it fits, that of the initial weights or of the tokenizer. Raises CheckpointError."""
    return choose_family(
        config.model,
        None,
        read_model_type(named_external_dir(config)) or read_model_type(tokenizer_source_dir(config.data)),
    )


def export_problems(config: Config) -> list[str]:
    """What stands against --export-hf: no family has this model; its target is not empty, or cannot be written."""
    if config.checkpoint.export_hf is None:
        return []
    target = Path(config.checkpoint.export_hf)
    above = next(folder for folder in target.absolute().parents if folder.exists())
    wrong = ""
    try:
        export_family(config)
    except CheckpointError as error:
        wrong = f": {error}"
    if not wrong and target.exists() and (not target.is_dir() or any(target.iterdir())):
        wrong = " is not empty; give a new directory"
    elif not wrong and not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        wrong = f": nothing can be written in {above}; give another directory"
    return [f"export_hf={str(target)!r}{wrong}"] if wrong else []


def export(run: Run, config: Config, eod: int | None) -> str | None:
    """Write the directory of --export-hf; returns lines about it, on the first rank. Collective until the weights are
    in files: those of --save's last checkpoint, or of a temporary one with weights only. Raises CheckpointError."""
    c, mesh = config.checkpoint, run.mesh
    if c.export_hf is None:
        return None
    family, target = export_family(config), Path(c.export_hf)
    folder = None if c.save is None else storage.checkpoint_dir(c.save, run.state.step)
    saved = folder is not None and "COMPLETE" in storage.storage_of(folder).list_files(folder)
    temporary = target.with_name(f".{target.name}.weights")
    try:
        if folder is None or not broadcast_int(saved, mesh):
            clear = lambda: remove(temporary) if mesh.world.is_first else None  # noqa: E731
            run_on_all_ranks(mesh, clear, f"making {temporary}")
            folder = saver.save(temporary, run.state.step, pieces_to_save(run, optimizer=False), {}, mesh)
        if not mesh.world.is_first:
            return None
        tokens = {
            "eos_token_id": eod,
            **hugging_face.special_token_ids(tokenizer_source_dir(config.data) or named_external_dir(config)),
        }
        own = config.data.tokenizer_type is not None
        files, note = (
            tokenizer_files(config.data, eod)
            if own
            else (hugging_face.auxiliary_files(named_external_dir(config)), None)
        )
        ours = ExportSource(
            Checkpoint(folder, manifests.load_manifest(folder)), used=model_specs(config.model, run.vocab_size)
        )
        written = write_model(target, ours, config.model, family, run.vocab_size, tokens=tokens, files=files)
    finally:
        if mesh.world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    line = f"exported to {target}: {family}, {len(written.tensors)} tensors, vocabulary {run.vocab_size}"
    return line if note is None else f"{line}\nnote: {note}"
