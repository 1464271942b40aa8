"""The parameters whose gradients are exchanged, and what is kept for each, by name.

What is kept for the parameters of a bucket can be laid out as the bucket is, in one flat buffer: it
is then compressed as one without being copied together.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from adaptive.model.replicas import Replica
from compressors.kernels.blocks import Flag, fill_if

COMPILED = "_orig_mod."
"""What torch.compile puts before the names of a module's parameters; a state fits with and without.
"""


@dataclass(eq=False)
class ModelParameter:
    """What is kept for one parameter, flat. For half-precision parameters it is in float32.

    tensor: the parameter, as the optimizer has it. Where it is sharded (a DTensor), all that is
    kept is of the shard that is here.
    residual_dtype: bfloat16 to keep the residual of a parameter that is not float64 in that.
    residual: meaningless unless `filled`. velocity: with momentum correction only. started: it has
    had its first step, on this rank: one that has not used the parameter has no velocity. lag: the
    share of the momentum's lag that it moves with (`MomentumRule.with_lag`). stepped: the optimizer
    has stepped with a mean gradient of the parameter, which is so on all ranks or on none.
    """

    name: str
    tensor: Tensor
    residual: Tensor | None = None
    filled: bool = False
    velocity: Tensor | None = None
    started: bool = False
    lag: float = 1.0
    stepped: bool = False
    residual_dtype: torch.dtype = torch.float32

    @property
    def local(self) -> Tensor:
        """The values that are here: all of them, or the shard."""
        return local(self.tensor)

    @cached_property
    def numel(self) -> int:
        """Number of the elements that are here."""
        return self.local.numel()

    @property
    def largest(self) -> torch.Size:
        """Shape of the largest shard; alike on all ranks, as `local` need not be."""
        return largest_shard(self.tensor)

    @property
    def sharded(self) -> bool:
        """Only a shard of it is here, of which FSDP sets the gradient."""
        return hasattr(self.tensor, "to_local")

    @property
    def shard(self) -> str:
        """Which one is here; nothing if it is all of the parameter."""
        mesh = getattr(self.tensor, "device_mesh", None)
        return "" if mesh is None else f", shard {mesh.get_local_rank()} of {mesh.size()}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.tensor.dtype == torch.float64 else torch.float32

    def zeros(self, name: str = "", numel: int | None = None) -> Tensor:
        """For what is kept under this name; so many elements, or as many as the parameter has."""
        own = name == "residual" and self.dtype == torch.float32
        dtype = self.residual_dtype if own else self.dtype
        numel = self.numel if numel is None else numel
        return torch.zeros(numel, dtype=dtype, device=self.tensor.device)

    def open_residual(self) -> Tensor:
        """The residual, zero if it was empty."""
        if self.residual is None:
            self.residual = self.zeros("residual")
        elif not self.filled:
            self.residual.zero_()
        self.filled = True
        return self.residual

    def end_dense(self, nonfinite: Flag) -> None:
        """A dense step has sent all that was kept, unless some rank's gradient was nonfinite."""
        if nonfinite is False:
            self.filled = False
        elif self.filled:
            assert self.residual is not None
            fill_if(nonfinite ^ True, self.residual, 0.0)


class ModelParameters(dict[Tensor, ModelParameter]):
    """What is kept of each parameter of a model.

    replica: is not kept alive. residual_dtype: see `ModelParameter`.
    left_to_ddp: parameters, by name, whose gradients are exchanged as by DDP without a hook (see
    `is_left_to_ddp`); nothing is kept of these.
    """

    def __init__(
        self,
        replica: Replica,
        residual_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._replica = weakref.ref(replica)
        self.left_to_ddp: dict[str, Tensor] = {}
        sparse = _with_sparse_gradients(replica.module)
        for name, p in replica.parameters():
            name = name.replace(COMPILED, "")
            if p.is_complex() or p in sparse:
                self.left_to_ddp[name] = p
            else:
                self[p] = ModelParameter(name, p, residual_dtype=residual_dtype)

    def find(self, param: Tensor) -> ModelParameter:
        """Of a parameter in a bucket. RuntimeError if the model has it not."""
        if param in self:
            return self[param]
        replica = self._replica()
        named = replica.module.named_parameters() if replica and replica.model else ()
        names: dict[Tensor, str] = {p: name for name, p in named}
        raise RuntimeError(
            f"DDP reduces {names.get(param, 'a parameter of another model')}, which was not to "
            f"be reduced when the compressor was attached: freeze parameters before DDP(model)"
        )

    def by_name(self) -> dict[str, ModelParameter]:
        return {parameter.name: parameter for parameter in self.values()}

    def maybe_unused(self) -> bool:
        """A step may leave some of them without a gradient on all ranks."""
        replica = self._replica()
        return replica is None or replica.maybe_unused

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self), torch.device("cpu"))


def is_left_to_ddp(buffer: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether a bucket's gradients are exchanged as by DDP without a hook. DDP puts a parameter
    with a sparse gradient into a bucket of its own, and complex ones, as pairs of real numbers,
    into buckets of theirs."""
    return buffer.is_sparse or any(p.is_complex() for p in parameters)


def _with_sparse_gradients(module: nn.Module) -> set[Tensor]:
    """The parameters that DDP expects sparse gradients of."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return {each.weight for each in module.modules() if isinstance(each, kinds) and each.sparse}


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is here, in the same memory: of a DTensor the shard, else all of it."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # otherwise it would be a new tensor, with a history
        shard: Tensor = tensor.to_local()
    return shard


def storage_of(p: Tensor) -> tuple[Any, ...]:
    """Tells whether the elements that are here lie where they lay before."""
    here: Tensor = getattr(p, "_local_tensor", p)
    return here.untyped_storage()._cdata, here.storage_offset()


def largest_shard(p: Tensor) -> torch.Size:
    """Shape of the largest shard of a parameter, of all of it if it is not sharded."""
    mesh = getattr(p, "device_mesh", None)
    if mesh is None:
        return p.shape
    shape, dim = list(p.shape), p.placements[0].dim  # type: ignore[attr-defined]
    shape[dim] = -(-shape[dim] // mesh.size())
    return torch.Size(shape)


def is_dense(tensor: Tensor) -> bool:
    """Its elements fill a piece of memory, in whatever order: neither gaps nor overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def shaped(flat: Tensor, p: Tensor) -> Tensor:
    """Elements of a bucket, in the shape of their parameter. In a bucket they are in the order of
    memory if the parameter is dense there, else row by row, as `Tensor.reshape` takes them."""
    if not is_dense(p):
        return flat.view(p.shape)
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())


def like(values: Tensor, p: Tensor) -> Tensor:
    """Local values, as a tensor of the kind of `p`: if that is a DTensor, one that has these for
    its shard."""
    if not hasattr(p, "to_local"):
        return values
    if values.storage_offset():  # as which torch cannot copy a DTensor
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


def lay_out(parameters: Sequence[ModelParameter], names: Sequence[str]) -> dict[str, Tensor]:
    """Let the named tensors of a bucket's parameters lie one after the other in memory, with zeros
    where there were none. Returns a flat view of all, by name."""
    first, sizes = parameters[0], [parameter.numel for parameter in parameters]
    flat = {}
    for name in names:
        held: list[Tensor | None] = [getattr(parameter, name, None) for parameter in parameters]
        whole = _as_one(held)
        if whole is None:
            # Zeros that nobody has written yet take no memory on a CPU.
            whole = first.zeros(name, sum(sizes))
            for parameter, place, old in zip(parameters, whole.split(sizes), held, strict=True):
                setattr(parameter, name, place if old is None else place.copy_(old))
        flat[name] = whole
    return flat


def _as_one(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """A flat view of all, if each begins in memory where the one before ends; else None."""
    first = tensors[0]
    if first is None:
        return None
    storage, start = first.untyped_storage().data_ptr(), first.data_ptr()
    end = start
    for tensor in tensors:
        if tensor is None or tensor.data_ptr() != end:
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.nbytes
    return first.as_strided(((end - start) // first.element_size(),), (1,))
