"""megalite from Python (docs/python.md). `train`, `plan`, `verify` and `convert` are the commands of that name, in a
process of its own each: ranks, signals, exits and torch's settings stay out of the caller's. Exit codes are exceptions
with the words of the command: 2 a ConfigError, 130 a KeyboardInterrupt, others but an orderly stop's a CommandError."""

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
from megalite.config import cli
from megalite.config.option import MAX_SHOWN, to_argv
from megalite.config.options import Config, ConfigError
from megalite.config.plugins import load_plugins as load_plugins
from megalite.config.plugins import no_exit
from megalite.data.errors import DataError
from megalite.launch.children import with_module_path
from megalite.launch.local_launcher import ORDERLY
from megalite.models.families import PRESETS
from megalite.training.logging.run_dir import ExitCode, read_jsonl, run_dir

if TYPE_CHECKING:
    from megalite.generate.generation import TextGenerator

# With this process's modules, and with a stop, which saves, when this process dies.
_CHILD_SCRIPT = """from megalite.config.exits import report_code_on; report_code_on({report})
from megalite.launch.rank_info import die_with_parent; die_with_parent(15)
from megalite.__main__ import main; main()"""
_PROGRAM_PREFIX = re.compile(
    r"^(?:\w+\.py|megalite [a-z ]+): (?:error: )?", re.MULTILINE
)  # who says the words of an error
MOST_BITS = 1024  # of a whole number: Python writes none of more than 4,300 digits as text
Direction = Literal["to_hf", "from_hf", "to_megatron", "from_megatron"]
Dtype = Literal["float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


class CommandError(RuntimeError):
    """A command that has ended badly; its text is what the command said. `code`: its exit code (docs/logging.md)."""

    def __init__(self, command: str, code: int, text: str):
        super().__init__(text or f"megalite {command} ended with exit code {code}")
        self.code = code


class RunConfig(tuple[str, ...]):
    """megalite.Config: what a run is asked for, as the words of its command line.

        Config(preset="tiny", mock_data=True, train_iters=20)     options by their names, or short as tp
        Config(config="run.toml", lr=1e-4)                        a file of options; other keywords win
        Config("--num-layers 12 --no-masked-softmax-fusion")      a command line, also Megatron-LM's; or its words

    Words up to pretrain_gpt.py are left out, and a keyword of None is not given. Raises ConfigError with all words that
    are no options, and for values that are no words of a command line; all else about values is checked by `options`.
    """

    def __new__(cls, words: str | Sequence[str] = "", /, **options: Any) -> "RunConfig":
        found = _split(words)
        first = next((i for i, word in enumerate(found, 1) if word.endswith("pretrain_gpt.py")), 0)
        config = super().__new__(cls, (*found[first:], *_words_of(options)))
        if problems := cli.parse_args(config).problems:
            raise ConfigError(problems)
        return config

    @property
    def options(self) -> Config:
        """Every option's value, in typed sections: options.model.num_layers, options.optim.lr. Raises ConfigError with
        every problem that is not of a number of ranks or of a machine: those come with `train`."""
        with no_exit():
            return cli.read(self, PRESETS)[0]


def train(config: RunConfig, *, quiet: bool = False) -> Path:
    """Train, on `nproc` ranks of this machine, until the run ends, or stops as asked: its status.json tells. Returns
    the folder of its files, which `name`, `run_dir` or `save` says. Prints its lines, unless `quiet`. Ctrl-C: it saves,
    and stops. Raises ConfigError before it begins, CommandError where it fails."""
    folder = run_dir(_checked(config).options)
    _run("train", config, quiet)
    return folder


def plan(config: RunConfig, *, gpus: int, device: str = "h100", **flags: Any) -> dict[str, Any]:
    """Which layouts fit, how fast a step is, what the run takes and costs; of all layouts, unless `config` names one.
    "plans": the best first, with "layout", "seconds" of a step, "mfu", "tokens_per_s", "peak" (bytes). "command": words
    of the best one's run, for Config. `flags`: of megalite plan, as tokens="300B". Raises ConfigError where the
    question is wrong or nothing fits, CommandError where the layout that is named does not."""
    return _run_json("plan", config, num_gpus=gpus, device=device, **flags)


def verify(config: RunConfig, *, steps: int = 3, dtype: str = "float64", **flags: Any) -> dict[str, Any]:
    """Train the layout at a small size, and compare everything with one process: "rows", with "apart" and "tolerance".
    `flags`: of megalite verify, as most_ranks=4. Raises ConfigError, and CommandError that says where they differ."""
    return _run_json("verify", config, steps=steps, dtype=dtype, **flags)


def convert(way: Direction, source: str | Path, target: str | Path, **flags: Any) -> Path:
    """Weights to or from Hugging Face or Megatron-LM, whose side is the other way a checkpoint of megalite's; returns
    `target`. `flags`: of megalite convert, as check=True, dtype="bfloat16". Raises ConfigError for those that do not go
    together, CommandError for what cannot be converted exactly, and where a check finds a difference."""
    if way not in get_args(Direction):
        raise ConfigError([f"way={way!r} is not one of {', '.join(get_args(Direction))}; give one"])
    there, here = _path("source", source), _path("target", target)
    places = {way: there, "save": here} if way.startswith("from") else {"load": there, way: here}
    _run("convert", _words_of({**places, **_flags("convert", flags)}))
    return Path(target)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """What a run has logged so far, by its folder: a row for each log line (`step`, `train/loss`, `train/lr`,
    `perf/step_s`, ...) and each evaluation (`step`, `val/valid/loss`, ...); None: not finite. Raises OSError, and
    ConfigError where `run` is no path."""
    path = Path(_path("run", run), "metrics.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a run that has logged a step")
    return [row for _, row in read_jsonl(path)]


def load(
    path: str | Path, *, dtype: Dtype = "float32", device: Device = "auto", plugins: Sequence[str] = (),
) -> "TextGenerator":  # fmt: skip
    """A model, whole on one device, for `logits` and `generate`: the newest checkpoint of a run, of whatever layout, or
    a Hugging Face model. `dtype`: of weights and arithmetic. `device`: cpu, cuda, or auto, the card if there is one.
    `plugins`: those that the run had, for this process. Imports torch. Raises CommandError where there is no model, it
    cannot be read, or it has no tokenizer, ConfigError for an argument that cannot be, and where a plugin fails."""
    problems = [
        f"{name}={value!r} is not one of {', '.join(get_args(known))}; give one"
        for name, value, known in (("dtype", dtype, Dtype), ("device", device, Device))
        if not (isinstance(value, str) and value in get_args(known))
    ]
    if not (isinstance(plugins, list | tuple) and all(isinstance(plugin, str) for plugin in plugins)):
        problems.append(f"plugins={plugins!r} is not a list of names; give one, as ['mine.py']")
    if problems:
        raise ConfigError(problems)
    path = _path("path", path)

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


def _split(words: object) -> list[str]:
    """The words of a command line. Raises ConfigError."""
    if isinstance(words, str):
        try:
            found = shlex.split(words.replace("\\\n", " "))
        except ValueError as error:  # as "No closing quotation"
            raise ConfigError([f"{_short(words)} cannot be split into words ({error}); correct its quotes"]) from None
    elif isinstance(words, list | tuple) and all(isinstance(word, str) for word in words):
        found = [*words]
    else:
        what = f"is of type {type(words).__name__}, not a command line or a list of its words"
        raise ConfigError([f"{_short(words)} {what}; give one, or options by their names, as lr=1e-4"])
    for word in found:
        try:
            whole = "\0" not in os.fsdecode(os.fsencode(word))
        except UnicodeEncodeError:
            whole = False
        if not whole:
            raise ConfigError([f"{_short(word)} has a character that no word may have; remove it"])
    return found


def _flags(command: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Of a command, as keywords. Raises ConfigError for those that only a terminal can use."""
    if wrong := flags.keys() & {"help", "h", "ask"}:
        name = min(wrong)
        raise ConfigError([f"{name} is for a terminal, where megalite {command} --{name} is typed; leave it out"])
    return flags


def _words_of(options: Mapping[str, Any]) -> list[str]:
    """As `words_of`. Raises ConfigError for values that have no form on a command line."""
    problems = []
    for name, value in options.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(one, str | Number | os.PathLike) and (one is not None or one is not value):
                what = "is of type" if one is value else "has a value of type"
                kinds = "give a text, a number, a path, True or False, or a list of these"
                problems.append(f"{name}={_short(value)} {what} {type(one).__name__}; {kinds}")
                break
            if isinstance(one, int) and one.bit_length() > MOST_BITS:
                problems.append(f"{name} is a whole number of more than {MOST_BITS} bits; give a smaller one")
                break
    if problems:
        raise ConfigError(problems)
    return _split(to_argv(options))


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # of a number with more than 4,300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _checked(config: object) -> RunConfig:
    """Raises ConfigError for what is not a `RunConfig`."""
    if isinstance(config, RunConfig):
        return config
    what = f"config={_short(config)} is of type {type(config).__name__}, not a megalite.Config"
    made = f"megalite.Config({_short(config)})" if isinstance(config, str | list) else "megalite.Config(...)"
    raise ConfigError([f"{what}; give {made}"])


def _path(name: str, value: object) -> str:
    """A path or URL as text. Raises ConfigError for what is none."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise ConfigError([f"{name}={_short(value)} is not a path; give the folder's"])
    return text


def _run_json(command: str, config: RunConfig, **flags: Any) -> dict[str, Any]:  # JSON, and as "text" what is printed
    with TemporaryDirectory() as folder:
        file = Path(folder, "told.json")
        text = _run(command, [*_checked(config), *_words_of({**_flags(command, flags), "json": file})])
        return json.loads(file.read_text("utf-8")) | {"text": text}


def _run(command: str, words: Sequence[str], quiet: bool = True) -> str:
    """The last lines that `megalite COMMAND WORDS` prints. Raises what its exit code says."""
    report, of_child = os.pipe()
    start = [sys.executable, "-P", "-c", with_module_path(_CHILD_SCRIPT.format(report=of_child)), command, *words]
    lines = deque[str](maxlen=1000)
    with os.fdopen(report, "rb") as reported:
        try:
            child = Popen(
                start,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                encoding="utf-8",
                errors="replace",
                pass_fds=[of_child],
            )
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            more = "put the options into a file: config=FILE; data_args_path names a file of paths"
            raise ConfigError([f"{len(words)} words are longer than a command line may be; {more}"]) from None
        finally:
            os.close(of_child)
        with child:
            try:
                for line in child.stdout or ():
                    lines.append(line)
                    if not quiet:
                        print(line, end="", flush=True)
            except BaseException:  # Ctrl-C, mostly, which a notebook sends to its own process alone
                child.send_signal(signal.SIGINT)
                child.communicate()
                raise
        os.set_blocking(report, False)  # a process that it has left behind may hold it open
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        if code == 0:  # which subprocess also says where the caller ignores SIGCHLD or has taken the status itself
            answer = reported.read()
            if not answer:
                lines.append(f"megalite {command}: error: it was ended before it had reported an exit code\n")
            code = int(answer or ExitCode.CRASH)
    said = "".join(lines)
    if code in (0, *ORDERLY):
        return said
    text = ("".join(_PROGRAM_PREFIX.split(said)[1:]) or said).strip()  # from the first that was told on
    if code == ExitCode.USAGE:
        raise ConfigError(text.splitlines())
    raise KeyboardInterrupt(text) if code == ExitCode.INTERRUPTED else CommandError(command, code, text)
