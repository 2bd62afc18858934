"""Runs a kernel of the rings of fewer bits without a GPU and without Triton: what Gluon's functions mean for
whole tensors, in torch, one program after the other. Layouts, barriers and threads mean nothing here: this
finds a wrong index, place or turn, and tests/gpu what a compiler or a race makes of the right ones.

Gluon has no interpreter of its own. `load` reads a kernel's file once more with these functions in place of
Triton's.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import shoal.kernels

FOLDER = Path(next(iter(shoal.kernels.__path__)))
FP8 = torch.float8_e4m3fn
# Imports whose names `load` gives a file instead.
REPLACED = ("from triton", "from shoal.kernels.hopper", "from shoal.kernels.pdl", "from shoal.kernels.matmul")


class Pointer:
    """An address in a flat tensor, or many of them."""

    def __init__(self, memory: torch.Tensor, at: object = 0) -> None:
        self.memory, self.at = memory.view(-1), at
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: object) -> Pointer:
        return Pointer(self.memory, self.at + offset)


class Value:
    """A tensor with Gluon's methods."""

    def __init__(self, data: object) -> None:
        self.data = data if isinstance(data, torch.Tensor) else torch.as_tensor(data)

    shape = property(lambda self: tuple(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    type = types.SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.data.contiguous().view(dtype) if bitcast else self.data.to(dtype))

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.data.permute(order))

    def reshape(self, shape: tuple[int, ...]) -> Value:
        return Value(self.data.reshape(shape))

    def __getitem__(self, key: object) -> Value:
        return Value(self.data[key])

    def _with(self, other: object, does: str, swapped: bool = False) -> Value:
        other = other.data if isinstance(other, Value) else other
        return Value(getattr(self.data, "__r" + does[2:] if swapped else does)(other))


for name in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "and",
    "or",
    "rshift",
    "lshift",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
]:
    setattr(Value, f"__{name}__", lambda self, other, n=f"__{name}__": self._with(other, n))
    if name in ("add", "sub", "mul"):
        setattr(Value, f"__r{name}__", lambda self, other, n=f"__{name}__": self._with(other, n, True))
Value.__hash__ = None  # type: ignore[assignment]
Value.__neg__ = lambda self: Value(-self.data)  # type: ignore[attr-defined]


class Number(int):
    """A scalar of the kernel: an int with the methods that scalars have there."""

    def __add__(self, other: object) -> object:
        return Number(int(self) + other) if isinstance(other, int) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: int) -> Number:
        return Number(int(self) - other)

    def __mul__(self, other: object) -> object:
        return Number(int(self) * other) if isinstance(other, int) else NotImplemented

    __rmul__ = __mul__

    def __eq__(self, other: object) -> object:
        return Flag(int(self) == other)

    def __lt__(self, other: int) -> Flag:
        return Flag(int(self) < other)

    __hash__ = int.__hash__

    def to(self, _: object) -> Number:
        return self


class Flag(Number):
    pass


class Function:
    """A function of a kernel's file, or the kernel, which a grid launches."""

    def __init__(self, machine: Machine, function: Callable[..., object]) -> None:
        self.machine, self.function = machine, function

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*(Number(arg) if type(arg) is int else arg for arg in args), **kwargs)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            taken = [Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.machine.programs = grid[0]
            for self.machine.program in range(grid[0]):
                self(*taken, **kwargs)

        return launch


class Shared:
    """A part of shared memory. It begins as numbers that nobody may see."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    shape = property(lambda self: tuple(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.data)
        return Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _: object) -> Shared:
        return Shared(self.data.view(torch.uint8).view(-1).view(dtype).view(shape))

    def load(self, _: object) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.data.view(torch.uint8).copy_(
            value.data.contiguous().view(torch.uint8).view(self.data.view(torch.uint8).shape)
        )


class Descriptor:
    """TensorDescriptor: boxes of a tensor, zeros beyond it."""

    def __init__(
        self, base: torch.Tensor, shape: list[int], strides: list[int], block: list[int], layout: object
    ) -> None:
        self.base = base.as_strided(shape, strides)
        self.block, self.layout, self.dtype = block, layout, base.dtype
        self.block_type = types.SimpleNamespace(nbytes=int(np.prod(block)) * base.itemsize)

    def box(self, at: list[int]) -> torch.Tensor:
        found = torch.zeros(self.block, dtype=torch.float64 if self.dtype == FP8 else self.dtype)
        cut = tuple(
            slice(int(a), min(int(a) + n, size)) for a, n, size in zip(at, self.block, self.base.shape)
        )
        part = self.base[cut]
        into = tuple(slice(0, n) for n in part.shape)
        found[into] = part.to(found.dtype)
        return found.to(self.dtype)


class Machine:
    """A program's view: its number, the grid's, and barriers, which check that copies and waits meet."""

    def __init__(self) -> None:
        self.program = self.programs = 0

    def gl(self) -> types.SimpleNamespace:
        def load(ptr: Pointer, mask: Value | None = None, other: float = 0.0) -> Value:
            at = ptr.at.data.long()
            inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.data
            found = ptr.memory[torch.where(inside, at, 0)]
            return Value(torch.where(inside, found, torch.zeros_like(found)))

        def store(ptr: Pointer, value: Value, mask: Value) -> None:
            ptr.memory[ptr.at.data[mask.data].long()] = value.data[mask.data].to(ptr.memory.dtype)

        def asm(
            text: str, constraints: str, args: list[Value], dtype: object, pure: bool, pack: int
        ) -> Value:
            if dtype == torch.int8:  # four bytes of a word, which stands there four times
                words = args[0].data
                words = (words >> 4 if "shr" in text else words) & 0x0F0F0F0F
                bytes_of = words.contiguous().view(torch.int8).view(*words.shape, 4)
                where = torch.tensor([[0, 1], [2, 3]]).expand(words.shape).unsqueeze(-1)
                return Value(bytes_of.gather(-1, where).squeeze(-1))
            raise AssertionError(f"unknown assembler: {text}")

        def where(condition: object, a: object, b: object) -> Value:
            def data(x: object) -> object:
                return x.data if isinstance(x, Value) else x

            return Value(torch.where(data(condition), data(a), data(b)))

        ignore = lambda *_, **__: None  # noqa: E731
        names = dict(
            constexpr=lambda value: value,
            program_id=lambda _: Number(self.program),
            num_programs=lambda _: Number(self.programs),
            cdiv=lambda a, b: Number(-(-int(a) // int(b))),
            arange=lambda a, b, _=None: Value(torch.arange(a, b)),
            zeros=lambda shape, dtype, _=None: Value(torch.zeros(tuple(shape), dtype=dtype)),
            load=load,
            store=store,
            where=where,
            sum=lambda x, axis: Value(x.data.sum(axis)),
            max=lambda x, axis: Value(x.data.amax(axis)),
            maximum=lambda a, b: Value(a.data.clamp(min=b)),
            abs=lambda x: Value(x.data.abs()),
            rsqrt=lambda x: Value(x.data.rsqrt()),
            join=lambda a, b: Value(torch.stack((a.data, b.data), -1)),
            split=lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])),
            convert_layout=lambda x, *_, **__: x,
            static_range=range,
            static_assert=ignore,
            inline_asm_elementwise=asm,
            allocate_shared_memory=lambda dtype, shape, _: Shared(
                torch.full((int(np.prod(shape)) * dtype.itemsize,), 0x7F, dtype=torch.uint8)
                .view(dtype)
                .view(shape)
            ),
            float32=torch.float32,
            int32=torch.int32,
            int64=torch.int64,
            int8=torch.int8,
            float8e4nv=FP8,
            bfloat16=torch.bfloat16,
        )
        for layout in [
            "BlockedLayout",
            "SliceLayout",
            "SwizzledSharedLayout",
            "NVMMASharedLayout",
            "NVMMADistributedLayout",
            "DotOperandLayout",
            "DistributedLinearLayout",
        ]:
            names[layout] = ignore
        return types.SimpleNamespace(**names)

    def mbarrier(self) -> types.SimpleNamespace:
        """A barrier is [bytes that are wanted, its phase]: a copy takes its bytes, and the last one ends the
        phase."""

        def expect(barrier: Shared, num_bytes: int, pred: bool = True) -> None:
            if pred:
                assert int(barrier.data[0]) & 0xFFFFFFFF == 0, "the place is still being filled"
                barrier.data[0] += num_bytes

        def wait(barrier: Shared, parity: int) -> None:
            assert int(barrier.data[0]) >> 32 & 1 != parity, "a wait that would never end"

        def init(barrier: Shared, count: int) -> None:
            barrier.data[0] = 0

        return types.SimpleNamespace(
            expect=expect, wait=wait, init=init, invalidate=lambda _: None, MBarrierLayout=lambda: None
        )

    def tma(self) -> types.SimpleNamespace:
        def copy(desc: Descriptor, at: list[int], barrier: Shared, target: Shared, pred: bool = True) -> None:
            if pred:
                box = desc.box(at)
                target.store(Value(box))
                barrier.data[0] -= desc.block_type.nbytes
                if int(barrier.data[0]) & 0xFFFFFFFF == 0:
                    barrier.data[0] += 1 << 32

        return types.SimpleNamespace(async_copy_global_to_shared=copy)


def warpgroup_mma(a: object, b: Shared, sums: Value, use_acc: bool, is_async: bool) -> Value:
    assert not use_acc
    return Value(a.data.to(torch.float32) @ b.data.to(torch.float32))


def load(machine: Machine, name: str, others: dict[str, object]) -> types.SimpleNamespace:
    """The names of a kernel's file, with Gluon's functions replaced. `others`: those of another file of this
    kind."""
    text = (FOLDER / "matmul" / f"{name}.py").read_text()
    lines, skipping = [], False
    for line in text.split("\n"):
        if line.startswith(REPLACED):
            skipping = line.endswith("(")
            continue
        if skipping:
            skipping = line != ")"
            continue
        lines.append(line.replace(".value", ""))
    space: dict[str, object] = dict(
        gluon=types.SimpleNamespace(jit=lambda function: Function(machine, function)),
        gl=machine.gl(),
        mbarrier=machine.mbarrier(),
        tma=machine.tma(),
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=lambda _, deps: deps if len(deps) > 1 else deps[0],
        fence_async_shared=lambda: None,
        barrier=lambda: None,
        wait_for_inputs=lambda _: None,
        pdl_options=lambda: {"PDL": False},
        TensorDescriptor=Descriptor,
        **others,
    )
    exec(compile("\n".join(lines), name, "exec"), space)
    return types.SimpleNamespace(**space)
