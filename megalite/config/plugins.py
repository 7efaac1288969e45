"""Plugins: Python code of users that registers components (docs/plugins.md).

A plugin runs only if its user has named it on the command line or in the --config file (cli.py). Data, checkpoints and
model directories cannot name one.

The plugins of a process are those of the last `load_plugins`. Ranks that --nproc starts get the sources that the
launcher has read, so that all ranks, including restarted ones, run the same code.
"""

import hashlib
import os
import stat
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from megalite.common.console import shortened
from megalite.common.exits import early_exit, message_of
from megalite.common.safe_open import open_nofollow
from megalite.common.text_file import read_small_bytes
from megalite.config.options import ConfigError
from megalite.config.registry import REGISTRIES

ComponentT = TypeVar("ComponentT")
PluginSources = Mapping[str, bytes | None]
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass
class Plugin:
    """A file or a module that registers components."""

    spec: str  # FILE.py or a module, as the user wrote it
    source: bytes | None  # the content of a file; None for a module
    sha256: str  # of the source, or of all files of a module
    components: list[tuple[str, str, Any]] = field(default_factory=list)  # kind, name, component

    @property
    def name(self) -> str:
        """The file name or module, without a directory; checkpoints identify plugins by it."""
        return os.path.basename(self.spec)


_known: dict[tuple[str, str], Plugin] = {}  # by spec and hash: plugins whose code has run in this process
_active: list[Plugin] = []
_loading: list[Plugin] = []  # the plugin whose code is running


@overload
def register(kind: str, name: str) -> Callable[[ComponentT], ComponentT]: ...
@overload
def register(kind: str, name: str, component: ComponentT) -> ComponentT: ...
def register(kind: str, name: str, component: Any = None) -> Any:
    """Register a component of a plugin as the value `name` of the option `kind`.

    Args:
        component: the component; if omitted, `register` is a decorator of the class or function that is the component.

    Raises:
        ValueError: if there is no such kind, the name is in use, or the component lacks something.
    """
    if component is None and kind != "metric":  # no metric is a class or function
        return lambda decorated: register(kind, name, decorated)
    if not _loading:
        raise ValueError(f"{kind}={name!r} is registered outside of a plugin; put it into FILE.py: --plugin FILE.py")
    if kind not in REGISTRIES:
        raise ValueError(f"{kind!r} is not a kind of component; use one of {', '.join(REGISTRIES)}")
    REGISTRIES[kind].register(name, component)
    _loading[-1].components.append((kind, name, component))
    return component


def plugin_sources() -> PluginSources:
    """Return spec -> source of this process's plugins, with which `load_plugins` loads them in another process."""
    return {plugin.spec: plugin.source for plugin in _active}


def plugin_hashes() -> dict[str, str]:
    """Return name -> sha256 of this process's plugins."""
    return {plugin.name: plugin.sha256 for plugin in _active}


def changed_plugins(saved: object) -> list[tuple[str, str, str]]:
    """Return (name, saved sha256, current sha256) of plugins that differ from those of a checkpoint.

    The hashes are the first 12 digits; the current one is "" if the plugin is not loaded.

    Args:
        saved: the plugins' name -> sha256 in the checkpoint; another type, from a damaged file, counts as none.
    """
    saved_hashes = {str(name): str(sha256)[:12] for name, sha256 in saved.items()} if isinstance(saved, dict) else {}
    current_hashes = {name: sha256[:12] for name, sha256 in plugin_hashes().items()}
    changed = []
    for name, saved_sha256 in saved_hashes.items():
        current_sha256 = current_hashes.get(name, "")
        if saved_sha256 != current_sha256:
            changed.append((name, saved_sha256, current_sha256))
    return changed


def missing_plugins_message(saved: object) -> str:
    """Return a message about plugins of a checkpoint that are not loaded, with a remedy; "" if all are."""
    missing = [
        (name, saved_sha256) for name, saved_sha256, current_sha256 in changed_plugins(saved) if not current_sha256
    ]
    if not missing:
        return ""
    plugins = " and ".join(f"plugin={name!r} (sha256 {sha256}...)" for name, sha256 in missing)
    flags = " ".join(f"--plugin {name}" for name, _ in missing)
    return f"was written with {plugins}, not given here; add {flags}"


def error_location(error: BaseException) -> str:
    """Return "FILE:LINE: " of the innermost frame in a plugin's file; "" if the error passed through none."""
    files = {os.path.abspath(plugin.spec) for plugin in _active if plugin.source is not None}
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f"{frame.filename}:{frame.lineno}: " for frame in frames if frame.filename in files), "")


def load_plugins(specs: Sequence[str], known: PluginSources | None = None) -> None:
    """Replace the plugins of this process.

    Args:
        specs: files, whose names end in .py, or modules.
        known: spec -> source of files that were already read.

    Raises:
        ConfigError: with a line for each plugin that fails.
    """
    problems = list[str]()
    requested = list[Plugin]()
    for spec in dict.fromkeys(specs):
        try:
            requested.append(_read(spec, (known or {}).get(spec)))
        except (OSError, ValueError) as error:
            problems.append(f"plugin={spec!r} cannot be read ({getattr(error, 'strerror', None) or error}); correct it")
    counts = Counter(plugin.name for plugin in requested)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        problems.append(f"plugin: {' and '.join(duplicates)} is the name of two files; rename one")
    for registry in REGISTRIES.values():
        registry.plugin_components.clear()
    _active.clear()
    if not problems:
        for plugin in requested:
            try:
                _activate(plugin)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a plugin may raise anything, also SystemExit
                problems.append(_problem(plugin, error))
    if problems:
        raise ConfigError(problems)


@contextmanager
def no_exit() -> Iterator[None]:
    """Convert a SystemExit, which a plugin may raise and which would end the caller's program, to a ConfigError."""
    try:
        yield
    except SystemExit as error:
        raise ConfigError([early_exit(error)]) from error


def _read(spec: str, source: bytes | None) -> Plugin:
    """Return a plugin without running it, or the one with the same content whose code has run already.

    Args:
        source: the content of a file that was already read; None: read it.
    """
    if spec.endswith(".py"):
        if source is None:
            # a link in a directory where other users may write could point to their file
            others_may_write = os.stat(os.path.dirname(spec) or ".").st_mode & OTHERS_MAY_WRITE
            source = read_small_bytes(spec, opener=open_nofollow if others_may_write else None)
        content = source or b""
    else:
        content = b"".join(f"{path.name}\0".encode() + read_small_bytes(path) for path in _files_of(spec))
    sha256 = hashlib.sha256(content).hexdigest()
    return _known.get((spec, sha256), Plugin(spec, source, sha256))


def _files_of(module: str) -> list[Path]:
    """Return the source files of a module without importing it. Raises ValueError if there is no such module."""
    try:
        spec = find_spec(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the package that contains it is imported and may raise anything
        raise ValueError(f"neither FILE.py nor a module: {message_of(error)}") from None
    if spec is None or spec.origin is None:
        raise ValueError("neither FILE.py nor a module that can be imported")
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)]
    return sorted(path for location in spec.submodule_search_locations for path in Path(location).rglob("*.py"))


def _activate(plugin: Plugin) -> None:
    """Register the components of a plugin; run its code only the first time."""
    key = plugin.spec, plugin.sha256
    if key in _known:
        for kind, name, component in plugin.components:
            REGISTRIES[kind].register(name, component)
    else:
        _loading.append(plugin)
        try:
            _run(plugin)
            for kind, name, _ in plugin.components:
                REGISTRIES[kind].verify(name)
        finally:
            _loading.pop()
        _known[key] = plugin
    _active.append(plugin)


def _run(plugin: Plugin) -> None:
    if plugin.source is None:
        if any(spec == plugin.spec for spec, _ in _known):
            # an older version of the module was imported; forget it, or the new one would not run
            for name in [name for name in sys.modules if f"{name}.".startswith(f"{plugin.spec}.")]:
                del sys.modules[name]
        import_module(plugin.spec)
        return
    module = ModuleType(f"megalite_plugin_{Path(plugin.spec).stem}")
    module.__file__ = os.path.abspath(plugin.spec)
    sys.modules[module.__name__] = module  # dataclasses look up annotations there
    exec(compile(plugin.source, module.__file__, "exec", dont_inherit=True), module.__dict__)


def _problem(plugin: Plugin, error: BaseException) -> str:
    """Return a line about an error of a plugin, with the innermost line of its own code in the traceback."""
    files = {os.path.abspath(plugin.spec)} if plugin.source is not None else {*map(str, _files_of(plugin.spec))}
    message = message_of(error)
    locations = [(frame.filename, frame.lineno) for frame in traceback.TracebackException.from_exception(error).stack]
    if isinstance(error, SyntaxError):
        message = shortened(f"{type(error).__name__}: {error.msg}")
        locations.append((error.filename or "", error.lineno))
    where = next((f"{file}:{line}" for file, line in reversed(locations) if file in files), plugin.spec)
    return f"plugin={plugin.spec!r}: {where}: {message}; correct the plugin"
