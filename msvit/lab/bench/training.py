"""A training step as a call: forward, loss, backward, optimizer. What `msvit train` does, without data and clipping.

    step = training_step(call, subject, config, gated=True)
    step(images)

Weights are float32; on a GPU the forward runs under autocast. The gate samples its decisions and gets gradients of the
task and of its own loss (GBaS by default). The learning rate is so small that weights, and with them the tokens, stay.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.lab.bench.rows import Subject
from msvit.lab.config import Config
from msvit.lab.data import Batch
from msvit.lab.timing import Call
from msvit.lab.training.objective import GateObjective, compute_losses, make_objective
from msvit.types import MSViTOutput

RATE = 1e-9


def training_step(call: Call, subject: Subject, config: Config, gated: bool) -> Call:
    """`gated`: the call is a model with a gate, not the dense host."""
    device = next(subject.host.parameters()).device
    amp = config.optim.precision == "bf16"
    objective = make_objective(config, subject.wrap()) if gated else GateObjective()
    trained = call if gated and isinstance(call, nn.Module) else subject.host
    modules = (trained, objective.module)
    weights = [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, fused=device.type == "cuda")
    classes = int(subject.host.num_classes)  # type: ignore[arg-type]
    labels: dict[int, Tensor] = {}

    def step(images: Tensor) -> None:
        num = images.shape[0]
        if num not in labels:
            labels[num] = torch.randint(classes, (num,), generator=torch.Generator().manual_seed(0)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            output = call(images)
            if isinstance(output, MSViTOutput):
                loss = compute_losses(output, Batch(images, labels[num], None), objective, config)["loss"]
            else:
                loss = F.cross_entropy(output.float(), labels[num])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
