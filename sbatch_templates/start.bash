# shellcheck shell=bash
# What a batch script of slurm_forge needs until the supervisor runs.  A copy of this file lies in the
# folder of the script, under a name that holds its digest: a newer slurm_forge brings another file,
# and leaves this one to the jobs that wait for it.
#
#   . FILE --|--chain from now on a broken start is reported.  --chain: the job is an array whose tasks
#                     are attempts of one run
#   forge_defaults NAME=VALUE...
#                     export the variables that are not set yet
#   forge_exec INTERPRETER... -m slurm_forge.process NAME ARGUMENT...
#                     check the interpreter, then become that process
#   forge_run ...     the same, but the shell stays, for the commands that follow
#
# Where the environment is broken, the job goes to another node once, and if it is broken there too
# it goes back into the queue and waits there, held, with a note of what is wrong: whoever has
# repaired it releases the job (slurm-forge requeue).

forge_folder=${BASH_SOURCE[0]%/*}
forge_chain=
if [ "${1:-}" = --chain ]; then forge_chain=1; fi
forge_job=${SLURM_JOB_ID:-}
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    forge_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
forge_node=${SLURMD_NODENAME:-${HOSTNAME:-}}
forge_note=$forge_folder/not-started-$forge_job.txt
forge_moves='it goes to other nodes, once, away from'
# Since Slurm 22.05 srun no longer takes --cpus-per-task over from sbatch.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"
fi

forge_tell() {
    {
        printf '%s job %s on %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$forge_job" "$forge_node"
        printf '%s\n' "$@"
    } | (umask 077 && tee -a "$forge_note") >&2
}

# Ends the script: the job goes to other nodes, or waits, held.
not_started() {
    set +eu
    trap '' HUP INT TERM USR1 USR2 # Slurm ends a job that goes back into the queue
    trap - EXIT ERR
    [ ! -e "$forge_folder/../DONE" ] || exit 0
    local pause note moved='' notes=("$forge_note")
    # Of one run in many tasks one finds out for all of them.
    [ -z "$forge_chain" ] || notes+=("$forge_folder/not-started-${SLURM_ARRAY_JOB_ID:-}"_*.txt)
    for note in "${notes[@]}"; do
        # A start that came to anything since has made it whole again.
        if [ -f "$note" ] && grep -qs "^$forge_moves " "$note" &&
            [ ! "$forge_folder/../attempts" -nt "$note" ]; then
            moved=1
        fi
    done
    forge_tell "$@" ${forge_failed:+"before that: $forge_failed"}
    timeout 60 scontrol update JobId="$forge_job" \
        Comment="slurm_forge: not started, see $forge_note"
    [ -n "$moved" ] || forge_elsewhere
    if [ -n "$forge_chain" ]; then
        timeout 60 scontrol hold "${SLURM_ARRAY_JOB_ID:-$forge_job}"
    fi
    for pause in 0 5 30; do
        sleep "$pause"
        if timeout 60 scontrol requeuehold "$forge_job"; then break; fi
    done
    exit 1
}

# Ends the script where the job can do without this node; one broken node must not hold every run.
forge_elsewhere() {
    local record out all pause
    record=$(timeout 60 scontrol -o show job "$forge_job") || return 1
    [[ $record == *' ReqNodeList=(null) '* && -n $forge_node ]] || return 1
    out=$(sed -n 's/.* ExcNodeList=\([^ ]*\) .*/\1/p' <<< "$record")
    case $out in
        '') return 1 ;;
        '(null)') out=$forge_node ;;
        *) out=$out,$forge_node ;;
    esac
    all=$(timeout 60 scontrol -o show partition "${SLURM_JOB_PARTITION:-}" |
        sed -n 's/.* TotalNodes=\([0-9]*\) .*/\1/p')
    out=$(timeout 60 scontrol show hostnames "$out" | sort -u)
    # Never so many that too few would be left.
    [ "$((${all:-0} - $(grep -c . <<< "$out")))" -ge "${SLURM_JOB_NUM_NODES:-1}" ] || return 1
    # Before Slurm is asked: a job that could not remember would go round for ever.
    printf '%s %s\n' "$forge_moves" "$forge_node" >> "$forge_note" || return 1
    tail -n 1 "$forge_note" >&2
    if [ -n "$forge_chain" ]; then
        # The next task starts at once: it refuses that of the one which runs, and takes the others'.
        timeout 60 scontrol update JobId="${SLURM_ARRAY_JOB_ID:-}" ExcNodeList="${out//$'\n'/,}"
    fi
    timeout 60 scontrol requeue "$forge_job" || return 1
    # A job that runs can't be given other nodes; and what asks may be ended along with us.
    for pause in 0 1 5 10; do
        sleep "$pause"
        timeout 60 scontrol update JobId="$forge_job" ExcNodeList="${out//$'\n'/,}" && break
    done
    exit 1
}

# A job that is cancelled or preempted now is not broken.  It does not come back by itself unless
# Slurm puts it back, and the journal knows nothing of this start.
# shellcheck disable=SC2329 # called by a trap
forge_ended() {
    set +eu
    trap '' HUP INT TERM USR1 USR2
    forge_starting=
    [ -e "$forge_folder/../DONE" ] || forge_tell \
        "Slurm ended it (SIG$1) before it had begun: it was cancelled or preempted, or out of time"
    exit 143
}

# The command may hold a password: no more of it than its first word.
# shellcheck disable=SC2329 # called by a trap
forge_remember() {
    local word
    read -r word _ <<< "$(sed -n "${2}p" -- "$3" 2> /dev/null)"
    forge_failed="status $1 in line $2: ${word%%[!A-Za-z0-9_./-]*}"
}

forge_watch() {
    trap 'forge_status=$?
        [ -z "$forge_starting" ] || not_started "the script ended with status $forge_status"' EXIT
    trap 'forge_remember "$?" "$LINENO" "${BASH_SOURCE[0]:-$0}"' ERR
    local name
    for name in HUP INT TERM USR1 USR2; do
        # shellcheck disable=SC2064 # the name of now is meant
        trap "forge_ended $name" "$name"
    done
}

forge_defaults() {
    local each name
    for each; do
        name=${each%%=*}
        [ -n "${!name+set}" ] || export "${each?}"
    done
}

# Checks the INTERPRETER that begins the words of a process, or ends the script.  `again`: the process
# begins the script again where it can't import its modules (a word of this file's, `forge_script`);
# else they are imported by the check, which takes most of a second.
forge_check() {
    local again=$1 status=0 since=$SECONDS said interpreter=()
    shift
    # What the setup has run may have set traps of its own, and commands of it that failed are not
    # the reason for what comes now.
    forge_watch
    forge_failed=
    while [ "$#" -gt 0 ] && [ "$1 ${2:-}" != '-m slurm_forge.process' ]; do
        interpreter+=("$1")
        shift
    done
    if [ -n "$again" ] && [ "${#interpreter[@]}" = 1 ]; then
        export forge_script=$0
        set -- -c 'import slurm_forge.process'
    else # out of a container, or below a shell that stays, nothing can begin the script again
        set -- -m slurm_forge.process --try "${3:-}"
    fi
    said=$(timeout -k 10 300 "${interpreter[@]}" "$@" 2>&1 < /dev/null) || status=$?
    if [ "$status" != 0 ] && [ "$((SECONDS - since))" -ge 300 ]; then
        not_started 'no answer in 300 seconds (is a file system down?) from' "${interpreter[*]}"
    elif [ "$status" != 0 ]; then
        not_started 'this interpreter can not import slurm_forge:' "${interpreter[*]}" \
            "$(tail -n 20 <<< "$said")"
    fi
}

forge_exec() {
    forge_check again "$@"
    # exec: signals for the batch step reach the supervisor, not a shell that runs no trap while it
    # waits.
    shopt -s execfail
    exec "$@"
    not_started "the supervisor can not be executed (status $?)"
}

forge_run() {
    forge_check '' "$@"
    forge_starting=
    trap : HUP INT TERM USR1 USR2 # what follows comes after the supervisor in any case
    "$@"
}

forge_starting=1
forge_status=0
forge_failed=
forge_watch
# This is the second time: the supervisor could not be imported.
if [ -n "${forge_not_started:-}" ]; then
    not_started 'this interpreter can not import slurm_forge:' "$forge_not_started"
fi
