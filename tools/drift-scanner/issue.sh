#!/usr/bin/env bash
# Keep one issue about drift: open or update it with the report where there is drift (exit code 1), close it where there
# is none (0), and leave it alone where nothing could be looked at (2). Needs `gh` and, in the environment, CODE, REPORT,
# RUN, REPOSITORY and GH_TOKEN.
set -euo pipefail

label=vllm-drift
number=$(gh issue list --repo "$REPOSITORY" --label "$label" --state open --limit 1 --json number --jq '.[0].number // empty')

case "$CODE" in
    1)
        title=$(head -n 1 "$REPORT" | sed 's/^#* *//')
        body=$(mktemp)
        {
            cat "$REPORT"
            printf '\n[The run that found it](%s). It is updated every day, and closed when the drift is gone.\n' "$RUN"
        } >"$body"
        if [ -n "$number" ]; then
            gh issue edit "$number" --repo "$REPOSITORY" --title "$title" --body-file "$body"
        else
            gh label create "$label" --repo "$REPOSITORY" --description "vLLM changed what the plugin relies on" --force
            gh issue create --repo "$REPOSITORY" --label "$label" --title "$title" --body-file "$body"
        fi
        ;;
    0)
        if [ -n "$number" ]; then
            gh issue close "$number" --repo "$REPOSITORY" --comment "No drift any more: $RUN"
        fi
        ;;
    *)
        echo "nothing could be looked at (exit code $CODE): the issue stays as it is"
        ;;
esac
