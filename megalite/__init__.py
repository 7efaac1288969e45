"""megalite: 3D-parallel pretraining of large language models. From Python (docs/python.md) it is what `__all__` names,
of megalite/api.py, which is imported when the first is used: `import megalite` costs nothing."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalite.api import CommandError, ConfigError, convert, load, plan, read_metrics, train, verify
    from megalite.api import RunConfig as Config
    from megalite.config.plugins import register
    from megalite.train.moments import log

__version__ = "0.1.0"
__all__ = ["CommandError", "Config", "ConfigError", "convert", "load", "log", "plan"]
__all__ += ["read_metrics", "register", "train", "verify"]
OF_PLUGINS = {"register": "megalite.config.plugins", "log": "megalite.train.moments"}


class _Called(ModuleType):
    """A package with the name of a function of megalite/api.py, which it is where it is called."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return getattr(importlib.import_module("megalite.api"), self.__name__.rpartition(".")[2])(*args, **named)


for _room in ("plan", "train"):
    importlib.import_module(f"megalite.{_room}").__class__ = _Called


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'megalite' has no attribute {name!r}")
    module = importlib.import_module(OF_PLUGINS.get(name, "megalite.api"))
    return getattr(module, "RunConfig" if name == "Config" else name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
