"""What the source does not show of the uses of torch: owners of private names, guards, builds."""

from __future__ import annotations

#: Private attributes of torch's objects and the class that has to give them one.
PRIVATE_OWNERS: dict[str, str] = {
    "_buffers": "torch.nn.Module",
    "_cdata": "torch.Generator",
    "_compiled_call_impl": "torch.nn.Module",
    "_enable_collectives_timing": "torch.distributed.ProcessGroup",
    "_flatten": "torch.distributed.device_mesh.DeviceMesh",
    "_get_backend": "torch.distributed.ProcessGroup",
    "_get_duration": "torch.distributed.Work",
    "_has_rebuilt_buckets": "torch.nn.parallel.DistributedDataParallel",
    "_index_queues": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "_is_compiled": "torch.cuda",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_modules": "torch.nn.Module",
    "_non_persistent_buffers_set": "torch.nn.Module",
    "_optimizer_state_dict_post_hooks": "torch.optim.Optimizer",
    "_optimizer_state_dict_pre_hooks": "torch.optim.Optimizer",
    "_parameters": "torch.nn.Module",
    "_per_optimizer_states": "torch.amp.grad_scaler.GradScaler",
    "_pin_memory_thread": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "_pin_memory_thread_done_event": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "_rebuild_buckets": "torch.distributed.Reducer",
    "_sampler_iter": "torch.utils.data.dataloader._BaseDataLoaderIter",
    "_shutdown": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "_spec": "torch.distributed.tensor.DTensor",
    "_state_dict_pre_hooks": "torch.nn.Module",
    "_sync_buffers": "torch.nn.parallel.DistributedDataParallel",
    "_timeout": "torch._C._distributed_c10d.Backend.Options",
    "_use_python_reducer": "torch.nn.parallel.DistributedDataParallel",
    "_version": "torch.Tensor",
    "_worker_pids_set": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "_worker_result_queue": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "_workers": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "_workers_done_event": "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
}
#: Private attributes of other libraries, in modules that use torch, too.
NOT_TORCHS = frozenset({"_current_frames"})

#: Calls that the source makes through another name, as it makes them.
INDIRECT = """
import torch
from torch.distributed.device_mesh import DeviceMesh
torch.cuda._is_compiled()
torch.xpu._is_compiled()
DeviceMesh._flatten(mesh, name)
DeviceMesh.get_group(mesh, name)
torch.distributed.ProcessGroup._get_backend(group, device)
torch.distributed.ProcessGroup._enable_collectives_timing(group)
torch.distributed.Work._get_duration(work)
torch.nn.parallel.DistributedDataParallel._sync_buffers(ddp)
torch.distributed.Reducer._rebuild_buckets(reducer)
torch.distributed.ProcessGroupNCCL.Options().config
"""

#: What a device module may lack, and the module that asks before it calls.
ASKED_FOR = """
import torch
module_of(device).memory_stats(device)
module_of(device).memory_summary(device)
module_of(device).memory_snapshot()
module_of(device).memory._record_memory_history(max_entries=max_entries)
module_of(device).memory._dump_snapshot(file)
module_of(device).is_current_stream_capturing()
"""

#: Names and calls that a check for them precedes, and where.
GUARDED: dict[str, str] = {
    "torch.distributed.distributed_c10d._abort_process_group": "rank/in_process_relaunch.py",
    "torch.distributed.checkpoint.state_dict_loader.load"
    "(…, storage_reader=…, planner=…, no_dist=…)": "torch_versions.py",
    "torch.distributed.checkpoint.state_dict_loader.load_state_dict": "torch_versions.py",
}

#: Missing from builds without CUDA.
CUDA_BUILDS = ("torch.distributed.ProcessGroupNCCL",)
