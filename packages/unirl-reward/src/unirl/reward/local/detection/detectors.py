"""Object detectors of transformers behind one protocol.

Legend: H W pixels of an image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from unirl.reward.local.detection.geneval_rules import Detection
from unirl.reward.local.pretrained import check_dtype, check_source, load_transformers
from unirl.types.errors import ConfigError
from unirl.types.precision import DTYPES


class Detector(Protocol):
    """Finds objects of known classes."""

    @property
    def labels(self) -> Sequence[str]:
        """The classes."""

    def modules(self) -> list[nn.Module]:
        """What offloading moves."""

    def detect(self, pictures: Sequence[Image.Image], threshold: float) -> list[list[Detection]]:
        """Objects of each image with a score above `threshold`."""


class _PretrainedDetector(ABC):
    """Model and image processor from a folder or the hub, on PIL, one batch for images of one size."""

    _auto_class: str

    def __init__(self, *, model: str, dtype: str, device: str) -> None:
        owner = f"detector {model}"
        check_dtype(dtype, owner)
        transformers = load_transformers(owner)
        check_source(model, f"{owner}: model")
        try:
            loaded = getattr(transformers, self._auto_class).from_pretrained(model, dtype=DTYPES[dtype])
            # The PIL processor, not the torchvision one: rewards must not depend on what else is installed.
            self._processor: Any = transformers.AutoImageProcessor.from_pretrained(model, backend="pil")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{owner}: cannot load it as {type(self).__name__}: {error}") from error
        self._model: Any = loaded.to(device).eval().requires_grad_(False)  # Any: transformers is optional

    @property
    def labels(self) -> Sequence[str]:
        """The classes that the model was trained on."""
        return list(self._model.config.id2label.values())

    def modules(self) -> list[nn.Module]:
        """The model."""
        return [self._model]

    @torch.no_grad()
    def detect(self, pictures: Sequence[Image.Image], threshold: float) -> list[list[Detection]]:
        """Objects of each image with a score above `threshold`."""
        ready = self._processor(images=list(pictures), return_tensors="pt").to(self._model.device, self._model.dtype)
        return self._read(ready, [(picture.height, picture.width) for picture in pictures], threshold)

    @abstractmethod
    def _read(self, ready: Any, sizes: list[tuple[int, int]], threshold: float) -> list[list[Detection]]: ...


class BoxDetector(_PretrainedDetector):
    """Boxes of a detector with fixed classes: DETR, RT-DETR, Deformable DETR, YOLOS and the like.

    model: folder or hub id. dtype: "fp32", "bf16" or "fp16". Extra `geneval`.
    Raises ConfigError if the model cannot be loaded.
    """

    _auto_class = "AutoModelForObjectDetection"

    def __init__(self, *, model: str, dtype: str = "fp32", device: str = "cpu") -> None:
        super().__init__(model=model, dtype=dtype, device=device)

    def _read(self, ready: Any, sizes: list[tuple[int, int]], threshold: float) -> list[list[Detection]]:
        found = self._processor.post_process_object_detection(
            _in_float32(self._model(**ready)), threshold=threshold, target_sizes=sizes
        )
        return [_boxes(each, [self._model.config.id2label[i] for i in each["labels"].tolist()]) for each in found]


class MaskDetector(_PretrainedDetector):
    """Instances with masks of Mask2Former or MaskFormer; an instance's box is that of its mask.

    model: folder or hub id of an instance segmentation model; GenEval was published with Mask2Former Swin-S on COCO.
    dtype: "fp32", "bf16" or "fp16". Extra `geneval`. Raises ConfigError if the model cannot be loaded.
    """

    model_billions: ClassVar[float] = 0.069
    """Size of Mask2Former Swin-S, for `trainer check --memory`."""
    _auto_class = "AutoModelForUniversalSegmentation"

    def __init__(
        self,
        *,
        model: str = "facebook/mask2former-swin-small-coco-instance",
        dtype: str = "fp32",
        device: str = "cpu",
    ) -> None:
        super().__init__(model=model, dtype=dtype, device=device)

    def _read(self, ready: Any, sizes: list[tuple[int, int]], threshold: float) -> list[list[Detection]]:
        found = self._processor.post_process_instance_segmentation(
            _in_float32(self._model(**ready)), threshold=threshold, target_sizes=sizes, return_binary_maps=True
        )
        return [
            [
                Detection(self._model.config.id2label[info["label_id"]], info["score"], _around(mask), mask)
                for info, mask in zip(each["segments_info"], each["segmentation"].bool().cpu(), strict=False)
                if info["score"] > threshold
            ]
            for each in found
        ]


class OpenVocabularyDetector(_PretrainedDetector):
    """Boxes of the classes that you name, by OWL-ViT or OWLv2.

    model: folder or hub id. labels: the classes, in words. template: how a class is put to the model.
    dtype: "fp32", "bf16" or "fp16". Extra `geneval`. Scores of these models are lower than those of closed detectors:
    set the thresholds of the scorer accordingly. Raises ConfigError if the model cannot be loaded or without labels.
    """

    model_billions: ClassVar[float] = 0.155
    """Size of OWLv2 base, for `trainer check --memory`."""
    _auto_class = "AutoModelForZeroShotObjectDetection"

    def __init__(
        self,
        *,
        labels: Sequence[str],
        model: str = "google/owlv2-base-patch16-ensemble",
        template: str = "a photo of a {label}",
        dtype: str = "fp32",
        device: str = "cpu",
    ) -> None:
        if not labels or "{label}" not in template:
            raise ConfigError(f"detector {model}: it needs labels, and {{label}} in its template {template!r}")
        super().__init__(model=model, dtype=dtype, device=device)
        tokenizer = load_transformers(f"detector {model}").AutoTokenizer.from_pretrained(model)
        self._labels = list(labels)
        length = self._model.config.text_config.max_position_embeddings
        asked = [template.replace("{label}", label) for label in self._labels]
        tokens = tokenizer(asked, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        self._tokens = {key: tokens[key] for key in ("input_ids", "attention_mask")}

    @property
    def labels(self) -> Sequence[str]:
        """The classes that were named."""
        return self._labels

    def _read(self, ready: Any, sizes: list[tuple[int, int]], threshold: float) -> list[list[Detection]]:
        texts = {key: value.repeat(len(sizes), 1).to(self._model.device) for key, value in self._tokens.items()}
        found = self._processor.post_process_object_detection(
            _in_float32(self._model(**ready, **texts)), threshold=threshold, target_sizes=sizes
        )
        return [_boxes(each, [self._labels[i] for i in each["labels"].tolist()]) for each in found]


def _in_float32(outputs: Any) -> Any:  # Any: every model has its own output class
    for key, value in outputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            outputs[key] = value.float()
    return outputs


def _boxes(found: Any, labels: Sequence[str]) -> list[Detection]:  # Any: a dict of transformers
    """Detections of boxes and scores as transformers gives them."""
    boxes = [(x0, y0, x1, y1) for x0, y0, x1, y1 in found["boxes"].tolist()]
    return [
        Detection(label, score, box) for label, score, box in zip(labels, found["scores"].tolist(), boxes, strict=True)
    ]


def _around(mask_HW: Tensor) -> tuple[float, float, float, float]:
    """The smallest box around a mask, its far corner one past the last pixel."""
    rows, columns = mask_HW.any(dim=1).nonzero().flatten(), mask_HW.any(dim=0).nonzero().flatten()
    return columns[0].item(), rows[0].item(), columns[-1].item() + 1, rows[-1].item() + 1
