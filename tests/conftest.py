"""Test session set-up: eight virtual CPU devices, and the operator torchvision's wheel lacks."""

import importlib
import importlib.util
import os

# Before jax is imported: sharding is tested on virtual devices, never on an accelerator.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if importlib.util.find_spec("torch") is not None:
    torch = importlib.import_module("torch")  # not `import`: it is absent on some Pythons
    torch.set_num_threads(1)
    if importlib.util.find_spec("torchvision") is not None:
        # The torchvision wheel beside a CPU build of torch registers fakes for these operators,
        # whose schemas only its missing C++ library defines.
        _torchvision_ops = torch.library.Library("torchvision", "DEF")
        for _name in ("nms", "qnms"):
            _torchvision_ops.define(
                f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
