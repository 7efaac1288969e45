"""megalite: 3D-parallel pretraining of large language models.

The Python API (docs/python.md) is the names in `__all__`. megalite/api.py is imported when the first of them is used,
so `import megalite` is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalite.api import CommandError, ConfigError, convert, load, plan, read_metrics, train, verify
    from megalite.api import RunConfig as Config
    from megalite.config.plugins import register
    from megalite.training.plugin_metrics import log

__version__ = "0.1.0"
__all__ = ["CommandError", "Config", "ConfigError", "convert", "load", "log", "plan"]
__all__ += ["read_metrics", "register", "train", "verify"]
_PLUGIN_API = {"register": "megalite.config.plugins", "log": "megalite.training.plugin_metrics"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'megalite' has no attribute {name!r}")
    module = importlib.import_module(_PLUGIN_API.get(name, "megalite.api"))
    return getattr(module, "RunConfig" if name == "Config" else name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
