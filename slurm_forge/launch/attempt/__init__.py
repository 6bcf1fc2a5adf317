"""One attempt of a run: its loop, its claim, its evidence, its end; used by every front end.

``attempt_loop`` launches, has the end of the launch judged, and launches again, gives the job back
or stops.  A front end gives it what starts a launch (``FrontEnd``) and how the run comes back
(``Requeuer``); ``job_attempt`` is what front ends inside a job of Slurm's have in common.

``evidence`` collects what was not reported over the channel: error files, the end of the output of
ranks that died silently, what Slurm knows of their nodes and of the step.  Where an attempt left no
end in the journal, ``post_mortem`` asks Slurm how it ended before the next one begins, so that
every end has a cause and is charged to a budget.  ``requeuer`` records strikes against nodes and
carries out the decision.

Entry: ``attempt_loop``.
"""
