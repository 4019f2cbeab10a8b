"""A model's image in shared memory, of random weights; and the same model as PyTorch has it."""

import mmap
import os
from pathlib import Path

import torch
from bench.swap.shapes import Shape
from torch import nn
from transformers import initialization

from dormouse.core.types import Bytes, round_up
from dormouse.model import huggingface, skeleton
from dormouse.model.access import first_use_order
from dormouse.model.loaded import prepared
from dormouse.model.places import find_places
from dormouse.model.profiling import KeptTensor, kept_tensors, run
from dormouse.model.tasks import wrapped
from dormouse.store.image import laid_out
from dormouse.store.index import PAGE_BYTES, HuggingFaceSkeleton, ImageIndex, TensorEntry, write_index
from dormouse.tensors import Signature
from dormouse.wire import Extent

BLOCK = 1 << 22
"""So many random numbers are made; weights are that block over and over, from another start each."""


class Image:
    """A model's image in shared memory, made without ever making the model."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self.shape = shape
        self.directory = directory
        shape.config.architectures = [shape.architecture]
        shape.config.save_pretrained(directory)
        self._skeleton = HuggingFaceSkeleton(shape.architecture, shape.task)
        with initialization.no_init_weights():
            template = self._template()
        self.index = self._index(template)
        write_index(directory, self.index)
        size_bytes = round_up(self.index.image_bytes, PAGE_BYTES)
        self._fd = os.memfd_create("image")
        os.ftruncate(self._fd, size_bytes)
        self._memory = mmap.mmap(self._fd, size_bytes)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.extents = (Extent(0, size_bytes),)
        self._fill(template)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def view(self, offset: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset:end].view(dtype).view(shape)

    def plain(self, device: torch.device) -> nn.Module:
        """The model as PyTorch has it: tensors of its own, on that device."""
        module = skeleton.rebuild(self.directory, self.index, ())
        skeleton.bind(module, self.index, lambda *place: self.view(*place).to(device, copy=True))
        return module

    def _template(self) -> nn.Module:
        """On the CPU, with real buffers and parameters that nobody has written to, so that they take no memory."""
        model_class = huggingface.class_of(self.shape.architecture, self.directory)
        config = model_class.config_class.from_pretrained(self.directory)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.shape.dtype))
        try:
            return prepared(wrapped(model_class(config), self.shape.task, self.directory), None)
        finally:
            torch.set_default_dtype(before)

    def _index(self, template: nn.Module) -> ImageIndex:
        kept = kept_tensors(template)
        order = self._order(template, kept)
        tensors, weight_bytes, image_bytes = laid_out([_entry(kept[place]) for place in order], ())
        return ImageIndex(
            tensors, weight_bytes, image_bytes, (), self._skeleton, Signature((), ()), "", self.shape.dtype
        )

    def _order(self, template: nn.Module, kept: list[KeptTensor]) -> list[int]:
        """First-use order, from a forward pass over memory that nobody has written to."""
        used, _ = first_use_order(template, [item.tensor for item in kept], lambda: run(template, self.shape.inputs))
        seen = set(used)
        return [*used, *(place for place in range(len(kept)) if place not in seen)]

    def _fill(self, template: nn.Module) -> None:
        values = {place.name: place for place in find_places(template)}
        block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).to(getattr(torch, self.shape.dtype))
        for number, entry in enumerate(self.index.tensors):
            target = self.view(entry.offset, getattr(torch, entry.dtype), entry.shape)
            if entry.kind == "parameter" and len(entry.shape) > 1:
                _fill_random(target, block.roll(-number * 4099) if number < 64 else block, target[0].numel() ** -0.5)
            elif entry.kind == "parameter":
                target.fill_(1.0 if entry.names[0].endswith("weight") else 0.0)
            else:
                source = values[entry.names[0]].tensor
                assert source is not None
                target.copy_(source)

    def close(self) -> None:
        os.close(self._fd)


def _entry(item: KeptTensor) -> TensorEntry:
    return TensorEntry(
        names=tuple(place.name for place in item.places),
        kind=item.kind,
        dtype=str(item.tensor.dtype).removeprefix("torch."),
        shape=tuple(item.tensor.shape),
        offset=0,
        size_bytes=item.tensor.nbytes,
    )


def _fill_random(target: torch.Tensor, block: torch.Tensor, scale: float) -> None:
    flat = target.view(-1)
    whole = flat.numel() // len(block)
    flat[: whole * len(block)].view(whole, len(block)).copy_((block * scale).expand(whole, len(block)))
    flat[whole * len(block) :].copy_(block[: flat.numel() - whole * len(block)] * scale)
