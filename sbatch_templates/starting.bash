{#- How every batch script of slurm_forge starts the supervisor, or says why it could not.
    `submissions`, `interpreter`, `command` and the like are shell text, quoted by the caller. -#}

{% macro directives(options) -%}
{% for option in options -%}
#SBATCH {{ option | directive }}
{% endfor -%}
# --requeue: the job may come back, by itself or by Slurm.  --open-mode=append: Slurm truncates the
# log of a requeued job otherwise.
{%- endmacro %}

{% macro prepare(env, setup) -%}
{% if env -%}
# The site's variables; what is set already wins.
{% endif -%}
{% for name, value in env.items() -%}
[ -n "${{ '{' }}{{ name }}+set}" ] || export {{ name }}={{ value | shellquote }}
{% endfor -%}
# Since Slurm 22.05 srun no longer takes --cpus-per-task over from sbatch.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"
fi
{% for line in setup -%}
{{ line }}
{% endfor -%}
{%- endmacro %}

{% macro torchrun() -%}
# The task that Slurm signals is the shield: it tells the supervisor, and torchrun, which would end
# its ranks 30 seconds later, hears nothing of it.  The shield fills in the words in braces, on each
# node its own.  --max-restarts=0: whether ranks are started again, and where, is the supervisor's to
# decide.
{%- endmacro %}

{% macro guard(submissions, chain=none) -%}
# Where the environment is broken, the job goes to another node once, and if it is broken there too
# it goes back into the queue and waits there, held, with a note of what is wrong: whoever has
# repaired it releases the job (slurm-forge requeue).
forge_job=${SLURM_JOB_ID:-}
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    forge_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
forge_node=${SLURMD_NODENAME:-${HOSTNAME:-}}
forge_folder={{ submissions }}
forge_note=$forge_folder/not-started-$forge_job.txt
forge_moves='it goes to other nodes, once, away from'
forge_tell() {
    {
        printf '%s job %s on %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$forge_job" "$forge_node"
        printf '%s\n' "$@"
    } | (umask 077 && tee -a "$forge_note") >&2
}
not_started() {
    set +eu
    trap '' HUP INT TERM USR1 USR2 # Slurm ends a job that goes back into the queue
    trap - EXIT ERR
    [ ! -e "$forge_folder/../DONE" ] || exit 0
    local pause moved=
    # A start that came to anything since has made it whole again.
    if [ -f "$forge_note" ] && grep -qs "^$forge_moves " "$forge_note" &&
        [ ! "$forge_folder/../attempts" -nt "$forge_note" ]; then
        moved=1
    fi
{%- if chain %}
    # Of one run in many tasks one finds out for all of them.
    local note
    for note in "$forge_folder/not-started-${SLURM_ARRAY_JOB_ID:-}"_*.txt; do
        if grep -qs "^$forge_moves " "$note" && [ ! "$forge_folder/../attempts" -nt "$note" ]; then
            moved=1
        fi
    done
{%- endif %}
    forge_tell "$@" ${forge_failed:+"before that: $forge_failed"}
    timeout 60 scontrol update JobId="$forge_job" \
        Comment="slurm_forge: not started, see $forge_note"
    [ -n "$moved" ] || forge_elsewhere
{%- if chain %}
    timeout 60 scontrol hold "${SLURM_ARRAY_JOB_ID:-$forge_job}"
{%- endif %}
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
{%- if chain %}
    # The next task starts at once: it refuses that of the one which runs, and takes the others'.
    timeout 60 scontrol update JobId="${SLURM_ARRAY_JOB_ID:-}" ExcNodeList="${out//$'\n'/,}"
{%- endif %}
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
forge_starting=1
forge_failed=
forge_watch
# This is the second time: the supervisor could not be imported.
if [ -n "${forge_not_started:-}" ]; then
    not_started 'this interpreter can not import slurm_forge:' "$forge_not_started"
fi
{%- endmacro %}

{% macro start(interpreter, command, again=true, teardown=false) -%}
# What is wrong is told here: after the exec nobody could{% if again %}, except by this script, begun again{% endif %}.  What the
# setup has run may have set traps of its own, and commands of it that failed are not the reason for
# what comes now.
forge_watch
forge_failed=
forge_status=0
forge_since=$SECONDS
{% if again -%}
export forge_script=${BASH_SOURCE[0]:-$0}
{% endif -%}
forge_said=$(timeout -k 10 300 {{ interpreter }} \
    {% if again %}-c 'import slurm_forge.process'{% else %}-m slurm_forge.process --try supervise{% endif %} \
    2>&1 < /dev/null) || forge_status=$?
if [ "$forge_status" != 0 ] && [ "$((SECONDS - forge_since))" -ge 300 ]; then
    not_started 'no answer in 300 seconds (is a file system down?) from' \
        {{ interpreter | shellquote }}
elif [ "$forge_status" != 0 ]; then
    not_started 'this interpreter can not import slurm_forge:' {{ interpreter | shellquote }} \
        "$(tail -n 20 <<< "$forge_said")"
fi
{% if teardown -%}
forge_starting=
trap : HUP INT TERM USR1 USR2 # the teardown comes after the supervisor in any case
{{ command }}
{%- else -%}
# exec: signals for the batch step reach the supervisor, not a shell that runs no trap while it
# waits.
shopt -s execfail
exec {{ command }}
not_started "the supervisor can not be executed (status $?)"
{%- endif %}
{%- endmacro %}

{% macro succeed(submitted, folder, first, tasks) -%}
# A successor has a job id of its own: submitit looks under it for what to run, and whoever holds
# the first job looks under that one's for the results.
cp -p -- {{ submitted }} {{ folder }}/"${SLURM_JOB_ID}_submitted.pkl" ||
    not_started 'the submission can not be put into' {{ folder }}
for forge_task in {{ tasks }}; do
    ln -sfn -- "${SLURM_JOB_ID}_${forge_task}_result.pkl" \
        {{ folder }}/{{ first }}"_${forge_task}_result.pkl"
done
{%- endmacro %}
