"""Makes a page and a plot of what `soak.py` measured.

    python soak_report.py build/soak docs/soak.md

The directory holds `suffix.json`, and may hold `none.json` and `ngram.json`, of the same without
our drafter, and `alone.json`, of `soak_alone.py`.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

MIB = 2**20
PAGE = """\
# Soak

`nox -s soak` puts mixed load on one server for {minutes:g} minutes: `vllm serve`, SmolLM2-135M in
float32 on the CPU, {clients} clients at once, a cache of {cached} responses. What they ask for is
drawn at random: copies, edits, open questions, long prompts, single tokens, three samples at
temperature 0.8, JSON by a schema, logprobs, stop strings, and streams that the client leaves in
the middle. One more client asks the same every ten seconds and compares the answers.

| | |
| --- | --- |
| measured on | {measured} |
| `VLLM_DRAFTER_VERIFY_TOKENS` | {verify} |
| requests answered | {answered:,} |
| streams that clients left | {left} |
| requests that failed | {errors} |
| probes, and those whose answer was not the first one's | {probes:,}, {changed:,} |
| faults of the drafter | {faults:,.0f} |
| preemptions | {preemptions:,.0f} |
| tokens drafted, accepted | {drafted:,.0f}, {accepted:,.0f} ({rate:.0%}) |
| time in drafting, of all time | {share:.2%} |
| cores, and the machine's load average, median | {cores}, {load:.1f} |

Some of these ask at a temperature, beside which vLLM's builds for the CPU get greedy requests
wrong, whoever drafts: the server ran with that mended ([traffic.md](traffic.md)).

Three parts of the same length, sizes at their ends; the first one fills the cache:

| part | worker's RSS | drafter | cached | evicted | probe, median | probe, slowest |
| --- | --- | --- | --- | --- | --- | --- |
{parts}

Latency by kind of request, over the whole run, in seconds:

| kind | requests | median | p99 |
| --- | --- | --- | --- |
{kinds}

![Memory and latency over time]({plot})
{beside}{alone}"""
BESIDE = """
## Whose memory grows

The same load on the same server without our drafter:

| | measured on | minutes | answered | failed | probes, changed | preemptions | load average |
| --- | --- | --- | --- | --- | --- | --- | --- |
{runs}

The most memory that the worker had taken, in MiB, when so many requests were answered (what it
means: [traffic.md](traffic.md#memory)):

| requests | {names} |
| --- | {rules} |
{rows}
"""
OTHERS = {"none": "without speculation", "ngram": "vLLM's ngram"}
ALONE = """
The drafter in a process of its own, without an engine (`tests/traffic/soak_alone.py`), eight
requests at a time: {first_mib:.1f} MiB after {first:,} requests, {middle_mib:.1f} after {middle:,},
{last_mib:.1f} after {last:,}; {tokens:,.0f} tokens, {faults:,.0f} faults.
"""


def measured(run: dict[str, Any]) -> str:
    """The versions of a run; those of a run before they were noted are not known."""
    said = run.get("measured")
    if said is None:
        return "not noted"
    return f"vLLM {said['vllm']}, vllm-drafter {said['vllm_drafter']} (commit {said['commit']})"


def at_end(samples: list[dict[str, Any]], until: float) -> dict[str, Any]:
    return [sample for sample in samples if sample["at"] <= until][-1]


def parts(run: dict[str, Any]) -> str:
    seconds = 60 * run["minutes"]
    lines = []
    for part in range(3):
        begin, end = seconds * part / 3, seconds * (part + 1) / 3
        sample = at_end(run["samples"], end)
        took = [probe["took"] for probe in run["probes"] if begin <= probe["at"] < end]
        lines.append(
            f"| {part + 1} | {sample['rss']['worker'] / MIB:,.0f} MiB "
            f"| {sample['vllm_drafter_memory_bytes'] / MIB:,.2f} MiB "
            f"| {sample['vllm_drafter_cached_requests']:,.0f} "
            f"| {sample['vllm_drafter_evicted_responses_total']:,.0f} "
            f"| {statistics.median(took):.2f} s | {max(took):.2f} s |"
        )
    return "\n".join(lines)


def kinds(run: dict[str, Any]) -> str:
    lines = []
    for kind in sorted({request["kind"] for request in run["requests"]}):
        took = sorted(request["took"] for request in run["requests"] if request["kind"] == kind)
        slow = took[min(int(len(took) * 0.99), len(took) - 1)]
        lines.append(f"| {kind} | {len(took):,} | {statistics.median(took):.2f} | {slow:.2f} |")
    return "\n".join(lines)


def answered(run: dict[str, Any]) -> list[float]:
    """When each request was answered, or its stream left, in order."""
    return sorted(request["at"] + request["took"] for request in run["requests"])


def most_memory(run: dict[str, Any], requests: int) -> float:
    """The most resident memory of the worker until so many requests were answered, in MiB."""
    until = answered(run)[requests - 1] if requests else run["samples"][0]["at"]
    most: int = max(s["rss"]["worker"] for s in run["samples"] if s["at"] <= until)
    return most / MIB


def beside(run: dict[str, Any], others: dict[str, dict[str, Any]]) -> str:
    """What the same did without our drafter, for the page; by what took its place."""
    runs = [
        f"| {name} | {measured(other)} | {other['minutes']:g} | {len(other['requests']):,} "
        f"| {len(other['errors']):,} | {len(other['probes']):,}, {other['changed']:,} "
        f"| {other['samples'][-1]['vllm:num_preemptions_total']:,.0f} "
        f"| {statistics.median(sample['load'] for sample in other['samples']):.1f} |"
        for name, other in others.items()
    ]
    columns = {"our drafter": run, **others}
    last = max(len(column["requests"]) for column in columns.values())
    counts = [0, *(10 * 2**place for place in range(20) if 10 * 2**place <= last)]
    rows = [
        f"| {count:,} | " + " | ".join(cell(column, count) for column in columns.values()) + " |"
        for count in counts
    ]
    return BESIDE.format(
        runs="\n".join(runs),
        names=" | ".join(columns),
        rules=" | ".join("---" for _ in columns),
        rows="\n".join(rows),
    )


def cell(run: dict[str, Any], requests: int) -> str:
    return f"{most_memory(run, requests):,.0f}" if requests <= len(run["requests"]) else ""


def alone(samples: list[dict[str, Any]]) -> str:
    """What the drafter took without an engine, for the page."""
    named = {"first": samples[0], "middle": samples[len(samples) // 2 - 1], "last": samples[-1]}
    return ALONE.format(
        **{name: sample["requests"] for name, sample in named.items()},
        **{f"{name}_mib": sample["rss"] / MIB for name, sample in named.items()},
        tokens=samples[-1]["tokens"],
        faults=samples[-1]["faults"],
    )


def plot(run: dict[str, Any], path: Path) -> None:
    samples = run["samples"]
    minutes = [sample["at"] / 60 for sample in samples]
    figure, (memory, cache, latency) = plt.subplots(3, 1, figsize=(9, 9), sharex=True)
    for role in samples[0]["rss"]:
        memory.plot(minutes, [sample["rss"][role] / MIB for sample in samples], label=role)
    memory.set_ylabel("resident memory, MiB")
    memory.set_ylim(bottom=0)
    memory.legend()
    cache.plot(
        minutes,
        [sample["vllm_drafter_memory_bytes"] / MIB for sample in samples],
        label="drafter's memory, MiB",
    )
    cache.set_ylabel("MiB")
    cache.set_ylim(bottom=0)
    count = cache.twinx()
    count.plot(
        minutes,
        [sample["vllm_drafter_cached_requests"] for sample in samples],
        "C1",
        label="cached responses",
    )
    count.set_ylabel("responses")
    count.set_ylim(bottom=0)
    cache.legend(loc="lower center")
    count.legend(loc="lower right")
    whole = [request for request in run["requests"] if request["kind"] != "hang up"]
    latency.plot(
        [request["at"] / 60 for request in whole],
        [request["took"] for request in whole],
        ".",
        ms=2,
        alpha=0.4,
        label="requests",
    )
    latency.plot(
        [probe["at"] / 60 for probe in run["probes"]],
        [probe["took"] for probe in run["probes"]],
        "C3",
        label="the same request, every ten seconds",
    )
    latency.set_ylabel("seconds")
    latency.set_ylim(bottom=0)
    latency.set_xlabel("minutes")
    latency.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(numbers: Path, page: Path) -> None:
    found = {file.stem: json.loads(file.read_text()) for file in numbers.glob("*.json")}
    run = found["suffix"]
    others = {said: found[name] for name, said in OTHERS.items() if name in found}
    last = run["samples"][-1]
    drawn = page.with_suffix(".svg")
    plot(run, drawn)
    left = sum(request["kind"] == "hang up" for request in run["requests"])
    drafted = last["vllm_drafter_draft_tokens_total"]
    accepted = last["vllm_drafter_accepted_tokens_total"]
    said = run["measured"]
    auto = ", which is what `auto` means on a CPU" if said["verify_tokens_set"] == "auto" else ""
    page.write_text(
        PAGE.format(
            measured=measured(run),
            verify=f"{said['verify_tokens']:,}{auto}",
            minutes=run["minutes"],
            clients=run["clients"],
            cached=run["cached"],
            answered=len(run["requests"]) - left,
            left=left,
            errors=len(run["errors"]),
            probes=len(run["probes"]),
            changed=run["changed"],
            faults=run["faults"],
            preemptions=last["vllm:num_preemptions_total"],
            drafted=drafted,
            accepted=accepted,
            rate=accepted / drafted,
            share=last["vllm_drafter_step_seconds_sum"] / last["at"],
            cores=run["cores"],
            load=statistics.median(sample["load"] for sample in run["samples"]),
            parts=parts(run),
            kinds=kinds(run),
            plot=drawn.name,
            beside=beside(run, others) if others else "",
            alone=alone(found["alone"]) if "alone" in found else "",
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
