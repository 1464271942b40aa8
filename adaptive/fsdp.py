"""The compressed exchange between replicas of a model that torch's FSDP2 (`fully_shard`) shards.

A mesh has two dimensions, (replicas, shards). `fully_shard` is called with the second dimension:
inside a replica, over the fast network, torch gathers parameters and reduce-scatters gradients as
usual. For each module it then calls the all-reduce hook (`FSDPModule.set_all_reduce_hook`, public
since torch 2.7) with the flat, reduced shard. The hook makes the exchange between replicas, over
the slow network, among the ranks that hold the same shard.

The rest is as with DDP. A module takes the place of DDP's bucket; parameters and residuals are
shards. All ranks of the mesh make the same decisions, by the sum of everyone's statistics.

The differences from DDP:

- The hook must have written the mean when it returns. On a CPU backward waits for each exchange; on
  a device backward's stream waits.
- No module is marked as the last one. A step ends when backward ends. Modules without a gradient
  are not reduced, and FSDP leaves parameters without a gradient out of the others.
- FSDP pads shards to equal size before it reduces them. Padding is not exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from adaptive.model.parameters import largest_shard, local
from adaptive.model.replicas import Exchanging, Replica
from adaptive.network.collectives import groups_joined, join_groups
from adaptive.network.link import done_with
from adaptive.step.config import Settings
from adaptive.step.reducer import SendsItself
from adaptive.step.synchronisation import EveryStep


@dataclass(frozen=True)
class ShardBucket:
    """The gradients of one module in one backward, with the methods of `dist.GradBucket` that the
    session uses."""

    number: int
    flat: Tensor
    of: Sequence[Tensor]

    def index(self) -> int:
        """The number of this bucket in its backward, from 0 on."""
        return self.number

    def is_last(self) -> bool:
        """True: FSDP waits for each bucket, so no bucket may wait for a later one."""
        return True

    def buffer(self) -> Tensor:
        """The gradients of this rank's shards, one after the other."""
        return self.flat

    def parameters(self) -> list[Tensor]:
        """The sharded parameters, in the order of the buffer."""
        return list(self.of)


@dataclass(eq=False)
class _Unit:
    """The parameters that FSDP reduces together.

    name: of their module. group: FSDP's object for them. arrived: the parameters that have got a
    gradient since the unit was last reduced.
    """

    name: str
    group: Any
    parameters: list[Any]
    arrived: set[DTensor] = field(default_factory=set)

    def reduced(self, numel: int) -> list[DTensor]:
        """The parameters whose gradients are in a flat tensor of `numel` elements. FSDP leaves out
        parameters without a gradient (unless `set_reduce_scatter_unused_params` is on)."""
        trained = [p for p in self.parameters if p.requires_grad]
        arrived, self.arrived = self.arrived, set()
        for found in (trained, [p for p in trained if p in arrived]):
            if sum(largest_shard(p).numel() for p in found) == numel:
                return found
        raise RuntimeError(
            f"FSDP has reduced {numel} elements of {self.name or 'the root module'}, and it is not "
            f"known of which of its parameters: before the first backward call its forward() once, "
            f"under torch.no_grad(), say (register_fsdp_forward_method's methods run no hooks)"
        )


class ShardedReplica(Replica):
    """One replica of a sharded model. group: the ranks that hold the same shard, one of each
    replica. everyone: all ranks of the mesh."""

    def __init__(self, root: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(root)
        self.mesh = mesh
        self.group, self.everyone = mesh.get_group(0), _group_of(mesh)
        self._unused = False  # some backward has left a parameter out
        self._units = list(_units(root))
        self._reduced: set[Tensor] = set()  # parameters reduced in this backward
        self._buckets = 0  # number of buckets so far in this backward
        self._kept: list[Tensor] = []

    @classmethod
    def of(cls, root: Any, mesh: Any, settings: Settings) -> ShardedReplica:
        """The replica of this model, made if there is none. TypeError or ValueError if the model
        cannot be compressed."""
        root = getattr(root, "_orig_mod", root)  # of torch.compile
        _check(root, mesh, settings)
        found = cls._found(root)
        return found if found is not None and found.mesh == mesh else cls(root, mesh)

    @property
    def module(self) -> nn.Module:
        root: nn.Module = self.model
        return root

    @property
    def maybe_unused(self) -> bool:
        return self._unused

    def sent_dtype(self, p: Tensor) -> torch.dtype:
        policy = next(unit.group.mp_policy for unit in self._units if p in set(unit.parameters))
        return _exchanged_in(policy.reduce_dtype or policy.param_dtype or p.dtype, p.dtype)

    def moved(self) -> None:
        """Free the whole parameters, of before the move, that a forward without backward leaves."""
        for unit in self._units:
            unit.group.modules[0].reshard()

    def check_free(self) -> None:
        """RuntimeError if the script has set an all-reduce hook of its own. FSDP takes one: setting
        this library's would replace it, and it has replaced this library's if it was set later."""
        for unit in self._units:
            hook = getattr(unit.group, "_all_reduce_hook", None)
            function = getattr(getattr(hook, "func", None), "__func__", None)  # of `partial`
            if hook is not None and function is not ShardedReplica._reduce:
                raise RuntimeError(
                    f"{unit.name or 'the root module'} has an all-reduce hook already "
                    f"({getattr(hook, '__name__', '?')}); FSDP takes one, and attach_fsdp sets it"
                )

    def _ignored(self) -> set[str]:
        managed = {p for unit in self._units for p in unit.parameters}
        return {name for name, p in self.module.named_parameters() if p not in managed}

    def start(self, exchanging: Exchanging) -> None:
        """Broadcast parameters and buffers of the first replica to all others, and start handing
        over buckets. RuntimeError on all ranks if torch cannot average gradients inside a replica.
        """
        _check_mean(self.mesh)
        with torch.no_grad():
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                _broadcast(local(tensor), self.group)
        super().start(exchanging)

    def _register(self) -> None:
        self.module.register_forward_pre_hook(self._forward_begins)
        for unit in self._units:
            for module in unit.group.modules:
                module.set_all_reduce_hook(partial(self._reduce, unit))
                # FSDP's own hooks are not traced by torch.compile either. A traced one would not
                # register autograd hooks.
                marks = torch.compiler.disable(_ArrivalMarks(unit))
                module.register_forward_pre_hook(marks)

    def _forward_begins(self, *_: Any) -> None:
        self._buckets = 0  # an earlier backward may have raised before its end

    def _reduce(self, unit: _Unit, flat: Tensor) -> None:
        """Write the mean over the replicas to `flat`, the padded shards of a unit's gradients."""
        self._check_scale(unit, flat)
        parameters = unit.reduced(flat.numel())
        assert self.exchanging is not None
        if self._buckets == 0:
            self.check_free()  # another hook, set after this one, would leave its module out
            self._reduced.clear()
            # FSDP's own callback, which may have modules left to reduce, is queued already.
            Variable._execution_engine.queue_callback(self._end_backward)
        self._reduced.update(parameters)
        numels = [local(p).numel() for p in parameters]
        parts = flat.split([largest_shard(p).numel() for p in parameters])
        shards = [part[:numel] for part, numel in zip(parts, numels, strict=True)]
        buffer = flat if sum(numels) == flat.numel() else torch.cat(shards)
        buffer = buffer.to(_exchanged_in(buffer.dtype, parameters[0].dtype))
        bucket: Any = ShardBucket(self._buckets, buffer, parameters)  # replaces a GradBucket
        mean = self.exchanging.reduce(bucket, at_once=True).value()
        self._buckets += 1
        if mean.data_ptr() != flat.data_ptr():
            for shard, of_mean in zip(shards, mean.split(numels), strict=True):
                shard.copy_(of_mean)
        if flat.device.type != "cpu":
            # FSDP may free `flat` while the hook's stream still uses it.
            self._kept.append(flat)

    def _check_scale(self, unit: _Unit, flat: Tensor) -> None:
        """RuntimeError if torch would scale the hook's result, or add to it."""
        shards, exact = self.mesh.size(1), flat.dtype in (torch.float32, torch.bfloat16)
        if not getattr(unit.group, "all_reduce_grads", True):
            raise RuntimeError(
                "set_requires_all_reduce(False) has no effect before a hook: accumulate gradients "
                "under set_requires_gradient_sync(False)"
            )
        factor = getattr(unit.group, "gradient_divide_factor", None)
        if factor is not None:
            raise RuntimeError(
                f"set_gradient_divide_factor must not be called with attach_fsdp, which exchanges "
                f"means between replicas (torch would sum there); got {factor!r}: scale the loss"
            )
        if (shards > 2 and not exact) or getattr(
            unit.group, "force_sum_reduction_for_comms", False
        ):
            raise RuntimeError(
                "FSDP divides gradients once more after the hook if it reduces them in "
                f"{flat.dtype} or is forced to sum them: "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )

    def _end_backward(self) -> None:
        """Called once all modules with gradients have been reduced."""
        self._buckets = 0
        self._kept.clear()
        if not self._unused:
            trained = (p for unit in self._units for p in unit.parameters if p.requires_grad)
            self._unused = any(p not in self._reduced for p in trained)
        grads = [local(p.grad) for _, p in self.parameters() if p.grad is not None]
        assert self.exchanging is not None
        self.exchanging.end_backward(done_with(grads[-1] if grads else torch.empty(0))).wait()


class _ArrivalMarks:
    """A forward pre-hook that registers autograd hooks, which record the parameters of a unit that
    get gradients. (Autograd sees unsharded parameters, which exist from the first forward on.)"""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit
        self._seen: dict[DTensor, Tensor] = {}

    def __call__(self, module: nn.Module, args: Any) -> None:
        for sharded in self._unit.group.fsdp_params:
            p, whole = sharded.sharded_param, getattr(sharded, "_unsharded_param", None)
            if whole is not None and whole.requires_grad and self._seen.get(p) is not whole:
                self._seen[p] = whole
                whole.register_post_accumulate_grad_hook(lambda _, p=p: self._unit.arrived.add(p))


def _units(root: Any) -> Iterator[_Unit]:
    """The units of FSDP, in the order of modules. RuntimeError if this version of torch has changed
    the private attributes that tell a module's parameters and their order."""
    seen = set()
    for name, module in root.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        try:
            group = module._get_fsdp_state()._fsdp_param_group
            parameters = [] if group is None else [each.sharded_param for each in group.fsdp_params]
        except AttributeError as error:
            raise RuntimeError(
                f"this version of torch keeps the parameters of an FSDP module where they are not "
                f"found: {error}"
            ) from error
        except AssertionError as error:  # of several groups
            raise ValueError(
                f"{name or 'the root module'} is sharded over several meshes: shard_placement_fn "
                f"must choose dimensions only, all of them over the mesh's second dimension"
            ) from error
        if group is not None and group not in seen:
            seen.add(group)
            yield _Unit(name, group, parameters)


def _exchanged_in(reduced: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are exchanged that FSDP has reduced in the dtype `reduced`:
    narrow ones as they are, others in the precision of the memory. dtype: of their parameters."""
    if reduced.itemsize < torch.float32.itemsize:
        return reduced
    return torch.float64 if dtype == torch.float64 else torch.float32


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Broadcast a tensor from the first rank of the group. Process groups do not support all
    dtypes, and ignore strides. So the bytes of a contiguous tensor are sent, a copy if needed."""
    if not tensor.numel():
        return
    expanded = [slice(None) if stride else slice(1) for stride in tensor.stride()]
    once = tensor[tuple(expanded)]
    row = once.contiguous()
    dist.broadcast(row.view(-1).view(torch.uint8), group_src=0, group=group)
    if row.data_ptr() != once.data_ptr():
        once.copy_(row)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A process group of all ranks of the mesh."""
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    joined = torch.tensor([groups_joined()], device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    join_groups(int(joined))
    group = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _check_mean(mesh: DeviceMesh) -> None:
    """RuntimeError if torch sums gradients inside a replica, although FSDP asks for the mean. A
    collective on CPUs. (NCCL always makes the mean.)"""
    shards = mesh.size(1)
    if mesh.device_type != "cpu":
        return
    mean = torch.empty(1)
    # New versions of torch call it reduce_scatter_single.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(mean, torch.ones(shards), op=dist.ReduceOp.AVG, group=mesh.get_group(1))
    if float(mean) != 1:
        raise RuntimeError(
            f"attach_fsdp needs the mean of a replica's gradients, and the gloo of torch "
            f"{torch.__version__} sums them, with or without a compressor: on CPUs use a newer "
            f"version (2.8 sums, 2.13 does not)"
        )


def _check(root: Any, mesh: Any, settings: Settings) -> None:
    if not hasattr(FSDPModule, "set_all_reduce_hook"):
        raise RuntimeError(
            f"attach_fsdp needs FSDPModule.set_all_reduce_hook, which torch has from 2.7 on; this "
            f"is torch {torch.__version__}"
        )
    if not isinstance(root, FSDPModule):
        raise TypeError(
            f"root must be a module that fully_shard was called on, got {type(root).__name__}; "
            f"attach(model) is for DistributedDataParallel"
        )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        raise ValueError(
            f"mesh must have two dimensions, (replicas, shards), of which fully_shard was given "
            f"the second; got {mesh}"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"mesh must have its ranks in ascending order, got {mesh}")
    if settings.sync != EveryStep():
        raise ValueError(f"sync must be None with attach_fsdp, got {settings.sync!r}")
    rungs = settings.base.rungs
    if hooks := {cf: rung for cf, rung in rungs.items() if isinstance(rung, SendsItself)}:
        raise ValueError(f"hooks must be empty with attach_fsdp, got {hooks!r}")
    if settings.exchange.levels is not None:
        raise ValueError(
            f"exchange must have one level with attach_fsdp, because shards are the other level; "
            f"got {settings.exchange.levels!r}"
        )
    own = mesh.mesh[mesh.get_local_rank(0)].tolist()
    for unit in _units(root):
        for p in unit.parameters:
            _check_parameter(unit, p, own)


def _check_parameter(unit: _Unit, p: Any, ranks: list[int]) -> None:
    """ValueError or TypeError if a parameter cannot be compressed. ranks: those of this replica."""
    where = unit.name or "the root module"
    if not isinstance(p, DTensor) or p.device_mesh.ndim != 1:
        raise ValueError(
            f"{where} is sharded over {getattr(p, 'device_mesh', None)}, where torch exchanges "
            f"gradients between replicas itself (HSDP, replicate()): call fully_shard with the "
            f"mesh's second dimension alone, mesh['shard']; for replicas that are not sharded, "
            f"attach(DistributedDataParallel(model))"
        )
    if p.device_mesh.mesh.tolist() != ranks:
        raise ValueError(
            f"{where} is sharded over {p.device_mesh}, which is not the mesh's second dimension on "
            f"this rank: {ranks}"
        )
    if p.device.type == "cpu" and p.device_mesh.device_type != "cpu":
        raise ValueError(f"{where} is offloaded to the CPU, and its gradients are on a device")
    if p.is_complex():
        raise TypeError(f"root must have real parameters, {where} has some of {p.dtype}")
