"""Front end for a command that does not import slurm_forge; started by ``exec`` and job files.

A sentinel step (``signal_listener``) receives the signals that the batch step does not;
``conductor`` tells the program to save and stop by its convention.  A rank that joins the hub
(``launch.attach``) makes it an ordinary launch.

Entry: ``main``.
"""
