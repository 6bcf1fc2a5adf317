"""What the kernel reports of TCP connections."""
