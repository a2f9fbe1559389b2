"""Taking a GGUF file apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from demo import make_model


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What a GGUF converter does to a projection: it interleaves the two halves of a head."""
    rows, hidden = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, hidden)
    return halves.swapaxes(1, 2).reshape(rows, hidden)


@pytest.mark.parametrize(("heads", "head_dim"), [(9, 64), (3, 64), (1, 4)])
def test_unpermuting_undoes_the_converters_order(heads: int, head_dim: int) -> None:
    weight = np.arange(heads * head_dim * 3, dtype=np.float32).reshape(heads * head_dim, 3)
    assert np.array_equal(make_model.unpermute(permute(weight, heads), heads), weight)


def test_rows_stay_within_their_head() -> None:
    weight = np.repeat(np.arange(4), 8)[:, None].astype(np.float32)
    assert np.array_equal(make_model.unpermute(weight, 4), weight)


@pytest.mark.parametrize(
    ("gguf", "llama"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.12.attn_k.weight", "model.layers.12.self_attn.k_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_tensors_get_the_names_of_a_llama_checkpoint(gguf: str, llama: str) -> None:
    assert make_model.llama_name(gguf) == llama


@pytest.fixture
def stamped(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    stamp = {"maker": "1"}
    monkeypatch.setattr(make_model, "stamp", lambda name: {**stamp, "model": name})
    return stamp


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path, stamped: dict[str, str]) -> None:
    make_model.make("m", tmp_path, lambda target: (target / "weights").touch())

    def fail(target: Path) -> None:
        raise AssertionError("made again")

    assert make_model.make("m", tmp_path, fail) == tmp_path / "m"


def test_a_model_of_another_maker_is_made_anew(tmp_path: Path, stamped: dict[str, str]) -> None:
    make_model.make("m", tmp_path, lambda target: (target / "old").touch())
    stamped["maker"] = "2"
    make_model.make("m", tmp_path, lambda target: (target / "new").touch())
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["new", "stamp.json"]


def test_a_run_that_stops_half_way_leaves_nothing(tmp_path: Path, stamped: dict[str, str]) -> None:
    def stop(target: Path) -> None:
        (target / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model.make("m", tmp_path, stop)
    assert list(tmp_path.iterdir()) == []


def test_the_stamp_is_json(tmp_path: Path, stamped: dict[str, str]) -> None:
    target = make_model.make("m", tmp_path, lambda target: None)
    assert json.loads((target / "stamp.json").read_text())["model"] == "m"
