"""What the kernel reports of TCP connections; called by the hub and by rank monitors.

Entry: ``tcp_info``.
"""
