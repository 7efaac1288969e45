import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "support")]

import forkserver_imports  # noqa: E402, F401
