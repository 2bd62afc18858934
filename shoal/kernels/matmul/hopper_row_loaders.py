"""Loaders of weights for hopper_row.py: how a format is read and multiplied with a row. The methods:

    create    takes shared memory for the ring and the row
    request   requests a tile, 1024 inputs of a strip of outputs, with its scales
    order     returns the inputs in the order in which `put_row` takes them
    put_row   puts the row into shared memory, times a power of two, and returns that power's inverse
    start     returns a strip's outputs, their factors, up's factors, and its first sums
    wait      returns when a tile is there
    multiply  adds a tile's matmul to the sums, and to up's
    total     returns the sums of a strip's outputs, one number each
    end       ends the use of the ring

PlainLoader: weights of 16 bits, which are multiplied elementwise, one output a warp.

Fp8Loader: weights in e4m3. To widen them in registers takes more instructions than an SM can issue while
memory brings the next ones. So weights never come to registers: tensor cores take them as they lie.

The row, too, has to be in fp8 then, but nothing of it is lost: it is taken times a power of two and cut in
two numbers of 4 bits each, x = high + low / 16. All 8 bits of a bf16 number are there if it is not smaller
than 2^-14 of the row's largest one, and what a smaller one loses is less than 2^-17 of the largest.

A tile has 128 rows for the tensor cores. They are 16 outputs by 8 slices of the inputs, so that a weight with
few outputs too has work for all SMs. The matmul with high and low of all 8 slices is made, and the part is
taken that belongs together. Tensor cores add fp8 in fewer bits than float32, so sums are promoted
every 128 inputs, where they may also get the scale of their group.

Int4Loader: weights of 4 bits that lie as gpu_weight.py lays them. A quant of 4 bits, taken as it is, is a
small number of fp8. The lanes of a warp have just the weights that they have to feed to the tensor cores, so
a mask makes operands: the low halves of a word's bytes are weights of one output, the high halves of another.
The row lies in shared memory in the order that these have. A tile is 16 outputs by 4 slices of 256 inputs,
one a warp, with the scales of each slice's two groups. What quants are too large by (8, or the zero point) is
a matmul of the group's minimum and the sum of its inputs.
"""

# Triton looks at the types of an aggregate's fields, so annotations must not become strings in this file.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shoal.kernels.hopper import aggregate, barrier

# Triton compares all global names of a kernel at each launch, so loaders take sizes from their shared memory.
TILE: gl.constexpr = gl.constexpr(1024)  # inputs of a tile
INT4_SLICES: gl.constexpr = gl.constexpr(4)  # slices of a tile's inputs with 4 bits, of two parts, one a warp


@aggregate
class PlainLoader:
    weight_ptr: gl.tensor
    ring: gl.shared_memory_descriptor  # A part of a tile has OUTS rows; up's parts follow gate's.
    row: gl.shared_memory_descriptor
    O: gl.tensor
    I: gl.tensor
    GATED: gl.constexpr
    EVEN: gl.constexpr
    OUTS: gl.constexpr
    PART: gl.constexpr  # inputs that a warp reads at once, 16 bytes a thread
    LAYOUT: gl.constexpr  # output, input

    @gluon.constexpr_function
    def __init__(self, weight_ptr, ring, row, O, I, GATED, EVEN, OUTS):
        self.weight_ptr, self.ring, self.row, self.O, self.I = weight_ptr, ring, row, O, I
        self.GATED, self.EVEN, self.OUTS = gl.constexpr(GATED), gl.constexpr(EVEN), gl.constexpr(OUTS)
        self.PART = gl.constexpr(ring.shape[2])
        self.LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [OUTS, 1], [1, 0]))

    @gluon.jit
    def create(weight_ptr, scales, minima, O, I, GATED, EVEN, OUTS, STAGES, BLOCK_X):
        DTYPE: gl.constexpr = weight_ptr.dtype.element_ty
        PART: gl.constexpr = 256
        shape: gl.constexpr = [STAGES // (1 + GATED), (1 + GATED) * (TILE // PART) * OUTS, PART]
        ring = gl.allocate_shared_memory(DTYPE, shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        row = gl.allocate_shared_memory(DTYPE, [BLOCK_X], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return PlainLoader(weight_ptr, ring, row, O, I, GATED, EVEN, OUTS)

    @gluon.jit
    def request(self, stage, strip, k_tile):
        PARTS: gl.constexpr = TILE // self.PART
        row = gl.arange(0, self.ring.shape[1], gl.SliceLayout(1, self.LAYOUT))
        out = strip * self.OUTS + row % self.OUTS
        part = k_tile * PARTS + row // self.OUTS % PARTS
        column = part[:, None] * self.PART
        column += gl.arange(0, self.PART, gl.SliceLayout(0, self.LAYOUT))[None, :]
        inside = (out < self.O)[:, None]
        if not self.EVEN:
            inside = inside & (column < self.I)
        if self.GATED:
            out += row // (PARTS * self.OUTS) * self.O
        ptrs = self.weight_ptr + out.to(gl.int64)[:, None] * self.I + column
        async_copy.async_copy_global_to_shared(self.ring.index(stage), ptrs, mask=inside)
        async_copy.commit_group()  # Each request is a group, those beyond the last strip, too.

    @gluon.jit
    def order(self):
        return gl.arange(0, self.row.shape[0], gl.BlockedLayout([8], [32], [self.OUTS], [0]))

    @gluon.jit
    def put_row(self, x):
        self.row.store(x.to(self.row.dtype))
        return 1.0

    @gluon.jit
    def start(self, strip):
        out = strip * self.OUTS + gl.arange(0, self.OUTS, gl.SliceLayout(1, self.LAYOUT))
        return out, 1.0, 1.0, gl.zeros([self.OUTS, self.PART], gl.float32, self.LAYOUT)

    @gluon.jit
    def wait(self, stage, turn):
        async_copy.wait_group(self.ring.shape[0] - 1)

    @gluon.jit
    def multiply(self, stage, k_tile, sums, up_sums):
        PARTS: gl.constexpr = TILE // self.PART
        row = self.row._reinterpret(
            self.row.dtype, [self.row.shape[0] // self.PART, self.PART], self.row.layout
        )
        for part in gl.static_range(PARTS):
            of_row = k_tile * PARTS + part
            x = row.index(of_row).load(gl.SliceLayout(0, self.LAYOUT)).to(gl.float32)[None, :]
            place = stage * ((1 + self.GATED) * PARTS) + part
            sums += self._product(place, of_row, x)
            if self.GATED:
                up_sums += self._product(place + PARTS, of_row, x)
        return sums, up_sums

    @gluon.jit
    def _product(self, place, of_row, x):
        PARTS: gl.constexpr = self.ring.shape[0] * self.ring.shape[1] // self.OUTS
        parts = self.ring._reinterpret(self.row.dtype, [PARTS, self.OUTS, self.PART], self.ring.layout)
        product = parts.index(place).load(self.LAYOUT).to(gl.float32) * x
        if not self.EVEN:  # What was not copied need not be zeros.
            column = of_row * self.PART + gl.arange(0, self.PART, gl.SliceLayout(0, self.LAYOUT))
            product = gl.where((column < self.I)[None, :], product, 0.0)
        return product

    @gluon.jit
    def total(self, sums):
        return gl.sum(sums, axis=1)

    @gluon.jit
    def end(self):
        async_copy.wait_group(0)  # The next program's ring lies in the same memory.


class _TmaLoader:
    @gluon.jit
    def wait(self, stage, turn):
        mbarrier.wait(self.full.index(stage), turn & 1)

    @gluon.jit
    def end(self):
        COUNT: gl.constexpr = self.full.shape[0]
        for i in gl.static_range(COUNT):
            mbarrier.invalidate(self.full.index(i))


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
    return full


@gluon.jit
def _to_fp8(x):
    """Converts four numbers at once, in assembler, as the compiler would put each byte in its place alone."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
        " mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [x],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _put_row(x, row):
    """Puts a row, [parts, 128] in float32, into shared memory as high and low in fp8, [2 parts, 128]. Returns
    the row times a power of two, as high and low stand for it, and what makes up for that power."""
    SHIFT: gl.constexpr = 7  # The largest number becomes 2^7 to 2^8.
    largest = gl.max(gl.max(gl.abs(x), axis=1), axis=0)
    # Powers of two are made of float32's bits. The scale of a row with an infinite number is NaN, as its
    # products are.
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 8)
    larger = ((254 + SHIFT - exponent) << 23).to(gl.float32, bitcast=True)
    smaller = ((exponent - SHIFT) << 23).to(gl.float32, bitcast=True)
    smaller = gl.where(exponent == 255, float("nan"), smaller)
    x *= larger
    # The first 4 bits are kept, as the numbers that rounding to fp8 gives come back in another order from
    # Triton 3.6's conversion to float32.
    high = (x.to(gl.int32, bitcast=True) & -0x100000).to(gl.float32, bitcast=True)
    both = gl.join(_to_fp8(high), _to_fp8((x - high) * 16.0)).to(row.dtype, bitcast=True)
    row = row._reinterpret(row.dtype, [2 * x.shape[0], x.shape[1]], row.layout)
    row.store(both.permute((0, 2, 1)).reshape(row.shape))
    fence_async_shared()
    barrier()
    return x, smaller


@gluon.jit
def _total(sums, BY_SLICE: gl.constexpr):
    """The sums of a strip's outputs: what each slice has with its own inputs, high and low. BY_SLICE: the
    rows of a slice follow each other, otherwise the rows of an output."""
    mma: gl.constexpr = sums.type.layout
    SLICES: gl.constexpr = sums.shape[1] // 2
    OUTS: gl.constexpr = sums.shape[0] // SLICES
    row = gl.arange(0, OUTS * SLICES, gl.SliceLayout(1, mma))[:, None]
    column = gl.arange(0, 2 * SLICES, gl.SliceLayout(0, mma))[None, :]
    own = gl.where(column % 2 == 0, sums, sums * 0.0625)
    own = gl.where((row // OUTS if BY_SLICE else row % SLICES) == column // 2, own, 0.0)
    if BY_SLICE:
        result = gl.sum(gl.sum(own, axis=1).reshape((SLICES, OUTS)), axis=0)
    else:
        result = gl.sum(gl.sum(own, axis=1).reshape((OUTS, SLICES)), axis=1)
    return gl.convert_layout(result, gl.BlockedLayout([1], [32], [SLICES], [0]))


@aggregate
class Fp8Loader(_TmaLoader):
    weight_desc: tma.tensor_descriptor
    scales: tma.tensor_descriptor | gl.tensor  # a group of 128 inputs has one, or an output
    ring: gl.shared_memory_descriptor
    scales_ring: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    row: gl.shared_memory_descriptor
    O: gl.tensor
    GATED: gl.constexpr
    GROUPED: gl.constexpr
    OUTS: gl.constexpr
    SLICES: gl.constexpr  # slices of a tile's inputs, and warps
    PART: gl.constexpr  # inputs of a slice, as many bytes as TMA swizzles as one row

    @gluon.constexpr_function
    def __init__(self, weight_desc, scales, ring, scales_ring, full, row, O, GATED, GROUPED):
        self.weight_desc, self.scales, self.ring, self.scales_ring = weight_desc, scales, ring, scales_ring
        self.full, self.row, self.O = full, row, O
        self.GATED, self.GROUPED = gl.constexpr(GATED), gl.constexpr(GROUPED)
        self.OUTS, self.SLICES, self.PART = (gl.constexpr(size) for size in ring.shape[1:])

    @gluon.jit
    def create(weight_desc, scales, minima, O, I, GATED, EVEN, OUTS, STAGES, BLOCK_X):
        FP8: gl.constexpr = weight_desc.dtype
        GROUPED: gl.constexpr = isinstance(scales, tma.tensor_descriptor)
        ring = gl.allocate_shared_memory(FP8, [STAGES] + weight_desc.block_type.shape, weight_desc.layout)
        scales_ring = ring
        if GROUPED:
            shape: gl.constexpr = [STAGES] + scales.block_type.shape
            scales_ring = gl.allocate_shared_memory(gl.float32, shape, scales.layout)
        SLICES: gl.constexpr = ring.shape[2]
        row_shape: gl.constexpr = [BLOCK_X // TILE, 2 * SLICES, TILE // SLICES]
        row = gl.allocate_shared_memory(FP8, row_shape, gl.NVMMASharedLayout(128, 8))
        full = _barriers(STAGES // (1 + GATED))
        return Fp8Loader(weight_desc, scales, ring, scales_ring, full, row, O, GATED, GROUPED)

    @gluon.jit
    def request(self, stage, strip, k_tile):
        SCALES: gl.constexpr = self.scales.block_type.nbytes if self.GROUPED else 0
        BYTES: gl.constexpr = (1 + self.GATED) * (self.weight_desc.block_type.nbytes + SCALES)
        full, part = self.full.index(stage), k_tile * self.SLICES
        pred = strip * self.OUTS < self.O
        mbarrier.expect(full, BYTES, pred=pred)
        for half in gl.static_range(1 + self.GATED):
            place, out = stage * (1 + self.GATED) + half, strip * self.OUTS + half * self.O
            tma.async_copy_global_to_shared(
                self.weight_desc, [out, part, 0], full, self.ring.index(place), pred=pred
            )
            if self.GROUPED:
                tma.async_copy_global_to_shared(
                    self.scales, [part, out], full, self.scales_ring.index(place), pred=pred
                )

    @gluon.jit
    def order(self):
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [self.SLICES, 1], [1, 0])
        part = gl.arange(0, self.row.shape[0] * self.SLICES, gl.SliceLayout(1, layout))
        return part[:, None] * self.PART + gl.arange(0, self.PART, gl.SliceLayout(0, layout))[None, :]

    @gluon.jit
    def put_row(self, x):
        _, smaller = _put_row(x, self.row)
        return smaller

    @gluon.jit
    def start(self, strip):
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [self.SLICES, 1], [16, 2 * self.SLICES, 32])
        out = strip * self.OUTS + gl.arange(0, self.OUTS, gl.BlockedLayout([1], [32], [self.SLICES], [0]))
        factor, up_factor = 1.0, 1.0
        if not self.GROUPED:
            factor = gl.load(self.scales + out, mask=out < self.O, other=0.0)
            if self.GATED:
                up_factor = gl.load(self.scales + self.O + out, mask=out < self.O, other=0.0)
        return out, factor, up_factor, gl.zeros((self.OUTS * self.SLICES, 2 * self.SLICES), gl.float32, mma)

    @gluon.jit
    def multiply(self, stage, k_tile, sums, up_sums):
        place = stage * (1 + self.GATED)
        product = self._product(place, k_tile, sums)
        if self.GATED:
            up_product = self._product(place + 1, k_tile, up_sums)
            product, up_product = warpgroup_mma_wait(0, deps=[product, up_product])
            up_sums += self._scaled(up_product, place + 1)
        else:
            product = warpgroup_mma_wait(0, deps=[product])
        return sums + self._scaled(product, place), up_sums

    @gluon.jit
    def _product(self, place, k_tile, sums):
        shape: gl.constexpr = [self.ring.shape[0], self.OUTS * self.SLICES, self.PART]
        weights = self.ring._reinterpret(self.ring.dtype, shape, self.row.layout)
        row = self.row.index(k_tile).permute((1, 0))
        return warpgroup_mma(weights.index(place), row, sums, use_acc=False, is_async=True)

    @gluon.jit
    def _scaled(self, product, place):
        if self.GROUPED:
            plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            of_rows: gl.constexpr = gl.DistributedLinearLayout(
                [[1, 0]],
                [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
                [[2, 0], [4, 0], [8, 0]],
                [],
                [self.OUTS, self.SLICES],
            )
            scales = self.scales_ring._reinterpret(gl.float32, self.scales_ring.shape, plain)
            scales = scales.index(place).permute((1, 0)).load(of_rows).reshape((self.OUTS * self.SLICES,))
            rows: gl.constexpr = gl.SliceLayout(1, product.type.layout)
            product *= gl.convert_layout(scales, rows, assert_trivial=True)[:, None]
        return product

    @gluon.jit
    def total(self, sums):
        return _total(sums, False)


@gluon.jit
def _in_order(x):
    """Puts the inputs of each part, which come in the row's order, in the weights' order. A thread has whole
    sixteens of them, so that none goes to another one."""
    ordered = x.reshape((x.shape[0], x.shape[1] // 16, 2, 4, 2)).permute((0, 1, 3, 4, 2)).reshape(x.shape)
    return gl.convert_layout(ordered, x.type.layout, assert_trivial=True)


@gluon.jit
def _quants(words, asm: gl.constexpr):
    """Returns four quants of 4 bits of each word, one a byte. It is written in assembler, as the compiler
    would take the bytes apart and put them together again."""
    four: gl.constexpr = gl.DistributedLinearLayout(
        [
            [0, 0, 0, 0, 0, 0, 0, 1],
            [0, 0, 0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 1, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0, 0],
        ],
        [
            [0, 0, 0, 1, 0, 0, 0, 0],
            [0, 0, 0, 2, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0, 0, 0],
            [0, 0, 2, 0, 0, 0, 0, 0],
            [0, 0, 4, 0, 0, 0, 0, 0],
        ],
        [[1, 0, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]],
        [],
        [INT4_SLICES, 2, 8, 4, 2, 2, 2, 2],
    )  # A word's four bytes are neighbours, so that an assembler's register has them.
    words = gl.join(words, words)
    words = gl.convert_layout(gl.join(words, words), four, assert_trivial=True)
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [words], gl.int8, True, 4)


@gluon.jit
def _operand(words, dot: gl.constexpr):
    """Quants of 4 bits as numbers of fp8, [64, 128]. words: int32, by slice, step, lane's output and place,
    two and two words."""
    low = _quants(words, "and.b32 $0, $1, 0x0F0F0F0F;")
    high = _quants(words, "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }")
    quants = gl.join(low, high).to(gl.float8e4nv, bitcast=True)
    quants = quants.permute((0, 8, 2, 1, 4, 5, 3, 6, 7)).reshape((16 * INT4_SLICES, 128))
    return gl.convert_layout(quants, dot, assert_trivial=True)


@gluon.jit
def _pairs(ring, place, pairs: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr):
    """The numbers in bf16 of each slice's two groups, one after the other: of outputs g, times LOW, and of
    outputs g + 8, times HIGH, [4 slices, 8]."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    both: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [INT4_SLICES, 2, 8],
    )  # as the tensor cores' rows lie, two of them together
    numbers = ring._reinterpret(gl.int32, [ring.shape[0], INT4_SLICES, 2, 8], plain)
    first, last = gl.split(numbers.index(place).load(both).permute((0, 2, 1)))
    first = gl.convert_layout(first, pairs, assert_trivial=True)
    last = gl.convert_layout(last, pairs, assert_trivial=True)
    return (
        (first << 16).to(gl.float32, bitcast=True) * LOW,
        (first & -65536).to(gl.float32, bitcast=True) * HIGH,
        (last << 16).to(gl.float32, bitcast=True) * LOW,
        (last & -65536).to(gl.float32, bitcast=True) * HIGH,
    )


@gluon.jit
def _add(part, low, high, low_minimum, high_minimum, x_sum, all_sums):
    """Adds the matmul of a half of a tile, with its scales, and what its minima are with the sums of its
    inputs."""
    sums, lowest, highest = all_sums
    rows = gl.join(low, high).permute((0, 2, 1)).reshape((part.shape[0],))
    of_rows: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    sums += part * gl.convert_layout(rows, of_rows, assert_trivial=True)[:, None]
    x = x_sum[:, None]
    return sums, lowest + low_minimum * x, highest + high_minimum * x


@aggregate
class Int4Loader(_TmaLoader):
    words_desc: tma.tensor_descriptor
    scales_desc: tma.tensor_descriptor
    minima_desc: tma.tensor_descriptor  # the scales' again, if there are no MINIMA
    words: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    minima: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    row: gl.shared_memory_descriptor
    row_sums: gl.shared_memory_descriptor  # one a part of 128 inputs
    O: gl.tensor
    I: gl.tensor
    GATED: gl.constexpr
    MINIMA: gl.constexpr
    OUTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, descriptors, words, scales, minima, full, row, row_sums, O, I, GATED, MINIMA, OUTS):
        self.words_desc, self.scales_desc, self.minima_desc = descriptors
        self.words, self.scales, self.minima, self.full = words, scales, minima, full
        self.row, self.row_sums, self.O, self.I = row, row_sums, O, I
        self.GATED, self.MINIMA, self.OUTS = gl.constexpr(GATED), gl.constexpr(MINIMA), gl.constexpr(OUTS)

    @gluon.jit
    def create(words_desc, scales_desc, minima_desc, O, I, GATED, EVEN, OUTS, STAGES, BLOCK_X):
        MINIMA: gl.constexpr = minima_desc is not None
        words_shape: gl.constexpr = [STAGES] + words_desc.block_type.shape
        scales_shape: gl.constexpr = [STAGES] + scales_desc.block_type.shape
        words = gl.allocate_shared_memory(gl.int32, words_shape, words_desc.layout)
        scales = gl.allocate_shared_memory(gl.int32, scales_shape, scales_desc.layout)
        minima, descriptors = scales, (words_desc, scales_desc, scales_desc)
        if MINIMA:
            minima = gl.allocate_shared_memory(gl.int32, scales_shape, scales_desc.layout)
            descriptors = words_desc, scales_desc, minima_desc
        full = _barriers(STAGES // (1 + GATED))
        row_shape: gl.constexpr = [BLOCK_X // 128 // INT4_SLICES, 2 * INT4_SLICES, 128]
        row = gl.allocate_shared_memory(gl.float8e4nv, row_shape, gl.NVMMASharedLayout(128, 8))
        row_sums = gl.allocate_shared_memory(
            gl.float32, [BLOCK_X // 128], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        return Int4Loader(descriptors, words, scales, minima, full, row, row_sums, O, I, GATED, MINIMA, OUTS)

    @gluon.jit
    def request(self, stage, strip, k_tile):
        SCALES: gl.constexpr = self.scales_desc.block_type.nbytes
        BYTES: gl.constexpr = self.words_desc.block_type.nbytes + (1 + self.MINIMA) * SCALES
        full = self.full.index(stage)
        pred = strip * self.OUTS < self.O
        mbarrier.expect(full, (1 + self.GATED) * BYTES, pred=pred)
        for half in gl.static_range(1 + self.GATED):
            place = stage * (1 + self.GATED) + half
            tile = (strip + half * (self.O // self.OUTS)) * (self.I // TILE) + k_tile
            step, group = tile * self.words.shape[1], tile * self.scales.shape[1]
            tma.async_copy_global_to_shared(
                self.words_desc, [step, 0], full, self.words.index(place), pred=pred
            )
            tma.async_copy_global_to_shared(
                self.scales_desc, [group, 0], full, self.scales.index(place), pred=pred
            )
            if self.MINIMA:
                tma.async_copy_global_to_shared(
                    self.minima_desc, [group, 0], full, self.minima.index(place), pred=pred
                )

    @gluon.jit
    def order(self):
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [INT4_SLICES, 1], [1, 0])
        part = gl.arange(0, self.row_sums.shape[0], gl.SliceLayout(1, layout))  # over k-tile, half and slice
        first = (part // 8 * 8 + part % INT4_SLICES * 2 + part // INT4_SLICES % 2) * 128
        return first[:, None] + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]

    @gluon.jit
    def put_row(self, x):
        ZERO: gl.constexpr = -8 * 2.0**-9  # the zero of a symmetric quant, in fp8
        x, smaller = _put_row(_in_order(x), self.row)
        x_sum = gl.sum(x, axis=1)
        self.row_sums.store(x_sum if self.MINIMA else x_sum * ZERO)
        return smaller

    @gluon.jit
    def start(self, strip):
        """Sums are of quants, and of the minima of outputs g and g + 8."""
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [INT4_SLICES, 1], [16, 2 * INT4_SLICES, 32])
        pairs: gl.constexpr = gl.DistributedLinearLayout(
            [], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]], [], [INT4_SLICES, 8]
        )  # as `_pairs` are
        out = strip * self.OUTS + gl.arange(0, self.OUTS, gl.BlockedLayout([1], [32], [INT4_SLICES], [0]))
        sums = gl.zeros((self.OUTS * INT4_SLICES, 2 * INT4_SLICES), gl.float32, mma)
        lowest = gl.zeros((INT4_SLICES, 8), gl.float32, pairs)
        return out, 1.0, 1.0, (sums, lowest, lowest)

    @gluon.jit
    def multiply(self, stage, k_tile, sums, up_sums):
        place = stage * (1 + self.GATED)
        sums = self._add_tile(place, k_tile, sums)
        if self.GATED:
            up_sums = self._add_tile(place + 1, k_tile, up_sums)
        return sums, up_sums

    @gluon.jit
    def _add_tile(self, place, k_tile, sums):
        # gpu_weight.py packs scales and minima for quants in bf16. These factors fit them to quants in fp8.
        SCALE: gl.constexpr = 2.0**-108
        MINIMUM: gl.constexpr = 2.0**16
        words_layout: gl.constexpr = gl.BlockedLayout([4, 1, 4], [1, 32, 1], [INT4_SLICES, 1, 1], [2, 1, 0])
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        pairs: gl.constexpr = sums[1].type.layout
        lanes: gl.constexpr = [self.words.shape[0], self.words.shape[1], 32, 4]
        words = self.words._reinterpret(gl.int32, lanes, plain).index(place).load(words_layout)
        words = words.reshape((INT4_SLICES, 2, 2, 8, 4, 2, 2))
        first, last = gl.split(words.permute((0, 2, 3, 4, 5, 6, 1)))  # The last is the half.
        a = self._product(first, k_tile * 2, sums[0])
        b = self._product(last, k_tile * 2 + 1, sums[0])
        a_low, a_high, b_low, b_high = _pairs(self.scales, place, pairs, SCALE, SCALE * 16)
        c_low, c_high, d_low, d_high = a_low, a_high, b_low, b_high
        if self.MINIMA:
            c_low, c_high, d_low, d_high = _pairs(self.minima, place, pairs, MINIMUM, MINIMUM)
        x_sums = self.row_sums._reinterpret(
            gl.float32, [self.row.shape[0], INT4_SLICES], self.row_sums.layout
        )
        of_slices: gl.constexpr = gl.SliceLayout(1, pairs)
        x_first, x_last = (
            x_sums.index(k_tile * 2).load(of_slices),
            x_sums.index(k_tile * 2 + 1).load(of_slices),
        )
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        sums = _add(a, a_low, a_high, c_low, c_high, x_first, sums)
        return _add(b, b_low, b_high, d_low, d_high, x_last, sums)

    @gluon.jit
    def _product(self, words, part, sums):
        operand = _operand(words, gl.DotOperandLayout(0, sums.type.layout, 4))
        row = self.row.index(part).permute((1, 0))
        return warpgroup_mma(operand, row, sums, use_acc=False, is_async=True)

    @gluon.jit
    def total(self, sums):
        total = _total(sums[0], True)
        low = gl.join(gl.sum(sums[1], axis=0), gl.sum(sums[2], axis=0)).permute((1, 0)).reshape((self.OUTS,))
        return total + gl.convert_layout(low, total.type.layout)
