"""A captured run in a file, so that one served run serves several measurements."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import torch

from ..config import LocksConfig
from ..kernels.build_page_summaries import PageSummaries, RecordLayout
from .calibration import Calibration
from .capture import CapturedRun, CaptureError, LayerCapture

FORM = "locks-sglang capture 1"


def keep(run: CapturedRun, identity: dict[str, Any], file: Path) -> None:
    """Write every layer of a run, and what identifies it. The file takes four bytes for each number of the prompt's cache.

    Args:
        identity: ready for JSON.
    """
    layers = {}
    for layer_id in run.layer_ids:
        # Names, numbers and tensors alone, which `torch.load` reads without running anything.
        layer = dict(vars(run.layer(layer_id)))
        summaries: PageSummaries = layer["summaries"]
        layer["summaries"] = {name: getattr(summaries, name) for name in ("valid", "center", "record", "values")}
        layer["summaries"]["layout"] = dataclasses.asdict(summaries.layout)
        layer["calibration"] = dict(vars(layer["calibration"]))
        layers[layer_id] = layer
    made = {"form": FORM, "identity": identity, "config": dataclasses.asdict(run.config), "dtype": run.dtype, "layers": layers}
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(made, file)


class StoredRun:
    """A run that `keep` wrote.

    Args:
        file: of `keep`.

    Raises:
        CaptureError: it is no such file.
    """

    def __init__(self, file: Path) -> None:
        try:
            made = torch.load(file, mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise CaptureError(f"{file} is no capture: {str(error).splitlines()[0]}") from None
        if not isinstance(made, dict) or made.get("form") != FORM:
            raise CaptureError(f"{file} is no capture that this release reads; delete it and it is made anew")
        self.identity: dict[str, Any] = made["identity"]
        self.config = LocksConfig(**made["config"])
        self.dtype: torch.dtype = made["dtype"]
        self._layers: dict[int, dict[str, Any]] = made["layers"]

    @property
    def layer_ids(self) -> list[int]:
        """Layers of the model."""
        return list(self._layers)

    def layer(self, layer_id: int) -> LayerCapture:
        """One layer, on the device that it was captured on."""
        given = dict(self._layers[layer_id])
        summaries = dict(given.pop("summaries"))
        layout = RecordLayout(**summaries.pop("layout"))
        calibration = Calibration(**given.pop("calibration"))
        return LayerCapture(**given, summaries=PageSummaries(layout, **summaries), calibration=calibration)
