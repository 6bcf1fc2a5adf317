"""The expensive questions about a skipped step: where it was bad, and whether it is so again.

All ranks ask them together, and only after an incident.  The step left weights, moments and buffers
unchanged, so recomputing its gradients distinguishes what repeats (data or model) from what does
not (hardware).  That costs about one step, and as much memory as its forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.json_codec import from_json
from slurm_forge.training.core.host_generators import Generators
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.core.rank_layout import ActiveLayout, RankLayout
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.core.sample_order import SampleId
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.instability.diagnosis_report import (
    MOST_NAMES,
    MOST_SAMPLES,
    Blamed,
    Examination,
    RankFindings,
    merge_findings,
    not_finite,
    shortened,
)
from slurm_forge.training.instability.replay import (
    ReplayedMicroBatch,
    StateGuard,
    below,
    modules_of,
    needs_peers,
    plain_values,
    replay,
    tensors_in,
    unsynchronised,
)
from slurm_forge.training.step.gradient_norms import parameter_names


class StepDiagnoser:
    """Examines a skipped step; every method is collective.

    ``group`` carries CPU tensors; None is a single process.  ``device`` is where losses are.
    """

    def __init__(
        self,
        registry: Registry,
        device: torch.device,
        *,
        rank: int,
        host: str,
        group: dist.ProcessGroup | None,
        layout: ActiveLayout | None = None,
    ) -> None:
        self._registry = registry
        self._device = device
        self._rank, self._host = rank, host
        self._ranks = Ranks(group)
        self._layout = layout or ActiveLayout(rank, self._ranks.size)
        self._meant: frozenset[str] = frozenset()

    def take_as_meant(self) -> None:
        """Accept NaN in buffers now as intended.  Local; before the first step of a launch."""
        self._meant = frozenset(
            path for path, buffer in self._buffers() if _word(buffer, may_be_infinite=True)
        )

    def examine(
        self,
        *,
        batch: Batch | None,
        compute_loss: Callable[[Any], torch.Tensor | Loss] | None,
        loss: float | None,
        blame: Sequence[Blamed] = (),
        generators: Generators | None = None,
        no_replay: str = "",
    ) -> Examination:
        """The findings, the same on all ranks; everything is restored afterwards.

        Gradients must be cleared, and weights and buffers must be those of the step's beginning.
        ``batch`` and ``compute_loss`` are what the step was computed from, or one of them None on
        all ranks if it can't be recomputed; ``no_replay`` is the reason, for people.  ``loss`` is
        this rank's own mean loss in that step, ``blame`` its gradients, worst first; ``generators``
        were captured when the step began (without them dropout differs).

        An error on one rank is part of the findings.  If a forward needs the other ranks (FSDP2,
        SyncBatchNorm, a mesh) it is raised instead, because they wait for this one: end the launch.
        """
        facts = self._facts(batch, loss, blame)
        shelter: StateGuard | None = None
        if batch is not None and compute_loss is not None:
            try:
                shelter = StateGuard(self._registry.models.values())
            except Exception as error:
                facts["failed"] = _error_text(error)
        everybody = self._ranks.agree(None, shelter is not None, all, doing="Examining a bad step")
        if everybody and shelter is not None and batch is not None and compute_loss is not None:
            facts |= self._again(batch, compute_loss, shelter, generators)
        findings = RankFindings(rank=self._rank, host=self._host, **facts)
        without = ""
        if batch is None or compute_loss is None:
            without = f"not computed again{no_replay and ': '}{no_replay}"

        def decide(answers: Sequence[Any]) -> Any:
            reports = [from_json(RankFindings, each) for each in answers]
            return asdict(merge_findings(reports, no_replay=without))

        answer = self._ranks.agree(None, findings.to_json(), decide, doing="Examining a bad step")
        return from_json(Examination, answer)

    def _facts(
        self, batch: Batch | None, loss: float | None, blame: Sequence[Blamed]
    ) -> dict[str, Any]:
        """What is known without computing anything."""
        bad = [shortened(each.name) for each in blame if not each.finite]
        facts: dict[str, Any] = {
            "was_bad": loss is not None and not math.isfinite(loss),
            "blamed": tuple(bad[:MOST_NAMES]),
            "blamed_in_all": len(bad),
        }
        if blame and not bad:
            facts["largest"] = f"{shortened(blame[0].name)}, norm {blame[0].norm:.4g}"
        try:
            facts["state"] = tuple(self._bad_state())
            if batch is not None:
                facts["data"] = tuple(_bad_data(batch))[:MOST_SAMPLES]
        except Exception as error:  # a tensor of an unexpected kind
            facts["failed"] = _error_text(error)
        return facts

    def _again(
        self,
        batch: Batch,
        compute_loss: Callable[[Any], torch.Tensor | Loss],
        shelter: StateGuard,
        generators: Generators | None,
    ) -> dict[str, Any]:
        models = self._registry.models
        together = needs_peers(models.values()) or bool(self._layout.now.model_coordinates)
        alone = self._ranks.size == 1 or not together
        replayed: list[ReplayedMicroBatch] = []
        failed, random, scale = "", False, self._loss_scale()
        try:
            with unsynchronised(models.values()):
                shelter.begin(generators)
                try:
                    replay(
                        models,
                        batch,
                        compute_loss,
                        replayed,
                        device=self._device,
                        loss_scale=scale,
                    )
                except Exception as error:
                    if not alone:
                        raise
                    failed = _error_text(error)
                random = shelter.drew(generators)
        finally:
            shelter.put_back()
        facts = _summary(replayed, batch, self._layout.now, scale, self._dtypes())
        if failed:
            facts["failed"] = failed
        return {**facts, "replayed": not failed, "random": random}

    def _loss_scale(self) -> float:
        """The gradient scaler's scale before it processed the bad step."""
        scaler = self._registry.scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        return float(scaler.get_scale() / scaler.get_backoff_factor())

    def _bad_state(self) -> Iterator[str]:
        """Non-finite values in memory: weights, buffers, optimizer state."""
        names = parameter_names(self._registry.models)
        count = 0
        for what, tensor, may_be_infinite in self._state(names):
            word = _word(tensor, may_be_infinite)
            if word:
                count += 1
                yield f"{word} in {shortened(what)}"
            if count > MOST_NAMES:
                return

    def _state(self, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor, bool]]:
        for model in self._registry.models.values():
            for weight in model.parameters():
                yield names.get(id(weight), "a parameter"), weight, False
        for path, buffer in self._buffers():
            if path not in self._meant:
                yield path, buffer, True  # the mask of an attention holds -inf
        for optimizer in self._registry.optimizers.values():
            for parameter, state in optimizer.state.items():
                of = names.get(id(parameter), "a parameter")
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{key} of {of}", value, False

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in modules_of(self._registry.models, compiled=True):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield below(path, name), buffer

    def _dtypes(self) -> set[torch.dtype]:
        """The dtypes of gradients, as the optimizers see them."""
        return {
            parameter.dtype
            for model in self._registry.models.values()
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.is_floating_point()
        }


def _summary(
    replayed: Sequence[ReplayedMicroBatch],
    batch: Batch,
    layout: RankLayout,
    loss_scale: float,
    dtypes: Iterable[torch.dtype],
) -> dict[str, Any]:
    """The result of one rank's replay."""
    norms: dict[str, float] = {}
    losses = [not_finite(each.loss) for each in replayed]
    bad = [bool(word) for word in losses]
    for at, each in enumerate(replayed):
        for name, norm in each.first_bad.norms:
            norms[name] = norms.get(name, 0.0) + norm
            bad[at] = bad[at] or not math.isfinite(norm)
    wrong = {name: norm for name, norm in norms.items() if not math.isfinite(norm)}
    gradient = "NaN" if any(map(math.isnan, wrong.values())) else "infinite" if wrong else ""
    total = math.hypot(*norms.values()) / loss_scale if not wrong else 0.0
    if not wrong and total > _largest_norm(dtypes):
        gradient = f"too large for its norm to be finite (up to {total:.1e})"
        wrong = {name: norms[name] for name in sorted(norms, key=norms.__getitem__)[-1:]}
    first_bad = [at for at, one in enumerate(bad) if one] or list(range(len(replayed)))
    if not (any(losses) or gradient):
        first_bad = []
    counts = [each.count for each in replayed if each.count is not None]
    samples, positions = _samples(batch, first_bad, layout.data_rank, layout.data_ranks)
    return {
        "loss": next((word for word in losses if word), ""),
        "gradient": gradient,
        "parameters": tuple(shortened(name) for name in list(wrong)[:MOST_NAMES]),
        "bad_gradients": len(wrong),
        "gradients": len(norms),
        "layer": shortened(next((replayed[at].first_bad.layer for at in first_bad), "")),
        "micro_batches": tuple(at + 1 for at in first_bad[:MOST_SAMPLES]),
        "samples": samples[:MOST_SAMPLES],
        "positions": positions[:MOST_SAMPLES],
        "count": sum(counts) if counts else None,
    }


def _largest_norm(dtypes: Iterable[torch.dtype]) -> float:
    """The limit above which the guard's norm, whose squares are summed in that type, overflows."""
    narrow = torch.finfo(torch.float16).max  # summed in float32, then converted to float16
    largest = [torch.finfo(dtype).max for dtype in dtypes]
    return min((one if one == narrow else math.sqrt(one) for one in largest), default=math.inf)


def _samples(
    batch: Batch, micro_batches: Sequence[int], rank: int, ranks: int
) -> tuple[tuple[SampleId | int | str, ...], tuple[tuple[int, int], ...]]:
    """Ids and stream positions of the samples in some of this rank's micro-batches."""
    share = sum(batch.micro_sizes)
    starts = [sum(batch.micro_sizes[:at]) for at in micro_batches]
    parts = [
        (start, start + batch.micro_sizes[at] - 1)
        for start, at in zip(starts, micro_batches, strict=True)
    ]
    known = batch.ids_of()
    if known is None and not batch.global_size:
        return (), ()  # a batch that the program created
    ids = () if known is None else tuple(each for at in micro_batches for each in known[at])
    if batch.consumed - batch.first != share * ranks:
        return ids, ()  # part of the stream in between is skipped
    before = batch.first + rank * share
    return ids, tuple((before + first, before + last) for first, last in parts)


def _bad_data(batch: Batch) -> Iterator[SampleId | int | str]:
    """Samples with non-finite values, if a micro-batch has one row per sample."""
    for micro, own in zip(batch.micro_batches, batch.ids_of() or (), strict=False):
        size = len(own)
        bad: set[int] = set()
        for tensor in tensors_in(micro):
            values = plain_values(tensor)
            if values is None or values.numel() == 0 or tuple(values.shape[:1]) != (size,):
                continue
            # -inf may be intended: a mask.
            smallest, largest = torch.aminmax(values.reshape(size, -1), dim=1)
            rows = smallest.isnan() | (largest == math.inf)
            bad.update(rows.nonzero().flatten().tolist())
        yield from (own[row] for row in sorted(bad))


def _word(tensor: torch.Tensor, may_be_infinite: bool) -> str:
    values = plain_values(tensor)
    if values is None or values.numel() == 0:
        return ""
    smallest, largest = torch.stack(torch.aminmax(values)).tolist()
    if math.isnan(smallest):
        return "NaN"
    if may_be_infinite:
        return ""
    return "infinity" if math.isinf(smallest) or math.isinf(largest) else ""


def _error_text(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}".replace("\n", " "), 200)
