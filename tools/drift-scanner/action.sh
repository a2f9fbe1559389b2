#!/usr/bin/env bash
# The step of action.yml: install the scanner of this checkout into an environment of its own, run it, publish what it
# says, and end as it did. Everything it needs comes in environment variables, so that no input is ever part of a script.
set -uo pipefail

out="$WORK/report"
rm -rf "$out"
mkdir -p "$out"
if [ ! -x "$WORK/venv/bin/vllm-drift" ]; then
    "$PYTHON" -m venv "$WORK/venv" &&
        "$WORK/venv/bin/python" -m pip install -qq "$ACTION/packages/compat" "$ACTION/tools/drift-scanner" || exit 2
fi

if [ -n "$FROM" ]; then
    command=(check --from "$FROM" --to "$TO")
    if [ -n "$SURFACE" ]; then
        command+=(--surface "$SURFACE")
    else
        command+=("$PLUGIN")
    fi
elif [ -n "$SURFACE" ]; then
    command=(scan "$TO" --surface "$SURFACE")
else
    echo "::error title=vllm-drift::give 'from', the release that the plugin works with, or 'surface', a manifest"
    exit 2
fi
read -r -a more <<<"$ARGUMENTS"

"$WORK/venv/bin/vllm-drift" "${command[@]}" ${more[@]+"${more[@]}"} --fail-on "$FAIL_ON" --format github \
    --write "markdown=$out/drift.md" --write "json=$out/drift.json" --write "sarif=$out/drift.sarif"
code=$?

echo "exit-code=$code" >>"$GITHUB_OUTPUT"
for name in markdown:md json:json sarif:sarif; do
    file="$out/drift.${name#*:}"
    [ -f "$file" ] && echo "${name%%:*}=$file" >>"$GITHUB_OUTPUT"
done
if [ -f "$out/drift.md" ] && [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    cat "$out/drift.md" >>"$GITHUB_STEP_SUMMARY"
fi
exit "$code"
