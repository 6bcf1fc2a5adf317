"""A job file and a site become sbatch options, a script and an environment; called by ``submit``.

Pure.  ``launch_command`` is what a script starts, ``containers`` speaks the container runtimes'
languages, ``signal_convention`` those of foreign programs.

Entry: ``batch_script``.
"""
