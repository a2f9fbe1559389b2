"""Lay out the Python source of one real vLLM release, to be imported with vLLM's requirements.

    python tests/contract/release.py 0.15.1 build/releases

The compiled extensions are left in the index: a few megabytes are read instead of half a gigabyte,
and what the contract tests import does not need them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from vllm_drift.errors import SourceError
from vllm_drift.sources import Sources
from vllm_drift.tree import SourceTree


def lay_out(tree: SourceTree, directory: Path) -> Path:
    """Write a release's modules and metadata below `directory/<version>`; returns that path."""
    target = directory / str(tree.version)
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory))
    for module in tree.modules():
        path = partial / tree.path(module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tree.data(module) or b"")
    # The local part is what tells vLLM that it is a build for the CPU.
    version = f"{tree.version}+cpu"
    metadata = partial / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8"
    )
    try:
        partial.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return target


def main() -> None:
    version, directory = sys.argv[1:]
    try:
        with Sources() as sources:
            (candidate,) = sources.expand([version])
            print(lay_out(sources.load(candidate), Path(directory)))
    except SourceError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
