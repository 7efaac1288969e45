"""Contradictions in the options of data, tokenizer and checkpoints, and options of these without effect."""

from collections.abc import Iterator

from megalite.config.options import CheckpointConfig, Config, DataConfig
from megalite.config.pattern import read_split
from megalite.config.problem import Problem, Say

_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


def data_problems(d: DataConfig, tp: int, complete: bool, say: Say) -> Iterator[Problem]:
    """`complete`: no checkpoint can still bring a vocabulary."""
    if d.split is not None:
        try:
            read_split(d.split)
        except ValueError as error:
            yield say("{=split!r} {error}", error=error)
    yield from _sources(d, say)
    if d.multiple_validation_sets and not (d.valid_data_path or d.per_split_data_args_path):
        yield say("{multiple_validation_sets} needs {--valid-data-path}", "per_split_data_args_path")
    if d.validation_set_names and not d.multiple_validation_sets:
        text = "{=validation_set_names} has no effect; add {--multiple-validation-sets}"
        yield say(text, validation_set_names=" ".join(d.validation_set_names))
    if d.fim_data and d.document_packing != "concatenate":
        yield say("{fim_data} and {=document_packing} exclude each other; drop one")
    if d.fim_data and d.mock_data:
        yield say("{fim_data} has no effect on {mock_data}; give {--data-path}")
    if d.document_packing != "concatenate" and d.mock_data:
        yield say("{=document_packing} has no effect on {mock_data}; give {--data-path}")
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_data"):
        if getattr(d, name) and d.tokenizer_type is None and complete:
            text = "{option} needs a tokenizer that knows the end of a document; give {--tokenizer-type}"
            yield say(text, option=name)
    yield from _tokenizer(d, complete, say)
    if (d.padded_vocab_size or tp) % tp:
        yield say("{=tensor_model_parallel_size} does not divide {=padded_vocab_size}; change one")


def _sources(d: DataConfig, say: Say) -> Iterator[Problem]:
    if d.mock_data and d.data_path:
        yield say("{mock_data} and {data_path} exclude each other; give one")
    per_split = " ".join(n for n in _PER_SPLIT if getattr(d, n))
    ways = [n for n in ("data_path", "data_args_path", "per_split_data_args_path", "mock_data") if getattr(d, n)]
    ways += [per_split] if per_split else []
    if not ways:
        yield say("{data_path} is not set; give {--data-path} PREFIX, or {--mock-data}")
    elif len(ways) > 1 and not (d.mock_data and d.data_path):
        text = "{named} exclude each other; give the data in one way"
        yield say(text, *" ".join(ways).split(), named=" and ".join(ways))
    elif ways[0] in _PER_SPLIT[1:]:
        yield say("{train_data_path} is not set beside {option}; give it", option=ways[0])


def _tokenizer(d: DataConfig, complete: bool, say: Say) -> Iterator[Problem]:
    kind = d.tokenizer_type
    if kind is None and d.vocab_size is None and complete:
        text = "{vocab_size} is not set; give a tokenizer ({--tokenizer-type}, {--tokenizer-model}) or {--vocab-size}"
        yield say(text)
    if kind == "NullTokenizer" and d.vocab_size is None:
        yield say("{=tokenizer_type} needs {--vocab-size}")
    if kind == "GPT2BPETokenizer" and not (d.vocab_file and d.merge_file):
        yield say("{=tokenizer_type} needs {--vocab-file} and {--merge-file}")
    for one, other in (("vocab_file", "merge_file"), ("merge_file", "vocab_file")):
        if kind is None and getattr(d, one) and not getattr(d, other):
            yield say(f"{{=option}} is half of GPT-2's tokenizer; give {{--{other}}} too", option=one)
    no_file = (None, "GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer")
    if kind not in no_file and not d.tokenizer_model:
        yield say("{=tokenizer_type} needs {--tokenizer-model}")


def files_effects(config: Config, say: Say) -> Iterator[Problem]:
    c, d = config.checkpoint, config.data
    if d.dataloader_type == "cyclic":
        yield say("{=dataloader_type}: samples are shuffled within each epoch, not over all epochs together")
    if c.save is not None and c.save_interval is None and c.save_interval_mins is None:
        yield say("{=save} without {--save-interval} saves only when the run ends or stops; a crash loses all")
    for name in ("vocab_file", "merge_file"):
        if getattr(d, name) is not None and d.tokenizer_type not in (None, "GPT2BPETokenizer"):
            yield say("{=option} has no effect with {--tokenizer-type} {kind}", option=name, kind=d.tokenizer_type)


def checkpoint_problems(c: CheckpointConfig, say: Say) -> Iterator[Problem]:
    if c.save is not None and c.save_local == c.save:
        yield say("{=save_local!r} is {--save}; give another directory, or remove it")
    if c.save_local is not None and "://" in c.save_local:
        yield say("{=save_local!r} is a URL; give a directory on a fast disk")
    of_save = ("keep_last", "save_retain_interval", "no_save_optim", "save_local")
    of_load = ("ckpt_step", "no_load_optim", "finetune", "exit_on_missing_checkpoint")
    for needed, names in (("save", of_save), ("load", of_load)):
        for name in names if getattr(c, needed) is None else ():
            if getattr(c, name):
                yield say(f"{{=option}} has no effect; add {{--{needed}}}", option=name)
    if c.use_checkpoint_args and c.load is None and c.pretrained_checkpoint is None:
        yield say("{use_checkpoint_args} needs {--load} or {--pretrained-checkpoint}")
    if c.finetune and c.no_load_optim:
        yield say("{no_load_optim} has no effect with {--finetune}, which loads weights only; remove it")
    if c.override_opt_param_scheduler and c.use_checkpoint_opt_param_scheduler:
        yield say(
            "{override_opt_param_scheduler} and {use_checkpoint_opt_param_scheduler} exclude each other; give one"
        )
