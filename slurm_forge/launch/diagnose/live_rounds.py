"""From what listeners have said to what became of each of them in a round.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from pydantic import TypeAdapter, ValidationError

from slurm_forge.control.messages.live import MARK, ListenerEvent
from slurm_forge.recovery.live_observations import Fate, Receiver, Sighting

_EVENT = TypeAdapter(ListenerEvent)
#: Whose listener is a task itself: where its step ends without a word, the signal has killed it.
_TASKS = frozenset({Receiver.TASK, Receiver.TASK_PLAIN})
#: Forked by the task: they end with its step.
WORKERS = (Receiver.WORKER, Receiver.WORKER_PLAIN)


def parse_event(line: str) -> ListenerEvent | None:
    """What a line says; None for one that is somebody else's."""
    _, mark, text = line.partition(MARK)
    with suppress(ValidationError):
        return _EVENT.validate_json(text) if mark else None
    return None


def sightings(
    present: Collection[tuple[Receiver, str]],
    events: Sequence[ListenerEvent],
    *,
    expected: Collection[tuple[Receiver, str]],
    signal: str,
    sent_at: float | None,
) -> tuple[Sighting, ...]:
    """One of each that is ``expected``; ``events`` are those since the sending.

    ``signal`` is what a task that ended without a word is taken to have died of.
    """
    order = list(Receiver)
    return tuple(
        _sighting(way, host, events, signal, sent_at)
        if (way, host) in present
        else Sighting(way=way, host=host, fate=Fate.ABSENT)
        for way, host in sorted(expected, key=lambda pair: (order.index(pair[0]), pair[1]))
    )


def _sighting(
    way: Receiver, host: str, events: Sequence[ListenerEvent], signal: str, sent_at: float | None
) -> Sighting:
    own = [each for each in events if (each.way, each.host) == (way.value, host)]
    saw = [each for each in own if each.what == "saw"]
    died = [each for each in own if each.what == "died"]
    names = tuple(dict.fromkeys(each.signal for each in (*saw, *died)))
    step = Receiver.TASK if way in WORKERS else way
    over = [each for each in events if (each.way, each.what) == (step.value, "ended")]
    if died:
        fate, at = Fate.DIED, died[0].at
    elif saw:
        fate, at = Fate.HEARD, saw[0].at
    elif over:
        fate, at = (Fate.DIED if way in _TASKS else Fate.CARRIED_OFF), over[-1].at
        names = (signal,) if fate is Fate.DIED else ()
    else:
        return Sighting(way=way, host=host, fate=Fate.NOTHING)
    after = None if sent_at is None else max(0.0, at - sent_at)
    return Sighting(way=way, host=host, fate=fate, signals=names, at=at, after_s=after)
