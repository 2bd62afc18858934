#!/usr/bin/env bash
# Two models on one GPU behind one address. One is awake and has the card; a request for the other waits until the running ones have
# ended, puts the first to sleep and wakes the second, which takes about a second for 8B in bf16.
#
#   examples/two_models.sh [more options of shoal serve]
#   SMALL=... LARGE=... examples/two_models.sh
set -euo pipefail
exec shoal serve --model small="${SMALL:-Qwen/Qwen3-0.6B}" --model large="${LARGE:-Qwen/Qwen3-8B}" --swap "$@"
