"""Saving: every rank copies its part and writes it into a stage; rank 0 publishes the stage.

Before the rename there is no checkpoint; after it there is a complete one.  A failure before it
leaves the previous checkpoints as they were.  Training is held up for the copy; the rest can run on
a thread, with a process group of its own for the one exchange at the end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.health import (
    NotFinite,
    infinite_by_design,
    unhealthy,
    unhealthy_here,
)
from slurm_forge.checkpoint.content.index import data_file
from slurm_forge.checkpoint.content.models import name_parameters
from slurm_forge.checkpoint.content.rank_states import OWN, called
from slurm_forge.checkpoint.content.stages import StageDocuments
from slurm_forge.checkpoint.content.tensors import local_part
from slurm_forge.checkpoint.content.training_state import (
    Captured,
    Known,
    TrainingState,
)
from slurm_forge.checkpoint.write.arena import Arena
from slurm_forge.checkpoint.write.copying import (
    Copier,
    Filling,
)
from slurm_forge.checkpoint.write.direct_io import (
    PAGE,
    round_up,
)
from slurm_forge.checkpoint.write.pending_save import (
    After,
    PendingSave,
    Saved,
)
from slurm_forge.checkpoint.write.plan import (
    Plan,
    Planner,
)
from slurm_forge.checkpoint.write.replica_check import (
    OWN_BUFFERS,
    Comparison,
    RankFacts,
    ReplicaCheck,
    SavedStates,
)
from slurm_forge.checkpoint.write.replicas import (
    RankMismatch,
    StateDigest,
)
from slurm_forge.checkpoint.write.sealing import (
    common_plan,
    open_stage,
    report_of,
    require_same_tensors,
    sealed,
)
from slurm_forge.checkpoint.write.shard_writer import write_shard_file
from slurm_forge.checkpoint.write.shares import (
    copies,
    share_of,
)
from slurm_forge.checkpoint.write.tensor_keys import in_words
from slurm_forge.device.accelerator import on_accelerator
from slurm_forge.device.memory import can_pin
from slurm_forge.device.streams import Event, event_behind, when_done
from slurm_forge.errors import FencedError, RanksLostError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import INDEX_NAME, FileEntry, Manifest
from slurm_forge.vocabulary.json_value import Json

#: The digest of each rank's state, in the manifest's information about its checkpoint.
DIGEST = "digest"
_NO_FACTS = RankFacts()


class CheckpointWriter:
    """Saves one checkpoint after another; keeps its memory and its plan from save to save.

    Collective over ``group``, which must carry CPU tensors; ``None`` is one process without a
    process group.  ``background`` is another group of the same ranks: with it (or alone) a save can
    continue while the ranks do something else.  ``clock`` gives seconds since 1970, ``host`` is the
    name of this rank's node.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        group: dist.ProcessGroup | None,
        background: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.time,
        host: str = "",
    ) -> None:
        self._store = store
        self._ranks = Ranks(group)
        self._background_ranks = Ranks(group if background is None else background)
        self._threaded = group is None or background is not None
        self._clock = clock
        self._planner = Planner()
        self._stage_documents = StageDocuments()
        self._arena = Arena(pinned=can_pin())
        self._views: list[torch.Tensor] = []
        self._views_of = 0
        self._infinite: Mapping[str, NotFinite] | None = None
        self._known: Known | None = None
        #: What is saved per rank because ranks were found to differ in it.
        self._own: frozenset[str] = frozenset()
        self._estimated_size = 0
        self._copier = Copier()
        self._replicas = ReplicaCheck(host)
        self._pending_save: PendingSave | None = None
        self._warming: threading.Thread | None = None

    def begin(
        self,
        state: TrainingState,
        *,
        name: CheckpointName,
        reason: str,
        fence: Callable[[], None],
        parent: CheckpointName | None = None,
        background: bool = False,
        after: After = lambda _: None,
        permit: Callable[[int, Path], None] = lambda size, directory: None,
        fallback: bool = False,
        about: Mapping[str, Json] | None = None,
        doubts: Callable[[], Sequence[str]] = tuple,
        all_copies: bool = False,
        facts: RankFacts = _NO_FACTS,
        tolerant: bool = False,
    ) -> PendingSave:
        """Begin a save and return when the state may change again.  Waits for the one before.

        Rank 0's ``name`` counts (the nonce may differ, the step may not).  ``fence`` is called on
        rank 0 right before the rename, and on a rank that finds the stage gone.  If anything
        fails on any rank, all ranks get a CheckpointError (FencedError if ``fence`` did), here or
        from ``PendingSave``; no checkpoint appears then (or a complete one, if only the last fsync
        failed).  RanksLostError, a CheckpointError, means that a rank is gone: no collective may
        follow.  Without ``background`` the save is over on return.  ``after`` is called with
        the result of a save before its waiters continue, on the save's thread.

        ``permit`` is called on rank 0 with the size of all files, and the directory for them,
        before anything is written; it raises CheckpointError if the save should not begin.  With
        ``fallback`` (rank 0's) the save goes to the store's fallback directory, without it only if
        the other one has no room or fails.  ``about`` (rank 0's) goes into the manifest.
        ``doubts`` is called on every rank, on the save's thread, and returns what makes this state
        suspect; non-finite values are found here.  With ``all_copies`` they are also searched for
        in the copies that this rank holds and another one writes: in the live ones, which may have
        changed by then.

        Copies that several ranks hold are compared, and so are the ranks' ``facts``: a difference
        is ``Saved.mismatch``, and makes the checkpoint suspect unless ``tolerant``.
        """
        self._wait()
        began, started = self._clock(), time.monotonic()
        captured, agreed = self._agree(state, name, permit, fallback=fallback)
        name = CheckpointName.parse(agreed["name"])
        stage = self._store.folder(fallback=bool(agreed["fallback"])) / agreed["stage"]
        try:
            plan = (
                self._planner.plan
                if agreed["plan"]
                else self._planner.make(captured, self._ranks, _replicated(state, captured))
            )
        except RanksLostError:
            raise
        except Exception:
            self._discard(stage)
            raise
        document = captured.document  # so that the tensors are not kept during the write
        held = copies(captured, plan) if all_copies else ()
        updated = {device: event_behind(device) for device in {each.device for _, each in held}}
        told = self._stage_documents.report(state.stages, document)
        filling, turn, own = Filling(), self._replicas.next_turn(name.step), self._own
        blocked: Future[timedelta] = Future()
        digest: Future[StateDigest] = Future()

        def seal(
            reports: Sequence[Any], mismatch: RankMismatch | None, found: Sequence[str]
        ) -> dict[str, Json]:
            more = [] if mismatch is None or tolerant else [mismatch.text]
            more += [
                f"the ranks differ in {in_words(each)}, and it has rank 0's alone"
                for each in found
                if each.startswith("objects/")
            ]
            manifest = sealed(
                name,
                self._stage_documents.merged(document, [each["document"] for each in reports]),
                reports,
                more=more,
                about={**(about or {}), DIGEST: SavedStates.of(reports).to_json()},
                run_id=self._store.run_id,
                sequence=self._store.next_sequence(),
                created_at=datetime.fromtimestamp(self._clock(), timezone.utc),
                reason=reason,
                parent=parent,
            )
            try:
                self._store.publish(stage, manifest, fence)
            except FileNotFoundError as error:
                raise _swept(error, fence) from error
            return {"size": manifest.size, "findings": list(manifest.findings)}

        def persist() -> Saved:
            agreed_end, mismatch = self._persist(
                name,
                plan,
                stage,
                filling,
                seal,
                doubts,
                fence,
                held=held,
                updated=updated,
                told=told,
                digest=digest,
                facts=facts,
            )
            return Saved(
                name=name,
                path=stage.parent / str(name),
                size=int(agreed_end["size"]),
                blocked=blocked.result(),
                duration=timedelta(seconds=self._clock() - began),
                disagreeing=(*agreed["disagreeing"], *agreed_end[OWN_BUFFERS]),
                own=tuple(sorted(own)),
                findings=tuple(agreed_end["findings"]),
                mismatch=mismatch,
            )

        pending_save = PendingSave(name)
        self._make_room(plan, captured, filling)
        # What has been copied is written while the rest is copied, even if the caller waits.
        thread = threading.Thread(
            target=pending_save.run_to_end, args=(persist, after), name="forge-save", daemon=True
        )
        self._pending_save = pending_save  # not earlier: others wait for it
        try:
            thread.start()
        except BaseException as error:
            blocked.set_result(timedelta(seconds=time.monotonic() - started))
            filling.fail(error)
            if not isinstance(error, RuntimeError):
                self._pending_save = pending_save if thread.is_alive() else None
                raise
            # No thread can be created: reported to the others like any failure.
            pending_save.run_to_end(persist, after)
            return pending_save
        try:
            self._copy(plan, captured, filling)
            self._take_digest(plan, captured, turn, digest)
        finally:
            digest.cancel()  # if it never ran, so that nobody waits for it
            blocked.set_result(timedelta(seconds=time.monotonic() - started))
        if not (background and self._threaded):
            pending_save.wait()
        return pending_save

    def unsound_parts(self, state: TrainingState) -> tuple[str, ...]:
        """The findings in this rank's part that a save would have.  Not collective."""
        captured, error = self._capture(state, None)
        error = error or self._accept(state, captured)
        if captured is None or error is not None:
            return ()  # a save reports why it can't be saved
        tensors = ((key, local_part(each).detach()) for key, each in captured.tensors.items())
        return unhealthy_here(tensors, allowed=self._infinite or {})

    def compare(
        self,
        state: TrainingState,
        *,
        step: int,
        facts: RankFacts = _NO_FACTS,
        manifest: Manifest | None = None,
    ) -> Comparison:
        """Compare the copies that ranks hold of this state, and their facts.  Collective; waits.

        ``manifest``: that of the loaded checkpoint, for ``Comparison.as_saved``.  Raises
        CheckpointError if the state could not be saved.
        """
        captured, plan = self._planned(state)
        saved = None if manifest is None else SavedStates.from_json(manifest.about.get(DIGEST))
        found = self._replicas.compare(self._ranks, captured, plan, facts, step=step, saved=saved)
        self._keeps_own(found.own)
        return found

    def _planned(self, state: TrainingState) -> tuple[Captured, Plan]:
        """The captured state, examined tensor by tensor, and the plan that fits it.

        Collective; CheckpointError if it could not be saved.
        """
        self._wait()
        while True:
            captured, error = self._capture(state, None)
            self._known = captured.known if captured else None
            plan = self._planner.known(captured) if captured else 0
            self._estimated_size = share_of(captured, leads=self._leads(state))
            error = error or self._accept(state, captured)
            known = self._ranks.agree(
                error, _report_of(state, captured, plan), common_plan, doing="Planning checkpoints"
            )
            if not self._differ(known, state, captured):
                break
        if captured is None:
            raise AssertionError("agree() raises where a rank failed")
        if known["plan"]:
            return captured, self._planner.plan
        return captured, self._planner.make(captured, self._ranks, _replicated(state, captured))

    def _differ(
        self, agreed: Mapping[str, Any], state: TrainingState, captured: Captured | None
    ) -> bool:
        """Whether ranks have just been found to differ in what each of them saves from now on.

        Raises CheckpointError if they hold other tensors.
        """
        if agreed["unlike"]:
            keys = [
                key
                for key in (captured.tensors if captured else ())
                if key.startswith(("models/", "optimizers/", "extra/"))
            ]
            report: Json = {"stage": _stage_of(state), "keys": list[Json](keys)}
            self._ranks.agree(None, report, require_same_tensors, doing="Comparing tensors")
        return self._keeps_own(agreed["own"])

    def _keeps_own(self, names: Sequence[str]) -> bool:
        """Whether ranks have just been found to differ in something that each saves from now on."""
        self._own |= set(names)
        return bool(names)

    def _capture(
        self, state: TrainingState, known: Known | None
    ) -> tuple[Captured | None, Exception | None]:
        try:
            placed = state.placed(self._ranks.rank, self._ranks.size)
            return placed.capture(known, self._own), None
        except Exception as caught:
            return None, caught

    def prepare(self, state: TrainingState) -> None:
        """Plan the next save, and touch the memory for it on a thread.  Collective.

        Both would hold up the first save of a launch.  Raises CheckpointError if this state could
        not be saved: better known now than after the first hour.
        """
        _, plan = self._planned(state)
        if self._views_of == plan.number:
            return
        self._views, self._views_of = [], 0  # they would keep released memory alive

        def warm() -> None:
            # Any failure will be reported by the save itself: mmap raises OSError for memory.
            with contextlib.suppress(MemoryError, OSError, RuntimeError):
                self._arena.reserve(plan.size)

        warming = threading.Thread(target=warm, name="forge-arena", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be created: the save does it itself
            warming.start()
            self._warming = warming

    def _accept(self, state: TrainingState, captured: Captured | None) -> Exception | None:
        """Accept non-finite values in what is not learned as intended, if found at the first check.

        Returns what failed: the other ranks wait for the report.
        """
        if captured is None:
            return None
        if self._infinite is None:
            try:
                learned = state.trained()
                self._infinite = infinite_by_design(
                    (key, local_part(tensor))
                    for key, tensor in captured.tensors.items()
                    if key not in learned and not key.startswith("optimizers/")
                )
            except Exception as caught:
                return caught
        if self._own:
            shared = {key: called(key) for key in captured.tensors if key.startswith(OWN)}
            meant = self._infinite
            self._infinite = {**meant, **{k: meant[c] for k, c in shared.items() if c in meant}}
        return None

    def _leads(self, state: TrainingState) -> bool:
        return self._ranks.rank == 0 if state.stages is None else state.stages.leads

    def _wait(self) -> None:
        if self._pending_save is not None:
            self._pending_save.wait()
        if self._warming is not None:
            self._warming.join()

    def _agree(
        self,
        state: TrainingState,
        name: CheckpointName,
        permit: Callable[[int, Path], None],
        *,
        fallback: bool,
    ) -> tuple[Captured, dict[str, Any]]:
        while True:
            captured, error = self._capture(state, self._known)
            plan = self._planner.known(captured) if captured else 0
            if captured and not plan and self._known is not None:
                captured, error = self._capture(state, None)  # examined one by one for planning
                plan = self._planner.known(captured) if captured else 0
            self._known = captured.known if captured else None
            if not plan:  # it is valid as long as the plan is
                self._estimated_size = share_of(captured, leads=self._leads(state))
            error = error or self._accept(state, captured)
            agreed = self._ranks.agree(
                error,
                {
                    **_report_of(state, captured, plan),
                    "step": name.step,
                    "name": str(name),
                    "size": self._planner.plan.size if plan else 0,
                    "rough": self._estimated_size,
                },
                lambda reports: open_stage(self._store, name, reports, permit, fallback=fallback),
                doing="Preparing a checkpoint",
            )
            if not self._differ(agreed, state, captured):
                break
        if captured is None:
            raise AssertionError("agree() raises where a rank failed")
        return captured, agreed

    def _make_room(self, plan: Plan, captured: Captured, filling: Filling) -> None:
        if self._views_of == plan.number:
            return
        self._views = []  # they would keep memory alive that is to be released
        try:
            self._arena.reserve(plan.size)
            self._views = [
                self._arena.view(at, at + shard.nbytes)
                .view(captured.tensors[shard.key].dtype)
                .view(shard.sizes)
                for shard, at in zip(plan.shards, plan.places, strict=True)
            ]
            self._views_of = plan.number
        except Exception as error:  # reported to the others in the one exchange at the end
            filling.fail(error)

    def _copy(self, plan: Plan, captured: Captured, filling: Filling) -> None:
        """Copy what this rank writes; a failure is reported through ``filling``."""
        try:
            sources = [local_part(captured.tensors[shard.key]) for shard in plan.shards]
            self._copier.copy(self._views, sources, plan.ends, filling)
            devices = {source.device for source in sources if on_accelerator(source)}
            if devices:
                filling.promise(plan.size, when_done(devices))
        except BaseException as error:
            filling.fail(error)
            if not isinstance(error, Exception):
                raise

    def _take_digest(
        self, plan: Plan, captured: Captured, turn: int, digest: Future[StateDigest]
    ) -> None:
        """Begin the digest; a failure is reported to the others in the next exchange."""
        try:
            digest.set_result(self._replicas.take(captured, plan, turn))
        except Exception as error:
            digest.set_exception(error)

    def _persist(
        self,
        name: CheckpointName,
        plan: Plan,
        stage: Path,
        filling: Filling,
        seal: Callable[[Sequence[Any], RankMismatch | None, Sequence[str]], dict[str, Json]],
        doubts: Callable[[], Sequence[str]],
        fence: Callable[[], None],
        *,
        held: Sequence[tuple[str, torch.Tensor]],
        updated: Mapping[torch.device, Event | None],
        told: Json,
        digest: Future[StateDigest],
        facts: RankFacts,
    ) -> tuple[dict[str, Any], RankMismatch | None]:
        entries: list[FileEntry] = []
        taken: StateDigest | None = None
        findings: list[str] = []
        error: Exception | None = None
        try:
            filling.wait(0)  # raises if there is no arena
            memory = self._arena.memory(round_up(plan.size, PAGE))
            target = stage / data_file(self._background_ranks.rank)
            with ThreadPoolExecutor(1, thread_name_prefix="forge-health") as looking:
                # Beside the write, which mostly waits for the disk; not beside the copy, which
                # training waits for.
                check = looking.submit(self._unhealthy, plan, filling)
                entries.append(write_shard_file(target, memory, plan.size, ready=filling.wait))
                findings += check.result()
            findings += doubts()
            place = f"on rank {self._background_ranks.rank}"
            problems = unhealthy_here(held, allowed=self._infinite or {}, behind=updated)
            findings += [f"{each} {place}" for each in problems if each not in findings]
            taken = digest.result()
            if self._background_ranks.rank == 0:
                index = memoryview(plan.index)
                entries.append(write_shard_file(stage / INDEX_NAME, index, len(index)))
        except FileNotFoundError as caught:
            error = _swept(caught, fence)
        except Exception as caught:
            error = caught
        try:
            agreed = self._replicas.exchange(
                self._background_ranks,
                error,
                report_of(entries, findings, told),
                taken,
                facts,
                seal,
                step=name.step,
                doing=f"Saving {name}",
            )
        except RanksLostError:
            raise  # others may still be writing; the stage is swept by a later launch
        except Exception:
            self._discard(stage)
            raise
        self._stage_documents.accepted(told)
        self._keeps_own(agreed[0][OWN_BUFFERS])  # from the next save on, which waits for this one
        return agreed

    def _unhealthy(self, plan: Plan, filling: Filling) -> tuple[str, ...]:
        filling.wait(plan.size)
        keys = (shard.key for shard in plan.shards)
        return unhealthy(zip(keys, self._views, strict=True), allowed=self._infinite or {})

    def _discard(self, stage: Path) -> None:
        if self._ranks.rank == 0:
            self._store.discard_stage(stage)


def save_checkpoint(
    store: CheckpointStore,
    state: TrainingState,
    *,
    name: CheckpointName,
    reason: str,
    group: dist.ProcessGroup | None,
    fence: Callable[[], None],
    clock: Callable[[], float] = time.time,
    parent: CheckpointName | None = None,
) -> Saved:
    """Write and publish one checkpoint; on disk on return.  Arguments as ``CheckpointWriter``."""
    writer = CheckpointWriter(store, group=group, clock=clock)
    pending_save = writer.begin(state, name=name, reason=reason, fence=fence, parent=parent)
    return pending_save.result()


def _swept(error: FileNotFoundError, fence: Callable[[], None]) -> Exception:
    """The error of ``fence``: newer attempts remove older stages.  Else the error itself."""
    try:
        fence()
    except FencedError as fenced:
        return fenced
    return error


def _replicated(state: TrainingState, captured: Captured) -> frozenset[str]:
    """The keys of all parameters, and of registered objects' copies of them."""
    parameters = name_parameters(state.models).values()
    return captured.copies.union(f"models/{name.key}" for name in parameters)


def _stage_of(state: TrainingState) -> int:
    return 0 if state.stages is None else state.stages.stage


def _report_of(state: TrainingState, captured: Captured | None, plan: int) -> dict[str, Json]:
    """What each rank reports about a state before it is planned or saved."""
    return {
        "stage": _stage_of(state),
        "shape": captured.shape if captured else "",
        "parts": dict(captured.parts) if captured else {},
        "plan": plan,
    }
