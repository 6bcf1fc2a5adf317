#!/bin/bash
# A loop over pieces of work that keeps its place in a file.  Usage: loop.sh FOLDER PIECES
set -eu
mkdir -p "$1"
done=0
if [ -f "$1/all" ]; then done=$(wc -l < "$1/all"); fi
while [ "$done" -lt "$2" ]; do
    sleep 0.2 # the work
    done=$((done + 1))
    echo "$done" >> "$1/all" # its place: one line, written at once
    echo "$done" > "$1/done.new"
    mv "$1/done.new" "$1/done"
    echo "piece $done of $2"
done
