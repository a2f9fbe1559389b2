"""Before any test imports vLLM."""

import earlier_torch  # noqa: F401
