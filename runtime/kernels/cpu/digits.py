"""A token in whole numbers of 16 bits, each as two digits of 8 bits, which processors multiply by
codes without rounding. Importing this module imports numba.

A group of inputs has one worth, its largest number over 32639. The rounding error of a number is at
most half of that: 1 / 65278 of the largest, compared with up to 1 / 512 of each in bfloat16. The
sum of a group that holds NaN or infinity is NaN.
"""

import numpy as np

from runtime.kernels.cpu.column_vectors import DIGITS, UNIT
from runtime.kernels.cpu.gated import part

# inputs of a group, whose sums with codes of 8 bits are whole numbers of 32 bits
MAX_WIDTH = 1 << 16
_LARGEST = np.float32(127 * 256 + 127)
_LEAST = np.float32(1e-30)  # groups below it are zero: the inverse of their worth could be infinite
i32 = np.int32
f32 = np.float32


@part
def in_digits(x, num_groups, width):
    """Return x [I] as digits int8 [I / 32, 2, 32], the higher first, and for each group the worth
    of its numbers and their sum [G], float32. A group is of `width` numbers, a multiple of 32."""
    digits = np.empty((len(x) // UNIT, DIGITS, UNIT), np.int8)
    worth = np.empty(num_groups, np.float32)
    sums = np.empty(num_groups, np.float32)
    for group in range(num_groups):
        largest = f32(0)
        for k in range(group * width, (group + 1) * width):
            largest = max(largest, abs(x[k]))
        worth[group] = largest / _LARGEST
        inverse = _LARGEST / largest if largest > _LEAST else f32(0)
        total = f32(0)
        for unit in range(group * width // UNIT, (group + 1) * width // UNIT):
            own = x[unit * UNIT : (unit + 1) * UNIT]
            high = digits[unit, 0]
            low = digits[unit, 1]
            for i in range(UNIT):
                number = np.rint(own[i] * inverse)
                digit = np.floor((number + f32(128)) * f32(1 / 256))
                total += number
                high[i] = np.int8(i32(digit))
                low[i] = np.int8(i32(number - digit * f32(256)))
        sums[group] = total
    return digits, worth, sums
