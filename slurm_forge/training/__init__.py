"""Inside a rank: the run object and the parts that it is made of.  The only rooms besides
``slurm_forge.checkpoint`` that import torch; nothing is imported here, so that looking at the
package costs nothing.
"""
