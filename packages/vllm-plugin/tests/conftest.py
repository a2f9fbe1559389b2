"""What the plugin's tests share. None of them imports vLLM or torch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `import batches` under importlib mode
