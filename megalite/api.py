"""The Python API (docs/python.md).

`train`, `plan`, `verify` and `convert` run the command of that name in a process of its own, so that ranks, signals,
exits and torch's settings do not affect the caller. Exit codes become exceptions with the message of the command: 2 a
ConfigError, 130 a KeyboardInterrupt, and any other that is not an orderly stop a CommandError.
"""

import errno
import json
import os
import re
import shlex
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

from megalite.checkpoint.storage.location import CheckpointError
from megalite.common.exit_codes import ExitCode
from megalite.config import cli
from megalite.config.option import MAX_SHOWN, to_argv
from megalite.config.options import Config, ConfigError
from megalite.config.plugins import load_plugins as load_plugins
from megalite.config.plugins import no_exit
from megalite.data.errors import DataError
from megalite.launch.children import with_module_path
from megalite.launch.local_launcher import ORDERLY_STOPS
from megalite.models.families import PRESETS
from megalite.training.logging.event_log import read_jsonl
from megalite.training.logging.run_dir import run_dir

if TYPE_CHECKING:
    from megalite.generate.generation import TextGenerator

# The child imports the same modules as this process, and stops (which saves a checkpoint) when this process dies.
_CHILD_SCRIPT = """from megalite.common.exits import report_code_on; report_code_on({report})
from megalite.launch.process_group import die_with_parent; die_with_parent(15)
from megalite.__main__ import main; main()"""
_PROGRAM_PREFIX = re.compile(r"^(?:\w+\.py|megalite [a-z ]+): (?:error: )?", re.MULTILINE)  # in front of an error
MAX_INT_BITS = 1024  # Python converts no integer of more than 4,300 digits to text
Direction = Literal["to_hf", "from_hf", "to_megatron", "from_megatron"]
Dtype = Literal["float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


class CommandError(RuntimeError):
    """The failure of a command, with the text that it printed.

    `code` is its exit code (docs/logging.md).
    """

    def __init__(self, command: str, code: int, text: str):
        super().__init__(text or f"megalite {command} ended with exit code {code}")
        self.code = code


class RunConfig(tuple[str, ...]):
    """The arguments of a run's command line; exported as megalite.Config.

        Config(preset="tiny", mock_data=True, train_iters=20)     options by name, or by a short name such as tp
        Config(config="run.toml", lr=1e-4)                        a file of options; other keywords win
        Config("--num-layers 12 --no-masked-softmax-fusion")      a command line, Megatron-LM's included, or a list

    Arguments up to pretrain_gpt.py are dropped, and a keyword whose value is None is ignored.

    Raises:
        ConfigError: for all unknown options, and for values that cannot be written on a command line. Everything else
            about values is checked by `options`.
    """

    def __new__(cls, argv: str | Sequence[str] = "", /, **options: Any) -> "RunConfig":
        args = _split_args(argv)
        first = next((i for i, arg in enumerate(args, 1) if arg.endswith("pretrain_gpt.py")), 0)
        config = super().__new__(cls, (*args[first:], *_to_args(options)))
        if problems := cli.parse_args(config).problems:
            raise ConfigError(problems)
        return config

    @property
    def options(self) -> Config:
        """The value of every option in typed sections, such as options.model.num_layers.

        Raises ConfigError with every problem, except for those that depend on the number of ranks or the machine, which
        `train` reports.
        """
        with no_exit():
            return cli.read(self, PRESETS)[0]


def train(config: RunConfig, *, quiet: bool = False) -> Path:
    """Train on `nproc` ranks of this machine until the run ends or stops as requested.

    Ctrl-C saves a checkpoint and stops.

    Args:
        config: the run.
        quiet: print no log lines.

    Returns:
        The run directory, as given by `name`, `run_dir` or `save`. Its status.json contains the outcome.

    Raises:
        ConfigError: before the run starts.
        CommandError: if the run fails.
    """
    directory = run_dir(_require_config(config).options)
    _run("train", config, quiet)
    return directory


def plan(config: RunConfig, *, gpus: int, device: str = "h100", **flags: Any) -> dict[str, Any]:
    """Find the layouts that fit, with the time of a step and the duration and cost of the run.

    Args:
        config: the model and the run. If it names a layout, only that one is planned.
        gpus: number of GPUs.
        device: GPU type.
        flags: flags of megalite plan, such as tokens="300B".

    Returns:
        A dict with "plans", the best first, each with "layout", "seconds" per step, "mfu", "tokens_per_s" and "peak"
        (bytes); and "command", the arguments of the best plan for Config.

    Raises:
        ConfigError: if an argument is wrong or no layout fits.
        CommandError: if the layout that `config` names does not fit.
    """
    return _run_json("plan", config, num_gpus=gpus, device=device, **flags)


def verify(config: RunConfig, *, steps: int = 3, dtype: str = "float64", **flags: Any) -> dict[str, Any]:
    """Train the layout at a small size and compare every value with one process.

    `flags` are flags of megalite verify, such as max_ranks=4. Returns a dict whose "rows" have "distance" (the
    difference) and "tolerance". Raises ConfigError, or CommandError with the first difference.
    """
    return _run_json("verify", config, steps=steps, dtype=dtype, **flags)


def convert(direction: Direction, source: str | Path, target: str | Path, **flags: Any) -> Path:
    """Convert weights from or to Hugging Face or Megatron-LM, and return `target`.

    Args:
        direction: the external format. The other side is a megalite checkpoint.
        source: the directory to read.
        target: the directory to write.
        flags: flags of megalite convert, such as check=True, dtype="bfloat16".

    Raises:
        ConfigError: if flags contradict each other.
        CommandError: if the weights cannot be converted exactly, or a check finds a difference.
    """
    if direction not in get_args(Direction):
        raise ConfigError([f"direction={direction!r} is not one of {', '.join(get_args(Direction))}; give one"])
    source_path, target_path = _to_path("source", source), _to_path("target", target)
    if direction.startswith("from"):
        paths = {direction: source_path, "save": target_path}
    else:
        paths = {"load": source_path, direction: target_path}
    _run("convert", _to_args({**paths, **_check_flags("convert", flags)}))
    return Path(target)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Return what a run has logged so far.

    There is a row for each log line (`step`, `train/loss`, `train/lr`, `perf/step_s`, ...) and for each evaluation
    (`step`, `val/valid/loss`, ...). A value that is not finite is None. Raises OSError, or ConfigError if `run` is not
    a path.
    """
    path = Path(_to_path("run", run), "metrics.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the directory of a run that has logged a step")
    return [row for _, row in read_jsonl(path)]


def load(
    path: str | Path, *, dtype: Dtype = "float32", device: Device = "auto", plugins: Sequence[str] = (),
) -> "TextGenerator":  # fmt: skip
    """Load the full model on one device, for `logits` and `generate`. Imports torch.

    Args:
        path: a run directory, whose newest checkpoint is loaded whatever its layout, or a Hugging Face model.
        dtype: data type of weights and arithmetic.
        device: cpu, cuda, or auto: the GPU if there is one.
        plugins: the plugins of the run, to load in this process.

    Raises:
        CommandError: if there is no model, it cannot be read, or it has no tokenizer.
        ConfigError: if an argument is invalid or a plugin fails.
    """
    problems = [
        f"{name}={value!r} is not one of {', '.join(get_args(known))}; give one"
        for name, value, known in (("dtype", dtype, Dtype), ("device", device, Device))
        if not (isinstance(value, str) and value in get_args(known))
    ]
    if not (isinstance(plugins, list | tuple) and all(isinstance(plugin, str) for plugin in plugins)):
        problems.append(f"plugins={plugins!r} is not a list of names; give one, as ['mine.py']")
    if problems:
        raise ConfigError(problems)
    path = _to_path("path", path)

    import torch

    from megalite.generate.generation import SetupError, load_model
    from megalite.parallel.mesh import Mesh
    from megalite.training.job.preflight import choose_device

    load_plugins(plugins)
    try:
        with no_exit():
            return load_model(path, Mesh.single_process(choose_device(device)), getattr(torch, dtype))
    except (SetupError, CheckpointError, DataError) as error:
        raise CommandError("generate", ExitCode.PREFLIGHT, str(error)) from error


def _split_args(argv: object) -> list[str]:
    """Return the arguments of a command line or a list. Raises ConfigError."""
    if isinstance(argv, str):
        try:
            args = shlex.split(argv.replace("\\\n", " "))
        except ValueError as error:  # such as "No closing quotation"
            raise ConfigError(
                [f"{_shorten(argv)} cannot be split into arguments ({error}); correct its quotes"]
            ) from None
    elif isinstance(argv, list | tuple) and all(isinstance(arg, str) for arg in argv):
        args = [*argv]
    else:
        rule = f"is of type {type(argv).__name__}, not a command line or a list of arguments"
        raise ConfigError([f"{_shorten(argv)} {rule}; give one, or options by their names, as lr=1e-4"])
    for arg in args:
        try:
            is_valid = "\0" not in os.fsdecode(os.fsencode(arg))
        except UnicodeEncodeError:
            is_valid = False
        if not is_valid:
            raise ConfigError([f"{_shorten(arg)} has a character that no argument may contain; remove it"])
    return args


def _check_flags(command: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords for a command. Raises ConfigError for flags that only make sense on a terminal."""
    if interactive := flags.keys() & {"help", "h", "ask"}:
        name = min(interactive)
        raise ConfigError([f"{name} is for a terminal, where megalite {command} --{name} is typed; leave it out"])
    return flags


def _to_args(options: Mapping[str, Any]) -> list[str]:
    """Return options as arguments. Raises ConfigError for values that cannot be written on a command line."""
    problems = []
    for name, value in options.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            is_unset = item is None and item is value
            if not isinstance(item, str | Number | os.PathLike) and not is_unset:
                rule = "is of type" if item is value else "has a value of type"
                remedy = "give a text, a number, a path, True or False, or a list of these"
                problems.append(f"{name}={_shorten(value)} {rule} {type(item).__name__}; {remedy}")
                break
            if isinstance(item, int) and item.bit_length() > MAX_INT_BITS:
                problems.append(f"{name} is a whole number of more than {MAX_INT_BITS} bits; give a smaller one")
                break
    if problems:
        raise ConfigError(problems)
    return _split_args(to_argv(options))


def _shorten(value: object) -> str:
    """Return the repr of a value, cut to MAX_SHOWN characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _require_config(config: object) -> RunConfig:
    """Return `config`. Raises ConfigError if it is not a `RunConfig`."""
    if isinstance(config, RunConfig):
        return config
    rule = f"config={_shorten(config)} is of type {type(config).__name__}, not a megalite.Config"
    remedy = f"megalite.Config({_shorten(config)})" if isinstance(config, str | list) else "megalite.Config(...)"
    raise ConfigError([f"{rule}; give {remedy}"])


def _to_path(name: str, value: object) -> str:
    """Return a path or URL as text. Raises ConfigError if it is neither."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise ConfigError([f"{name}={_shorten(value)} is not a path; give that of a directory"])
    return text


def _run_json(command: str, config: RunConfig, **flags: Any) -> dict[str, Any]:
    """Run a command and return its JSON output, with the text that it printed under "text"."""
    with TemporaryDirectory() as directory:
        file = Path(directory, "result.json")
        args = [*_require_config(config), *_to_args({**_check_flags(command, flags), "json": file})]
        text = _run(command, args)
        return json.loads(file.read_text("utf-8")) | {"text": text}


def _run(command: str, args: Sequence[str], quiet: bool = True) -> str:
    """Run `megalite COMMAND ARGS` and return the last lines that it prints. Raises the exception of its exit code."""
    report, child_report = os.pipe()
    script = with_module_path(_CHILD_SCRIPT.format(report=child_report))
    argv = [sys.executable, "-P", "-c", script, command, *args]
    lines = deque[str](maxlen=1000)
    with os.fdopen(report, "rb") as reported:
        try:
            child = Popen(
                argv,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                encoding="utf-8",
                errors="replace",
                pass_fds=[child_report],
            )
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            remedy = "put the options into a file: config=FILE; data_args_path names a file of paths"
            raise ConfigError([f"{len(args)} arguments are longer than a command line may be; {remedy}"]) from None
        finally:
            os.close(child_report)
        with child:
            try:
                for line in child.stdout or ():
                    lines.append(line)
                    if not quiet:
                        print(line, end="", flush=True)
            except BaseException:  # usually Ctrl-C, which a notebook sends to its own process only
                child.send_signal(signal.SIGINT)
                child.communicate()
                raise
        os.set_blocking(report, False)  # a process that the child left behind may keep the pipe open
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        if code == 0:  # subprocess also returns 0 if the caller ignores SIGCHLD or has reaped the child
            reported_code = reported.read()
            if not reported_code:
                lines.append(f"megalite {command}: error: it was ended before it had reported an exit code\n")
            code = int(reported_code or ExitCode.CRASH)
    output = "".join(lines)
    if code in (ExitCode.DONE, *ORDERLY_STOPS):
        return output
    text = ("".join(_PROGRAM_PREFIX.split(output)[1:]) or output).strip()  # from the first error on
    if code == ExitCode.USAGE:
        raise ConfigError(text.splitlines())
    raise KeyboardInterrupt(text) if code == ExitCode.INTERRUPTED else CommandError(command, code, text)
