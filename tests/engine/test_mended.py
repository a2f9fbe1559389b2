"""What a release cannot do as shipped, for which its sessions run with `tests/mended/`.

Collected only where they do: see `mended` in pins.toml.
"""

from __future__ import annotations

import pytest
from engines import NGRAM, SUFFIX, start_engine
from prompts import ALL, GREEDY


@pytest.mark.parametrize(
    ("speculation", "plugins"),
    [
        pytest.param(NGRAM, "", id="ngram, without any plugin"),
        pytest.param(SUFFIX, None, id="suffix, with us"),
    ],
)
def test_as_shipped_the_first_drafted_step_ends_the_engine(speculation, plugins, tiny, tmp_path):
    done, result = start_engine(
        tmp_path / "engine",
        {"model": tiny, "speculative_config": speculation},
        [{"name": "greedy", "prompts": ALL[:4], "sampling": {**GREEDY, "ignore_eos": True}}],
        PYTHONPATH=None,
        VLLM_PLUGINS=plugins,
    )
    assert done.returncode != 0
    assert not result.exists()
    assert (tmp_path / "engine" / "stamps.jsonl").exists() == (speculation is SUFFIX)
    assert "Cannot inspect kernel parameters" in done.stdout, done.stdout[-6000:]
