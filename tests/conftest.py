"""What the tests that cross packages share. It needs neither vLLM nor our packages."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("contract", "engine"):  # their helpers, under importlib mode
    sys.path.insert(0, str(Path(__file__).parent / folder))
