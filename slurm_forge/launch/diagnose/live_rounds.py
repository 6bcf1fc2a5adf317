"""From what listeners have said to what became of each of them in a round.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slurm_forge.control.messages.live import ListenerEvent
from slurm_forge.recovery.live_observations import (
    Fate,
    Receiver,
    Sighting,
)

#: Whose listener is a task itself: where its step ends without a word, the signal has killed it.
_TASKS = frozenset({Receiver.TASK, Receiver.TASK_PLAIN})


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step that is over: the listeners of that way, and all of theirs, are gone."""

    way: Receiver
    at: float


def sightings(
    present: Collection[tuple[Receiver, str]],
    events: Sequence[ListenerEvent],
    step_ends: Sequence[StepEnded],
    *,
    expected: Collection[tuple[Receiver, str]],
    workers_of: Receiver,
    signal: str,
    sent_at: float | None,
) -> tuple[Sighting, ...]:
    """One of each that is ``expected``; ``events`` and ``step_ends`` are those since the sending.

    ``workers_of`` is the way whose listeners have forked the loader workers.  ``signal`` is what a
    task that ended without a message is taken to have died of.
    """
    over = {each.way: each.at for each in step_ends}
    results = []
    for way, host in sorted(expected, key=lambda pair: (list(Receiver).index(pair[0]), pair[1])):
        if (way, host) not in present:
            results.append(Sighting(way=way, host=host, fate=Fate.ABSENT))
            continue
        own = [each for each in events if (each.way, each.host) == (way.value, host)]
        step = workers_of if way in (Receiver.WORKER, Receiver.WORKER_PLAIN) else way
        results.append(_one(way, host, own, over.get(step), signal, sent_at))
    return tuple(results)


def _one(
    way: Receiver,
    host: str,
    events: Sequence[ListenerEvent],
    over: float | None,
    signal: str,
    sent_at: float | None,
) -> Sighting:
    saw = [each for each in events if each.what == "saw"]
    died = [each for each in events if each.what == "died"]
    names = tuple(dict.fromkeys(each.signal for each in (*saw, *died)))
    if died:
        fate, at = Fate.DIED, died[0].at
    elif saw:
        fate, at = Fate.HEARD, saw[0].at
    elif over is not None:
        fate, at = (Fate.DIED if way in _TASKS else Fate.CARRIED_OFF), over
        names = (signal,) if fate is Fate.DIED else ()
    else:
        return Sighting(way=way, host=host, fate=Fate.NOTHING)
    after = None if sent_at is None else max(0.0, at - sent_at)
    return Sighting(way=way, host=host, fate=fate, signals=names, at=at, after_s=after)
