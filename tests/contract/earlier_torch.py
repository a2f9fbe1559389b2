"""What earlier releases of vLLM call in torch and later torch has elsewhere, under its old name.

Every release is imported with the torch of the default pin. 0.17 and 0.18 ask torch's compiled
half which instructions the processor has; those functions are in `torch.cpu` now.
"""

from __future__ import annotations

import torch

for name in ("_is_avx2_supported", "_is_avx512_supported", "_is_amx_tile_supported"):
    if not hasattr(torch._C._cpu, name) and hasattr(torch.cpu, name):
        setattr(torch._C._cpu, name, getattr(torch.cpu, name))
