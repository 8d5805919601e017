"""What the Triton kernels share: rounding as the torch reference rounds, reading a record, and the soft cap.

Arguments that follow the batch or the longest context are not specialised: serving would stop to compile at new lengths.
"""

import triton
import triton.language as tl


@triton.jit
def round_half_even(x):
    """Nearest whole number of fp32 x, |x| < 2^22, ties to even, as `torch.round`."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def bf16_scale(largest, usable, LEVELS: tl.constexpr):
    """bf16 scale of a slice from its largest absolute value.

    Returns its bits (int16; NaN where the slice is not `usable` or the scale overflows), the divisor that stands for it
    in fp32, and whether the slice can be stored. Rounded by hand: the interpreter's own conversion truncates.
    """
    bits = tl.div_rn(largest, LEVELS * 1.0).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    scale = (bits << 16).to(tl.float32, bitcast=True)
    usable = usable & (scale < float("inf"))
    return tl.where(usable, bits, 0x7FC0).to(tl.int16), tl.where(usable & (scale > 0), scale, 1.0), usable


@triton.jit
def load_section(at, within, WHOLE: tl.constexpr):
    """What stands at `at` where it lies within a record's section, else 0; without a mask where the whole block does."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=within, other=0)


@triton.jit
def soft_cap(x, cap):
    """cap * tanh(x / cap)."""
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
