"""What the tests that cross packages share. It needs neither vLLM nor our packages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "engine"))  # its helpers, under importlib mode
