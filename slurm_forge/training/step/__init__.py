"""One update: ``gradient_guard`` judges the gradient before it is applied; called by ``Run``.

The global gradient norm, which clipping needs anyway, is compared with one limit; NaN and infinity
exceed every limit.  Where the optimizer can skip on the device, the host does not wait.

Entry: ``gradient_guard``.
"""
