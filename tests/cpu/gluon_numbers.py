"""Runs a Gluon kernel without a GPU and without Triton: what Gluon's functions mean for whole tensors, in torch,
one program after the other. The partitions of a program take turns where one of them waits. Layouts and threads
mean nothing here: this finds a wrong index, place or turn, and tests/gpu what a compiler or a race makes of the
right ones.

Gluon has no interpreter of its own. `load` reads a kernel's file once more with these functions in place of
Triton's.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import shoal.kernels

FOLDER = Path(next(iter(shoal.kernels.__path__)))
FP8 = torch.float8_e4m3fn
# Imports whose names `load` gives a file instead.
REPLACED = ("from triton", "from shoal.kernels.hopper", "from shoal.kernels.pdl", "from shoal.kernels.matmul")
WAITS = "start_next", "wait_for_previous", "wait_for_inputs", "wait_then_start_next"


class Pointer:
    """An address in the memory from a tensor's first number on, or many of them."""

    def __init__(self, memory: torch.Tensor, at: object = 0) -> None:
        first = memory.storage_offset()
        length = memory.untyped_storage().nbytes() // memory.itemsize - first
        self.memory, self.at = memory.as_strided((length,), (1,)), at
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

    def __floordiv__(self, other: int) -> Number:
        return Number(int(self) // other)

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

    def __get__(self, instance: object, _: type) -> Callable[..., object]:  # a method
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*(Number(arg) if type(arg) is int else arg for arg in args), **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            plain = (getattr(arg, "value", arg) for arg in args)  # constants of Triton's
            taken = [Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in plain]
            known = inspect.signature(self.function).parameters
            kwargs = {name: arg for name, arg in kwargs.items() if name in known}
            self.machine.grid = grid
            for self.machine.program in itertools.product(*map(range, grid)):
                self(*taken, **kwargs)
                assert not self.machine.groups, "copies that nobody waited for"

        return launch


class Shared:
    """A part of shared memory. It begins as numbers that nobody may see."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    shape = property(lambda self: tuple(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    layout = None

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.data)
        return Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, int(start), int(length)))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _: object) -> Shared:
        size = int(np.prod(shape)) * dtype.itemsize  # Numbers of 16 bits may have more here.
        return Shared(self.data.view(torch.uint8).view(-1)[:size].view(dtype).view(shape))

    def load(self, _: object) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        if value.data.dtype == self.data.dtype:
            self.data.copy_(value.data)
            return
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
        self.block_type = types.SimpleNamespace(nbytes=int(np.prod(block)) * base.itemsize, shape=block)

    def box(self, at: list[int]) -> torch.Tensor:
        found = torch.zeros(self.block, dtype=torch.float64 if self.dtype == FP8 else self.dtype)
        cut = tuple(
            slice(int(a), min(int(a) + n, size)) for a, n, size in zip(at, self.block, self.base.shape)
        )
        part = self.base[cut]
        into = tuple(slice(0, n) for n in part.shape)
        found[into] = part.to(found.dtype)
        return found.to(self.dtype)


@dataclass
class Barrier:
    """A phase ends when all arrivals and all bytes that it waits for have come."""

    count: int
    left: int
    bytes_left: int = 0
    phase: int = 0

    def arrive(self, arrivals: int = 1, num_bytes: int = 0) -> None:
        self.left -= arrivals
        self.bytes_left += num_bytes
        assert self.left >= 0, "more arrivals than the barrier counts"
        if self.left == self.bytes_left == 0:
            self.left, self.phase = self.count, self.phase + 1


class Partitions:
    """The partitions of a program: threads of which one runs, until it waits for another one. `turns`: the
    order in which they run first."""

    def __init__(
        self, functions: list[tuple[Callable[..., None], tuple[object, ...]]], turns: list[int]
    ) -> None:
        self.changed = threading.Condition()
        self.turns, self.waits = list(turns), 0
        self.error: BaseException | None = None
        self.threads = [threading.Thread(target=self._run, args=(i, *one)) for i, one in enumerate(functions)]

    def join(self) -> None:
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _run(self, number: int, function: Callable[..., None], args: tuple[object, ...]) -> None:
        try:
            self._await_turn(number)
            function(*args)
        except BaseException as error:  # noqa: BLE001 -- raised where the program began
            self.error = self.error or error
        with self.changed:
            self.waits = 0
            if number in self.turns:
                self.turns.remove(number)
            self.changed.notify_all()

    def _await_turn(self, number: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None or self.turns[0] == number)
        if self.error is not None:
            raise RuntimeError("another partition failed")

    def pause(self) -> None:
        """Lets the next partition run until this one's turn comes again."""
        with self.changed:
            self.waits += 1
            assert self.waits <= len(self.turns), "a wait that would never end"
            number = self.turns.pop(0)
            self.turns.append(number)
            self.changed.notify_all()
        self._await_turn(number)


class Machine:
    """A program's view: its numbers, the grid, and barriers, which check that copies and waits meet. `turns`:
    the order in which partitions run first, where there are some."""

    def __init__(self, turns: tuple[int, ...] = ()) -> None:
        self.program: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.turns = turns
        self.barriers: dict[int, Barrier] = {}
        self.partitions: Partitions | None = None
        self.copies: list[tuple[Shared, Value]] = []  # since the last group
        self.groups: list[list[tuple[Shared, Value]]] = []

    def warp_specialize(self, functions: list, warps: list[int], registers: list[int]) -> None:
        assert len(functions) == len(self.turns) == len(warps) + 1 == len(registers) + 1
        self.partitions = Partitions(functions, list(self.turns))
        self.partitions.join()
        self.partitions = None

    def gl(self) -> types.SimpleNamespace:
        def load(
            ptr: Pointer, mask: Value | None = None, other: float = 0.0, cache_modifier: str = ""
        ) -> Value | Number:
            if not isinstance(ptr.at, Value):
                return Number(int(ptr.memory[ptr.at]))
            at = ptr.at.data.long()
            inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.data
            found = ptr.memory[torch.where(inside, at, 0)]
            return Value(torch.where(inside, found, torch.zeros_like(found)))

        def store(ptr: Pointer, value: Value | int, mask: Value | None = None) -> None:
            if not isinstance(ptr.at, Value):
                ptr.memory[ptr.at] = value
                return
            at = ptr.at.data.long()
            inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.data.expand(at.shape)
            ptr.memory[at[inside]] = value.data.expand(at.shape)[inside].to(ptr.memory.dtype)

        def atomic_add(ptr: Pointer, value: int, sem: str, scope: str) -> Number:
            before = Number(int(ptr.memory[ptr.at]))
            ptr.memory[ptr.at] += value
            return before

        def larger(a: Value | int, b: Value | int) -> Value | Number:
            if not isinstance(a, Value):
                return Number(max(a, b))
            return Value(torch.maximum(a.data, b.data) if isinstance(b, Value) else a.data.clamp(min=b))

        def summed(x: Value, axis: int | None = None) -> Value | Number:
            total = x.data.sum(axis)
            return Number(int(total)) if total.dim() == 0 and not total.is_floating_point() else Value(total)

        def highest(x: Value, axis: int) -> Value | Number:
            most = x.data.amax(axis)
            return Value(most) if most.dim() or most.is_floating_point() else Number(int(most))

        def asm(
            text: str, constraints: str, args: list[Value], dtype: object, is_pure: bool, pack: int
        ) -> Value | Number:
            if "cvt.rn.satfinite.e4m3x2.f32" in text:
                return Value(args[0].data.clamp(-448, 448).to(FP8).view(torch.int8))
            if dtype == torch.int8:  # four bytes of a word, which stands there four times
                words = args[0].data
                words = (words >> 4 if "shr" in text else words) & 0x0F0F0F0F
                bytes_of = words.contiguous().view(torch.int8).view(*words.shape, 4)
                where = torch.tensor([[0, 1], [2, 3]]).expand(words.shape).unsqueeze(-1)
                return Value(bytes_of.gather(-1, where).squeeze(-1))
            if "%clock64; shr.u64 t, t, 63;" in text:
                return Number(0)
            if text == "xor.b32 $0, $1, $2;":  # Each word has two numbers.
                a, b = (arg.data.contiguous().view(torch.int16) for arg in args)
                return Value((a ^ b).view(args[0].dtype))
            raise AssertionError(f"unknown assembler: {text}")

        def where(condition: object, a: object, b: object) -> object:
            if not isinstance(condition, Value) and isinstance(a, int):
                return Number(a if condition else b)

            def data(x: object) -> object:
                return x.data if isinstance(x, Value) else x

            return Value(torch.where(data(condition), data(a), data(b)))

        ignore = lambda *_, **__: None  # noqa: E731
        names = dict(
            constexpr=lambda value: value,
            program_id=lambda axis: Number(self.program[axis]),
            num_programs=lambda axis: Number(self.grid[axis]),
            cdiv=lambda a, b: Number(-(-int(a) // int(b))),
            arange=lambda a, b, _=None: Value(torch.arange(a, b)),
            zeros=lambda shape, dtype, _=None: Value(torch.zeros(tuple(shape), dtype=dtype)),
            load=load,
            store=store,
            where=where,
            full=lambda shape, value, dtype, _=None: Value(torch.full(tuple(shape), value, dtype=dtype)),
            sum=summed,
            associative_scan=lambda x, axis, _: Value(x.data.cumsum(axis)),
            exp2=lambda x: Value(x.data.exp2()),
            log2=lambda x: Value(x.data.log2()),
            log=lambda x: Value(x.data.log()),
            atomic_add=atomic_add,
            max=highest,
            maximum=larger,
            minimum=lambda a, b: Number(min(int(a), int(b))),
            warp_specialize=self.warp_specialize,
            abs=lambda x: Value(x.data.abs()),
            rsqrt=lambda x: Value(x.data.rsqrt()),
            join=lambda a, b: Value(torch.stack((a.data, b.data), -1)),
            split=lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])),
            reshape=lambda x, shape: x.reshape(shape),
            permute=lambda x, order: x.permute(order),
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
            int16=torch.int16,
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
        def state(barrier: Shared) -> Barrier:
            return self.barriers[barrier.data.data_ptr()]

        def init(barrier: Shared, count: int) -> None:
            self.barriers[barrier.data.data_ptr()] = Barrier(count, count)

        def expect(barrier: Shared, num_bytes: int, pred: bool = True) -> None:
            if pred:
                assert state(barrier).bytes_left == 0, "the place is still being filled"
                state(barrier).arrive(1, num_bytes)

        def arrive(barrier: Shared, pred: bool = True) -> None:
            if pred:
                state(barrier).arrive()

        def wait(barrier: Shared, parity: int) -> None:
            while state(barrier).phase & 1 == parity:
                assert self.partitions is not None, "a wait that would never end"
                self.partitions.pause()
            if self.partitions is not None:
                self.partitions.waits = 0

        return types.SimpleNamespace(
            expect=expect,
            arrive=arrive,
            wait=wait,
            init=init,
            invalidate=lambda _: None,
            MBarrierLayout=lambda: None,
        )

    def tma(self) -> types.SimpleNamespace:
        def copy(desc: Descriptor, at: list[int], barrier: Shared, target: Shared, pred: bool = True) -> None:
            if pred:
                box = desc.box(at)
                target.store(Value(box))
                self.barriers[barrier.data.data_ptr()].arrive(0, -desc.block_type.nbytes)

        return types.SimpleNamespace(async_copy_global_to_shared=copy, tensor_descriptor=Descriptor)

    def async_copy(self, threads: int = 128) -> types.SimpleNamespace:
        """Copies by the threads of a partition, each of which arrives; or which are waited for as groups, and
        come no sooner."""

        def copy(target: Shared, ptrs: Pointer, mask: Value | None = None) -> None:
            at = ptrs.at.data.long()
            inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.data.expand(at.shape)
            found = ptrs.memory[torch.where(inside, at, 0)]
            self.copies.append((target, Value(torch.where(inside, found, torch.zeros_like(found)))))

        def commit() -> None:
            self.groups.append(self.copies)
            self.copies = []

        def wait(most: int) -> None:
            while len(self.groups) > most:
                for target, value in self.groups.pop(0):
                    target.store(value)

        def arrive(barrier: Shared, increment_count: bool) -> None:
            assert not increment_count
            commit()
            wait(0)
            self.barriers[barrier.data.data_ptr()].arrive(threads)

        return types.SimpleNamespace(
            async_copy_global_to_shared=copy, mbarrier_arrive=arrive, commit_group=commit, wait_group=wait
        )


def warpgroup_mma(a: object, b: Shared, sums: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    result = a.data.to(torch.float32) @ b.data.to(torch.float32)
    return Value(result + sums.data if use_acc else result)


def load(
    machine: Machine, name: str, others: dict[str, object], folder: str = "matmul"
) -> types.SimpleNamespace:
    """The names of a kernel's file, with Gluon's functions replaced. `others`: those of another file of this
    kind."""
    text = (FOLDER / folder / f"{name}.py").read_text()
    lines, skipping = [], False
    for line in text.split("\n"):
        if line.startswith(REPLACED):
            skipping = line.endswith("(")
            continue
        if skipping:
            skipping = line != ")"
            continue
        lines.append(line.replace(".value", ""))

    def jit(function: Callable[..., object] | None = None, **options: object) -> object:
        return jit if function is None else Function(machine, function)

    space: dict[str, object] = dict(
        gluon=types.SimpleNamespace(jit=jit, constexpr_function=lambda function: function),
        gl=machine.gl(),
        mbarrier=machine.mbarrier(),
        tma=machine.tma(),
        async_copy=machine.async_copy(),
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=lambda _, deps: deps if len(deps) > 1 else deps[0],
        fence_async_shared=lambda: None,
        barrier=lambda: None,
        aggregate=lambda kind: kind,
        **dict.fromkeys(WAITS, lambda _: None),
        pdl_options=lambda: {"PDL": False},
        TensorDescriptor=Descriptor,
        **others,
    )
    exec(compile("\n".join(lines), name, "exec"), space)
    return types.SimpleNamespace(**space)
