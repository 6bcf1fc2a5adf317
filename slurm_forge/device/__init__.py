"""All that depends on the kind of accelerator; called by ``training`` and ``checkpoint``.

Everything goes through the device module that torch has for each kind (``torch.cuda``, also for
ROCm, ``torch.xpu``, the module of a PrivateUse1 backend), whose names are the same.  ``torch``'s
own ``torch.accelerator`` (2.6 and later) has neither the state of the generators, nor events that
tell the time, nor what memory is free, and its memory figures only since 2.9.

Entry: ``accelerator``; streams and events: ``streams``; memory: ``memory``; NCCL: ``groups``.
"""
