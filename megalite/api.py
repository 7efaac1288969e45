"""megalite from Python (docs/python.md). `train`, `plan`, `verify` and `convert` are the commands of that name, in a
process of its own each: ranks, signals, exits and torch's settings stay out of the caller's. Exit codes are exceptions
with the words of the command: 2 a ConfigError, 130 a KeyboardInterrupt, others but an orderly stop's a CommandError."""

import json
import os
import re
import shlex
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from megalite.checkpoint.storage.location import CheckpointError
from megalite.config import cli
from megalite.config.exits import early_exit
from megalite.config.field import words_of
from megalite.config.options import Config, ConfigError
from megalite.config.plugins import load as load_plugins
from megalite.data.errors import DataError
from megalite.launch.children import with_module_path
from megalite.launch.local_ranks import ORDERLY
from megalite.models.families import PRESETS
from megalite.train.tell.run_dir import Exit, json_rows, run_folder

if TYPE_CHECKING:
    from megalite.generate.generation import Generator

# With this process's modules, and with a stop, which saves, when this process dies.
_START = """from megalite.config.exits import report_code_on; report_code_on({report})
from megalite.launch.ranks import die_with_parent; die_with_parent(15)
from megalite.__main__ import main; main()"""
_TELLER = re.compile(r"^(?:\w+\.py|megalite [a-z ]+): (?:error: )?", re.MULTILINE)  # who says the words of an error
Way = Literal["to_hf", "from_hf", "to_megatron", "from_megatron"]


class CommandError(RuntimeError):
    """A command that has ended badly; its text is what the command said. `code`: its exit code (docs/running.md)."""

    def __init__(self, command: str, code: int, text: str):
        super().__init__(text or f"megalite {command} ended with exit code {code}")
        self.code = code


class RunConfig(tuple[str, ...]):
    """megalite.Config: what a run is asked for, as the words of its command line.

        Config(preset="tiny", mock_data=True, train_iters=20)     options by their names (docs/flags.md), or short as tp
        Config(config="run.toml", lr=1e-4)                        a file of options; other keywords win
        Config("--num-layers 12 --no-masked-softmax-fusion")      a command line, also Megatron-LM's; or its words

    Words up to pretrain_gpt.py are left out, and a keyword of None is not given. Raises ConfigError with all words that
    are no options; values are checked by `options`."""

    def __new__(cls, words: str | Sequence[str] = "", /, **options: Any) -> "RunConfig":
        found = shlex.split(words.replace("\\\n", " ")) if isinstance(words, str) else [*words]
        first = next((i for i, word in enumerate(found, 1) if word.endswith("pretrain_gpt.py")), 0)
        config = super().__new__(cls, (*found[first:], *words_of(options)))
        if problems := cli.take_apart(config).problems:
            raise ConfigError(problems)
        return config

    @property
    def options(self) -> Config:
        """Every option's value, in typed sections: options.model.num_layers, options.optim.lr. Raises ConfigError with
        every problem that is not of a number of ranks or of a machine: those come with `train`."""
        with _no_exit():
            return cli.read(self, PRESETS)[0]


def train(config: RunConfig, *, quiet: bool = False) -> Path:
    """Train, on `nproc` ranks of this machine, until the run ends, or stops as asked: its status.json tells. Returns
    the folder of its files, which `name`, `run_dir` or `save` says. Prints its lines, unless `quiet`. Ctrl-C: it saves,
    and stops. Raises ConfigError before it begins, CommandError where it fails."""
    folder = run_folder(config.options)
    _command("train", config, quiet)
    return folder


def plan(config: RunConfig, *, gpus: int, device: str = "h100", **flags: Any) -> dict[str, Any]:
    """Which layouts fit, how fast a step is, what the run takes and costs; of all layouts, unless `config` names one.
    "plans": the best first, with "layout", "seconds" of a step, "mfu", "tokens_per_s", "peak" (bytes). "command": words
    of the best one's run, for Config. `flags`: of megalite plan, as tokens="300B". Raises ConfigError where the
    question is wrong or nothing fits, CommandError where the layout that is named does not."""
    return _told("plan", config, num_gpus=gpus, device=device, **flags)


def verify(config: RunConfig, *, steps: int = 3, dtype: str = "float64", **flags: Any) -> dict[str, Any]:
    """Train the layout at a small size, and compare everything with one process: "rows", with "apart" and "tolerance".
    `flags`: of megalite verify, as most_ranks=4. Raises ConfigError, and CommandError that says where they differ."""
    return _told("verify", config, steps=steps, dtype=dtype, **flags)


def convert(way: Way, source: str | Path, target: str | Path, **flags: Any) -> Path:
    """Weights to or from Hugging Face or Megatron-LM, whose side is the other way a checkpoint of megalite's; returns
    `target`. `flags`: of megalite convert, as check=True, dtype="bfloat16". Raises ConfigError for those that do not go
    together, CommandError for what cannot be converted exactly, and where a check finds a difference."""
    places = {way: source, "save": target} if way.startswith("from") else {"load": source, way: target}
    _command("convert", words_of({**places, **flags}))
    return Path(target)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """What a run has logged so far, by its folder: a row for each log line (`step`, `train/loss`, `train/lr`,
    `perf/step_s`, ...) and each evaluation (`step`, `val/valid/loss`, ...); None: not finite. Raises OSError."""
    path = Path(run, "metrics.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a run that has logged a step")
    return [row for _, row in json_rows(path)]


def load(
    path: str | Path, *, dtype: Literal["float32", "bfloat16"] = "float32", device: str = "auto",
    plugins: Sequence[str] = (),
) -> "Generator":  # fmt: skip
    """A model, whole on one device, for `logits` and `generate`: the newest checkpoint of a run, of whatever layout, or
    a Hugging Face model. `dtype`: of weights and arithmetic. `device`: cpu, cuda, or auto, the card if there is one.
    `plugins`: those that the run had, for this process. Imports torch. Raises CommandError where there is no model, it
    cannot be read, or it has no tokenizer, ConfigError where a plugin fails."""
    import torch

    from megalite.generate.generation import SetupError, load_model
    from megalite.parallel.mesh import Mesh
    from megalite.train.life.preflight import choose_device

    load_plugins(plugins)
    try:
        with _no_exit():
            return load_model(path, Mesh.alone(choose_device(device)), getattr(torch, dtype))
    except (SetupError, CheckpointError, DataError) as error:
        raise CommandError("generate", Exit.PREFLIGHT, str(error)) from error


@contextmanager
def _no_exit() -> Iterator[None]:
    """Turn a SystemExit, which a plugin may raise, into a ConfigError: it would end the caller's program."""
    try:
        yield
    except SystemExit as error:
        raise ConfigError([early_exit(error)]) from error


def _told(command: str, config: RunConfig, **flags: Any) -> dict[str, Any]:  # JSON, and as "text" what is printed
    with TemporaryDirectory() as folder:
        file = Path(folder, "told.json")
        text = _command(command, [*config, *words_of({**flags, "json": file})])
        return json.loads(file.read_text("utf-8")) | {"text": text}


def _command(command: str, words: Sequence[str], quiet: bool = True) -> str:
    """The last lines that `megalite COMMAND WORDS` prints. Raises what its exit code says."""
    report, of_child = os.pipe()
    start = [sys.executable, "-P", "-c", with_module_path(_START.format(report=of_child)), command, *words]
    lines = deque[str](maxlen=1000)
    with os.fdopen(report, "rb") as reported:
        try:
            child = Popen(start, stdout=PIPE, stderr=STDOUT, encoding="utf-8", errors="replace", pass_fds=[of_child])
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
            code = int(answer or Exit.CRASH)
    said = "".join(lines)
    if code in (0, *ORDERLY):
        return said
    text = ("".join(_TELLER.split(said)[1:]) or said).strip()  # from the first that was told on
    if code == Exit.USAGE:
        raise ConfigError(text.splitlines())
    raise KeyboardInterrupt(text) if code == Exit.INTERRUPTED else CommandError(command, code, text)
