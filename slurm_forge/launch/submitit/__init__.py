"""Front end for functions submitted through submitit."""
