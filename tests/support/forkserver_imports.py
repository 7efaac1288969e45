"""What the fork server of a test process imports for all ranks it will start, beyond what a run needs: 0.25 s of a
processor for each. Nothing here may import triton, which reads TRITON_INTERPRET when it is imported: a rank chooses."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]  # as pytest has it

import card.runs  # noqa: E402
import pytest  # noqa: E402

assert card.runs and pytest
assert "triton" not in sys.modules
