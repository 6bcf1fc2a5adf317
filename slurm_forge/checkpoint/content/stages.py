"""Pipeline stages: the tensors of each, their names, and what all stages together contain.

If names are global (``layers.7.weight`` on whichever stage has that layer) they are used as keys,
and a checkpoint can be loaded on another number of stages.  If stages number their own layers from
0, two of them share names: then a stage's model is called ``model@1`` in checkpoints.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.json_state import escape
from slurm_forge.checkpoint.content.models import name_parameters, names_in
from slurm_forge.errors import MismatchError
from slurm_forge.vocabulary.json_value import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStages:
    """This rank's stage, and the contents of the others.

    ``leads``: whether this rank reports the contents of its stage, for all ranks that have it.
    ``own_names``: models that are called by their stage in checkpoints.  ``models`` has the names
    of all stages' tensors, ``groups`` the keys of the parameters in each group of an optimizer;
    both as they are in checkpoints.
    """

    stage: int
    count: int
    leads: bool
    own_names: frozenset[str] = frozenset()
    models: Mapping[str, frozenset[str]] = field(default_factory=dict)
    groups: Mapping[str, tuple[frozenset[str], ...]] = field(default_factory=dict)

    @property
    def reports(self) -> bool:
        """Whether rank 0, which has the first stage, needs a report from this rank."""
        return self.leads and self.stage > 0

    def name(self, registered: str) -> str:
        """The name of a registered model in checkpoints."""
        return staged(registered, self.stage) if registered in self.own_names else registered

    @classmethod
    def gathered(
        cls,
        ranks: Ranks,
        *,
        stage: int,
        count: int,
        leads: bool,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
    ) -> PipelineStages:
        """Collect the contents of all stages.  Collective over all ranks, once per launch.

        Raises:
            MismatchError: The optimizers of two stages have different numbers of groups.
        """
        report: Json = None
        error: Exception | None = None
        if leads:
            try:
                report = _report(stage, models, optimizers)
            except Exception as caught:
                error = caught
        together = ranks.agree(error, report, _together, doing="Comparing the pipeline stages")
        return cls(
            stage=stage,
            count=count,
            leads=leads,
            own_names=frozenset(together["own_names"]),
            models={name: frozenset(names) for name, names in together["models"].items()},
            groups={
                name: tuple(frozenset(keys) for keys in groups)
                for name, groups in together["groups"].items()
            },
        )


def staged(name: str, stage: int) -> str:
    """The name of something that belongs to one stage."""
    return f"{name}@{stage}"


def merge(document: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of the first stage, completed by the other stages.

    Options of optimizers come from the first stage; parameters and their state from all.
    """
    merged: dict[str, Any] = copy.deepcopy(dict(document))
    for other in others:
        for name, rest in other["models"].items():
            merged["models"].setdefault(name, {}).update(rest)
        for name, optimizer in other["optimizers"].items():
            own = merged["optimizers"][name]
            for group, more in zip(own["groups"], optimizer["groups"], strict=True):
                group["params"] = [*group["params"], *more["params"]]
            own["state"].update(optimizer["state"])
        for name, value in other["objects"].items():
            merged["objects"].setdefault(name, value)
    return merged


class StageDocuments:
    """The documents that other stages sent to rank 0, so that each is sent again only if changed.

    One object on every rank.  Options are excluded because learning rates change all the time.
    """

    def __init__(self) -> None:
        self._accepted = ""
        self._known: dict[int, Any] = {}

    def report(self, stages: PipelineStages | None, document: Mapping[str, Any]) -> Json:
        """This rank's report to rank 0: a stage, a digest, and the contents if they are new."""
        if stages is None or not stages.reports:
            return None
        content: dict[str, Json] = {
            "models": document["models"],
            "optimizers": {
                name: {
                    "groups": [{"params": group["params"]} for group in optimizer["groups"]],
                    "state": optimizer["state"],
                }
                for name, optimizer in document["optimizers"].items()
            },
            "objects": {
                name: value
                for name, value in document["objects"].items()
                if name.endswith(staged("", stages.stage))
            },
        }
        digest = hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()
        return [stages.stage, digest, None if digest == self._accepted else content]

    def accepted(self, report: Any) -> None:
        """Rank 0 has received it; called on the rank that sent it."""
        if report is not None:
            self._accepted = report[1]

    def merged(self, document: Mapping[str, Any], reports: Sequence[Any]) -> Mapping[str, Any]:
        """On rank 0: the document of all stages, from its own and the ranks' reports."""
        by_stage = sorted(filter(None, reports), key=lambda report: int(report[0]))
        for stage, _, body in by_stage:
            if body is not None:
                self._known[stage] = body
        stages = [self._known[stage] for stage, _, _ in by_stage]
        return merge(document, stages) if stages else document


def _report(
    stage: int, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> Json:
    names = name_parameters(models)
    groups: dict[str, Json] = {
        optimizer_name: [
            [
                [name.model, name.fqn]
                for parameter in group["params"]
                if (name := names.get(id(parameter))) is not None
            ]
            for group in optimizer.param_groups
        ]
        for optimizer_name, optimizer in optimizers.items()
    }
    have: dict[str, Json] = {name: list(names_in(module)) for name, module in models.items()}
    return {"stage": stage, "models": have, "groups": groups}


def _together(reports: Sequence[Any]) -> Json:
    stages = sorted(filter(None, reports), key=lambda report: int(report["stage"]))
    counts = Counter(
        (model, name)
        for report in stages
        for model, names in report["models"].items()
        for name in names
    )
    own_names = {model for (model, _), count in counts.items() if count > 1}

    def called(model: str, report: Any) -> str:
        return staged(model, report["stage"]) if model in own_names else model

    models: dict[str, list[Json]] = {}
    groups: dict[str, list[list[Json]]] = {}
    for report in stages:
        for model, names in report["models"].items():
            models.setdefault(called(model, report), []).extend(names)
        for optimizer, own in report["groups"].items():
            all_groups = groups.setdefault(optimizer, [[] for _ in own])
            if len(all_groups) != len(own):
                raise MismatchError(
                    f"optimizer {optimizer!r} has {len(all_groups)} parameter groups on pipeline "
                    f"stage {stages[0]['stage']} and {len(own)} on stage {report['stage']}",
                    next_step="Give it the same groups on every stage, with no parameters in a "
                    "group where a stage has none.",
                )
            for all_keys, parameters in zip(all_groups, own, strict=True):
                all_keys += [
                    f"{escape(called(model, report))}/{escape(fqn)}" for model, fqn in parameters
                ]
    return {"own_names": list[Json](sorted(own_names)), "models": models, "groups": groups}  # type: ignore[dict-item]
