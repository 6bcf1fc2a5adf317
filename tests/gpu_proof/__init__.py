"""The proof on real hardware: one command for whoever has a GPU; see scripts/gpu-proof."""
