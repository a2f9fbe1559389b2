"""Writes a report of the demo as the page docs/demo.md.

    PYTHONPATH=tools python -m demo.page build/demo/report.json [NOTE ...] > docs/demo.md

Every figure on the page comes out of the report; only the words are here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from demo.prompts import GROUPS

__all__ = ["page"]

INTRODUCTION = """\
# What the demo measured

    nox -s demo

answers the same {prompts} prompts with vLLM as it is and with `method="suffix"` through our
drafter, greedily, and compares every output token. This page is one such run's report, written by
`python -m demo.page`.
"""

METHOD = """\
## How it was measured

- vLLM {vllm} on the CPU with its defaults (eager mode, at most {max_num_seqs} requests at a time,
  prefix caching on), {model} in {dtype}, at most {max_tokens} tokens an answer; {processor},
  {cores} cores, Python {python}; {versions}.
- Without speculation vLLM schedules asynchronously, with any suffix drafter it does not: the
  comparison is with vLLM at its best.
- Each run is an engine of its own in processes of its own. The two kinds take turns, {rounds}
  round(s), each in the other order. A warm-up with other prompts comes first and is not timed.
  Seconds are medians over the rounds: {seconds_baseline} s without speculation and
  {seconds_suffix} s with it, round by round.
- **Tokens per forward pass**: output tokens, divided by the number of (request, engine step)
  pairs in which the request got tokens. Without speculation that is 1 by definition. Drafted and
  accepted are vLLM's own counters (`vllm:spec_decode_num_draft_tokens`,
  `vllm:spec_decode_num_accepted_tokens`).
- The drafter starts empty in each round. Within a round it learns from the prompts and answers that
  it has seen, as it would in service; no question is asked twice.
- All prompts were written for the demo and are in its files (`tools/demo/texts`, `prompts.py`).
- A CPU has no computing power to spare: verifying a draft token costs about what it takes to
  generate one, so accepted tokens turn into less speed here than where small batches leave a
  processor idle.
"""


def page(report: dict[str, Any]) -> str:
    """Return the page in markdown."""
    return "\n".join(
        [
            INTRODUCTION.format(prompts=len(report["prompts"])),
            *_table(report),
            "",
            f"All together {report['speed_ratio']:.2f} times the tokens/s of no speculation.",
            "",
            *_processes(report),
            "",
            METHOD.format(
                vllm=report["vllm_version"],
                max_num_seqs=report["max_num_seqs"],
                model=report["model"],
                dtype=report["dtype"],
                max_tokens=report["max_tokens"],
                rounds=report["rounds"],
                seconds_baseline=_seconds(report["baseline"]),
                seconds_suffix=_seconds(report["suffix"]),
                versions=", ".join(f"{k} {v}" for k, v in report["versions"].items()),
                **report["machine"],
            ),
        ]
    ).rstrip("\n")


def _table(report: dict[str, Any]) -> list[str]:
    figures = ("output tokens/s", "tokens per forward pass", "drafted", "accepted")
    lines: list[tuple[str, ...]] = [
        ("prompts", "engine", *figures),
        ("---", "---", "---:", "---:", "---:", "---:"),
    ]
    for group in [*GROUPS, "all"]:
        for kind, name in (("baseline", "no speculation"), ("suffix", "suffix")):
            row = report[kind] if group == "all" else report[kind]["groups"][group]
            speed = f"{row['output_tokens_per_s']:.1f}", f"{row['tokens_per_forward_pass']:.2f}"
            drafts = ("", "")
            if row["drafted"]:
                drafts = (str(row["drafted"]), f"{row['accepted']} ({row['acceptance_rate']:.0%})")
            prompts = GROUPS.get(group, "all") if kind == "baseline" else ""
            lines.append((prompts, name, *speed, *drafts))
    return [f"| {' | '.join(line)} |" for line in lines]


def _processes(report: dict[str, Any]) -> list[str]:
    same = "Every" if report["identical"] else "NOT every"
    roles = ", ".join(process["role"] for process in report["processes"])
    peer = "was not" if not report["arctic_imported"] else "WAS"
    return [
        f"{same} output token was the same in all runs. {len(report['processes'])} processes "
        f"registered the plugin: {roles}.",
        f"The workers drafted with `{', '.join(sorted(set(report['drafters'])))}`; "
        f"arctic_inference {peer} imported by any of them.",
    ]


def _seconds(side: dict[str, Any]) -> str:
    return ", ".join(f"{seconds:.1f}" for seconds in side["seconds_per_round"])


def main() -> None:
    """Print the page of the report that the command line names, with the notes that follow it."""
    report, *notes = sys.argv[1:]
    print(page(json.loads(Path(report).read_text())))
    for note in notes:
        print(f"- {note}")


if __name__ == "__main__":
    main()
