{#- How every batch script of slurm_forge starts the supervisor, or says why it could not.
    `submissions`, `interpreter`, `command` and the like are shell text, quoted by the caller. -#}

{% macro guard(submissions) -%}
# Where the environment is broken, the job goes back into the queue and waits there, held, with a
# note of what is wrong: whoever has repaired it releases the job (slurm-forge requeue).
not_started() {
    set +eu
    trap '' TERM # Slurm ends a job that goes back into the queue
    trap - EXIT
    [ ! -e {{ submissions }}/../DONE ] || exit 0
    local job=$SLURM_JOB_ID note pause
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
        job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    fi
    note={{ submissions }}/not-started-$job.txt
    {
        printf '%s job %s on %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$job" \
            "${SLURMD_NODENAME:-$HOSTNAME}"
        printf '%s\n' "$@" ${forge_failed:+"before that: $forge_failed"}
    } | (umask 077 && tee -a "$note") >&2
    timeout 60 scontrol update JobId="$job" Comment="slurm_forge: not started, see $note"
    for pause in 0 5 30; do
        sleep "$pause"
        if timeout 60 scontrol requeuehold "$job"; then break; fi
    done
    exit 1
}
forge_starting=1
trap 'forge_status=$?
    [ -z "$forge_starting" ] || not_started "the script ended with status $forge_status"' EXIT
trap 'forge_failed="status $? in line $LINENO: $(sed -n "${LINENO}p" "$0")"' ERR
# A job that is cancelled or preempted now is not broken.
trap 'forge_starting=; exit 143' HUP INT TERM USR1 USR2
{%- endmacro %}

{% macro start(interpreter, command, teardown=false) -%}
# What is wrong is told here: after the exec nobody could.
if ! forge_said=$({{ interpreter }} -c 'import slurm_forge.launch.supervise' 2>&1 < /dev/null); then
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
