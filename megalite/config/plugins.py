"""Plugins: Python of the user's own that registers parts (docs/extending.md).

One runs because its user has typed its name, or that of a TOML file that has it (cli.py): nothing that a run reads,
be it data, a checkpoint or a model's folder, can name one. A process has those that it was given last; ranks that
--nproc starts get the texts that their launcher has read, so that all of them, restarted ones too, run the same.
"""

import hashlib
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from megalite.common.safe_open import open_nofollow
from megalite.config.console import shortened
from megalite.config.exits import early_exit, message_of
from megalite.config.options import ConfigError
from megalite.config.registry import REGISTRIES
from megalite.config.text_file import read_small_bytes

Part = TypeVar("Part")
PluginSources = Mapping[str, bytes | None]
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass
class Plugin:
    """`word`: as its user named it. `text`: of a file. `sha256`: of the text, or of all files of a module."""

    spec: str
    source: bytes | None
    sha256: str
    parts: list[tuple[str, str, Any]] = field(default_factory=list)  # kind, name, part

    @property
    def name(self) -> str:
        """Without its folder: what a checkpoint knows it by."""
        return os.path.basename(self.spec)


_known: dict[tuple[str, str], Plugin] = {}  # by word and hash: the code of each has run once
_active: list[Plugin] = []
_loading: list[Plugin] = []


@overload
def register(kind: str, name: str) -> Callable[[Part], Part]: ...
@overload
def register(kind: str, name: str, part: Part) -> Part: ...
def register(kind: str, name: str, part: Any = None) -> Any:
    """Make `part` the value `name` of the option `kind`; without a part, the class or function below this line. For
    plugins. Raises ValueError where there is no such kind, the name is taken, or the part lacks something."""
    if part is None and kind != "metric":  # of which none is a class or function
        return lambda below: register(kind, name, below)
    if not _loading:
        raise ValueError(f"{kind}={name!r} is registered outside of a plugin; put it into FILE.py: --plugin FILE.py")
    if kind not in REGISTRIES:
        raise ValueError(f"{kind!r} is no kind of part; use one of {', '.join(REGISTRIES)}")
    REGISTRIES[kind].register(name, part)
    _loading[-1].parts.append((kind, name, part))
    return part


def plugin_sources() -> PluginSources:
    """What `load` gives another process the same plugins from."""
    return {plugin.spec: plugin.source for plugin in _active}


def plugin_hashes() -> dict[str, str]:
    """Name -> sha256 of this process's plugins."""
    return {plugin.name: plugin.sha256 for plugin in _active}


def changed_plugins(saved: object) -> list[tuple[str, str, str]]:
    """Name, sha256 in a checkpoint and here, or "", in short, of those that differ. `saved`: whatever stands there."""
    there = {str(name): str(sha256) for name, sha256 in saved.items()} if isinstance(saved, dict) else {}
    found = [(name, sha256[:12], plugin_hashes().get(name, "")[:12]) for name, sha256 in there.items()]
    return [(name, sha256, here) for name, sha256, here in found if sha256 != here]


def missing_plugins_message(saved: object) -> str:
    """What to do where plugins of a checkpoint are not given here; "" where all are."""
    lost = [(name, sha256) for name, sha256, here in changed_plugins(saved) if not here]
    was = " and ".join(f"plugin={name!r} (sha256 {sha256}...)" for name, sha256 in lost)
    return f"was written with {was}, not given here; add {' '.join(f'--plugin {n}' for n, _ in lost)}" if lost else ""


def error_location(error: BaseException) -> str:
    """FILE:LINE: of the plugin's file that the error has come through last; "" where it has come through none."""
    files = {os.path.abspath(plugin.spec) for plugin in _active if plugin.source is not None}
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f"{frame.filename}:{frame.lineno}: " for frame in frames if frame.filename in files), "")


def load_plugins(words: Sequence[str], known: PluginSources | None = None) -> None:
    """Make these the plugins of this process: files, whose names end in .py, or modules. `known`: texts of files
    that were read already. Raises ConfigError with a line for each that fails."""
    problems, wanted = list[str](), list[Plugin]()
    for word in dict.fromkeys(words):
        try:
            wanted.append(_read(word, (known or {}).get(word)))
        except (OSError, ValueError) as error:
            problems.append(f"plugin={word!r} cannot be read ({getattr(error, 'strerror', None) or error}); correct it")
    if twice := {one.name for one in wanted for other in wanted if one is not other and one.name == other.name}:
        problems.append(f"plugin: {' and '.join(sorted(twice))} is the name of two files; rename one")
    for registry in REGISTRIES.values():
        registry.added.clear()
    _active.clear()
    for plugin in [] if problems else wanted:
        try:
            _activate(plugin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a plugin raises, also to end the process
            problems.append(_problem(plugin, error))
    if problems:
        raise ConfigError(problems)


@contextmanager
def no_exit() -> Iterator[None]:
    """Turn a SystemExit, which a plugin may raise, into a ConfigError: it would end the caller's program."""
    try:
        yield
    except SystemExit as error:
        raise ConfigError([early_exit(error)]) from error


def _read(word: str, text: bytes | None) -> Plugin:
    is_file = word.endswith(".py")
    if is_file and text is None:
        # where others may write, a link could be somebody else's
        others = os.stat(os.path.dirname(word) or ".").st_mode & OTHERS_MAY_WRITE
        text = read_small_bytes(word, opener=open_nofollow if others else None)
    files = [] if is_file else _files_of(word)
    contents = [text or b""] if is_file else [f"{path.name}\0".encode() + read_small_bytes(path) for path in files]
    sha256 = hashlib.sha256(b"".join(contents)).hexdigest()
    return _known.get((word, sha256), Plugin(word, text, sha256))


def _files_of(module: str) -> list[Path]:
    """Of a module, without importing it. Raises ValueError where there is none."""
    try:
        spec = find_spec(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the package that it is in, or of the name
        raise ValueError(f"neither FILE.py nor a module: {message_of(error)}") from None
    if spec is None or spec.origin is None:
        raise ValueError("neither FILE.py nor a module that can be imported")
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)]
    return sorted(path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py"))


def _activate(plugin: Plugin) -> None:
    key = plugin.spec, plugin.sha256
    if key in _known:
        for kind, name, part in plugin.parts:
            REGISTRIES[kind].register(name, part)
    else:
        _loading.append(plugin)
        try:
            _run(plugin)
            for kind, name, _ in plugin.parts:
                REGISTRIES[kind].prove(name)
        finally:
            _loading.pop()
        _known[key] = plugin
    _active.append(plugin)


def _run(plugin: Plugin) -> None:
    if plugin.source is None:
        again = any(word == plugin.spec for word, _ in _known)  # with another text, which would not run
        for name in [name for name in sys.modules if again and f"{name}.".startswith(f"{plugin.spec}.")]:
            del sys.modules[name]
        import_module(plugin.spec)
        return
    module = ModuleType(f"megalite_plugin_{Path(plugin.spec).stem}")
    module.__file__ = os.path.abspath(plugin.spec)
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    exec(compile(plugin.source, module.__file__, "exec", dont_inherit=True), module.__dict__)


def _problem(plugin: Plugin, error: BaseException) -> str:
    """With the plugin's own line: the last of its files that the error came through."""
    files = {os.path.abspath(plugin.spec)} if plugin.source is not None else {*map(str, _files_of(plugin.spec))}
    told = traceback.TracebackException.from_exception(error)  # of any error
    said, places = message_of(error), [(frame.filename, frame.lineno) for frame in told.stack]
    if isinstance(error, SyntaxError):
        said, places = shortened(f"{type(error).__name__}: {error.msg}"), [*places, (error.filename, error.lineno)]
    where = next((f"{file}:{line}" for file, line in reversed(places) if file in files), plugin.spec)
    return f"plugin={plugin.spec!r}: {where}: {said}; correct the plugin"
