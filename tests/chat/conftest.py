"""The second operator that torchvision's wheel lacks, where tests/conftest.py leaves it out."""

import importlib.util

if importlib.util.find_spec("torchvision") is not None:
    import torch

    if not hasattr(torch.ops.torchvision, "qnms"):
        _torchvision_ops = torch.library.Library("torchvision", "FRAGMENT")
        _torchvision_ops.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
