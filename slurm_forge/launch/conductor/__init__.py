"""One launch: reads what ranks and Slurm report and decides how the launch ends. Used by the front
ends.
"""
