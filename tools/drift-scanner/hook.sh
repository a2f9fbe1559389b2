#!/usr/bin/env bash
# The hook of .pre-commit-hooks.yaml: vllm-drift from this checkout, in an environment that the first run makes in it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
environment="$root/.vllm-drift"
if [ ! -x "$environment/bin/vllm-drift" ]; then
    echo "vllm-drift: installing the scanner, once" >&2
    if ! { python3 -m venv "$environment" &&
        "$environment/bin/python" -m pip install -qq "$root/packages/compat" "$root/tools/drift-scanner"; } >&2; then
        echo "vllm-drift: it could not be installed: see above" >&2
        exit 2
    fi
fi
exec "$environment/bin/vllm-drift" "$@"
