"""PyTorch Lightning 2.6: ``LocalSGDStrategy`` for its Trainer, ``FabricStrategy`` for Fabric.

    from prsgd.integrations.lightning import LocalSGDStrategy

    trainer = Trainer(devices=2, strategy=LocalSGDStrategy(schedule=prsgd.every(8), overlap=1))
    trainer.fit(model, loader)

What differs from ``strategy="ddp"`` is told in docs/integrations/lightning.md.
"""

from __future__ import annotations

from prsgd.integrations import require

require("lightning", at_least="2.6", below="2.7")

# The check comes first: what follows fails with an older version, in words that do not say why.
from prsgd.integrations.lightning.fabric import FabricStrategy
from prsgd.integrations.lightning.trainer import LocalSGDStrategy

__all__ = ["FabricStrategy", "LocalSGDStrategy"]
