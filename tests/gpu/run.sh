#!/usr/bin/env bash
# What only a GPU can show, in under five minutes; skips with a reason elsewhere.
# Needs torch with CUDA and transformers; flash-attn is used if it is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python3}" -m tests.gpu.check "$@"
