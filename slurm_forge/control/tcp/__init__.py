"""What the kernel reports about TCP connections; called by the hub and by rank monitors.

Entry: ``tcp_info``.
"""
