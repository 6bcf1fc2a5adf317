"""Front end for the batch step of a job file: starts one agent per rank and relaunches them."""
