"""What will happen to a run: every configuration of the controller, and what must hold in all."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    FirstSignal,
    JobConditions,
    ResumesFrom,
    predict,
)
from slurm_forge.site.model import Preemption, PreemptionMode
from slurm_forge.slurm.records import ConfigRecord

GRACE = timedelta(seconds=20)
NONE = timedelta(0)
CONFIG = ConfigRecord(
    cluster_name="hill", version="22.05.8", preempt_type="preempt/partition_prio",
    kill_wait=timedelta(seconds=30), job_requeue=True, has_epilog=False,
)  # fmt: skip
NEWER = replace(CONFIG, version="26.05.3", max_batch_requeue=5)
REQUEUE, CANCEL = PreemptionMode.REQUEUE, PreemptionMode.CANCEL


def here(
    mode: PreemptionMode | None, grace: timedelta | None = None, **more: object
) -> JobConditions:
    facts: dict = {"preemption": Preemption(mode=mode, grace=grace), "preemptable": True} | {
        "config": CONFIG
    }  # fmt: skip
    return JobConditions(**(facts | more))


@pytest.mark.parametrize(
    ("circumstances", "by", "same_job", "resumes"),
    [
        (here(REQUEUE, GRACE), BroughtBack.RUN, True, ResumesFrom.LAST_SAVE),
        (here(REQUEUE, NONE), BroughtBack.SLURM, True, ResumesFrom.PERIODIC),
        (here(CANCEL, GRACE), BroughtBack.RUN, True, ResumesFrom.LAST_SAVE),
        (here(CANCEL, NONE), BroughtBack.RUN, True, ResumesFrom.PERIODIC),
        (here(PreemptionMode.SUSPEND), BroughtBack.NOBODY, None, ResumesFrom.MEMORY),
        (here(PreemptionMode.OFF), BroughtBack.NOBODY, None, ResumesFrom.LAST_SAVE),
        (here(REQUEUE, GRACE, preemptable=False), BroughtBack.NOBODY, None, ResumesFrom.LAST_SAVE),
        (here(None), BroughtBack.RUN, True, ResumesFrom.PERIODIC),
        (here(CANCEL, GRACE, requeue=False), BroughtBack.SUCCESSOR, False, ResumesFrom.LAST_SAVE),
        (here(REQUEUE, NONE, requeue=False), BroughtBack.SUCCESSOR, False, ResumesFrom.PERIODIC),
        (here(REQUEUE, GRACE, self_requeue_allowed=False), BroughtBack.PERSON, None,
         ResumesFrom.LAST_SAVE),
        (here(CANCEL, GRACE, self_requeue_allowed=False, chained=True), BroughtBack.CHAIN, False,
         ResumesFrom.LAST_SAVE),
        (here(REQUEUE, GRACE, save=timedelta(seconds=45)), BroughtBack.RUN, True,
         ResumesFrom.PERIODIC),
    ],
)  # fmt: skip
def test_who_brings_it_back(
    circumstances: JobConditions, by: BroughtBack, same_job: bool | None, resumes: ResumesFrom
) -> None:
    found = predict(circumstances)
    assert (found.back_by, found.same_job, found.resumes_from) == (by, same_job, resumes)


def test_job_requeue_0_counts_only_for_jobs_that_say_nothing() -> None:
    off = replace(CONFIG, job_requeue=False)
    assert predict(here(REQUEUE, GRACE, config=off)).back_by is BroughtBack.RUN
    silent = predict(here(REQUEUE, GRACE, config=off, requeue=None))
    assert silent.back_by is BroughtBack.SUCCESSOR and "JobRequeue=0" in silent.impossible[0]
    assert predict(here(REQUEUE, GRACE, requeue=None)).back_by is BroughtBack.RUN


@pytest.mark.parametrize(
    ("config", "warned", "signal"),
    [
        (CONFIG, True, FirstSignal.SIGTERM),
        (replace(CONFIG, preempt_parameters=("send_user_signal",)), True, FirstSignal.USER),
        # The option of 22.05 and before.
        (replace(CONFIG, slurmctld_parameters=("preempt_send_user_signal",)), True,
         FirstSignal.USER),
        # A script without --signal has none that could be sent.
        (replace(CONFIG, preempt_parameters=("send_user_signal",)), False, FirstSignal.SIGTERM),
    ],
)  # fmt: skip
def test_what_the_ranks_see_first(config: ConfigRecord, warned: bool, signal: FirstSignal) -> None:
    assert predict(here(REQUEUE, GRACE, config=config, warned=warned)).first_signal is signal


def test_how_soon_it_is_back() -> None:
    quick = replace(CONFIG, auth_info=("cred_expire=5",))
    assert predict(here(REQUEUE, GRACE, config=quick)).delay == timedelta(seconds=6)
    assert predict(here(REQUEUE, GRACE)).delay == timedelta(seconds=25)
    assert predict(here(REQUEUE, GRACE, shorten_requeue=False)).delay == timedelta(seconds=121)
    # What Slurm requeues by itself nobody asks to start sooner.
    assert predict(here(REQUEUE, NONE)).delay == timedelta(seconds=121)
    unknown = here(REQUEUE, GRACE, config=None, requeue_delay=timedelta(seconds=40))
    assert predict(unknown).delay == timedelta(seconds=40)


def test_what_versions_do_otherwise_is_told() -> None:
    (old,) = predict(here(REQUEUE, GRACE)).caveats
    assert "does not requeue a job that exits" in old
    (new,) = predict(here(REQUEUE, GRACE, config=NEWER)).caveats
    assert "MaxBatchRequeue" in new and "after 5 such exits" in new
    assert predict(here(CANCEL, GRACE, config=NEWER)).caveats == ()


def test_what_is_impossible_is_told() -> None:
    (short,) = predict(here(REQUEUE, GRACE, save=timedelta(seconds=45))).impossible
    assert "45 s" in short and "20 s" in short
    assert "Slurm gives no notice" in predict(here(REQUEUE, NONE)).impossible[0]
    assert "memory" in predict(here(PreemptionMode.SUSPEND)).impossible[0]
    assert predict(here(REQUEUE, GRACE)).impossible == ()


def test_the_time_limit() -> None:
    day = timedelta(days=1)
    found = predict(here(PreemptionMode.OFF, limit=day, lead=timedelta(minutes=2)))
    assert found.lead == timedelta(minutes=2) and found.limit_back_by is BroughtBack.RUN
    forbidden = predict(here(PreemptionMode.OFF, limit=day, self_requeue_allowed=False))
    assert forbidden.limit_back_by is BroughtBack.PERSON and forbidden.impossible
    assert predict(here(PreemptionMode.OFF)).lead is None


TIMES = st.none() | st.integers(0, 10**6).map(lambda count: timedelta(seconds=count))
BOOLS = st.none() | st.booleans()
ANY = st.builds(
    JobConditions,
    preemption=st.builds(
        Preemption,
        mode=st.none() | st.sampled_from(PreemptionMode),
        grace=TIMES,
        exempt=TIMES,
    ),
    preemptable=BOOLS,
    config=st.none()
    | st.builds(
        ConfigRecord,
        version=st.sampled_from([None, "20.11.9", "24.05.0", "26.05.3", "x"]),
        kill_wait=TIMES,
        job_requeue=BOOLS,
        max_batch_requeue=st.none() | st.integers(1, 9),
        preempt_parameters=st.sampled_from([(), ("send_user_signal",)]),
        scheduler_parameters=st.sampled_from([(), ("requeue_delay=10",)]),
        has_epilog=BOOLS,
    ),
    self_requeue_allowed=BOOLS,
    requeue=BOOLS,
    warned=st.booleans(),
    limit=TIMES,
    save=TIMES,
    chained=st.booleans(),
)


@given(ANY)
def test_in_all_circumstances(given: JobConditions) -> None:
    found = predict(given)
    brought = found.back_by is not BroughtBack.NOBODY
    assert brought == (found.mode not in (PreemptionMode.OFF, PreemptionMode.SUSPEND))
    assert (found.first_signal is FirstSignal.NONE) == (not brought)
    if found.notice is None or (given.save or NONE) >= found.notice:
        assert not (brought and found.resumes_from is ResumesFrom.LAST_SAVE)
    if given.self_requeue_allowed is False and not given.chained:
        assert found.back_by is not BroughtBack.RUN and found.back_by is not BroughtBack.SUCCESSOR
        assert found.impossible, "a run that stands still is never left unsaid"
    assert (found.lead is None) == (given.limit is None)
    assert all(text.endswith(".") for text in (*found.impossible, *found.caveats))
