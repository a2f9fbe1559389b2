"""A package called `vllm`, made of nothing but the shapes that the surface manifest names.

Written for these tests; nothing of it is vLLM's. It is importable, so that the patches have
something to change, and small, so that a test can break one shape.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

VERSION = "0.32.0"

MODULES = {
    "__init__.py": "",
    "utils/__init__.py": "",
    "utils/import_utils.py": """
        def has_arctic_inference() -> bool:
            return False
        """,
    "plugins/__init__.py": """
        DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"

        def load_plugins_by_group(group: str):
            return {}

        def load_general_plugins():
            load_plugins_by_group(DEFAULT_PLUGINS_GROUP)
        """,
    "config/__init__.py": "",
    "config/speculative.py": """
        from typing import Literal
        from vllm.utils.import_utils import has_arctic_inference

        SpeculativeMethod = Literal["ngram", "suffix", "custom_class"]

        def Field(**kwargs):
            return kwargs["default"]

        class SpeculativeConfig:
            method: str | None = None
            num_speculative_tokens: int | None = Field(default=None, gt=0)
            suffix_decoding_max_tree_depth: int = 24
            suffix_decoding_max_cached_requests: int = 10000
            suffix_decoding_max_spec_factor: float = 1.0
            suffix_decoding_min_token_prob: float = 0.1

            def _validate_suffix_decoding(self):
                if not has_arctic_inference():
                    raise ImportError("refused")
        """,
    "config/vllm.py": """
        class VllmConfig:
            device_config: object
            model_config: object
            speculative_config: object

            def _get_v2_model_runner_unsupported_features(self):
                refused = ("suffix", "custom_class")
                return self.speculative_config.method in refused
        """,
    "config/model.py": """
        class ModelConfig:
            max_model_len: int = 0
        """,
    "config/device.py": """
        class DeviceConfig:
            device_type: str = "cuda"
        """,
    "engine/__init__.py": "",
    "engine/arg_utils.py": """
        from vllm.plugins import load_general_plugins

        class EngineArgs:
            def __post_init__(self):
                load_general_plugins()

        class AsyncEngineArgs(EngineArgs):
            @staticmethod
            def add_cli_args(parser):
                load_general_plugins()
        """,
    "v1/__init__.py": "",
    "v1/engine/__init__.py": "",
    "v1/engine/core.py": """
        class EngineCore:
            def __init__(self):
                from vllm.plugins import load_general_plugins
                load_general_plugins()
        """,
    "v1/worker/__init__.py": "",
    "v1/worker/worker_base.py": """
        class WorkerWrapperBase:
            def init_worker(self, all_kwargs):
                from vllm.plugins import load_general_plugins
                load_general_plugins()
        """,
    "v1/worker/gpu_input_batch.py": """
        class InputBatch:
            def __init__(self):
                self.req_id_to_index = {}
                self.num_tokens_no_spec = []
                self.num_prompt_tokens = []
                self.token_ids_cpu = []
                self.req_prompt_embeds = {}
                self.request_lora_mapping = []

            @property
            def req_ids(self):
                return []
        """,
    "v1/worker/gpu_model_runner.py": """
        from typing import Any, cast
        from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        class GPUModelRunner:
            def __init__(self, vllm_config):
                self.vllm_config = vllm_config
                if vllm_config.speculative_config.method == "custom_class":
                    self.drafter = create_custom_proposer(self.vllm_config)
                else:
                    self.drafter = SuffixDecodingProposer(self.vllm_config)

            def load_model(self):
                self.drafter.load_model(self.model)

            def propose_draft_token_ids(self, scheduler_output, sampled_token_ids, slot_mappings):
                num_spec_tokens_to_schedule = scheduler_output.num_spec_tokens_to_schedule
                if self.speculative_config.method == "custom_class":
                    return cast(Any, self.drafter).propose(
                        sampled_token_ids,
                        self.input_batch.num_tokens_no_spec,
                        self.input_batch.token_ids_cpu,
                        slot_mappings=slot_mappings,
                    )
                assert isinstance(self.drafter, SuffixDecodingProposer)
                return self.drafter.propose(
                    num_spec_tokens_to_schedule,
                    self.input_batch,
                    sampled_token_ids,
                    slot_mappings=slot_mappings,
                )
        """,
    "v1/worker/cpu_model_runner.py": """
        class CPUModelRunner:
            def load_model(self):
                self.drafter.load_model(self.model)
        """,
    "v1/spec_decode/__init__.py": "",
    "v1/spec_decode/suffix_decoding.py": """
        class SuffixDecodingProposer:
            def __init__(self, vllm_config):
                import arctic_inference
        """,
    "v1/spec_decode/custom_class_proposer.py": """
        from vllm.config.vllm import VllmConfig

        def create_custom_proposer(vllm_config: VllmConfig):
            return None
        """,
    "model_executor/__init__.py": "",
    "model_executor/models/__init__.py": "",
    "model_executor/models/registry.py": """
        def _run():
            from vllm.plugins import load_general_plugins
            load_general_plugins()
        """,
}


class Site:
    """An import path of its own: our packages and what they need, and what a test adds to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "site"
        self.path.mkdir()
        self._needs = folder / "needs"
        self._needs.mkdir()
        self._link_what_we_need()
        self.env: dict[str, str] = {}
        self.first: list[Path] = []

    def _link_what_we_need(self) -> None:
        """Everything installed here, except our distributions' metadata and other plugins."""
        for place in dict.fromkeys(Path(item) for item in sys.path if "site-packages" in item):
            for item in place.iterdir() if place.is_dir() else ():
                plain = item.name.lower().replace("-", "_")
                ours = plain.startswith(("vllm", "drafter", "__editable__", "arctic"))
                target = self._needs / item.name
                if not ours and not plain.endswith(".pth") and not target.exists():
                    target.symlink_to(item)
        import drafter_compat
        import drafter_core
        import vllm_drafter

        for package in (drafter_compat, drafter_core, vllm_drafter):
            assert package.__file__ is not None
            source = Path(package.__file__).parent
            (self._needs / source.name).symlink_to(source)

    def add_distribution(
        self, name: str, version: str, entry_points: str = "", where: Path | None = None
    ) -> None:
        info = (where or self.path) / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)

    def add_us(self, where: Path | None = None) -> None:
        """Our distribution, as pip would leave it."""
        declared = distribution("vllm-drafter").read_text("entry_points.txt")
        assert declared is not None
        self.add_distribution("vllm-drafter", "0.1.0", declared, where)

    def add_vllm(
        self,
        version: str = VERSION,
        changes: Mapping[str, tuple[str, str]] = {},
        distribution: str = "vllm",
    ) -> None:
        """The synthetic vLLM; `changes` replaces text in some of its files."""
        for name, source in MODULES.items():
            lines = source.strip("\n").splitlines()
            indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
            text = "\n".join(line[indent:] for line in lines) + "\n"
            if name in changes:
                before, after = changes[name]
                assert before in text, (name, before)
                text = text.replace(before, after)
            path = self.path / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.add_distribution(distribution, version)

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run code that sees this site, the standard library and nothing else."""
        path = [*map(str, self.first), str(self.path), str(self._needs)]
        start = (
            "import sys\n"
            f"sys.path[:] = {path!r} + [p for p in sys.path if 'site-packages' not in p]\n"
        )
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("VLLM") and name != "PYTHONPATH"
        }
        return subprocess.run(
            [sys.executable, "-S", "-c", start + code],
            env={**clean, **self.env, **env},
            cwd=self.path,
            text=True,
            capture_output=True,
            check=False,
        )
