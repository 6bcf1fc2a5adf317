"""Report values as JSON: the field names of the dataclasses are the keys."""

from __future__ import annotations

import dataclasses
import json
import math
from operator import attrgetter
from typing import Any

from slurm_forge.journal import events as ev
from slurm_forge.report.story import story as s
from slurm_forge.vocabulary.plan import SampleWindow, Variable

#: Value of the key ``schema`` of every document.  Keys are only added under one number.
SCHEMA = 1
#: What holds a noun of the journal, and is written with other keys than its fields: the path of
#: each value, of which the last name is the key, unless ``key=path`` gives another one.
_KEYS: dict[type, str] = {
    s.PlanInForce: (
        "lr_scale plan.lr_factor plan.lr_from_step plan.lr_ramp_steps plan.micro_batch "
        "plan.mem_factor plan.exclude_nodes lr_back_step plan.skipped plan.reseeded "
        "plan.worker_factor rolled_back_to plan.time_factor plan.nodes plan.variables"
    ),
    s.ResumeStory: (
        "time event.step event.checkpoint event.world_size event.exact start_s "
        "event.interpreter_s event.rendezvous_s event.load_s after"
    ),
    s.SlowStory: (
        "time event.step event.since_step event.host event.ranks event.factor event.trial "
        "event.why words event.lost_s steps cost_s over"
    ),
    s.TrendStory: "time event.step event.figure event.was event.now event.since over",
    ev.CheckpointCommitted: "name step reason save_s=seconds size findings",
    ev.CheckpointFailed: "step reason",
    ev.CheckpointRejected: "name reason",
    ev.NodesStruck: "nodes cause excluded until",
    ev.NoticeSeen: "what source",
    ev.ProbeMeasured: "step ranks=late_ranks hosts=late_hosts wrong",
}


def to_json(value: Any) -> str:
    """Indented JSON of a dataclass, or a dict of them.

    Times are seconds since the epoch, durations end in ``_s``.  Control characters of journal texts
    are escaped; NaN and infinity, which JSON lacks, are null.
    """
    body = {"schema": SCHEMA, **_plain(value)}
    return json.dumps(body, indent=2, ensure_ascii=True, allow_nan=False)


def _plain(value: Any) -> Any:
    match value:
        case s.Timed():
            return {"time": _plain(value.time), **_plain(value.event)}
        case SampleWindow():
            return {"first": value.first, "last": value.stop - 1}
        case Variable():
            return str(value)
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    if not dataclasses.is_dataclass(value):
        return value
    if type(value) not in _KEYS:
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    paths = (each.rpartition("=") for each in _KEYS[type(value)].split())
    return {
        key or path.rpartition(".")[2]: _plain(attrgetter(path)(value)) for key, _, path in paths
    }
