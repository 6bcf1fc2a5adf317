"""What will happen to runs on this cluster: a prediction for each place that a user may ask for.

Slurm's own word comes first: it is what happens.  The site file fills in what Slurm can't tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.launch.render.save_times import WARNED_FROM, lead_time
from slurm_forge.recovery.policy.prediction import (
    JobConditions,
    Prediction,
    predict,
)
from slurm_forge.site.model import Site
from slurm_forge.site.preemption import PreemptionRules, goes_by_qos, preemption_rules
from slurm_forge.site.usable import Person, longest, qos_of, usable_qos, why_not
from slurm_forge.slurm.records import PartitionRecord
from slurm_forge.slurm.sbatch_words import asks_for_requeue
from slurm_forge.slurm.survey import Survey
from slurm_forge.spec import JobSpec, job_from_mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRequest:
    """Which places are meant: those of the job, else the named, else all that the user may use.

    ``save`` is how long a save takes, None where none was seen.
    """

    job: JobSpec | None = None
    partition: str | None = None
    qos: str | None = None
    save: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionForecast:
    """What will happen to a run in one partition and QOS.

    ``limit`` is the time limit of the job, else the longest that there is.  ``preemptors`` are
    who may preempt: partitions, or QOS where ``by_qos``.  ``from_slurm`` is whether Slurm said so,
    or the site file.  ``refused`` is why the user's jobs do not run there.
    """

    partition: str | None
    qos: str | None
    prediction: Prediction
    limit: timedelta | None = None
    default_time: timedelta | None = None
    is_default: bool = False
    preemptors: tuple[str, ...] = ()
    by_qos: bool = False
    from_slurm: bool = True
    refused: str | None = None
    #: The longest time limit that there is, where the job asks for more.
    too_long: timedelta | None = None


def foreseen(
    survey: Survey, site: Site, person: Person, request: ForecastRequest
) -> tuple[PreemptionForecast, ...]:
    """A prediction for each place, the default partition first, then as Slurm lists them."""
    return tuple(
        _at(survey, site, person, request, partition, qos)
        for partition, qos in _places(survey, site, person, request)
    )


def _places(
    survey: Survey, site: Site, person: Person, request: ForecastRequest
) -> list[tuple[str | None, str | None]]:
    resources = None if request.job is None else request.job.resources
    partitions = request.partition or (resources.partition if resources else None)
    qos = request.qos or (resources.qos if resources else None)
    records = survey.partitions or ()
    default = next((each.name for each in records if each.is_default), None)
    if partitions is not None:
        return [(name, qos_of(survey, person, name, qos)) for name in partitions.split(",") if name]
    if resources is not None:
        return [(default, qos_of(survey, person, default, qos))]
    if goes_by_qos(survey.config):
        names = (qos,) if qos is not None else usable_qos(survey, person)
        return [(default, name) for name in names] or [(default, None)]
    listed = [each.name for each in sorted(records, key=lambda each: not each.is_default)]
    if survey.partitions is None:
        listed = list(site.partitions)
    places: list[tuple[str | None, str | None]] = [
        (name, qos_of(survey, person, name, qos)) for name in listed
    ]
    return places or [(None, qos)]


def _at(
    survey: Survey,
    site: Site,
    person: Person,
    request: ForecastRequest,
    name: str | None,
    qos_name: str | None,
) -> PreemptionForecast:
    partition = next((each for each in survey.partitions or () if each.name == name), None)
    qos_by_name = {each.name: each for each in survey.qos or ()}
    qos, of_partition = (
        qos_by_name.get(qos_name or ""),
        qos_by_name.get((partition and partition.qos) or ""),
    )
    facts = site.facts(name, qos_name)
    rules = PreemptionRules()
    if survey.config is not None:
        rules = preemption_rules(survey.config, partition, survey.partitions or (), qos, survey.qos)
    from_slurm = rules.preemption.mode is not None
    most = longest(partition, qos, of_partition, survey, person) or facts.max_time
    job = request.job or job_from_mapping({"name": "any", "command": ["any"]})
    limit = job.resources.time if request.job is not None else most
    prediction = predict(
        JobConditions(
            preemption=rules.preemption if from_slurm else facts.preemption,
            preemptable=rules.preemptable if from_slurm else None,
            config=survey.config,
            self_requeue_allowed=facts.self_requeue_allowed,
            requeue_delay=site.requeue_delay,
            shorten_requeue=site.shorten_requeue,
            # Our scripts ask for it, before the site's own options.
            requeue=asks_for_requeue(("--requeue", *site.sbatch_options)),
            warned=limit is not None and limit >= WARNED_FROM,
            limit=limit,
            lead=lead_time(job, limit, request.save or timedelta(0)),
            save=request.save,
            chained=job.chain is not None,
        )
    )
    return PreemptionForecast(
        partition=name,
        qos=qos_name,
        prediction=prediction,
        limit=limit,
        default_time=None if partition is None else partition.default_time,
        is_default=partition is not None and partition.is_default,
        preemptors=rules.preemptors,
        by_qos=goes_by_qos(survey.config),
        from_slurm=from_slurm,
        too_long=most if limit is not None and most is not None and limit > most else None,
        refused=_refused(partition, name, survey, person, qos_name),
    )


def _refused(
    partition: PartitionRecord | None,
    name: str | None,
    survey: Survey,
    person: Person,
    qos: str | None,
) -> str | None:
    if partition is not None:
        return why_not(partition, survey, person, qos)
    unknown = name is not None and survey.partitions is not None
    return "Slurm has no partition of that name" if unknown else None
