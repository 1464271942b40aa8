"""The parameters whose gradients are exchanged, and the state that is kept for each."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adaptive.model.replicas import Replica
from compressors.kernels.blocks import Flag, fill_if

COMPILED = "_orig_mod."
"""The prefix of parameter names in a module that torch.compile has wrapped. Names in this library
have no prefix, so that a state of a compiled model fits the same model uncompiled."""


@dataclass(eq=False)
class ModelParameter:
    """The state that is kept for one parameter, in flat tensors: float64 for a float64 parameter,
    else float32.

    tensor: the parameter, as the optimizer has it. A sharded parameter is a DTensor, and its state
    is that of the shard on this rank.
    residual: its values mean nothing unless `has_residual`. residual_dtype: bfloat16 keeps a
    residual in bfloat16 that would be in float32. velocity: with momentum correction only. started:
    the velocity has moved on this rank. momentum_share: the share with which the velocity moves
    (`MomentumRule.with_share`). stepped: the optimizer has stepped with a mean gradient of the
    parameter; the same on all ranks. sent_dtype: the dtype in which the gradient arrives, and in
    which a dense step sends the gradient; None: that of the parameter.
    """

    name: str
    tensor: Tensor
    residual: Tensor | None = None
    has_residual: bool = False
    velocity: Tensor | None = None
    started: bool = False
    momentum_share: float = 1.0
    stepped: bool = False
    residual_dtype: torch.dtype = torch.float32
    sent_dtype: torch.dtype | None = None

    @property
    def local(self) -> Tensor:
        """The elements on this rank: all of them, or the shard."""
        return local(self.tensor)

    @cached_property
    def numel(self) -> int:
        """Number of elements on this rank."""
        return self.local.numel()

    @property
    def largest(self) -> torch.Size:
        """Shape of the largest shard: the same on all ranks, unlike that of `local`."""
        return largest_shard(self.tensor)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of an element of the gradient, as a dense step sends it."""
        return (self.sent_dtype or self.tensor.dtype).itemsize

    @property
    def sharded(self) -> bool:
        """Whether this rank has only a shard of the parameter. FSDP then sets its gradient."""
        return hasattr(self.tensor, "to_local")

    @property
    def shard(self) -> str:
        """Which shard this rank has, in words; "" if it has the whole parameter."""
        mesh = getattr(self.tensor, "device_mesh", None)
        return "" if mesh is None else f", shard {mesh.get_local_rank()} of {mesh.size()}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.tensor.dtype == torch.float64 else torch.float32

    def zeros(self, name: str = "", numel: int | None = None) -> Tensor:
        """A new flat tensor for the state of this name. numel: number of elements; None: that of
        the parameter."""
        may_be_narrow = name == "residual" and self.dtype == torch.float32
        dtype = self.residual_dtype if may_be_narrow else self.dtype
        numel = self.numel if numel is None else numel
        return torch.zeros(numel, dtype=dtype, device=self.tensor.device)

    @property
    def unsent(self) -> Tensor | None:
        """The residual; None if it is empty."""
        return self.residual if self.has_residual else None

    def open_residual(self) -> Tensor:
        """The residual, to be written to; zero if it was empty. Afterwards the residual counts as
        nonempty."""
        if self.residual is None:
            self.residual = self.zeros("residual")
        elif not self.has_residual:
            self.residual.zero_()
        self.has_residual = True
        return self.residual

    def end_dense(self, nonfinite: Flag) -> None:
        """Empty the residual, which a dense step has sent, unless some rank's gradient was
        nonfinite."""
        if nonfinite is False:
            self.has_residual = False
        elif self.unsent is not None:
            fill_if(nonfinite ^ True, self.unsent, 0.0)


class ModelParameters(dict[Tensor, ModelParameter]):
    """The state of each parameter of a model whose gradients are exchanged, by the parameter.

    replica: the replica of the model, by a weak reference. residual_dtype: see `ModelParameter`.
    left_to_ddp: by name, the parameters whose gradients are exchanged as by DDP without a hook (see
    `is_left_to_ddp`). They have no state.
    """

    def __init__(
        self,
        replica: Replica,
        residual_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._replica = weakref.ref(replica)
        self.left_to_ddp: dict[str, Tensor] = {}
        kinds = nn.Embedding | nn.EmbeddingBag
        embeddings = (each for each in replica.module.modules() if isinstance(each, kinds))
        sparse = {each.weight for each in embeddings if each.sparse}
        for name, p in replica.parameters():
            name = name.replace(COMPILED, "")
            if p.is_complex() or p in sparse:
                self.left_to_ddp[name] = p
            else:
                sent_dtype = replica.sent_dtype(p)
                self[p] = ModelParameter(
                    name, p, residual_dtype=residual_dtype, sent_dtype=sent_dtype
                )

    def find(self, param: Tensor) -> ModelParameter:
        """The state of a parameter in a bucket. RuntimeError for a parameter of another model."""
        if (found := self.get(param)) is not None:
            return found
        replica = self._replica()
        named = replica.module.named_parameters() if replica and replica.model else ()
        names: dict[Tensor, str] = {p: name for name, p in named}
        who, advice = "DDP", "freeze parameters before DDP(model), or for a time after attach()"
        if hasattr(param, "to_local"):
            advice = "detach() it before parameters are unfrozen, and attach a new one after that"
            who = "FSDP"
        raise RuntimeError(
            f"{who} reduces {names.get(param, 'a parameter of another model')}, which was not to "
            f"be reduced when the compressor was attached: {advice}"
        )

    def by_name(self) -> dict[str, ModelParameter]:
        return {parameter.name: parameter for parameter in self.values()}

    def maybe_unused(self) -> bool:
        """Whether a step may leave some parameters without a gradient on all ranks."""
        replica = self._replica()
        return replica is None or replica.maybe_unused

    def moved(self) -> None:
        """Called after this library has moved parameters between a step and the next forward."""
        replica = self._replica()
        if replica is not None:
            replica.moved()

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self), torch.device("cpu"))


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups of an optimizer."""
    return (p for group in optimizer.param_groups for p in group["params"])


def is_left_to_ddp(buffer: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether the gradients of this bucket are exchanged as by DDP without a hook: sparse gradients
    and complex gradients. DDP gives a parameter with a sparse gradient a bucket of its own. It puts
    complex gradients (as pairs of real numbers) and real gradients into different buckets, so the
    first parameter shows the kind of all."""
    return buffer.is_sparse or any(p.is_complex() for p in parameters[:1])


def local(tensor: Tensor) -> Tensor:
    """The elements of a tensor on this rank, in the same memory: the shard of a DTensor; any other
    tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # otherwise `to_local` would return a new tensor, with a history
        shard: Tensor = tensor.to_local()
    return shard


def storage_of(p: Tensor) -> tuple[Any, ...]:
    """A key of the memory of the elements on this rank. Other memory has another key."""
    here: Tensor = getattr(p, "_local_tensor", p)
    return here.untyped_storage()._cdata, here.storage_offset()


def largest_shard(p: Tensor) -> torch.Size:
    """Shape of the largest shard of a parameter; its own shape if it is not sharded."""
    mesh = getattr(p, "device_mesh", None)
    if mesh is None:
        return p.shape
    shape, dim = list(p.shape), p.placements[0].dim  # type: ignore[attr-defined]
    shape[dim] = -(-shape[dim] // mesh.size())
    return torch.Size(shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def shaped(flat: Tensor, p: Tensor) -> Tensor:
    """A view of a parameter's elements in a bucket (flat) in the parameter's shape. In a bucket the
    elements have the order of the parameter's memory if this memory is dense, else the order of
    `Tensor.reshape`."""
    if not is_dense(p):
        return flat.view(p.shape)
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())


def like(values: Tensor, p: Tensor) -> Tensor:
    """The values of this rank's elements as a tensor like `p`: for a DTensor, a DTensor with
    `values` as its shard; else `values`."""
    if not hasattr(p, "to_local"):
        return values
    if values.storage_offset():  # torch cannot copy a DTensor whose shard has an offset
        first = values.storage_offset() * values.element_size()
        memory = values.untyped_storage()[first : first + values.nbytes]
        values = values.new_empty(0).set_(memory, 0, values.shape, values.stride())
    with torch.no_grad():
        whole: Tensor = type(p).from_local(  # type: ignore[attr-defined]
            values,
            p.device_mesh,  # type: ignore[attr-defined]
            p.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
    return whole
