#!/bin/bash
# Work that knows nothing of slurm_forge and keeps its place in a file; slow until there is a file
# named go.  Usage: loop.sh FOLDER PIECES PAUSE
set -eu
mkdir -p "$1"
done=0
if [ -f "$1/done" ]; then done=$(cat "$1/done"); fi
while [ "$done" -lt "$2" ]; do
    [ -e go ] || sleep "$3" # the work
    done=$((done + 1))
    echo "$done" >> "$1/all"
    echo "$done" > "$1/done.new"
    mv "$1/done.new" "$1/done"
done
